"""Drafts that hang, stall and come back: streams continue with the healthy draft, and a hung one is used again later.

Real processes around simulated engines are stopped and continued by signals; other services have a hanging device and
an event loop that answers. The tests count rounds and answers, so that a slow machine changes little, and their bounds
on time are far above the time of a round.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from bench.systems.simulated import write_tokenizer
from coordinator.replicas.replica import DRAFT
from specdec.v1 import coordinator_pb2 as pb
from tests.support.coordinator_rig import PROMPT, Coordinator, Rig, eventually, request
from tests.support.freezing import frozen_part
from tests.support.output import Output
from tests.support.process_rig import stub_of
from tests.support.stack import Stack

PAIR = "simulated:70b-1b,predraft=off"
NUM_TOKENS = 60


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def two_drafts(tokenizer: Path) -> Iterator[Stack]:
    """Every test leaves both drafts in use."""
    with Stack(PAIR, PAIR, num_drafts=2, tokenizer=tokenizer, replica_arguments=()) as stack:
        yield stack


def ask(num_tokens: int = NUM_TOKENS, gamma: int | None = None) -> pb.GenerateRequest:
    return pb.GenerateRequest(
        prompt_token_ids=pb.TokenIds(ids=(5, 17, 99, 42, 3, 8)),
        sampling=pb.SamplingParams(temperature=0.0, max_new_tokens=num_tokens, ignore_eos=True),
        speculation=pb.SpeculationParams(gamma=gamma),
    )


def run(stack: Stack, request: pb.GenerateRequest) -> Output:
    output = Output()
    for response in stub_of(stack.endpoint).Generate(request):
        output.add(response)
    return output


def target_only_steps(stack: Stack, num_requests: int, gamma: int | None = 4) -> list[int]:
    return [run(stack, ask(gamma=gamma)).finished.stats.num_target_only_steps for _ in range(num_requests)]


def drafts_used(stack: Stack) -> set[str]:
    """Return the addresses of the drafts that the coordinator is connected to."""
    served = stub_of(stack.endpoint).GetInfo(pb.GetInfoRequest())
    return {replica.address for pool in served.pools if pool.role == "draft" for replica in pool.replicas}


def wait_until_used(stack: Stack, name: str) -> None:
    while stack.parts[name].address not in drafts_used(stack):
        time.sleep(0.1)


def test_while_one_of_two_drafts_hangs_the_other_drafts_for_all_sessions(two_drafts: Stack) -> None:
    target_only_steps(two_drafts, 6)  # both have drafted
    with frozen_part(two_drafts, "draft"):
        outputs = [run(two_drafts, ask(gamma=4)) for _ in range(10)]
    assert all(len(output.token_ids) == NUM_TOKENS for output in outputs)
    # The one round that found out, its last round that leaves no room for a draft, and a trial now and then.
    steps = [output.finished.stats.num_target_only_steps for output in outputs]
    assert sum(steps) <= 10 + 10
    assert max(output.finished.stats.draft_s for output in outputs) < 2.5
    wait_until_used(two_drafts, "draft")


def test_a_draft_that_hung_is_used_again_once_it_answers(two_drafts: Stack) -> None:
    target_only_steps(two_drafts, 6)
    with frozen_part(two_drafts, "draft"):
        target_only_steps(two_drafts, 4)
        # Long enough to be given up: it describes itself no more, and its connection is closed.
        while two_drafts.parts["draft"].address in drafts_used(two_drafts):
            time.sleep(0.1)
    wait_until_used(two_drafts, "draft")
    with frozen_part(two_drafts, "draft2"):
        assert min(target_only_steps(two_drafts, 6)) <= 1


@pytest.mark.full
def test_stalls_of_the_only_draft_cost_some_rounds_and_have_no_later_effect(tokenizer: Path) -> None:
    with Stack(PAIR, PAIR, tokenizer=tokenizer, replica_arguments=()) as stack, ThreadPoolExecutor() as pool:
        healthy = target_only_steps(stack, 4, gamma=None)[-1]
        for _ in range(3):
            with frozen_part(stack, "draft"):
                request = pool.submit(run, stack, ask(gamma=None))
                time.sleep(1.5)
            during = request.result()
            assert len(during.token_ids) == NUM_TOKENS
        after = target_only_steps(stack, 3, gamma=None)
        assert after[-1] <= healthy + 5


# ---- a device that hangs in a process that answers --------------------------------------------------------------


async def drafted(coordinator: Coordinator, num_requests: int) -> list[Output]:
    return [await coordinator.generate(request(max_new_tokens=NUM_TOKENS, gamma=3)) for _ in range(num_requests)]


async def test_a_draft_whose_device_hangs_is_left_for_a_healthy_one_until_it_answers() -> None:
    async with Rig(drafts=2, draft_salt=0) as rig:
        coordinator = await rig.coordinator(draft_timeout_s=5.0)
        await drafted(coordinator, 4)
        first = rig.draft
        hung, healthy = (draft.worker for draft in rig.of_role(DRAFT))
        hung.gate.clear()
        try:
            outputs = await drafted(coordinator, 10)
        finally:
            hung.gate.set()
        assert {tuple(output.token_ids) for output in outputs} == {
            tuple(rig.target.worker.greedy_continuation(PROMPT, NUM_TOKENS))
        }
        num_rounds = sum(output.finished.stats.num_rounds for output in outputs)
        num_without_draft = sum(output.finished.stats.num_target_only_steps for output in outputs)
        # Each request ends with a round that leaves no room for a draft; few waited for the hung one.
        assert num_without_draft <= 10 + num_rounds / 10
        assert max(output.finished.stats.draft_s for output in outputs) < 2.5
        # It fails all calls and describes itself as draining until its watchdog sees that the stalled step has ended.
        await eventually(lambda: not first.engine.info().draining)
        await coordinator.pools.poll()
        record = next(r for r in coordinator.pools.drafts("default") if r.address == first.address)
        while not record.takes_sessions or record.health.is_marked:
            await coordinator.pools.poll()
            await drafted(coordinator, 1)
        healthy.gate.clear()
        try:
            outputs = await drafted(coordinator, 4)
        finally:
            healthy.gate.set()
        assert min(output.finished.stats.num_target_only_steps for output in outputs) <= 1


async def test_a_draft_that_prefills_a_long_prompt_does_not_count_as_hung() -> None:
    async with Rig(drafts=1, draft_salt=0) as rig:
        coordinator = await rig.coordinator(draft_timeout_s=1.0)
        await drafted(coordinator, 4)
        record = coordinator.pools.drafts("default")[0]
        outputs = [
            await coordinator.generate(request([5 + index] * 400, max_new_tokens=20, gamma=3)) for index in range(4)
        ]
        assert not record.health.is_out(record.link.heard_at)
        assert all(output.finished.stats.num_draft_tokens > 0 for output in outputs)
