"""Predict, then see.  A question before a surprise; nothing is hidden for good and no answer is scolded."""

from __future__ import annotations

from collections.abc import Sequence

import streamlit as st

from nvfp4viz.ui.i18n import t

_REVEALED = "_revealed"


def ask(key: str, options: Sequence[str], answer: str, **values: object) -> bool:
    """Ask once; afterwards show the guess beside the answer.

    Parameters
    ----------
    key
        Text key such as ``"e2m1.predict.product"`` with ``question``, ``options.<id>`` and ``reveal``.
    options
        Ids of the answers offered.
    answer
        The id that is right: computed by the caller from the library, never written down.
    **values
        For the placeholders of all these texts.

    Returns
    -------
    bool
        Whether the surprise may be shown.
    """
    assert answer in options, f"{answer} is not offered by {key}"
    slot = key.replace(".", "_")
    skipped = f"predict.skipped.{key}"
    guess_key = f"predict.guess.{key}"
    guess = st.session_state.get(guess_key)
    revealed = guess is not None or st.session_state.get(skipped, False)
    with st.container(border=True, key=f"predict_{slot}"):
        st.caption(t("ui.predict.label"))
        if not revealed:
            st.radio(
                t(f"{key}.question", **values),
                options,
                index=None,
                format_func=lambda option: t(f"{key}.options.{option}", **values),
                key=f"predict.asked.{key}",
                on_change=_guess,
                args=(key,),
            )
            st.button(t("ui.predict.skip"), type="tertiary", key=f"predict.skip.{key}", on_click=_skip, args=(skipped,))
            return False
        st.markdown(t(f"{key}.question", **values))
        if guess is not None:
            st.markdown(t("ui.predict.guess", guess=t(f"{key}.options.{guess}", **values)))
        right = t(f"{key}.options.{answer}", **values)
        if guess is None:
            st.markdown(t("ui.predict.answer", answer=right))
        elif guess == answer:
            st.markdown(t("ui.predict.as_predicted", answer=right))
        else:
            st.markdown(t("ui.predict.otherwise", answer=right))
        st.markdown(t(f"{key}.reveal", **values))
    st.session_state[_REVEALED] = True
    return True


def begin() -> None:
    """A page starts to draw: none of its answers is on the screen."""
    st.session_state[_REVEALED] = False


def revealed() -> bool:
    """Whether this run of the page shows an answer.  No link carries that: whoever opens it is asked first."""
    return bool(st.session_state.get(_REVEALED))


def _guess(key: str) -> None:
    # Kept apart from the radio, which is gone once the answer is there.
    st.session_state[f"predict.guess.{key}"] = st.session_state[f"predict.asked.{key}"]


def _skip(flag: str) -> None:
    st.session_state[flag] = True
