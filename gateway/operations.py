"""Measures each output that the gateway requests from a coordinator, for GenAI metrics over OTLP."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from specdec.client import Completion
from specdec.contract.errors import SpecdecError
from specdec.observability.genai_metrics import Ended, GenAiMetrics, Operation

#: `error.type` of an output whose request was left by its client, or of which another output failed.
_CANCELLED = "cancelled"


@dataclass(slots=True)
class Measured:
    """An output that is being generated."""

    completion: Completion | None = None
    """The whole output; set it at the end."""


@contextmanager
def measured_operation(metrics: GenAiMetrics | None, operation: Operation) -> Iterator[Measured]:
    """Record what the block generates, once it sets the completion or ends without; nothing if `metrics` is None."""
    measured, error, began_s = Measured(), _CANCELLED, time.monotonic()
    try:
        yield measured
    except SpecdecError as failure:
        error = failure.reason
        raise
    finally:
        if metrics is not None:
            metrics.observe_called(operation, _ended(measured.completion, error, time.monotonic() - began_s))


def _ended(completion: Completion | None, error: str, duration_s: float) -> Ended:
    if completion is None:
        return Ended(duration_s, error=error)
    usage = completion.usage
    return Ended(duration_s, num_input_tokens=usage.num_prompt_tokens, num_output_tokens=usage.num_output_tokens)
