"""One token per character: printable ASCII and the line feed, after three special tokens.

The padding token has id 0, as Gemma's has, because that is what ``argmax`` answers when every logit is NaN.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from nvfp4viz.errors import ModelError

SPECIAL_TOKENS = ("<pad>", "<eos>", "<bos>")
PAD, EOS, BOS = range(3)
ALPHABET = "\n" + "".join(chr(code) for code in range(0x20, 0x7F))
MOST_NAMED = 8
"""Unknown characters that one error names; a pasted page of Chinese has hundreds."""


@dataclass(frozen=True, slots=True)
class Tokenizer:
    """Characters to ids and back.

    >>> Tokenizer().encode("7 + 8")
    [2, 27, 4, 15, 4, 28]
    >>> Tokenizer().decode([2, 27, 4, 15, 4, 28, 0, 0])
    '7 + 8<pad><pad>'
    """

    alphabet: str = ALPHABET
    _ids: dict[str, int] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        ids = {character: number + len(SPECIAL_TOKENS) for number, character in enumerate(self.alphabet)}
        object.__setattr__(self, "_ids", ids)

    @property
    def vocabulary(self) -> tuple[str, ...]:
        """The text of every id, in order."""
        return SPECIAL_TOKENS + tuple(self.alphabet)

    @property
    def size(self) -> int:
        """Number of ids."""
        return len(SPECIAL_TOKENS) + len(self.alphabet)

    def encode(self, text: str, *, bos: bool = True) -> list[int]:
        """Ids of ``text``, after ``<bos>`` unless told otherwise.

        Raises
        ------
        ModelError
            ``prompt.unknown-characters``: names the first few characters and their positions, counted from 1.
        """
        unknown = [(place, character) for place, character in enumerate(text, 1) if character not in self._ids]
        if unknown:
            raise ModelError(
                "prompt.unknown-characters",
                characters=", ".join(f"{_show(c)} ({place})" for place, c in unknown[:MOST_NAMED]),
                count=len(unknown),
                vocabulary="".join(sorted(self.alphabet.strip())),
            )
        return [BOS] * bos + [self._ids[character] for character in text]

    def decode(self, ids: Iterable[int]) -> str:
        """The text of ``ids``: ``<pad>`` is spelled out (it is the symptom); ``<bos>`` and ``<eos>`` are left out."""
        words = self.vocabulary
        return "".join(words[token] for token in ids if token not in (BOS, EOS))


def _show(character: str) -> str:
    """Visible characters as they are, invisible ones by their code point."""
    return character if character.isprintable() and not character.isspace() else f"U+{ord(character):04X}"
