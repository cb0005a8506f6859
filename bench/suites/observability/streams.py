"""The models and the streams of the suite `observability`. The suite `faults` has streams of the same lengths."""

import os
from collections.abc import Sequence
from pathlib import Path

from bench.harness.streams import StreamRequest
from bench.systems.models import DEMO
from bench.systems.simulated import ReplicaCommand
from specdec.cli.launching import QUIET_THREADS

PROMPT_TOKENS = 48
#: Tokens of each output by the number of streams: a batch of 16 takes about four times as long as one stream.
NUM_TOKENS = {1: 128, 16: 64}
#: Largest share of a round that metrics may take, and of throughput that the audit may take at its default share.
MOST_COST = 0.01
_TRACE_VARIABLES = "OTEL_"


def model_replicas(target: Path, arguments: Sequence[Sequence[str]] = ((), ())) -> list[ReplicaCommand]:
    """Return a target and the demo pair's draft; `arguments` are further ones of each."""
    models = {"target": target, "draft": DEMO / "draft"}
    return [
        ReplicaCommand.serving(role, model, *own) for (role, model), own in zip(models.items(), arguments, strict=True)
    ]


def service_environ() -> dict[str, str]:
    """Return the environment that `specdec up` gives its services, without what would turn traces on."""
    inherited = {
        name: value
        for name, value in os.environ.items()
        if name != "OMP_NUM_THREADS" and not name.startswith(_TRACE_VARIABLES)
    }
    return QUIET_THREADS | inherited


def requests(prompts: Sequence[list[int]]) -> list[StreamRequest]:
    """Return one greedy stream for each prompt, all at once."""
    options = {"max_new_tokens": NUM_TOKENS[len(prompts)], "temperature": 0.0, "ignore_eos": True}
    return [StreamRequest(prompt, options) for prompt in prompts]


def case_of(pair: str, num_streams: int) -> str:
    """Return the name of a case."""
    return f"{pair}, {num_streams} stream{'s' if num_streams > 1 else ''}, greedy"
