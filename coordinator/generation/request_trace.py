"""The spans of one generation: one for the request, under the span of the call that started it, and one for each round.

The spans of draft and target are children of their round. They are made here from the times that the replicas report
with their answers (`round/timeline`), so that replicas need no OpenTelemetry and the links carry no trace context
(docs/adr/0031-traces). `publisher` notes rounds, and `accounting` the end.
"""

from __future__ import annotations

import time

from coordinator.generation.turn import PreparedTurn
from coordinator.requests import GenerationIdentity, RequestStats
from coordinator.round.outcome import RoundOutcome
from coordinator.round.timeline import CallTimeline, RoundTimeline
from specdec.observability.tracing import Attributes, Span, current_span

#: `service.name` of the spans of each role.
DRAFT_SERVICE = "specdec-draft"
TARGET_SERVICE = "specdec-target"


class RequestTrace:
    """The spans of one generation. Names that begin with `gen_ai.` are those of OpenTelemetry's conventions."""

    def __init__(self, span: Span) -> None:
        """`span` is the span of the request, which this object ends."""
        self._span = span
        # All times of rounds are monotonic. One offset for all of them keeps their order.
        self._epoch_ns = time.time_ns() - time.monotonic_ns()

    def note_round(self, round_id: int, num_tokens: int, outcome: RoundOutcome, timeline: RoundTimeline) -> None:
        """Record a round after its tokens were shown; `num_tokens` of them became output."""
        attributes: dict[str, str | int] = {
            "specdec.round.id": round_id,
            "specdec.round.gamma": outcome.num_draft_tokens,
            "specdec.round.accepted_tokens": outcome.num_accepted,
            "specdec.round.output_tokens": num_tokens,
            "specdec.round.wire_bytes": outcome.wire_bytes,
            "specdec.draft_pool": outcome.draft_pool,
        }
        if outcome.target_only_cause:
            attributes["specdec.round.target_only_cause"] = outcome.target_only_cause
        round_span = self._span.begin_child("round", start_ns=self._ns(timeline.began_s), attributes=attributes)
        if timeline.draft is not None:
            self._add_call(round_span, "propose", DRAFT_SERVICE, timeline.draft)
        if timeline.target is not None:
            self._add_call(round_span, "verify", TARGET_SERVICE, timeline.target)
        round_span.add_event("decided", self._ns(timeline.decided_s))
        round_span.add_event("committed", self._ns(timeline.committed_s))
        round_span.end(self._ns(timeline.shown_s))

    def end(self, how: str, reason: str, stats: RequestStats, num_output_tokens: int) -> None:
        """End the span of the request. `how` is finished, cancelled or failed, for `reason`."""
        self._span.set(
            {
                "gen_ai.usage.output_tokens": num_output_tokens,
                "gen_ai.usage.cache_read.input_tokens": stats.num_cached_prompt_tokens,
                "gen_ai.response.time_to_first_chunk": stats.ttft_s,
                "specdec.rounds": stats.num_rounds,
                "specdec.draft_tokens": stats.num_draft_tokens,
                "specdec.accepted_tokens": stats.num_accepted_tokens,
                "specdec.target_only_steps": stats.num_target_only_steps,
                "specdec.wire_bytes": stats.wire_bytes,
            }
        )
        if how == "finished":
            self._span.set({"gen_ai.response.finish_reasons": [reason]})
        elif how == "cancelled":
            self._span.set({"specdec.cancel_cause": reason})
        else:
            self._span.fail(reason)
        self._span.end()

    def _add_call(self, round_span: Span, name: str, service: str, call: CallTimeline) -> None:
        began_s, ended_s = call.replica_interval_s
        attributes: dict[str, str | float] = {"specdec.replica": call.replica}
        if call.stages is not None:
            attributes["specdec.wait_ms"] = (call.stages.step_began_s - call.stages.admitted_s) * 1e3
            attributes["specdec.step_ms"] = (call.stages.step_ended_s - call.stages.step_began_s) * 1e3
        span = round_span.begin_child(
            name, service=service, kind="server", start_ns=self._ns(began_s), attributes=attributes
        )
        span.end(self._ns(ended_s))

    def _ns(self, at_s: float) -> int:
        return self._epoch_ns + round(at_s * 1e9)


def begin_request_trace(prepared: PreparedTurn, model: str) -> RequestTrace | None:
    """Begin the span of a generation that the current call starts; None if that call is not recorded."""
    call = current_span()
    if call is None or not call.is_recorded:
        return None
    # Both clocks tick alike; the admission's is that of `time.perf_counter`.
    start_ns = time.time_ns() - round((time.perf_counter() - prepared.began) * 1e9)
    operation = "chat" if prepared.turn.identity.parameters.is_chat else "text_completion"
    attributes = {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": "specdec",
        "gen_ai.request.model": model,
        "gen_ai.response.model": model,
        "gen_ai.output.type": "text",
        "specdec.tenant.name": prepared.turn.lease.tenant,
        "specdec.resumed": prepared.replayed is not None,
        **_request_attributes(prepared.turn.identity),
    }
    return RequestTrace(call.begin_child(f"{operation} {model}", start_ns=start_ns, attributes=attributes))


def _request_attributes(identity: GenerationIdentity) -> Attributes:
    sampling, speculation = identity.parameters.sampling, identity.parameters.speculation
    return {
        "gen_ai.conversation.id": identity.session_id,
        "gen_ai.response.id": identity.request_id,
        "gen_ai.request.max_tokens": sampling.max_new_tokens,
        "gen_ai.request.temperature": sampling.filters.temperature,
        "gen_ai.request.top_p": sampling.filters.top_p,
        "gen_ai.request.top_k": float(sampling.filters.top_k),  # a double in the conventions
        "gen_ai.request.frequency_penalty": sampling.filters.frequency_penalty,
        "gen_ai.request.presence_penalty": sampling.filters.presence_penalty,
        "gen_ai.usage.input_tokens": identity.output_start,
        "specdec.mode": speculation.mode.name.lower(),
        "specdec.draft_pool": speculation.draft_pool,
        "specdec.turn": identity.turn,
    }
