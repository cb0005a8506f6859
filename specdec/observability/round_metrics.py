"""Metrics of the coordinator's rounds: drafting and acceptance by draft pool, and what the rounds wait for.

A series of a draft pool exists, at 0, from the time at which the pool is known. Updated from the coordinator's event
loop alone, once a round; every series is looked up once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

from prometheus_client import Counter, Histogram

from specdec.observability.series import GAMMA, LATENCY_S, ServiceSeries

#: Causes of rounds without a draft token whose series exist from the start.
_CAUSES = ("late", "no_replica", "off", "paused", "REPLICA_UNAVAILABLE")
#: Causes with which the number of draft tokens was chosen, and not given by a failure.
_CHOSEN = ("off", "empty")


class RoundMetrics:
    """Series of decided rounds."""

    def __init__(self, series: ServiceSeries) -> None:
        self.of_pool = cache(_PoolFamilies(series).of_pool)
        """Returns the series of a draft pool."""
        self._verify_s = series.histogram("verify_latency_seconds", "Verify calls, network included.", LATENCY_S)
        self._wire_bytes = series.counter("wire_bytes", "Serialised messages of both links, both directions.")
        waits = series.counters(
            "round_wait_seconds",
            "Time that requests waited: for drafts, for verifications, for the commit of the round before; client: "
            "for a client to take tokens, which delays no round.",
            "on",
            start=("draft", "target", "store", "client"),
        )
        self._draft_wait, self._target_wait = waits("draft"), waits("target")
        self._store_wait, self._client_wait = waits("store"), waits("client")

    def observe_round(
        self,
        *,
        pool: str,
        num_requested: int,
        num_draft_tokens: int,
        num_accepted: int,
        draft_s: float,
        verify_s: float,
        wire_bytes: int,
    ) -> None:
        """Record a decided round with at least one draft token."""
        series = self.of_pool(pool)
        series.draft_s.observe(draft_s)
        series.gamma.observe(num_requested)
        series.note_acceptance(num_draft_tokens, num_accepted)
        self._note_costs(draft_s, verify_s, wire_bytes)

    def observe_forced(self, pool: str, num_tokens: int) -> None:
        """Record the forced tokens before the draft of another pool in the same round."""
        self.of_pool(pool).note_acceptance(num_tokens, num_tokens)

    def observe_target_only_step(
        self, *, pool: str, cause: str, draft_s: float, verify_s: float, wire_bytes: int
    ) -> None:
        """Record a decided round without a draft token; `cause` is a fixed word (off, late, unavailable, ...)."""
        series = self.of_pool(pool)
        series.target_only(cause).inc()
        if cause == "late":
            series.late.inc()
        elif cause in _CHOSEN:
            series.gamma.observe(0)
        self._note_costs(draft_s, verify_s, wire_bytes)

    def observe_store_wait(self, seconds: float) -> None:
        """Record a wait of a request for the commit of its last round."""
        self._store_wait.inc(seconds)

    def observe_client_wait(self, seconds: float) -> None:
        """Record a wait until a client's stream took an event."""
        self._client_wait.inc(seconds)

    def _note_costs(self, draft_s: float, verify_s: float, wire_bytes: int) -> None:
        self._draft_wait.inc(draft_s)
        self._target_wait.inc(verify_s)
        self._verify_s.observe(verify_s)
        self._wire_bytes.inc(wire_bytes)


class _PoolFamilies:
    """The metrics that have a draft pool as a label."""

    def __init__(self, series: ServiceSeries) -> None:
        counters, histograms = series.counters, series.histograms
        self._drafts = counters("spec_decode_num_drafts", "Rounds with draft tokens.", "pool")
        self._draft_tokens = counters("spec_decode_num_draft_tokens", "Draft tokens verified.", "pool")
        self._accepted = counters("spec_decode_num_accepted_tokens", "Draft tokens accepted.", "pool")
        self._accepted_at = counters(
            "spec_decode_num_accepted_tokens_per_pos", "Draft tokens accepted, by position.", "pool", "position"
        )
        self._gamma = histograms(
            "draft_gamma", "Draft tokens requested in a round; 0: the round was to have none.", GAMMA, "pool"
        )
        self._draft_s = histograms("draft_latency_seconds", "Propose calls, network included.", LATENCY_S, "pool")
        self._late = counters("draft_late", "Rounds whose draft missed its deadline.", "pool")
        self._target_only = counters(
            "target_only_steps", "Rounds without a draft token, by the pool that should have drafted.", "pool", "cause"
        )

    def of_pool(self, pool: str) -> PoolSeries:
        for cause in _CAUSES:
            self._target_only(pool, cause)
        return PoolSeries(
            drafts=self._drafts(pool),
            draft_tokens=self._draft_tokens(pool),
            accepted=self._accepted(pool),
            accepted_at=cache(lambda position: self._accepted_at(pool, str(position))),
            gamma=self._gamma(pool),
            draft_s=self._draft_s(pool),
            late=self._late(pool),
            target_only=lambda cause: self._target_only(pool, cause),
        )


@dataclass(frozen=True, slots=True)
class PoolSeries:
    """The series of one draft pool, kept so that they are looked up once."""

    drafts: Counter
    draft_tokens: Counter
    accepted: Counter
    accepted_at: Callable[[int], Counter]
    gamma: Histogram
    draft_s: Histogram
    late: Counter
    target_only: Callable[[str], Counter]

    def note_acceptance(self, num_draft_tokens: int, num_accepted: int) -> None:
        self.drafts.inc()
        self.draft_tokens.inc(num_draft_tokens)
        self.accepted.inc(num_accepted)
        for position in range(num_accepted):
            self.accepted_at(position).inc()
