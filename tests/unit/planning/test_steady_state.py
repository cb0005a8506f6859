"""The means of a system under load: against laws of queues, and against a simulation of every call."""

from __future__ import annotations

import heapq
import random
from dataclasses import dataclass, replace

import pytest

from specdec.cli.planning.steady_state import CallTimes, Requests, SteadyState, steady_state

CALLS = CallTimes(target_s=0.002, draft_s=0.002, opening_s=0.005)


@dataclass(frozen=True)
class Steps:
    """A step takes `fixed_s`, and `row_s` for each row."""

    fixed_s: float
    row_s: float

    def step_s(self, num_sequences: float, num_rows: float, context_tokens: float) -> float:
        return self.fixed_s + self.row_s * num_sequences * num_rows


TARGET, DRAFT = Steps(0.018, 0.0004), Steps(0.0025, 0.00002)
REQUESTS = Requests(4.0, 64, 64, gamma=4, tokens_per_round=4.0)


def state(requests: Requests = REQUESTS, num_targets: int = 1, num_drafts: int = 1) -> SteadyState:
    found = steady_state(requests, CALLS, TARGET, DRAFT if requests.gamma else None, num_targets, num_drafts)
    assert found is not None
    return found


def test_a_stream_that_meets_no_other_takes_its_steps_and_calls() -> None:
    lone = state(replace(REQUESTS, rate_per_s=0.0))
    draft_s = 4 * DRAFT.step_s(1, 1, 0) + CALLS.draft_s
    assert lone.round_s == pytest.approx(TARGET.step_s(1, 5, 0) + CALLS.target_s + draft_s)
    prompt_s = 64 * (TARGET.row_s + DRAFT.row_s)
    assert lone.ttft_s == pytest.approx(lone.round_s + prompt_s + CALLS.opening_s)
    assert lone.tpot_s == pytest.approx(15 * lone.round_s / 63)
    assert (lone.num_streams, lone.target_busy_share, lone.draft_busy_share) == (0.0, 0.0, 0.0)


@pytest.mark.parametrize("rate_per_s", [0.5, 2.0, 5.0])
def test_streams_at_once_follow_littles_law(rate_per_s: float) -> None:
    found = state(replace(REQUESTS, rate_per_s=rate_per_s))
    assert found.num_streams == pytest.approx(rate_per_s * (found.ttft_s + 63 * found.tpot_s))


def test_times_and_busy_shares_grow_with_the_load_until_the_target_cannot_keep_up() -> None:
    rates = (0.0, 0.5, 1.0, 2.0, 4.0, 6.0)
    found = [state(replace(REQUESTS, rate_per_s=rate)) for rate in rates]
    for figure in ("round_s", "ttft_s", "tpot_s", "num_streams", "target_busy_share", "draft_busy_share"):
        values = [getattr(each, figure) for each in found]
        assert values == sorted(values)
    # 16 calls of 5 rows and a prompt of 64 rows: 57.6 ms of rows a request.
    assert steady_state(replace(REQUESTS, rate_per_s=1 / 0.0576), CALLS, TARGET, DRAFT, 1, 1) is None


def test_twice_the_load_on_twice_the_replicas_is_as_fast() -> None:
    one, two = state(num_targets=2, num_drafts=2), state(replace(REQUESTS, rate_per_s=8.0), 4, 4)
    assert two.tpot_s == pytest.approx(one.tpot_s, rel=0.02)
    assert two.num_streams == pytest.approx(2 * one.num_streams, rel=0.02)


@dataclass(frozen=True)
class Reading(Steps):
    """Steps that take at least the time in which the weights are read."""

    read_s: float = 0.006

    def step_s(self, num_sequences: float, num_rows: float, context_tokens: float) -> float:
        return max(self.read_s, self.fixed_s + self.row_s * num_sequences * num_rows)


@pytest.mark.parametrize(("prompt_tokens", "output_tokens"), [(150, 5), (1000, 2), (20, 300)])
def test_no_more_is_planned_than_the_rows_of_prompts_and_outputs_allow(prompt_tokens: int, output_tokens: int) -> None:
    steps = Reading(0.0, 0.00003)
    most_per_s = 1 / (steps.row_s * (prompt_tokens + output_tokens))
    for share, is_served in ((0.3, True), (1.05, False)):
        requests = Requests(share * most_per_s, prompt_tokens, output_tokens, gamma=0, tokens_per_round=1.0)
        assert (steady_state(requests, CALLS, steps, None, 1, 0) is not None) == is_served


