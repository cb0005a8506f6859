"""Searches for the fewest GPUs, with the cores of coordinators, that serve a load within its latencies.

The latencies have to hold at the peak, a multiple of the load. For each gamma the search finds the fewest
targets that hold them with any number of drafts, and then, for this and some larger numbers of targets, the fewest
drafts. `steady_state` has the times.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial

from specdec.cli.planning.cards import CALLS, PlacedModel
from specdec.cli.planning.deployment import (
    BASE_STREAMS,
    SLOT_GAIN,
    Deployment,
    ExpectedLoad,
    base_tpot_s,
    kv_bytes_of,
    num_coordinators,
    slot_gain,
)
from specdec.cli.planning.steady_state import Requests, SteadyState, steady_state
from specdec.contract.errors import InvalidRequest

MAX_GAMMA = 8
#: Largest pool that is planned, and numbers of targets that are tried for each gamma.
_MAX_REPLICAS = 1 << 20
_NUM_TRIED = 6
#: Shares of a coordinator's core that are planned: streams wait for each other there, so the second may save a GPU.
_CORE_SHARES = 0.6, 0.3
#: Cores for coordinators that count as much as a GPU: as many come with each GPU of a rented machine with eight H100.
_CORES_OF_A_GPU = 24


def best_deployment(load: ExpectedLoad, alpha: float, target: PlacedModel, draft: PlacedModel | None) -> Deployment:
    """Return the deployment with the fewest GPUs and coordinators, of these with the fewest drafts, and then the least
    time per token.

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
    usual_share, low_share = _CORE_SHARES

    def cost(each: Deployment) -> tuple[float, ...]:
        return _cost_gpus(each, load), each.num_drafts, each.expected.tpot_s

    found = min(_candidates(load, alpha, target, draft, usual_share, _gammas(draft)), key=cost, default=None)
    if draft is not None:  # with another share the best gamma is hardly ever another one
        gammas = _gammas(draft) if found is None else (found.gamma,)
        more = _candidates(load, alpha, target, draft, low_share, gammas)
        found = min((*more, *filter(None, (found,))), key=cost, default=None)
    if found is None:
        raise InvalidRequest(
            "--tpot-ms and --ttft-ms leave no room for the load: raise one of them, or name a faster --gpu",
            field="tpot_ms",
        )
    return found


def state_within_limits(load: ExpectedLoad, alpha: float, deployment: Deployment) -> SteadyState | None:
    """Return the means of a deployment at the peak of a load; None if a limit does not hold."""
    search = _Search(load, alpha, deployment.target, deployment.draft, deployment.gamma, deployment.core_share)
    return search.at_peak(deployment.num_targets, deployment.num_drafts)


def lone_stream(
    load: ExpectedLoad, alpha: float, target: PlacedModel, draft: PlacedModel | None, gamma: int
) -> SteadyState:
    """Return the times of a stream that no other one meets."""
    state = steady_state(replace(load.requests(gamma, alpha), rate_per_s=0.0), CALLS, target, draft, 1, 1)
    assert state is not None, "no queue grows without requests"
    return state


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


def _cost_gpus(deployment: Deployment, load: ExpectedLoad) -> float:
    return deployment.num_gpus + deployment.num_coordinators(load) / _CORES_OF_A_GPU


def _candidates(
    load: ExpectedLoad,
    alpha: float,
    target: PlacedModel,
    draft: PlacedModel | None,
    core_share: float,
    gammas: Iterable[int],
) -> Iterator[Deployment]:
    for gamma in gammas:
        search = _Search(load, alpha, target, draft, gamma, core_share)
        yield from (search.deployment(*pool) for pool in search.pools())


class _Search:
    """The deployments of one gamma and one share of the coordinators' cores."""

    def __init__(
        self,
        load: ExpectedLoad,
        alpha: float,
        target: PlacedModel,
        draft: PlacedModel | None,
        gamma: int,
        core_share: float,
    ) -> None:
        self._load, self._target, self._draft, self._gamma = load, target, draft, gamma
        self._expected = load.requests(gamma, alpha)
        self._peak = load.requests(gamma, alpha, load.peak_factor)
        self._core_share, self._num_coordinators = core_share, num_coordinators(load, core_share)

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
        if kv_bytes_of(self._target, state, load) > num_targets * self._target.kv_bytes:
            return None
        if self._draft and kv_bytes_of(self._draft, state, load) > num_drafts * self._draft.kv_bytes:
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
            self._core_share,
            self._slot_gain(peak, num_targets, num_drafts),
        )

    def _slot_gain(self, state: SteadyState, num_targets: int, num_drafts: int) -> float:
        if state.num_streams <= BASE_STREAMS * num_targets:
            return 1.0

        def state_at(rate_per_s: float) -> SteadyState | None:
            return self._state(replace(self._peak, rate_per_s=rate_per_s), num_targets, num_drafts)

        return slot_gain(base_tpot_s(state_at, self._peak.rate_per_s, num_targets), state, num_targets)

    def _state(self, requests: Requests, num_targets: int, num_drafts: int) -> SteadyState | None:
        return steady_state(
            requests, CALLS, self._target, self._draft, num_targets, num_drafts, self._num_coordinators
        )  # fmt: skip


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
