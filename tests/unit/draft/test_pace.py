"""How wide branches are made, and when none are: from measured times alone."""

from __future__ import annotations

import pytest

from draft_service.fan_out_policy import MAX_FAN_OUT, FanOutPolicy, Predraft

GAMMA = 4


def _measured(policy: Predraft, *, wait_s: float, step_s: dict[int, float]) -> FanOutPolicy:
    pace = FanOutPolicy(policy)
    pace.observe_wait(wait_s)
    for fan_out, seconds in step_s.items():
        pace.observe_step(fan_out, seconds)
    return pace


def test_nothing_is_branched_when_it_is_off() -> None:
    assert FanOutPolicy(Predraft.OFF).choose(GAMMA) == 0


def test_branches_are_wide_until_times_are_known() -> None:
    assert FanOutPolicy(Predraft.ON).choose(GAMMA) == MAX_FAN_OUT


@pytest.mark.parametrize(
    ("wait_s", "expected"),
    [(1.0, MAX_FAN_OUT), (0.1, 4), (0.074, 2), (0.051, 2), (0.049, 1), (0.001, 1)],
)
def test_the_widest_fan_out_that_is_done_within_the_wait_is_taken(wait_s: float, expected: int) -> None:
    """gamma + 1 steps: at 4 tokens 5 times 8, 10, 15 and 20 ms."""
    pace = _measured(Predraft.ON, wait_s=wait_s, step_s={1: 0.008, 2: 0.010, 3: 0.015, 4: 0.020})
    assert pace.choose(GAMMA) == expected


def test_a_longer_draft_is_branched_less_widely() -> None:
    pace = _measured(Predraft.ON, wait_s=0.06, step_s={1: 0.008, 2: 0.010, 3: 0.015, 4: 0.020})
    assert (pace.choose(1), pace.choose(4), pace.choose(9)) == (4, 2, 1)


def test_auto_seldom_tries_branches_that_cannot_be_done_within_the_wait() -> None:
    """Times of rounds would say little here: five steps of 30 ms, 60 ms of waiting."""
    pace = _measured(Predraft.AUTO, wait_s=0.06, step_s={1: 0.03})
    fan_outs = [pace.choose(GAMMA) for _ in range(640)]
    assert set(fan_outs) == {0, 1}
    assert sum(fan_outs) < 0.06 * len(fan_outs)
    pace.observe_wait(5.0)
    assert max(pace.choose(GAMMA) for _ in range(8)) > 1


def _share_branched(pace: FanOutPolicy, *, round_s: dict[bool, float], num_rounds: int) -> float:
    """Runs rounds that take so long with branches, and so long without."""
    num_branched = 0
    for _ in range(num_rounds):
        fan_out = pace.choose(GAMMA)
        pace.observe_round(fan_out, round_s[fan_out > 0])
        num_branched += fan_out > 0
    return num_branched / num_rounds


def test_auto_branches_where_that_makes_rounds_shorter_and_seldom_tries_without() -> None:
    pace = FanOutPolicy(Predraft.AUTO)
    assert _share_branched(pace, round_s={True: 0.03, False: 0.05}, num_rounds=640) > 0.94


def test_auto_leaves_branches_out_where_they_make_rounds_longer_and_seldom_tries_with() -> None:
    pace = FanOutPolicy(Predraft.AUTO)
    assert _share_branched(pace, round_s={True: 0.06, False: 0.05}, num_rounds=640) < 0.06


def test_auto_notices_when_that_changes() -> None:
    pace = FanOutPolicy(Predraft.AUTO)
    _share_branched(pace, round_s={True: 0.03, False: 0.05}, num_rounds=200)
    _share_branched(pace, round_s={True: 0.09, False: 0.05}, num_rounds=200)
    assert _share_branched(pace, round_s={True: 0.09, False: 0.05}, num_rounds=640) < 0.06
    _share_branched(pace, round_s={True: 0.03, False: 0.05}, num_rounds=2000)
    assert _share_branched(pace, round_s={True: 0.03, False: 0.05}, num_rounds=640) > 0.94


def test_on_branches_whatever_it_costs() -> None:
    assert _share_branched(FanOutPolicy(Predraft.ON), round_s={True: 0.09, False: 0.05}, num_rounds=200) == 1.0
