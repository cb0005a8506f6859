"""The outputs of each tenant's past turns, as bounded texts in which drafts are searched.

The text is kept in two automata. The newer one grows to half of the limit. Then it becomes the older one, and the
previous older one is dropped as a whole; frequent phrases return by themselves. A turn is indexed in pieces, between
other work of the event loop. Each tenant has a history of its own, so no text crosses tenants (docs/how-to/secure.md);
`lookup` searches the history and the session's own text.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections import OrderedDict, deque
from collections.abc import Sequence
from weakref import WeakValueDictionary

from coordinator.lookup.suffix_automaton import SEPARATOR, SuffixAutomaton

#: Number of tokens indexed at once, which takes a few milliseconds of the event loop.
TOKENS_AT_ONCE = 256

#: Largest number of tenants whose outputs are kept. The one that added nothing for the longest time is dropped first.
MAX_TENANTS = 256


class TokenHistory:
    """Indexes the outputs of turns. Used from one event loop."""

    def __init__(self, max_tokens: int) -> None:
        """`max_tokens`: largest number of tokens kept, at about 100 bytes each."""
        self.limit(max_tokens)
        self.newer = SuffixAutomaton()
        self.older = SuffixAutomaton()
        self._waiting: deque[int] = deque()
        self._worker: asyncio.Task[None] | None = None

    @property
    def num_tokens(self) -> int:
        """Number of tokens that are indexed or wait for it."""
        return len(self.newer) + len(self.older) + len(self._waiting)

    def add(self, token_ids: Sequence[int]) -> None:
        """Start to index a text; it is dropped if the limit would be exceeded by waiting text alone."""
        if len(self._waiting) + len(token_ids) > 2 * self._half:
            return
        self._waiting.extend(token_ids)
        self._waiting.append(SEPARATOR)
        if self._worker is None or self._worker.done():
            # An own context: its records must not have the ids of the request that came first.
            self._worker = asyncio.create_task(self._index(), name="token history", context=contextvars.Context())

    def limit(self, max_tokens: int) -> None:
        """Set the largest number of tokens from now on."""
        self._half = max(1, max_tokens // 2)

    def forget_older(self) -> None:
        """Drop the oldest part of the text: the older half, or else what is indexed, or else what waits."""
        if len(self.older):
            self.older = SuffixAutomaton()
        elif len(self.newer):
            self.newer = SuffixAutomaton()
        else:
            self._waiting.clear()

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


class TokenHistories:
    """The histories of all tenants. Used from one event loop.

    All together keep as many tokens as a single one may. Where there are several, each gets at most half of that; while
    their sum is too large, the largest one loses its older half. A tenant without outputs takes no space.
    """

    def __init__(self, max_tokens: int) -> None:
        """`max_tokens`: largest number of tokens kept, at about 100 bytes each."""
        self._max_tokens = max_tokens
        self._kept: OrderedDict[str, TokenHistory] = OrderedDict()
        """Histories with tokens; the latest one that tokens were added to is the last."""
        self._in_use: WeakValueDictionary[str, TokenHistory] = WeakValueDictionary()
        """The kept histories, and empty ones that requests hold."""

    def of(self, tenant: str) -> TokenHistory:
        """Return a tenant's history, which may be empty."""
        history = self._in_use.get(tenant)
        if history is None:
            self._in_use[tenant] = history = TokenHistory(self._max_tokens)
        return history

    def add(self, tenant: str, token_ids: Sequence[int]) -> None:
        """Start to index a text of a tenant; see `TokenHistory.add`."""
        history = self.of(tenant)
        is_alone = self._kept.keys() <= {tenant}
        history.limit(self._max_tokens if is_alone else self._max_tokens // 2)
        history.add(token_ids)
        self._kept[tenant] = history
        self._kept.move_to_end(tenant)
        if len(self._kept) > MAX_TENANTS:
            self._drop(next(iter(self._kept)))
        while len(self._kept) > 1 and sum(kept.num_tokens for kept in self._kept.values()) > self._max_tokens:
            self._shrink(max(self._kept, key=lambda name: self._kept[name].num_tokens))

    async def settle(self) -> None:
        """Return once everything that was added is indexed."""
        for history in list(self._kept.values()):
            await history.settle()

    async def close(self) -> None:
        """Drop what is not indexed yet. Idempotent."""
        for history in list(self._kept.values()):
            await history.close()

    def _shrink(self, tenant: str) -> None:
        self._kept[tenant].forget_older()
        if not self._kept[tenant].num_tokens:
            del self._kept[tenant]

    def _drop(self, tenant: str) -> None:
        history = self._kept.pop(tenant)
        while history.num_tokens:
            history.forget_older()
