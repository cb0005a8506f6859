"""A load, and the numbers of a deployment that serves it; `search` finds them, and `steady_state` has the times."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from specdec.cli.planning.cards import CALLS, Card, PlacedModel
from specdec.cli.planning.steady_state import Requests, SteadyState
from specdec.contract.errors import InvalidRequest

#: Peak over the load, for the chance of random arrivals.
PEAK_FACTOR = 1.05
#: A coordinator gives a target more than `BASE_STREAMS` streams while they gain at least `SLOT_GAIN`: the growth of
#: tokens per second relative to that of streams (coordinator/admission/speeds.py). Further requests wait for a slot.
BASE_STREAMS, SLOT_GAIN = 16, 0.1
_MAX_RANKS = 8
_NUM_HALVINGS = 12
#: Of a stored session beside its tokens, and of a token (docs/reference/redis.md).
_SESSION_BYTES, _TOKEN_BYTES = 2_500, 4


@dataclass(frozen=True, slots=True)
class ExpectedLoad:
    """The load, and the latencies that it may have."""

    rate_per_s: float
    prompt_tokens: int
    output_tokens: int
    ttft_s: float
    """Limit of the time to the first token."""
    tpot_s: float
    """Limit of the time per further token."""
    session_ttl_s: float = 3600.0
    """Time that Redis keeps an idle session."""
    peak_factor: float = PEAK_FACTOR
    """Peak, at which the limits hold, over the rate."""

    @property
    def context_tokens(self) -> float:
        """Mean tokens of a running stream."""
        return self.requests(0, 0.0).context_tokens

    @property
    def peak_per_s(self) -> float:
        """Requests per second at the peak."""
        return self.rate_per_s * self.peak_factor

    def requests(self, gamma: int, alpha: float, factor: float = 1.0) -> Requests:
        """Return the requests and their rounds, at a multiple of the load's rate."""
        rate_per_s = self.rate_per_s * factor
        return Requests(rate_per_s, self.prompt_tokens, self.output_tokens, gamma, tokens_per_round(alpha, gamma))


@dataclass(frozen=True, slots=True)
class Deployment:
    """Numbers of a deployment and what they give."""

    target: PlacedModel
    draft: PlacedModel | None
    gamma: int
    num_targets: int
    num_drafts: int
    tokens_per_round: float
    expected: SteadyState
    """At the planned load."""
    peak: SteadyState
    """At the peak, at which the limits hold."""
    core_share: float
    """Share of a coordinator's core that its streams take at the peak."""
    slot_gain: float
    """Gain of further streams at the peak. At less than `SLOT_GAIN`, coordinators give the targets fewer slots."""

    def kv_bytes_per_target(self, load: ExpectedLoad) -> float:
        """Return the KV of the streams of one target at their full length, at the peak."""
        return kv_bytes_of(self.target, self.peak, load) / self.num_targets

    @property
    def num_gpus(self) -> int:
        draft_gpus = 0 if self.draft is None else self.num_drafts * self.draft.num_gpus
        return self.num_targets * self.target.num_gpus + draft_gpus

    def redis_bytes(self, load: ExpectedLoad) -> float:
        """Return the memory of the sessions that Redis keeps."""
        num_sessions = load.rate_per_s * load.session_ttl_s + self.expected.num_streams
        return num_sessions * (_SESSION_BYTES + _TOKEN_BYTES * (load.prompt_tokens + load.output_tokens))

    def redis_writes_per_s(self, load: ExpectedLoad) -> float:
        """Return the number of commits: one a round."""
        return load.rate_per_s * max(1.0, load.output_tokens / self.tokens_per_round)

    def num_coordinators(self, load: ExpectedLoad) -> int:
        """See `num_coordinators`."""
        return num_coordinators(load, self.core_share)

    def gpu_hours_per_million_tokens(self, load: ExpectedLoad) -> float:
        return self.num_gpus * 1e6 / (load.rate_per_s * load.output_tokens * 3600)

    def limits(self, load: ExpectedLoad) -> str:
        """Return what keeps the system from more streams."""
        shares = {
            "time per token": self.peak.tpot_s / load.tpot_s,
            "time to the first token": self.peak.ttft_s / load.ttft_s,
            f"slots, further streams would gain less than {SLOT_GAIN:.0%}": SLOT_GAIN / self.slot_gain,
            "KV memory of the targets": self.kv_bytes_per_target(load) / self.target.kv_bytes,
        }
        if self.draft:
            shares["KV memory of the drafts"] = kv_bytes_of(self.draft, self.peak, load) / (
                self.num_drafts * self.draft.kv_bytes
            )
        return max(shares, key=lambda name: shares[name])


