"""Searches for the fewest GPUs that serve a load within its latencies.

The latencies have to hold at the peak, a multiple of the load. For each gamma the search finds the fewest
targets that hold them with any number of drafts, and then, for this and some larger numbers of targets, the fewest
drafts. `steady_state` has the times.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

from specdec.cli.planning.cards import CALLS, Card, PlacedModel
from specdec.cli.planning.steady_state import Requests, SteadyState, steady_state
from specdec.contract.errors import InvalidRequest

MAX_GAMMA = 8
#: Peak over the load, for the chance of random arrivals.
PEAK_FACTOR = 1.05
#: A coordinator gives a target more than `BASE_STREAMS` streams while they gain at least `SLOT_GAIN`: the growth of
#: tokens per second relative to that of streams (coordinator/admission/speeds.py). Further requests wait for a slot.
BASE_STREAMS, SLOT_GAIN = 16, 0.1
_MAX_RANKS = 8
#: Largest pool that is planned, and numbers of targets that are tried for each gamma.
_MAX_REPLICAS = 1 << 20
_NUM_TRIED = 6
_NUM_HALVINGS = 12
#: Processor time of a coordinator for a token, and the share of a core that is planned (docs/performance.md).
_COORDINATOR_S_PER_TOKEN, _CORE_SHARE = 0.0002, 0.6
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
    slot_gain: float
    """Gain of further streams at the peak. At less than `SLOT_GAIN`, coordinators give the targets fewer slots."""

    def kv_bytes_per_target(self, load: ExpectedLoad) -> float:
        """Return the KV of the streams of one target at their full length, at the peak."""
        return _kv_bytes(self.target, self.peak, load) / self.num_targets

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
        """Return the number of coordinator processes, each with one core; two at least, so that one may end."""
        return max(2, math.ceil(coordinator_cores(load)))

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
            shares["KV memory of the drafts"] = _kv_bytes(self.draft, self.peak, load) / (
                self.num_drafts * self.draft.kv_bytes
            )
        return max(shares, key=lambda name: shares[name])


def _kv_bytes(model: PlacedModel, state: SteadyState, load: ExpectedLoad) -> float:
    """Return the KV, with recurrent states, that a model has of all streams at their full length."""
    return state.num_streams * model.session_bytes(load.prompt_tokens + load.output_tokens)


def coordinator_cores(load: ExpectedLoad) -> float:
    """Return the cores of coordinators that a load keeps as busy as is planned."""
    return load.rate_per_s * load.output_tokens * _COORDINATOR_S_PER_TOKEN / _CORE_SHARE


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


def best_deployment(load: ExpectedLoad, alpha: float, target: PlacedModel, draft: PlacedModel | None) -> Deployment:
    """Return the deployment with the fewest GPUs, of these with the fewest drafts, and then the least time per token.

    Beyond 16 targets not every number of them is tried, so that some GPUs more than the fewest are possible.

    Args:
        load: the load.
        alpha: acceptance rate of the draft.
        target: the placed target.
        draft: the placed draft; None: without speculation.

    Raises:
        InvalidRequest: no deployment holds the limits; the message names the one that fails and its least value.
    """
    _require_reachable(load, alpha, target, draft)
    found = min(
        _candidates(load, alpha, target, draft),
        key=lambda each: (each.num_gpus, each.num_drafts, each.expected.tpot_s),
        default=None,
    )
    if found is None:
        raise InvalidRequest(
            "--tpot-ms and --ttft-ms leave no room for the load: raise one of them, or name a faster --gpu",
            field="tpot_ms",
        )
    return found


def state_within_limits(load: ExpectedLoad, alpha: float, deployment: Deployment) -> SteadyState | None:
    """Return the means of a deployment at the peak of a load; None if a limit does not hold."""
    search = _Search(load, alpha, deployment.target, deployment.draft, deployment.gamma)
    return search.at_peak(deployment.num_targets, deployment.num_drafts)


def lone_stream(
    load: ExpectedLoad, alpha: float, target: PlacedModel, draft: PlacedModel | None, gamma: int
) -> SteadyState:
    """Return the times of a stream that no other one meets."""
    state = steady_state(replace(load.requests(gamma, alpha), rate_per_s=0.0), CALLS, target, draft, 1, 1)
    assert state is not None, "no queue grows without requests"
    return state


def base_tpot_s(
    requests: Requests, target: PlacedModel, draft: PlacedModel | None, num_targets: int, num_drafts: int
) -> float:
    """Return the time per token with `BASE_STREAMS` streams of each target."""

    def at(rate_per_s: float) -> SteadyState | None:
        return steady_state(replace(requests, rate_per_s=rate_per_s), CALLS, target, draft, num_targets, num_drafts)

    def is_light(state: SteadyState | None) -> bool:
        return state is not None and state.num_streams <= BASE_STREAMS * num_targets

    low, high = 0.0, requests.rate_per_s
    while is_light(at(high)):
        low, high = high, 2.0 * high
    for _ in range(_NUM_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if is_light(at(middle)) else (low, middle)
    base = at(low)
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


def _require_reachable(load: ExpectedLoad, alpha: float, target: PlacedModel, draft: PlacedModel | None) -> None:
    lone = [lone_stream(load, alpha, target, draft, gamma) for gamma in _gammas(draft)]
    least_tpot_s, least_ttft_s = min(each.tpot_s for each in lone), min(each.ttft_s for each in lone)
    if least_tpot_s > load.tpot_s:
        raise InvalidRequest(
            f"--tpot-ms must be at least {least_tpot_s * 1e3:.1f} on {target.num_gpus} x {target.card.name}, the time "
            f"of one stream, got {load.tpot_s * 1e3:g}",
            field="tpot_ms",
        )
    if least_ttft_s > load.ttft_s:
        raise InvalidRequest(
            f"--ttft-ms must be at least {least_ttft_s * 1e3:.1f}, the time of a prompt of {load.prompt_tokens} "
            f"tokens, got {load.ttft_s * 1e3:g}",
            field="ttft_ms",
        )


def _gammas(draft: PlacedModel | None) -> range:
    return range(1, MAX_GAMMA + 1) if draft else range(1)


def _candidates(
    load: ExpectedLoad, alpha: float, target: PlacedModel, draft: PlacedModel | None
) -> Iterator[Deployment]:
    for gamma in _gammas(draft):
        search = _Search(load, alpha, target, draft, gamma)
        yield from (search.deployment(*pool) for pool in search.pools())


class _Search:
    """The deployments of one gamma."""

    def __init__(
        self, load: ExpectedLoad, alpha: float, target: PlacedModel, draft: PlacedModel | None, gamma: int
    ) -> None:
        self._load, self._target, self._draft, self._gamma = load, target, draft, gamma
        self._expected = load.requests(gamma, alpha)
        self._peak = load.requests(gamma, alpha, load.peak_factor)

    def pools(self) -> Iterator[tuple[int, int]]:
        """Give numbers of targets and drafts that hold the limits."""
        least = _fewest(lambda number: self._is_enough(number, _MAX_REPLICAS))
        if least is None:
            return
        if self._draft is None:
            yield least, 0
            return
        for num_targets in range(least, least + _NUM_TRIED * (stride := 1 + least // 16), stride):
            num_drafts = _fewest(partial(self._is_enough, num_targets))
            if num_drafts is not None:
                yield num_targets, num_drafts
                if num_drafts == 1:
                    return

    def at_peak(self, num_targets: int, num_drafts: int) -> SteadyState | None:
        """Return the means at the peak; None if a limit does not hold."""
        load, state = self._load, self._state(self._peak, num_targets, num_drafts)
        if state is None or state.tpot_s > load.tpot_s or state.ttft_s > load.ttft_s:
            return None
        if _kv_bytes(self._target, state, load) > num_targets * self._target.kv_bytes:
            return None
        if self._draft and _kv_bytes(self._draft, state, load) > num_drafts * self._draft.kv_bytes:
            return None
        return state if self._slot_gain(state, num_targets, num_drafts) >= SLOT_GAIN else None

    def _is_enough(self, num_targets: int, num_drafts: int) -> bool:
        return self.at_peak(num_targets, num_drafts) is not None

    def deployment(self, num_targets: int, num_drafts: int) -> Deployment:
        """Return a deployment that holds the limits."""
        expected, peak = self._state(self._expected, num_targets, num_drafts), self.at_peak(num_targets, num_drafts)
        assert expected is not None
        assert peak is not None
        return Deployment(
            self._target,
            self._draft,
            self._gamma,
            num_targets,
            num_drafts,
            self._peak.tokens_per_round,
            expected,
            peak,
            self._slot_gain(peak, num_targets, num_drafts),
        )

    def _slot_gain(self, state: SteadyState, num_targets: int, num_drafts: int) -> float:
        if state.num_streams <= BASE_STREAMS * num_targets:
            return 1.0
        base_s = base_tpot_s(self._peak, self._target, self._draft, num_targets, num_drafts)
        return slot_gain(base_s, state, num_targets)

    def _state(self, requests: Requests, num_targets: int, num_drafts: int) -> SteadyState | None:
        return steady_state(requests, CALLS, self._target, self._draft, num_targets, num_drafts)


def _fewest(is_enough: Callable[[int], bool]) -> int | None:
    """Return the smallest number from which on a condition holds; None if it does not for `_MAX_REPLICAS`."""
    most = 1
    while not is_enough(most):
        most *= 2
        if most > _MAX_REPLICAS:
            return None
    least = most // 2  # is not enough, or 0
    while most - least > 1:
        middle = (least + most) // 2
        if is_enough(middle):
            most = middle
        else:
            least = middle
    return most
