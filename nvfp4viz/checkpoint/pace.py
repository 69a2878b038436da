"""How many requests are under way at a time: few at first, more with every answer, half as many for good after trouble.

A server with a short queue drops connections that come too many at once, and what it dropped looks like silence.  So
the number grows only as answers come (as TCP's slow start does), and whoever finds trouble halves it, once for all
requests that were under way together.  A server that takes one request at a time is asked one at a time in the end.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from nvfp4viz.errors import CheckpointError

FEW = 8


class Pace:
    """Of one server; what it has shown stays known from one fetch to the next.

    Attributes
    ----------
    answers
        How many requests have been answered.
    lost
        What the first request met that was given up while nothing else was answered: the others need not wait too.
    """

    def __init__(self) -> None:
        self.answers = 0
        self.lost: CheckpointError | None = None
        self._limit = FEW
        self._ceiling: int | None = None
        self._running = 0
        self._troubles = 0
        self._turns = asyncio.Condition()

    @asynccontextmanager
    async def turn(self, most: int) -> AsyncIterator[None]:
        """Wait for one of at most ``most`` places."""
        async with self._turns:
            await self._turns.wait_for(lambda: self._running < min(self._limit, most))
            self._running += 1
        try:
            yield
        finally:
            self._running -= 1
            async with self._turns:
                self._turns.notify_all()

    def begun(self) -> int:
        """A mark for `trouble`: what was known when a request began."""
        return self._troubles

    def answered(self) -> None:
        self.answers += 1
        self.lost = None
        # Doubled by the time that all of them have answered.
        self._limit = self._limit + 1 if self._ceiling is None else min(self._limit + 1, self._ceiling)

    def trouble(self, begun: int) -> None:
        """A request met silence or a refusal; of those that began before the last halving, none halves again."""
        if begun == self._troubles:
            self._troubles += 1
            self._limit = self._ceiling = max(1, min(self._limit, self._running) // 2)
