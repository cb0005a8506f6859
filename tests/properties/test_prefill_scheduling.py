"""Prompts beside running sessions, on devices of any speed: the delay is bounded and every prompt completes."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import example, given, settings
from hypothesis import strategies as st

from specdec.contract.types import BLOCK_TOKENS
from specdec.engine.schedule.scheduler import Scheduler, is_short

#: Of the budget: what the fit of a device without noise may be off by. One step in a million is off by more than a
#: tenth, where most of what was measured is tails of prompts; half of it was never seen.
TOLERANCE = 1.5

NUM_ROWS = 5


@dataclass(eq=False)
class Job:
    num_pending: int
    num_logit_rows: int = 1
    last_step: int = 0
    kv_len: int = 0
    num_steps: int = 0


@dataclass
class Device:
    """Seconds of a step: fixed, per token, and per pair of a token and a token attended to."""

    fixed_s: float
    token_s: float
    pair_s: float

    def step_s(self, chunks: list[tuple[Job, int]]) -> float:
        pairs = sum(num_tokens * (job.kv_len + num_tokens / 2) for job, num_tokens in chunks)
        return self.fixed_s + self.token_s * sum(num for _, num in chunks) + self.pair_s * pairs


class Replica:
    """A scheduler and its device; the answer to a verification is followed by the next one."""

    def __init__(self, device: Device, budget_s: float, num_sessions: int) -> None:
        self.scheduler = Scheduler(2048, budget_s)
        self.device = device
        self.budget_s = budget_s
        self.verifications = [Job(NUM_ROWS, NUM_ROWS) for _ in range(num_sessions)]
        self.prompts: list[Job] = []

    def step(self, is_quiet: bool = False) -> tuple[float, int]:
        """Run a step; return the seconds that prefill added and its tokens. `is_quiet`: no session is active."""
        running = [*([] if is_quiet else self.verifications), *self.prompts]
        plan = [
            (running[chunk.job_index], chunk.num_tokens)
            for chunk in self.scheduler.plan_chunks(running, num_awaited=int(is_quiet))
        ]
        prefill = [(job, num_tokens) for job, num_tokens in plan if not is_short(job)]
        others = [(job, num_tokens) for job, num_tokens in plan if is_short(job)]
        step_s = self.device.step_s(plan) if plan else 0.0
        self.scheduler.observe_step(step_s)
        for job, num_tokens in plan:
            if job in self.verifications:
                assert num_tokens == NUM_ROWS
                job.kv_len += 1
            else:
                job.kv_len += num_tokens
                job.num_pending -= num_tokens
                job.num_steps += 1
                assert job.num_pending == 0 or job.num_pending >= job.num_logit_rows
        self.prompts = [job for job in self.prompts if job.num_pending]
        added_s = step_s - (self.device.step_s(others) if others else 0.0)
        return (added_s if prefill else 0.0), sum(num_tokens for _, num_tokens in prefill)


devices = st.builds(
    Device, st.floats(1e-3, 50e-3), st.floats(1e-5, 1e-3), st.one_of(st.just(0.0), st.floats(1e-9, 1e-7))
)
budgets = st.floats(5e-3, 0.2)
prompts = st.lists(st.builds(Job, st.integers(40, 3_000), st.integers(1, 9)), min_size=1, max_size=6)


@settings(deadline=None)
# A tail beside prefill, when little but prefill alone has been measured.
@example(Device(0.009765625, 0.0006537221014407394, 0.0), 0.10546875, 1,
         [Job(1267), Job(129), Job(316), Job(369), Job(483)], [True])  # fmt: skip
@example(Device(0.00390625, 0.00021983615913977235, 0.0), 0.099609375, 16,
         [Job(931), Job(50), Job(97)], [False, False, True, True, False])  # fmt: skip
@given(devices, budgets, st.integers(1, 32), prompts, st.lists(st.booleans(), min_size=1, max_size=7))
def test_prefill_lengthens_a_step_by_at_most_its_budget_or_takes_one_block(device, budget_s, num, jobs, quiet) -> None:
    replica = Replica(device, budget_s, num)
    replica.step()
    replica.prompts = jobs
    for step in range(100_000):
        if not replica.prompts:
            break
        added_s, num_tokens = replica.step(is_quiet=quiet[step % len(quiet)])
        assert num_tokens <= BLOCK_TOKENS or added_s <= TOLERANCE * budget_s
    assert not replica.prompts


@settings(deadline=None)
@given(devices, budgets, st.integers(0, 8), st.integers(20, 2_000))
def test_a_long_prompt_completes_while_short_prompts_keep_arriving(device, budget_s, num, num_tokens) -> None:
    replica = Replica(device, budget_s, num)
    long = Job(num_tokens)
    replica.prompts = [long]
    # The prompt came first, so it gets at least every other block.
    for _ in range(2 * (num_tokens // BLOCK_TOKENS + 1)):
        replica.prompts += [Job(40, last_step=replica.scheduler.num_steps) for _ in range(3)]
        replica.step(is_quiet=num == 0)
    assert long.num_pending == 0


@settings(deadline=None)
@given(devices, budgets, st.integers(0, 8), st.integers(20, 200))
def test_a_short_prompt_does_not_wait_for_the_whole_of_a_long_one(device, budget_s, num, num_tokens) -> None:
    replica = Replica(device, budget_s, num)
    long, short = Job(100_000), Job(num_tokens)
    replica.prompts = [long]
    replica.step(is_quiet=num == 0)
    replica.prompts.append(short)
    for _ in range(2 * (num_tokens // BLOCK_TOKENS + 1)):
        replica.step(is_quiet=num == 0)
    assert short.num_pending == 0
    assert long.num_pending


@settings(deadline=None)
@given(devices, budgets, st.integers(0, 8), prompts)
def test_the_same_history_gives_the_same_plan(device, budget_s, num, jobs) -> None:
    histories = []
    for _ in range(2):
        replica = Replica(device, budget_s, num)
        replica.prompts = [Job(job.num_pending, job.num_logit_rows) for job in jobs]
        histories.append([replica.step(is_quiet=num == 0) for _ in range(50) if replica.prompts])
    assert histories[0] == histories[1]
