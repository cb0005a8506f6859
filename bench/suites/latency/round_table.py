"""Suite `latency`: the table of a round, which says where its time goes. It is made from the spans of its trace.

A separate system is traced (`specdec up --otlp-endpoint`), so that recording slows no compared system.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from bench.harness.rows import Origin, Row
from bench.harness.trace_receiver import TraceReceiver
from bench.harness.workload import GAMMA, NUM_NEW_TOKENS
from bench.systems.ours import RunningSystem

SUITE = "latency"
CASE = "deep(18, 0.02), 1 stream, greedy, timed"
_NS_MS = 1e-6


class TracedRound(NamedTuple):
    """A round with both of its calls; times in nanoseconds."""

    began_ns: int
    propose: Any
    verify: Any
    decided_ns: int
    next_began_ns: int

    @property
    def stages_ms(self) -> dict[str, float]:
        """Durations of the stages, in the order in which they follow each other."""
        between_ns = {
            "draft call: way there": self.propose.start_time_unix_nano - self.began_ns,
            "target call: way back of the draft, way there": (
                self.verify.start_time_unix_nano - self.propose.end_time_unix_nano
            ),
            "coordinator: way back, decide, learn": self.decided_ns - self.verify.end_time_unix_nano,
            "coordinator: text, begin the next round": self.next_began_ns - self.decided_ns,
        }
        there, between, decide, follow = ({name: ns * _NS_MS} for name, ns in between_ns.items())
        return (
            there | _replica_ms("draft", self.propose) | between | _replica_ms("target", self.verify) | decide | follow
        )


def _replica_ms(role: str, call: Any) -> dict[str, float]:
    found = {attribute.key: attribute.value.double_value for attribute in call.attributes}
    wait_ms, step_ms = found["specdec.wait_ms"], found["specdec.step_ms"]
    whole_ms = (call.end_time_unix_nano - call.start_time_unix_nano) * _NS_MS
    return {
        f"{role}: admit, wait, plan": wait_ms,
        f"{role}: steps, sampling from logits": step_ms,
        f"{role}: read, check, answer": whole_ms - wait_ms - step_ms,
    }


def table_rows(target_dir: Path, draft_dir: Path, prompts: Sequence[list[int]], quick: bool) -> list[Row]:
    """Run the prompts once more and return the median time of a round and of its stages."""
    with TraceReceiver() as receiver:
        with RunningSystem(target_dir, draft_dir, flags=("--otlp-endpoint", receiver.url)) as ours:
            for prompt in prompts:
                ours.run(prompt, max_new_tokens=NUM_NEW_TOKENS, temperature=0.0, gamma=GAMMA)
        rounds = list(rounds_of(receiver.requests))
    row = partial(Row, suite=SUITE, case=CASE, origin=Origin(), quick=quick, unit="ms")
    round_ms = median((each.next_began_ns - each.began_ns) * _NS_MS for each in rounds)
    stages = [each.stages_ms for each in rounds]
    return [
        row(system="specdec", metric="timed_round_ms", value=round_ms),
        *(row(system=stage, metric="stage_ms", value=median(each[stage] for each in stages)) for stage in stages[0]),
    ]


def rounds_of(requests: Sequence[bytes]) -> Iterator[TracedRound]:
    """Yield the rounds with a draft, except for the first of each request, which reads the prompt, and the last."""
    spans = [
        span
        for request in requests
        for resource in ExportTraceServiceRequest.FromString(request).resource_spans
        for scope in resource.scope_spans
        for span in scope.spans
    ]
    calls = {(span.parent_span_id, span.name): span for span in spans}
    rounds = defaultdict(list)
    for span in spans:
        if span.name == "round":
            rounds[span.trace_id].append(span)
    for of_request in rounds.values():
        of_request.sort(key=lambda span: span.start_time_unix_nano)
        for this, following in pairwise(of_request[1:]):
            propose, verify = (calls.get((this.span_id, name)) for name in ("propose", "verify"))
            if propose is not None:
                decided_ns = next(event.time_unix_nano for event in this.events if event.name == "decided")
                yield TracedRound(
                    this.start_time_unix_nano, propose, verify, decided_ns, following.start_time_unix_nano
                )
