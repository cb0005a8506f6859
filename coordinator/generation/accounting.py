"""Counts what one request costs and how long it takes: its statistics, its metrics, and its line in the log.

`publisher` reports every round, `generation` the end. `request_log` stores the statistics.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from coordinator.admission.slots import RunningSlot
from coordinator.generation.request_trace import RequestTrace
from coordinator.requests import GRAMMAR_POOL, GenerationIdentity, RequestStats
from coordinator.round.outcome import RoundOutcome
from specdec.contract.tenant import DEFAULT_TENANT
from specdec.contract.types import FinishReason
from specdec.observability.coordinator_metrics import CoordinatorMetrics

_LOGGED_COUNTS = (
    "num_cached_prompt_tokens", "num_rounds", "num_draft_tokens", "num_accepted_tokens", "num_target_only_steps",
    "wire_bytes",
)  # fmt: skip
_LOGGED_TIMES = ("ttft_s", "e2el_s", "draft_s", "verify_s")

_log = logging.getLogger(__name__)


class Account:
    """Counters of one request from its admission here. The counts of a resumed request continue the stored ones."""

    def __init__(
        self,
        identity: GenerationIdentity,
        stats: RequestStats,
        metrics: CoordinatorMetrics,
        note_interrupted: Callable[[str], None],
        began: float,
        *,
        slot: RunningSlot,
        tenant: str = DEFAULT_TENANT,
        trace: RequestTrace | None = None,
    ) -> None:
        """
        Args:
            identity: the request.
            stats: its statistics so far.
            metrics: counts it.
            note_interrupted: takes the reason of the error that ends the request; it may be resumed.
            began: `time.perf_counter()` at admission; the rounds begin now.
            slot: learns how fast the request is served.
            tenant: tenant of the request.
            trace: gets the end of the request.
        """
        self.stats = stats
        self._slot = slot
        self._tenant = tenant
        self._trace = trace
        self._identity = identity
        self._metrics = metrics
        self._note_interrupted = note_interrupted
        self._began = began
        self._rounds_began = time.perf_counter()
        self._elapsed_before_s = stats.e2el_s
        self._last_chunk: float | None = None
        metrics.observe_queue(self._rounds_began - began)
        if stats.num_rounds == 0:
            parameters = identity.parameters
            metrics.observe_turn(parameters.target_fingerprint, target_changed=parameters.target_changed)

    def count_round(self, outcome: RoundOutcome) -> None:
        """Count a decided round."""
        stats = self.stats
        if stats.num_rounds == 0:
            stats.num_cached_prompt_tokens = min(outcome.num_cached_tokens, self._identity.output_start)
        stats.num_rounds += 1
        stats.num_draft_tokens += outcome.num_draft_tokens
        stats.num_accepted_tokens += outcome.num_accepted
        stats.num_target_only_steps += outcome.num_draft_tokens == 0
        stats.accepted_per_position.extend([0] * (outcome.num_draft_tokens - len(stats.accepted_per_position)))
        for index in range(outcome.num_accepted):
            stats.accepted_per_position[index] += 1
        stats.draft_s += outcome.draft_s
        stats.verify_s += outcome.verify_s
        stats.wire_bytes += outcome.wire_bytes
        stats.e2el_s = self._elapsed_s()
        # The first commit stores this value before it is through; `count_chunk` then sets the measured one.
        stats.ttft_s = stats.ttft_s or stats.e2el_s
        self._observe_round(outcome)

    def count_chunk(self, num_tokens: int, *, is_first: bool) -> None:
        """Count tokens that are about to be shown."""
        now = time.perf_counter()
        if is_first:
            self.stats.ttft_s = self._elapsed_before_s + now - self._began
            self._metrics.observe_first_token(self.stats.ttft_s, now - self._rounds_began)
        since_last_s = None if self._last_chunk is None else now - self._last_chunk
        self._metrics.observe_tokens(num_tokens, since_last_s)
        self._slot.note_chunk(num_tokens, since_last_s)
        self._last_chunk = now

    def count_commit(self, seconds: float) -> None:
        """Count the commit of a round."""
        self._metrics.observe_commit(seconds)

    def count_store_wait(self, seconds: float) -> None:
        """Count a wait for the commit of the round before."""
        self._metrics.rounds.observe_store_wait(seconds)

    def count_finish(self, reason: FinishReason, num_output_tokens: int) -> None:
        """Count a request that reached the end of its output."""
        self.stats.e2el_s = self._elapsed_s()
        self._slot.note_finished(num_output_tokens)
        self._metrics.observe_finished(
            finish_reason=reason.name.lower(),
            num_prompt_tokens=self._identity.output_start,
            num_cached_prompt_tokens=self.stats.num_cached_prompt_tokens,
            num_output_tokens=num_output_tokens,
            ttft_s=self.stats.ttft_s,
            e2el_s=self.stats.e2el_s,
        )
        self._end("finished", reason.name.lower(), num_output_tokens)

    def count_cancellation(self, cause: str, num_output_tokens: int) -> None:
        """Count a request that its client ended early."""
        self.stats.e2el_s = self._elapsed_s()
        self._metrics.observe_cancelled(cause)
        self._end("cancelled", cause, num_output_tokens)

    def count_failure(self, reason: str, num_output_tokens: int) -> None:
        """Count a request that ended with an error of this reason; it may be resumed."""
        self.stats.e2el_s = self._elapsed_s()
        if reason == "KV_EXHAUSTED" and not num_output_tokens:
            self._metrics.observe_refused(reason)  # it never began: no target had KV blocks for its prompt
        else:
            self._note_interrupted(reason)
        self._end("failed", reason, num_output_tokens)

    def _end(self, how: str, reason: str, num_output_tokens: int) -> None:
        self._log_end(how, reason, num_output_tokens)
        self._metrics.tenants.observe_end(self._tenant, how, self._identity.output_start, num_output_tokens)
        if self._trace is not None:
            self._trace.end(how, reason, self.stats, num_output_tokens)

    def _log_end(self, how: str, reason: str, num_output_tokens: int) -> None:
        """Log one line with ids, counts and times. Text and tokens are never logged."""
        if not _log.isEnabledFor(logging.INFO):
            return
        identity, stats = self._identity, self.stats
        counts = {name: getattr(stats, name) for name in _LOGGED_COUNTS}
        times = {name: round(getattr(stats, name), 4) for name in _LOGGED_TIMES}
        _log.info(
            "request %s",
            how,
            extra={
                "request_id": identity.request_id,
                "session_id": identity.session_id,
                "turn": identity.turn,
                "reason": reason,
                "mode": identity.parameters.speculation.mode.name.lower(),
                "draft_pool": identity.parameters.speculation.draft_pool,
                "num_prompt_tokens": identity.output_start,
                "num_output_tokens": num_output_tokens,
                **counts,
                **times,
            },
        )

    def _elapsed_s(self) -> float:
        return self._elapsed_before_s + time.perf_counter() - self._began

    def _observe_round(self, outcome: RoundOutcome) -> None:
        if outcome.num_draft_tokens == 0:
            self._metrics.rounds.observe_target_only_step(
                pool=outcome.draft_pool,
                cause=outcome.target_only_cause,
                draft_s=outcome.draft_s,
                verify_s=outcome.verify_s,
                wire_bytes=outcome.wire_bytes,
            )
            return
        num_forced = outcome.num_forced if outcome.draft_pool != GRAMMAR_POOL else 0
        if num_forced:
            self._metrics.rounds.observe_forced(GRAMMAR_POOL, num_forced)
        self._metrics.rounds.observe_round(
            pool=outcome.draft_pool,
            num_requested=outcome.num_requested,
            num_draft_tokens=outcome.num_draft_tokens - num_forced,
            num_accepted=outcome.num_accepted - num_forced,
            draft_s=outcome.draft_s,
            verify_s=outcome.verify_s,
            wire_bytes=outcome.wire_bytes,
        )
