"""Which tokens run next: budget, order, shares."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st

from specdec.engine.schedule.scheduler import Scheduler, is_short


@dataclass
class _Job:
    num_pending: int
    num_logit_rows: int = 1
    last_step: int = 0
    kv_len: int = 0
    steps: int = 0
    rows_seen: int = 0


def _run(scheduler: Scheduler, jobs: list[_Job]) -> list[_Job]:
    """Carries out one step; returns the jobs it served."""
    served = []
    for chunk in scheduler.plan_chunks(jobs):
        job = jobs[chunk.job_index]
        assert 0 < chunk.num_tokens <= job.num_pending
        job.num_pending -= chunk.num_tokens
        job.steps += 1
        job.rows_seen += chunk.num_logit_rows
        # The rows come with the last token, all at once.
        assert chunk.num_logit_rows == (0 if job.num_pending else job.num_logit_rows)
        assert job.num_pending == 0 or job.num_pending >= job.num_logit_rows
        served.append(job)
    return served


_jobs = st.lists(
    st.tuples(st.integers(1, 200), st.integers(1, 9)).map(lambda sizes: _Job(max(sizes), sizes[1])),
    min_size=1,
    max_size=12,
)


@settings(deadline=None)
@given(_jobs, st.integers(1, 64))
def test_every_job_runs_to_its_end_and_returns_its_rows_once(jobs, max_step_tokens):
    scheduler = Scheduler(max_step_tokens)
    for _ in range(10_000):
        running = [job for job in jobs if job.num_pending]
        if not running:
            break
        before = sum(job.num_pending for job in running)
        served = _run(scheduler, running)
        assert served
        num_tokens = before - sum(job.num_pending for job in running)
        assert (
            num_tokens <= max_step_tokens
            or len(served) == 1
            or num_tokens <= max_step_tokens + max(job.num_logit_rows + 16 for job in served)
        )
    assert all(job.num_pending == 0 and job.rows_seen == job.num_logit_rows for job in jobs)


@settings(deadline=None)
@given(_jobs, st.integers(40, 64))
def test_a_step_keeps_its_budget_when_every_tail_fits(jobs, max_step_tokens):
    """40 tokens hold the longest short job (25) beside the prefill share (at most 16 - 1 of 64)."""
    scheduler = Scheduler(max_step_tokens)
    while running := [job for job in jobs if job.num_pending]:
        before = sum(job.num_pending for job in running)
        _run(scheduler, running)
        assert before - sum(job.num_pending for job in running) <= max_step_tokens


def test_draft_steps_of_all_sessions_run_together():
    jobs = [_Job(1) for _ in range(50)]
    assert len(_run(Scheduler(64), jobs)) == 50


def test_short_jobs_go_before_prefill_chunks():
    prefill, verification = _Job(100), _Job(5, num_logit_rows=5)
    served = _run(Scheduler(32, prefill_budget_s=float("inf")), [prefill, verification])
    assert served == [verification, prefill]
    assert prefill.num_pending == 100 - (32 - 5)


def test_prefill_keeps_its_share_under_a_flood_of_verifications():
    scheduler = Scheduler(64, prefill_budget_s=1e-9)
    prefill = _Job(160)
    while prefill.num_pending:
        left = prefill.num_pending
        _run(scheduler, [prefill, *(_Job(8, num_logit_rows=8, last_step=scheduler.num_steps) for _ in range(40))])
        assert left - prefill.num_pending >= min(16, left)


def test_short_jobs_take_turns_when_a_step_cannot_hold_them_all():
    scheduler = Scheduler(16)
    jobs = [_Job(8, num_logit_rows=8) for _ in range(6)]
    for _ in range(3):
        for job in _run(scheduler, jobs):
            job.num_pending = 8  # a new round
    assert [job.steps for job in jobs] == [1] * 6


def test_newcomers_do_not_overtake_a_short_job_that_waits():
    scheduler = Scheduler(16)
    waiting = _Job(12, num_logit_rows=12)
    _run(scheduler, [_Job(8), waiting])
    assert waiting.steps == 0
    newcomers = [_Job(8, last_step=scheduler.num_steps) for _ in range(4)]
    assert _run(scheduler, [waiting, *newcomers])[0] is waiting


def test_a_tail_longer_than_the_budget_runs_alone_and_whole():
    job = _Job(30, num_logit_rows=12)
    scheduler = Scheduler(8)
    while job.num_pending:
        _run(scheduler, [job])
    assert job.rows_seen == 12


def test_prompts_alone_fill_the_step_as_long_as_nobody_may_call():
    for num_awaited, num_tokens in ((0, 64), (1, 16)):
        job = _Job(1000)
        Scheduler(64).plan_chunks([job], num_awaited=num_awaited)
        (chunk,) = Scheduler(64).plan_chunks([job], num_awaited=num_awaited)
        assert chunk.num_tokens == num_tokens


def test_a_prompt_that_came_first_and_the_shortest_share_a_step():
    first, second, shortest = _Job(1000), _Job(900), _Job(100)
    served = _run(Scheduler(64), [first, second, shortest])
    assert served == [first, shortest]
    assert (first.num_pending, shortest.num_pending) == (1000 - 32, 100 - 32)


def test_prompts_of_one_length_are_done_one_after_the_other():
    jobs = [_Job(640) for _ in range(3)]
    scheduler = Scheduler(64)
    for _ in range(9):
        _run(scheduler, [job for job in jobs if job.num_pending])
    assert [job.num_pending for job in jobs] == [64, 640, 640]


def test_a_short_job_is_one_block_at_most_before_its_rows():
    assert is_short(_Job(17, num_logit_rows=1))
    assert not is_short(_Job(18, num_logit_rows=1))
