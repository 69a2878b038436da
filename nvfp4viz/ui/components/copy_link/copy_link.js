// Copies the address of the view.  Browsers refuse the clipboard on plain http from another machine (a workshop's LAN): there the
// link is shown selected, to be copied by hand.
export default function ({ data, parentElement }) {
  const button = parentElement.querySelector("button");
  const said = parentElement.querySelector(".said");
  const link = parentElement.querySelector(".link");
  button.textContent = data.label;
  link.setAttribute("aria-label", data.label);
  button.onclick = async () => {
    const address = window.location.href;
    try {
      await navigator.clipboard.writeText(address);
      link.hidden = true;
      said.textContent = data.copied;
    } catch {
      link.hidden = false;
      link.value = address;
      link.focus();
      link.select();
      said.textContent = data.byHand;
    }
  };
}
