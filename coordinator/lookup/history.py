"""What a tenant's sessions have said, as far as it is remembered: a bounded text to look drafts up in.

Two automata by age. The newer one grows until it is half of what may be kept; then it becomes the older one, and what
that was is forgotten as a whole: what is said often comes back by itself. A turn is taken in a piece at a time, between
other work of the event loop.

Not here: a session's own text (`lookup`), other tenants' (a coordinator serves one, docs/how-to/secure.md). Used from
one event loop.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence

from coordinator.lookup.suffix_automaton import SEPARATOR, SuffixAutomaton

#: Tokens taken in at once; a few milliseconds, in which nothing else happens.
TOKENS_AT_ONCE = 256


class TokenHistory:
    """The ends of turns go in; automata to search come out."""

    def __init__(self, max_tokens: int) -> None:
        """`max_tokens`: kept at most, about 100 bytes each."""
        self._half = max(1, max_tokens // 2)
        self.newer = SuffixAutomaton()
        self.older = SuffixAutomaton()
        self._waiting: deque[int] = deque()
        self._worker: asyncio.Task[None] | None = None

    def add(self, token_ids: Sequence[int]) -> None:
        """Begins to take in a text; what is beyond twice the bound is not waited for but dropped."""
        if len(self._waiting) + len(token_ids) > 2 * self._half:
            return
        self._waiting.extend(token_ids)
        self._waiting.append(SEPARATOR)
        if self._worker is None or self._worker.done():
            self._worker = asyncio.create_task(self._take_in(), name="token history")

    async def settle(self) -> None:
        """Returns once everything that was added has been taken in."""
        if self._worker is not None:
            await self._worker

    async def close(self) -> None:
        """Gives up what is still to be taken in. Idempotent."""
        if self._worker is not None:
            self._worker.cancel()
            await asyncio.wait({self._worker})

    async def _take_in(self) -> None:
        while self._waiting:
            count = min(TOKENS_AT_ONCE, len(self._waiting))
            self.newer.extend([self._waiting.popleft() for _ in range(count)])
            if len(self.newer) >= self._half:
                self.older, self.newer = self.newer, SuffixAutomaton()
            await asyncio.sleep(0)
