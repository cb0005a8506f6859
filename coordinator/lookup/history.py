"""The outputs of a tenant's past turns, as a bounded text in which drafts are searched.

The text is kept in two automata. The newer one grows to half of the limit. Then it becomes the older one, and the
previous older one is dropped as a whole; frequent phrases return by themselves. A turn is indexed in pieces, between
other work of the event loop. A coordinator serves one tenant (docs/how-to/secure.md), so no text crosses tenants;
`lookup` searches the history and the session's own text.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence

from coordinator.lookup.suffix_automaton import SEPARATOR, SuffixAutomaton

#: Number of tokens indexed at once, which takes a few milliseconds of the event loop.
TOKENS_AT_ONCE = 256


class TokenHistory:
    """Indexes the outputs of turns. Used from one event loop."""

    def __init__(self, max_tokens: int) -> None:
        """`max_tokens`: largest number of tokens kept, at about 100 bytes each."""
        self._half = max(1, max_tokens // 2)
        self.newer = SuffixAutomaton()
        self.older = SuffixAutomaton()
        self._waiting: deque[int] = deque()
        self._worker: asyncio.Task[None] | None = None

    def add(self, token_ids: Sequence[int]) -> None:
        """Start to index a text; it is dropped where the limit would be exceeded by waiting text alone."""
        if len(self._waiting) + len(token_ids) > 2 * self._half:
            return
        self._waiting.extend(token_ids)
        self._waiting.append(SEPARATOR)
        if self._worker is None or self._worker.done():
            self._worker = asyncio.create_task(self._index(), name="token history")

    async def settle(self) -> None:
        """Return once everything that was added is indexed."""
        if self._worker is not None:
            await self._worker

    async def close(self) -> None:
        """Drop what is not indexed yet. Idempotent."""
        if self._worker is not None:
            self._worker.cancel()
            await asyncio.wait({self._worker})

    async def _index(self) -> None:
        while self._waiting:
            count = min(TOKENS_AT_ONCE, len(self._waiting))
            self.newer.extend([self._waiting.popleft() for _ in range(count)])
            if len(self.newer) >= self._half:
                self.older, self.newer = self.newer, SuffixAutomaton()
            await asyncio.sleep(0)