def kv_bytes_of(model: PlacedModel, state: SteadyState, load: ExpectedLoad) -> float:
    """Return the KV, with recurrent states, that a model has of all streams at their full length."""
    return state.num_streams * model.session_bytes(load.prompt_tokens + load.output_tokens)


def coordinator_cores(load: ExpectedLoad, core_share: float) -> float:
    """Return the cores of coordinators of which the peak of a load takes a share."""
    return load.peak_per_s * load.output_tokens * CALLS.coordinator_s / core_share


def num_coordinators(load: ExpectedLoad, core_share: float) -> int:
    """Return the number of coordinator processes, each with one core; two at least, so that one may end."""
    return max(2, math.ceil(coordinator_cores(load, core_share)))


def tokens_per_round(alpha: float, gamma: int) -> float:
    """Return the mean tokens of a round (Leviathan, Kalman and Matias 2023, equation 1)."""
    return sum(alpha**accepted for accepted in range(gamma + 1))


def formula_speedup(alpha: float, gamma: int, cost: float) -> float:
    """Return tokens per second against the target alone with one stream (the same paper, theorem 3.8).

    Args:
        alpha: acceptance rate.
        gamma: draft tokens of a round.
        cost: time of a draft step over that of a step of the target.
    """
    return tokens_per_round(alpha, gamma) / (gamma * cost + 1.0)


def placed(model: PlacedModel, card: Card, room_tokens: int) -> PlacedModel:
    """Return a model on the fewest cards that hold its weights and the KV of a stream.

    Args:
        model: the model, on any number of cards.
        card: the card.
        room_tokens: tokens of a stream.

    Raises:
        InvalidRequest: eight cards do not hold it.
    """
    num_gpus = 1
    while num_gpus <= _MAX_RANKS:
        one = replace(model, card=card, num_gpus=num_gpus)
        if one.kv_bytes >= model.session_bytes(room_tokens):
            return one
        num_gpus *= 2
    raise InvalidRequest(
        f"--gpu: {model.name} needs {model.weight_bytes / 1e9:.0f} GB and {_MAX_RANKS} x {card.name} have "
        f"{_MAX_RANKS * card.memory_gb:.0f} GB",
        field="gpu",
    )


def base_tpot_s(state_at: Callable[[float], SteadyState | None], rate_per_s: float, num_targets: int) -> float:
    """Return the time per token with `BASE_STREAMS` streams of each target.

    Args:
        state_at: means of the system at a rate of requests.
        rate_per_s: any rate.
        num_targets: targets of the system.
    """

    def is_light(state: SteadyState | None) -> bool:
        return state is not None and state.num_streams <= BASE_STREAMS * num_targets

    low, high = 0.0, rate_per_s
    while is_light(state_at(high)):
        low, high = high, 2.0 * high
    for _ in range(_NUM_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if is_light(state_at(middle)) else (low, middle)
    base = state_at(low)
    assert base is not None, "a load of few streams is served"
    return base.tpot_s


def slot_gain(base_s: float, state: SteadyState, num_targets: int) -> float:
    """Return the gain of further streams in a state with more than `BASE_STREAMS` streams of each target.

    It is that which coordinators predict (`stream_gain` in coordinator/admission/speeds.py): the time per token grows
    by as much with each stream.
    """
    num_streams = state.num_streams / num_targets
    per_stream_s = max(0.0, state.tpot_s - base_s) / (num_streams - BASE_STREAMS)
    return max(0.0, base_s - per_stream_s * BASE_STREAMS) / state.tpot_s
