"""Runs whose store or link fails: blocks are committed once, lost ones are written again, and no step is lost.

A block is the rounds that are committed together. The store is a real Redis; links are real gRPC streams.
"""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from coordinator.replicas import liveness
from coordinator.replicas.replica import TARGET
from specdec.contract.errors import Unavailable
from specdec.contract.types import Verification, VerifyRequest
from specdec.engine.loop import device_loop
from specdec.rpc.status_mapping import from_rpc_error
from specdec.state.store import Commit, Lease
from specdec.v1 import coordinator_pb2 as pb
from tests.support.coordinator_rig import PROMPT, Coordinator, Rig, request
from tests.support.interrupted_store import InterruptedStore, coordinator_on
from tests.support.output import Output, read_rest, read_until
from tests.support.redis_fixture import RedisServer, redis_server, redis_url
from tests.support.table_services import start_service

__all__ = ["redis_server", "redis_url"]

NUM_TOKENS = 48
PATIENCE_S = 120.0
MODES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "rejection": {"temperature": 1.0, "seed": 3},
    "coupled": {"mode": pb.SPECULATION_MODE_COUPLED, "temperature": 1.0, "seed": 5},
    "off": {"mode": pb.SPECULATION_MODE_OFF, "temperature": 1.0, "seed": 7},
}


class SlowStore(InterruptedStore):
    """A session store that takes its time, so that blocks are made, and that loses some answers after the write."""

    def __init__(self, store: Any, *, cut_every: int = 0) -> None:
        super().__init__(store, "nothing")
        self._cut_every = cut_every
        self.tried: list[Commit] = []
        """Every attempt of a commit."""
        self.cut: list[Commit] = []
        """Commits whose answers were lost."""

    async def commit_all(self, commits: Sequence[tuple[Lease, Commit]]) -> list[Any]:
        await asyncio.sleep(0.03)
        answers: list[Any] = await self._store.commit_all(commits)
        self.tried += [commit for _, commit in commits]
        if self._cut_every and len(self.tried) % self._cut_every == 0:
            self.cut += [commit for _, commit in commits]
            raise Unavailable("the connection broke after the write")
        return answers

    async def commit(self, lease: Lease, commit: Commit) -> None:
        self.tried.append(commit)
        await self._store.commit(lease, commit)


def num_alike(commits: Sequence[Commit], commit: Commit) -> int:
    """Return how many commits are the same block."""
    return sum(
        (each.round_id, each.base_len, each.num_rounds, each.token_ids.tolist())
        == (commit.round_id, commit.base_len, commit.num_rounds, commit.token_ids.tolist())
        for each in commits
    )


@asynccontextmanager
async def watched(coordinator: Coordinator) -> AsyncIterator[None]:
    """Poll and watch the coordinator's replicas, as a process does."""
    tasks = [
        asyncio.create_task(coordinator.pools.watch()),
        asyncio.create_task(liveness.watch_targets(coordinator.pools)),
    ]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


@pytest.mark.parametrize("mode", MODES)
async def test_a_block_whose_answer_was_lost_is_sent_again_as_it_was_and_written_once(
    redis_url: str, mode: str
) -> None:
    async with Rig(drafts=0, store_url=redis_url) as rig:
        asked = {"gamma": 0, "max_new_tokens": NUM_TOKENS, **MODES[mode]}
        expected = await (await rig.coordinator()).generate(request(session_id=f"undisturbed-{mode}", **asked))
        store = SlowStore(rig.store, cut_every=2)
        coordinator = await coordinator_on(rig, store)
        output = await coordinator.generate(request(session_id=f"cut-{mode}", **asked))
        assert output.token_ids == expected.token_ids
        assert (await rig.store.read_tokens(f"cut-{mode}")).tolist() == [*PROMPT, *output.token_ids]
        assert max(commit.num_rounds for commit in store.cut) > 1
        assert all(num_alike(store.tried, commit) == 2 for commit in store.cut)
        assert all(num_alike(store.tried, commit) <= 2 for commit in store.tried)
        record = await rig.store.load(f"cut-{mode}")
        assert record is not None
        assert record.round_id == store.tried[-1].round_id + store.tried[-1].num_rounds  # the next one


async def test_a_block_is_written_again_with_all_that_the_store_lost_before_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    server = RedisServer(tmp_path, keeps_log=True)
    server.start()
    try:
        async with Rig(drafts=0, store_url=server.url) as rig:
            store = SlowStore(rig.store)
            coordinator = await coordinator_on(rig, store)
            stream = coordinator.stub.Generate(request(session_id="s", gamma=0, max_new_tokens=200))
            output = await read_until(stream, 60)
            await asyncio.to_thread(server.restart_without_its_last, 2500)
            await read_rest(stream, output)
            assert output.token_ids == rig.target.worker.greedy_continuation(PROMPT, 200)
            assert (await rig.store.read_tokens("s")).tolist() == [*PROMPT, *output.token_ids]
            assert "writing tokens that the store lost" in caplog.text
            assert max(commit.num_rounds for commit in store.tried) > 1
    finally:
        server.stop()


