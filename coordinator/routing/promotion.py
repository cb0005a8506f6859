"""A draft pool on its way to all requests, share by share, and back where it makes fewer tokens a second.

A share of the sessions, by a hash of their ids, gets the pool whatever it would have had; the others are what it is
compared with. After so many requests of both kinds the pool goes on to the next share, unless at one of the looks on
the way its mean of log tokens a second was below the others' by more than chance: Welch's t beyond `LIMIT`. There are
six looks in a promotion, so that one of an equal pool goes back by chance less often than one in a hundred.

Source: Welch 1947; Bonferroni over the looks. What is decided lies in the store, shared by coordinators and kept beyond
them; what each of them measures is its own. Not here: the store (`specdec.state.promotions`), which pool a request
would have had (`coordinator.round.routing_table`).
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from dataclasses import replace
from math import log, sqrt

from specdec.errors import SpecdecError
from specdec.state.store import Promotion, Promotions, PromotionStatus

#: Shares of the sessions, and the requests of either kind that each takes.
STAGES = {0.01: 16, 0.05: 32, 0.25: 64}
LOOKS = (16, 32, 64)

#: One-sided, below 1.5e-3 a look with 15 degrees of freedom, the least there are; less with more.
LIMIT = 3.6

#: Requests shorter than this say more of their first token than of a draft.
LEAST_TOKENS = 16

#: Between two looks at what other coordinators decided.
POLL_S = 1.0

_log = logging.getLogger(__name__)


class Sample:
    """Mean and variance of log tokens a second."""

    def __init__(self) -> None:
        self.count = 0
        self.mean = 0.0
        self._squares = 0.0

    def add(self, value: float) -> None:
        self.count += 1
        step = value - self.mean
        self.mean += step / self.count
        self._squares += step * (value - self.mean)

    @property
    def variance_of_mean(self) -> float:
        """Needs two values at least."""
        return self._squares / (self.count - 1) / self.count


def is_worse(pool: Sample, others: Sample) -> bool:
    """Whether a pool's requests made significantly fewer tokens a second than the others."""
    spread = sqrt(pool.variance_of_mean + others.variance_of_mean)
    return pool.mean - others.mean < -LIMIT * max(spread, 1e-9)


def next_share(share: float, most: float) -> float:
    """The share after `share` on the way to `most`."""
    return next((stage for stage in STAGES if share < stage < most), most)


class Canary:
    """Follows the promotion there is. Used from one event loop."""

    def __init__(self, store: Promotions) -> None:
        self._store = store
        self._promotion: Promotion | None = None
        self._pool, self._others = Sample(), Sample()
        self._decided: Promotion | None = None
        self._watching: asyncio.Task[None] | None = None
        self._is_closed = False

    @property
    def promotion(self) -> Promotion | None:
        """As last seen."""
        return self._promotion

    def start(self) -> None:
        """Begins to follow what is in the store."""
        self._watching = asyncio.create_task(self._watch(), name="promotions")

    async def close(self) -> None:
        """Idempotent."""
        if self._watching is not None:
            self._is_closed = True  # the store's client may swallow what cancels it while it connects
            self._watching.cancel()
            await asyncio.wait([self._watching])

    async def promote(self, pool: str, most: float) -> Promotion | None:
        """Begins to promote a pool up to a share of the sessions, whatever was being promoted; 0 ends it.

        Raises:
            Unavailable: the store cannot be reached.
        """
        begun = Promotion(pool, next_share(0.0, most), most, PromotionStatus.RUNNING) if most > 0.0 else None
        self._see(await self._store.put(begun))
        return self._promotion

    def pool_of(self, session_id: str) -> str:
        """The pool that a session gets by promotion; "" where it gets what it would have had."""
        promotion = self._promotion
        if promotion is None or promotion.status is PromotionStatus.ROLLED_BACK:
            return ""
        drawn = int.from_bytes(hashlib.blake2b(f"{promotion.pool}\0{session_id}".encode(), digest_size=8).digest())
        return promotion.pool if drawn < promotion.share * 2.0**64 else ""

    def observe(self, pool: str, num_tokens: int, seconds: float) -> None:
        """Learns from a request that ended well.

        Args:
            pool: what `pool_of` gave it.
            num_tokens: of its output, after the first ones.
            seconds: that those took.
        """
        promotion = self._promotion
        if promotion is None or promotion.status is not PromotionStatus.RUNNING or pool not in ("", promotion.pool):
            return
        if num_tokens < LEAST_TOKENS or seconds <= 0.0:
            return
        sample = self._pool if pool else self._others
        sample.add(log(num_tokens / seconds))
        count = min(self._pool.count, self._others.count)
        if count in LOOKS and count == sample.count:
            self._look(promotion, count)

    def _look(self, promotion: Promotion, count: int) -> None:
        """Decides; the store hears of it from the task that follows it."""
        if is_worse(self._pool, self._others):
            self._decided = replace(promotion, status=PromotionStatus.ROLLED_BACK)
        elif count >= STAGES.get(promotion.share, LOOKS[-1]):
            share = next_share(promotion.share, promotion.most)
            is_there = share >= 1.0 or promotion.share >= promotion.most  # of all sessions none is left to compare with
            status = PromotionStatus.DONE if is_there else PromotionStatus.RUNNING
            self._decided = replace(promotion, share=share, status=status)

    async def _watch(self) -> None:
        complaint = ""
        while not self._is_closed:
            try:
                await self.look_at_store()
                complaint = ""
            except SpecdecError as error:
                if error.message != complaint:  # said once, not at every look
                    complaint = error.message
                    _log.warning("%s", complaint)
            await asyncio.sleep(POLL_S)

    async def look_at_store(self) -> None:
        """Tells the store what was decided here, and hears what was decided elsewhere.

        Raises:
            Unavailable: it cannot be reached; what was decided is told next time.
        """
        before, decided = self._promotion, self._decided
        if before is None or decided is None:
            self._see(await self._store.read())
            return
        self._see(await self._store.swap(before, decided))
        self._decided = None

    def _see(self, promotion: Promotion | None) -> None:
        if promotion == self._promotion:
            return
        self._promotion = promotion
        self._pool, self._others, self._decided = Sample(), Sample(), None
        if promotion is not None:
            _log.warning("draft pool %s: %s at %.0f %% of the sessions", promotion.pool, promotion.status.value,
                         100.0 * promotion.share)  # fmt: skip