@pytest.mark.parametrize("share", [0.9, 1.05])
def test_a_draft_that_cannot_run_all_prompts_does_not_keep_up(share: float) -> None:
    prompt_s = 4000 * DRAFT.row_s
    requests = Requests(share / prompt_s, 4000, 2, gamma=1, tokens_per_round=1.8)
    assert (steady_state(requests, CALLS, Steps(0.001, 0.0), DRAFT, 1, 1) is not None) == (share < 1)


def with_coordinators(requests: Requests, number: float) -> SteadyState | None:
    calls = replace(CALLS, coordinator_s=0.001)
    return steady_state(requests, calls, TARGET, DRAFT if requests.gamma else None, 1, 1, number)


def test_streams_of_a_step_wait_for_each_other_at_their_coordinators() -> None:
    rounds_s = [found.round_s for number in (2, 4, 1e9) if (found := with_coordinators(REQUESTS, number))]
    assert rounds_s[0] - rounds_s[2] > 2 * (rounds_s[1] - rounds_s[2]) > 0
    assert rounds_s[2] == pytest.approx(state().round_s)


def test_coordinators_that_cannot_keep_up_serve_no_load_with_drafts() -> None:
    busy = REQUESTS.rate_per_s * 64 * 0.001  # of one core
    assert with_coordinators(REQUESTS, busy * 1.01) is not None
    assert with_coordinators(REQUESTS, busy * 0.99) is None
    assert with_coordinators(replace(REQUESTS, rate_per_s=1.0, gamma=0, tokens_per_round=1.0), 0.01) is not None


@pytest.mark.parametrize("gamma", [0, 4])
@pytest.mark.parametrize("rate_per_s", [1.0, 3.0, 5.0])
def test_the_means_are_those_of_a_simulation_of_every_call(rate_per_s: float, gamma: int) -> None:
    tokens_per_round = 4.0 if gamma else 1.0
    requests = Requests(rate_per_s / (1 if gamma else 3), 64, 64, gamma, tokens_per_round)
    planned, simulated = state(requests), simulate(requests)
    assert planned.tpot_s == pytest.approx(simulated.tpot_s, rel=0.1)
    assert planned.ttft_s == pytest.approx(simulated.ttft_s, rel=0.15)
    assert planned.target_busy_share == pytest.approx(simulated.target_busy_share, abs=0.1)


def simulate(requests: Requests, num_requests: int = 3_000) -> SteadyState:
    """Run requests through one target whose steps take all calls that wait, and a draft whose steps are not shared."""
    source = random.Random(7)
    events: list[tuple[float, int, str, int]] = []
    now_s = 0.0
    for number in range(num_requests):
        now_s += source.expovariate(requests.rate_per_s)
        heapq.heappush(events, (now_s + CALLS.opening_s, number, "asks", number))
    began = {number: at_s - CALLS.opening_s for at_s, number, _, _ in events}
    left = dict.fromkeys(began, round(requests.num_rounds))
    first: dict[int, float] = {}
    last: dict[int, float] = {}
    waiting: list[int] = []
    running: list[int] = []
    busy_s = 0.0
    counter = num_requests
    while events:
        now_s, _, kind, number = heapq.heappop(events)
        counter += 1
        is_first = number not in first
        if kind == "asks":
            draft_s = requests.gamma * DRAFT.step_s(1, 1, 0) + is_first * 63 * DRAFT.row_s + CALLS.draft_s
            arrives_s = now_s + (draft_s if requests.gamma else 0.0)
            heapq.heappush(events, (arrives_s, counter, "arrives", number))
            continue
        if kind == "arrives":
            waiting.append(number)
        else:
            for done in running:
                shown_s = now_s + CALLS.target_s
                first.setdefault(done, shown_s)
                last[done] = shown_s
                left[done] -= 1
                if left[done] and requests.gamma:
                    counter += 1
                    heapq.heappush(events, (shown_s, counter, "asks", done))
            waiting += [] if requests.gamma else [done for done in running if left[done]]  # a run is in every step
            running = []
        if waiting and not running:
            running, waiting = waiting, []
            rows = sum(requests.gamma + 1 + (each not in first) * requests.prompt_tokens for each in running)
            step_s = TARGET.step_s(1, rows, 0)
            busy_s += step_s
            counter += 1
            heapq.heappush(events, (now_s + step_s, counter, "ends", -1))
    ttft_s = sum(first[number] - began[number] for number in began) / num_requests
    tpot_s = sum(last[number] - first[number] for number in began) / num_requests / (requests.output_tokens - 1)
    return SteadyState(0.0, ttft_s, tpot_s, 0.0, busy_s / now_s, 0.0)