@pytest.mark.parametrize("stop_s", [3.0, pytest.param(15.0, marks=pytest.mark.full)])
async def test_a_store_that_stands_still_breaks_no_target_off(
    stop_s: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A run that has ended meanwhile no longer waits for the target, although its answer was not taken."""
    if stop_s < device_loop.NO_STEP_PATIENCE_S:  # otherwise the replica's own limit is shorter than the stop
        monkeypatch.setattr(device_loop, "NO_STEP_PATIENCE_S", 0.2)
        monkeypatch.setattr(liveness, "LOOK_INTERVAL_S", 0.02)
    server = RedisServer(tmp_path)
    server.start()
    try:
        async with Rig(drafts=0, targets=2, store_url=server.url) as rig:
            for service in rig.services:
                await service.engine.warm_up()
            coordinator = await rig.coordinator(lease_ttl_s=60.0)
            async with watched(coordinator), asyncio.timeout(PATIENCE_S):
                asked = [request(session_id=f"s{index}", gamma=0, max_new_tokens=400) for index in range(4)]
                streams = [coordinator.stub.Generate(each) for each in asked]
                outputs = [await read_until(stream, 10) for stream in streams]
                server.signal(signal.SIGSTOP)
                await asyncio.sleep(stop_s)
                are_alive = [replica.takes_sessions for replica in coordinator.pools.targets()]
                server.signal(signal.SIGCONT)
                outputs = [
                    await to_the_end(coordinator, stream, output, f"s{index}")
                    for index, (stream, output) in enumerate(zip(streams, outputs, strict=True))
                ]
        for output in outputs:
            assert output.token_ids == rig.target.worker.greedy_continuation(PROMPT, 400)
        assert are_alive == [True, True]
        assert "stalled" not in caplog.text
        assert not [record for record in caplog.records if record.name.startswith("coordinator.replicas")
                    and record.levelno >= logging.WARNING]  # fmt: skip
    finally:
        server.signal(signal.SIGCONT)
        server.stop()


async def to_the_end(coordinator: Coordinator, stream: Any, output: Output, session_id: str) -> Output:
    """Read a stream to its end, and resume it if the store was away for longer than its coordinator waits."""
    while True:
        try:
            return await read_rest(stream, output)
        except grpc.aio.AioRpcError as error:
            if from_rpc_error(error).reason not in ("STORE_UNAVAILABLE", "SESSION_BUSY"):
                raise
        await asyncio.sleep(0.1)
        stream = coordinator.stub.Generate(request(None, session_id=session_id, resume_from=len(output.token_ids)))


class Cut:
    """An engine that calls `cut` once a session's run has decided the token at `position`."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self.position = -1
        self.cut: Callable[[], None] = lambda: None
        self.num_cuts = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    async def verify(self, request: VerifyRequest, on_step: Any = None) -> Verification:
        def note(step: Verification) -> None:
            if step.kv_len == self.position:
                self.position = -1
                self.num_cuts += 1
                self.cut()

        def take(step: Verification) -> None:
            on_step(step)
            note(step)

        verification: Verification = await self._engine.verify(request, on_step and take)
        note(verification)
        return verification


NUM_SHORT = 14


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("is_on_its_way", [True, False], ids=["a step on its way", "no step on its way"])
async def test_a_call_after_a_stream_that_broke_at_any_step_of_a_run_gives_the_same_text(
    mode: str, is_on_its_way: bool
) -> None:
    made: list[Cut] = []

    def between(engine: Any) -> Cut:
        made.append(Cut(engine))
        return made[-1]

    async with Rig(targets=0, drafts=0) as rig:
        rig.services.append(await start_service(TARGET, salt=0, between=between))
        coordinator = await rig.coordinator(target_wait_s=PATIENCE_S)
        (replica,), (target,) = coordinator.pools.targets(), made

        def cut() -> None:
            if is_on_its_way:
                replica.link.break_off("cut")
            else:
                asyncio.get_running_loop().call_later(0.005, replica.link.break_off, "cut")

        target.cut = cut
        asked = {"gamma": 0, "max_new_tokens": NUM_SHORT, **MODES[mode]}
        expected = await coordinator.generate(request(**asked))
        async with watched(coordinator), asyncio.timeout(PATIENCE_S):
            for step in range(NUM_SHORT):
                target.position = len(PROMPT) + step
                output = await coordinator.generate(request(session_id=f"s{step}", **asked))
                assert output.token_ids == expected.token_ids
                assert (await rig.store.read_tokens(f"s{step}")).tolist() == [*PROMPT, *output.token_ids]
        assert target.num_cuts == NUM_SHORT


async def test_another_seed_gives_another_text_so_that_equal_texts_say_something() -> None:
    async with Rig(drafts=0) as rig:
        coordinator = await rig.coordinator()
        asked = [request(gamma=0, **{**MODES["rejection"], "seed": seed}) for seed in (3, 4)]
        first, second = [(await coordinator.generate(each)).token_ids for each in asked]
        assert first != second
