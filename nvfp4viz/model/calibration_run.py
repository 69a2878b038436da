"""How large a real calibration run is: the public NVFP4 export of Gemma 4, beside tiny-moe's."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CalibrationRun:
    """A calibration with natural routing.

    Attributes
    ----------
    documents, length
        Texts, and tokens of each.
    layers, experts, top_k
        Of the model.
    """

    documents: int
    length: int
    layers: int
    experts: int
    top_k: int

    @property
    def tokens(self) -> int:
        return self.documents * self.length

    @property
    def slots(self) -> int:
        """(layer, expert) pairs."""
        return self.layers * self.experts

    @property
    def even_share(self) -> float:
        """Tokens that each expert would see if the router spread them evenly.

        >>> GEMMA4.tokens, GEMMA4.slots, GEMMA4.even_share
        (4194304, 3840, 262144.0)
        """
        return self.tokens * self.top_k / self.experts


GEMMA4 = CalibrationRun(documents=4096, length=1024, layers=30, experts=128, top_k=8)
"""Gemma 4 26B-A4B on CNN/DailyMail, as its exporter describes the run."""
