"""The promotion of a draft pool to a growing share of the sessions, and its rollback if it is slower.

A share of the sessions, chosen by a hash of their ids, gets the pool instead of its usual one; the other sessions are
the control group. After a number of requests of both groups the pool gets the next share. It is rolled back if at one
of the looks its mean of log tokens per second was significantly below the control group's: Welch's t beyond `LIMIT`. A
promotion has six looks, so an equal pool is rolled back by chance in less than 1 % of promotions.

Source: Welch 1947; Bonferroni over the looks. Decisions are kept in the store (`specdec.state.shared_decisions`), which
all coordinators share; each coordinator measures by itself. `coordinator.round.routing_table` chooses the usual pool.
"""

from __future__ import annotations

import hashlib
import logging
from dataclasses import replace
from math import log, sqrt

from coordinator.replicas.store_watch import Activity, StoreWatch
from specdec.state.store import PromotionRecord, Promotions, PromotionStatus

#: Shares of the sessions, and the number of requests of each group that a share takes.
STAGES = {0.01: 16, 0.05: 32, 0.25: 64}
LOOKS = (16, 32, 64)

#: Limit of t, one-sided: below 1.5e-3 per look at 15 degrees of freedom, the smallest number there is.
LIMIT = 3.6

#: Number of tokens from which a request counts; the time of a shorter one depends mostly on its first token.
LEAST_TOKENS = 16

_log = logging.getLogger(__name__)


class Sample:
    """Mean and variance of log tokens per second."""

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
        """Variance of the mean; needs at least two values."""
        return self._squares / (self.count - 1) / self.count


def is_worse(pool: Sample, others: Sample) -> bool:
    """Return whether a pool's requests made significantly fewer tokens per second than the others."""
    spread = sqrt(pool.variance_of_mean + others.variance_of_mean)
    return pool.mean - others.mean < -LIMIT * max(spread, 1e-9)


def next_share(share: float, most: float) -> float:
    """Return the share after `share` on the way to `most`."""
    return next((stage for stage in STAGES if share < stage < most), most)


class Canary:
    """Follows the current promotion. Used from one event loop."""

    def __init__(self, store: Promotions) -> None:
        self._store = store
        self._promotion: PromotionRecord | None = None
        self._pool, self._others = Sample(), Sample()
        self._decided: PromotionRecord | None = None
        self._watch = StoreWatch("promotion", self.sync_with_store)

    @property
    def promotion(self) -> PromotionRecord | None:
        """Current promotion as last read from the store; None for none."""
        return self._promotion

    def start(self, activity: Activity) -> None:
        """Start to follow the store in the background, less often while the coordinator is idle."""
        self._watch.start(activity)

    async def close(self) -> None:
        """Stop following the store. Idempotent."""
        await self._watch.close()

    async def promote(self, pool: str, most: float) -> PromotionRecord | None:
        """Begin the promotion of a pool up to a share of the sessions, in place of the current one; 0 ends it.

        Raises:
            Unavailable: the store cannot be reached.
        """
        begun = PromotionRecord(pool, next_share(0.0, most), most, PromotionStatus.RUNNING) if most > 0.0 else None
        self._follow(await self._store.put(begun))
        return self._promotion

    def pool_of(self, session_id: str) -> str:
        """Return the pool that a session gets by promotion; "" if it keeps its usual one."""
        promotion = self._promotion
        if promotion is None or promotion.status is PromotionStatus.ROLLED_BACK:
            return ""
        drawn = int.from_bytes(hashlib.blake2b(f"{promotion.pool}\0{session_id}".encode(), digest_size=8).digest())
        return promotion.pool if drawn < promotion.share * 2.0**64 else ""

    def observe(self, pool: str, num_tokens: int, seconds: float) -> None:
        """Learn from a request that ended well.

        Args:
            pool: pool that `pool_of` returned for it.
            num_tokens: number of output tokens after the first round.
            seconds: time that they took.
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

    def _look(self, promotion: PromotionRecord, count: int) -> None:
        """Decide after a look; `sync_with_store` writes the decision to the store."""
        if is_worse(self._pool, self._others):
            self._decided = replace(promotion, status=PromotionStatus.ROLLED_BACK)
        elif count >= STAGES.get(promotion.share, LOOKS[-1]):
            share = next_share(promotion.share, promotion.most)
            is_done = share >= 1.0 or promotion.share >= promotion.most  # at 1.0 the control group is empty
            status = PromotionStatus.DONE if is_done else PromotionStatus.RUNNING
            self._decided = replace(promotion, share=share, status=status)

    async def sync_with_store(self) -> None:
        """Write this coordinator's decision to the store, and read those of other coordinators.

        Raises:
            Unavailable: the store cannot be reached; the decision is written next time.
        """
        before, decided = self._promotion, self._decided
        if before is None or decided is None:
            self._follow(await self._store.read())
            return
        self._follow(await self._store.swap(before, decided))
        self._decided = None

    def _follow(self, promotion: PromotionRecord | None) -> None:
        if promotion == self._promotion:
            return
        self._promotion = promotion
        self._pool, self._others, self._decided = Sample(), Sample(), None
        if promotion is not None:
            _log.warning("draft pool %s: %s at %.0f %% of the sessions", promotion.pool, promotion.status.value,
                         100.0 * promotion.share)  # fmt: skip
