"""A step that works is never taken for hung: its limit is above its time, however prompts and contexts grow."""

from __future__ import annotations

from typing import NamedTuple

from hypothesis import given, settings
from hypothesis import strategies as st

from specdec.engine.loop.watchdog import PATIENCE_FACTOR, PATIENCE_S
from specdec.engine.schedule.step_times import StepLoad, StepTimes


class Device(NamedTuple):
    """Seconds per step, per token, and per token and token of its context."""

    fixed_s: float
    token_s: float
    pair_s: float

    def step_s(self, load: StepLoad) -> float:
        pairs = load.num_context_tokens + load.num_prefill_pairs
        return self.fixed_s + self.token_s * (load.num_tokens + load.num_prefill_tokens) + self.pair_s * pairs


#: The narrowest supported model attends to 64 tokens in the time of one further token.
_DEVICES = st.builds(
    lambda fixed_s, token_s, context_share: Device(fixed_s, token_s, token_s * context_share),
    st.sampled_from([1e-4, 5e-3, 0.5]), st.sampled_from([1e-5, 1e-3, 0.1]), st.sampled_from([0.0, 1 / 6000, 1 / 64]),
)  # fmt: skip

#: Steps that a target runs before it reports SERVING.
_WARM_UP = (StepLoad().with_prefill(33, 0), StepLoad(2, 31), StepLoad(2, 31))


@st.composite
def _loads(draw: st.DrawFn) -> StepLoad:
    num_tokens = draw(st.sampled_from([0, 0, 1, 5, 40]))
    load = StepLoad(num_tokens, num_tokens * draw(st.sampled_from([10, 1000, 100_000])))
    if num_tokens and draw(st.booleans()):
        return load
    return load.with_prefill(draw(st.sampled_from([16, 100, 512])), draw(st.sampled_from([0, 1000, 100_000])))


@settings(deadline=None, max_examples=300)
@given(_DEVICES, st.lists(st.tuples(_loads(), st.integers(1, 60)), min_size=1, max_size=12))
def test_no_step_of_a_device_of_steady_speed_exceeds_its_limit(
    device: Device, loads: list[tuple[StepLoad, int]]
) -> None:
    times = StepTimes()
    for load in (*_WARM_UP, *(load for load, count in loads for _ in range(count))):
        assert device.step_s(load) <= PATIENCE_FACTOR * times.step_s(load) + PATIENCE_S, load
        times.observe(load, device.step_s(load))


@settings(deadline=None)
@given(_DEVICES, _loads().filter(lambda load: not (load.num_tokens and load.num_prefill_tokens)))
def test_a_step_like_earlier_ones_is_limited_by_their_time(device: Device, load: StepLoad) -> None:
    times = StepTimes()
    for _ in range(3):
        times.observe(load, device.step_s(load))
    assert times.step_s(load) <= 1.01 * device.step_s(load)


@settings(deadline=None)
@given(_DEVICES, st.integers(1, 20), st.sampled_from([100, 512, 2048]))
def test_a_hung_prompt_step_is_given_up_soon_after_the_longest_time_its_tokens_could_take(
    device: Device, num_turns: int, num_tokens: int
) -> None:
    times = StepTimes()
    for load in (*_WARM_UP, *(StepLoad(5, 100),) * num_turns):
        times.observe(load, device.step_s(load))
    slowest_token_s = max(device.step_s(load) / load.num_tokens for load in (_WARM_UP[-1], StepLoad(5, 100)))
    assert times.step_s(StepLoad().with_prefill(num_tokens, 0)) <= slowest_token_s * num_tokens * (2 + num_tokens / 64)
