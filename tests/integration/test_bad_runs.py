"""Runs with bad input: renewals that must change nothing, and targets that answer steps outside their runs.

A target that answers a wrong step is at fault: the fault is counted, the stream goes on at another target, and nothing
is lost or shown twice.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import grpc
import numpy as np
import pytest

from coordinator.replicas.replica import TARGET
from specdec.contract.engine_api import EngineInfo
from specdec.contract.types import DrawRule, RunLimit, SamplingFilters, Verification, VerifyRequest
from specdec.engine.sessions.calls import DEFAULT_MAX_RUN
from specdec.rpc import codec
from specdec.v1 import coordinator_pb2 as pb
from specdec.v1 import target_pb2
from target_service.__main__ import main
from tests.support.coordinator_rig import PROMPT, Coordinator, Rig, request
from tests.support.hostile.catalogue import VERIFY
from tests.support.round_driver import make_round
from tests.support.table_services import Service, start_service
from tests.support.table_worker import held_steps_are_no_hangs

__all__ = ["held_steps_are_no_hangs"]

Tell = Callable[[Verification], None]
NUM_TOKENS = 24
GREEDY = SamplingFilters(temperature=0.0)
SAMPLED: dict[str, Any] = {"mode": pb.SPECULATION_MODE_COUPLED, "temperature": 1.0, "seed": 5}


class BadTarget:
    """An engine whose runs answer as `tell_badly(number of the step, step, tell)` does."""

    def __init__(self, engine: Any, tell_badly: Callable[[int, Verification, Tell], None]) -> None:
        self._engine = engine
        self._tell_badly = tell_badly
        self.num_runs = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    async def verify(self, request: VerifyRequest, on_step: Tell | None = None) -> Any:
        if on_step is None:
            return await self._engine.verify(request)
        self.num_runs += 1
        num_steps = 0
        if self._tell_badly is go_beyond and request.run is not None:
            request = replace(request, run=RunLimit(request.run.until + 100, request.run.end_token_ids))

        def take(step: Verification) -> None:
            nonlocal num_steps
            num_steps += 1
            self._tell_badly(num_steps, step, on_step)

        return await self._engine.verify(request, take)


def repeat(number: int, step: Verification, tell: Tell) -> None:
    """Answer the third step twice."""
    tell(step)
    if number == 3:
        tell(step)


def leave_out(number: int, step: Verification, tell: Tell) -> None:
    """Never answer the third step."""
    if number != 3:
        tell(step)


def move(number: int, step: Verification, tell: Tell) -> None:
    """Answer each step as if it were at the place before."""
    tell(replace(step, kv_len=step.kv_len - 1))


def name_no_token(number: int, step: Verification, tell: Tell) -> None:
    """Decide for tokens outside the vocabulary."""
    tell(replace(step, choice_token_ids=step.choice_token_ids + np.uint32(1 << 20)))


def go_beyond(number: int, step: Verification, tell: Tell) -> None:
    """Answer right, and go on beyond the limit of the run, which `BadTarget` changes."""
    tell(step)


def answer_right(number: int, step: Verification, tell: Tell) -> None:
    tell(step)


def num_faults(coordinator: Coordinator) -> float:
    labels = {"model_name": "table", "role": TARGET, "pool": "default"}
    return coordinator.metrics.registry.get_sample_value("specdec:replica_faults_total", labels) or 0.0


@asynccontextmanager
async def beside(tell_badly: Callable[[int, Verification, Tell], None]) -> AsyncIterator[tuple[Rig, Coordinator, Any]]:
    """Give a coordinator of a right target and a bad one, and the bad one."""
    made: list[BadTarget] = []

    def between(engine: Any) -> BadTarget:
        made.append(BadTarget(engine, tell_badly))
        return made[-1]

    async with Rig(drafts=0) as rig:
        rig.services.append(await start_service(TARGET, salt=0, between=between))
        yield rig, await rig.coordinator(), made[0]


@pytest.mark.parametrize("tell_badly", [repeat, leave_out, move, name_no_token, go_beyond])
async def test_a_stream_whose_target_answers_wrong_steps_goes_on_elsewhere_with_the_same_text(
    tell_badly: Callable[[int, Verification, Tell], None],
) -> None:
    async with beside(tell_badly) as (rig, coordinator, bad):
        for index in range(6):
            output = await coordinator.generate(request(session_id=f"s{index}", gamma=0, max_new_tokens=NUM_TOKENS))
            assert output.token_ids == rig.target.worker.greedy_continuation(PROMPT, NUM_TOKENS)
            assert (await rig.store.read_tokens(f"s{index}")).tolist() == [*PROMPT, *output.token_ids]
        assert bad.num_runs > 0
        assert num_faults(coordinator) > 0


async def test_a_target_that_answers_right_steps_has_no_fault() -> None:
    async with beside(answer_right) as (rig, coordinator, good):
        for index in range(6):
            output = await coordinator.generate(request(session_id=f"s{index}", gamma=0, max_new_tokens=NUM_TOKENS))
            assert output.token_ids == rig.target.worker.greedy_continuation(PROMPT, NUM_TOKENS)
        assert good.num_runs > 0
        assert num_faults(coordinator) == 0


async def test_a_sampled_text_is_the_same_after_wrong_steps() -> None:
    texts = []
    for tell_badly in (answer_right, repeat, leave_out):
        async with beside(tell_badly) as (_, coordinator, bad):
            texts.append(
                [
                    (await coordinator.generate(request(session_id=f"s{index}", gamma=0, **SAMPLED))).token_ids
                    for index in range(6)
                ]
            )
            assert bad.num_runs > 0
    assert texts[0] == texts[1] == texts[2]


class RawRun:
    """A run on a bare stream of frames, with whatever renewals a test sends."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self._num_asked = 100
        self.steps: list[tuple[int, int]] = []
        """Call id and position of every step and last answer, in order of arrival."""
        self.ended: set[int] = set()

    async def begin(self, call_id: int, session_id: str, until: int) -> None:
        position = make_round(PROMPT, session_id=session_id, filters=GREEDY, draw_rule=DrawRule.COUPLED)
        asked = VerifyRequest(position, np.empty(0, np.uint32), (), run=RunLimit(until, frozenset()))
        await self._send(requests=[codec.encode_verify_request(asked, call_id)])

    async def renew(self, *renewals: tuple[int, int, int]) -> None:
        """Send renewals, each call id, limit and committed length; return once the target has read them."""
        items = [
            target_pb2.Renewal(call_id=call_id, until=until, committed_len=length)
            for call_id, until, length in renewals
        ]
        await self._send(renewals=items)
        self._num_asked += 1
        await self._send(requests=[target_pb2.VerifyRequest(call_id=self._num_asked)])  # refused at once
        while self._num_asked not in self.ended:
            await self._read()

    async def read_until_end(self, call_id: int) -> int:
        """Return the number of tokens that the run has answered."""
        while call_id not in self.ended:
            await self._read()
        positions = [position for each, position in self.steps if each == call_id]
        assert positions == list(range(len(PROMPT), len(PROMPT) + len(positions)))
        return len(positions)

    async def _send(self, **parts: Any) -> None:
        await self._stream.write(target_pb2.VerifyFrame(**parts).SerializeToString())

    async def _read(self) -> None:
        frame = target_pb2.VerificationFrame.FromString(await self._stream.read())
        for step in frame.steps:
            self.steps += zip(step.call_ids, step.positions, strict=True)
        for item in frame.verifications:
            if not item.status.code:
                self.steps.append((item.call_id, item.kv_len))
            if not item.goes_on:
                self.ended.add(item.call_id)
        self.steps.sort(key=lambda each: each[1])


@asynccontextmanager
async def raw_run() -> AsyncIterator[tuple[Service, RawRun]]:
    service = await start_service(TARGET, salt=0)
    try:
        async with grpc.aio.insecure_channel(service.address) as channel:
            yield service, RawRun(channel.stream_stream(VERIFY)())
    finally:
        service.worker.gate.set()
        await service.kill()


END = len(PROMPT)


@pytest.mark.parametrize(
    ("renewals", "num_tokens"),
    [
        ([], 3),
        ([(1, END + 10, END)], 10),
        ([(1, END + 10, END), (1, END + 10, END)], 10),
        ([(1, END + 10, END), (1, END + 5, END)], 10),
        ([(1, END + 2, END)], 3),
        ([(1, 0, 0)], 3),
        ([(2, END + 10, END)], 3),
        ([(1, 1 << 31, END)], DEFAULT_MAX_RUN),
        ([(1, 1 << 31, 1 << 31)], 3),
        ([(1, END + 10, 1 << 31)], 3),
    ],
    ids=["none", "one", "the same twice", "a smaller one", "within the limit", "zero", "of no call", "a limit of 2^31",
         "all of 2^31", "a committed length of 2^31"],
)  # fmt: skip
async def test_a_renewal_raises_the_limit_of_its_own_run_alone_and_never_beyond_that_of_the_replica(
    renewals: list[tuple[int, int, int]], num_tokens: int
) -> None:
    async with raw_run() as (service, run):
        service.worker.gate.clear()
        await run.begin(1, "s", END + 3)
        await asyncio.to_thread(service.worker.entered.acquire)
        await run.renew(*renewals)
        service.worker.gate.set()
        assert await run.read_until_end(1) == num_tokens


async def test_a_renewal_changes_nothing_for_the_run_of_another_session() -> None:
    async with raw_run() as (service, run):
        service.worker.gate.clear()
        await run.begin(1, "s", END + 3)
        await run.begin(2, "other", END + 5)
        await asyncio.to_thread(service.worker.entered.acquire)
        await run.renew((2, END + 9, END))
        service.worker.gate.set()
        assert await run.read_until_end(1) == 3
        assert await run.read_until_end(2) == 9


async def test_a_renewal_of_a_run_that_has_ended_runs_nothing() -> None:
    async with raw_run() as (service, run):
        await run.begin(1, "s", END + 3)
        assert await run.read_until_end(1) == 3
        num_steps = len(service.worker.steps)
        await run.renew((1, END + 9, END + 3), (1, 1 << 31, END + 3))
        await run.begin(2, "other", END + 1)
        assert await run.read_until_end(2) == 1
        assert len(service.worker.steps) == num_steps + 1


async def test_a_renewed_run_counts_as_running_however_long_ago_its_call_was() -> None:
    """So a target that leaves waits for it."""
    async with raw_run() as (service, run):
        turns = service.servicer.open_turns
        service.worker.gate.clear()
        await run.begin(1, "s", END + 3)
        await asyncio.to_thread(service.worker.entered.acquire)
        turns._turns["s"] = turns._turns["s"]._replace(called_s=-1e9)
        assert turns.num_running(600.0) == 0
        await run.renew((1, END + 5, END))
        assert turns.num_running(600.0) == 1
        turns.end({"s": turns._turns["s"].epoch}, ())
        await run.renew((1, END + 6, END))
        assert turns.num_running(600.0) == 0
        service.worker.gate.set()
        assert await run.read_until_end(1) == 6


@pytest.mark.parametrize("value", ["0", "10000"])
def test_a_limit_of_runs_that_cannot_be_is_refused_in_one_line_with_the_range(
    value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--model", "simulated:8b-0.6b", "--max-run", value])
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert "--max-run" in line
    assert ("1" if value == "0" else "1024") in line.partition("--max-run")[2].replace(value, "")


@pytest.mark.parametrize("max_run", [0, pytest.param(1, marks=pytest.mark.full)])
async def test_a_target_without_runs_serves_beside_one_with_them_and_gets_none(max_run: int) -> None:
    made: list[Plain] = []

    class Plain(BadTarget):
        def info(self) -> EngineInfo:
            described: EngineInfo = replace(self._engine.info(), max_run=max_run)
            return described

        async def verify(self, request: VerifyRequest, on_step: Tell | None = None) -> Verification:
            assert request.run is None
            self.num_runs += 1
            return await super().verify(request)

    def between(engine: Any) -> Plain:
        made.append(Plain(engine, answer_right))
        return made[-1]

    async with Rig(drafts=0) as rig:
        rig.services.append(await start_service(TARGET, salt=0, between=between))
        coordinator = await rig.coordinator()
        for index in range(8):
            for options in ({}, SAMPLED):
                session = f"{index}-{len(options)}"
                output = await coordinator.generate(request(session_id=session, gamma=0, **options))
                again = await coordinator.generate(request(session_id=f"again-{session}", gamma=0, **options))
                assert again.token_ids == output.token_ids
                if not options:
                    assert output.token_ids == rig.target.worker.greedy_continuation(PROMPT, 24)
        assert made[0].num_runs > 0
        assert rig.target.worker.steps
        assert num_faults(coordinator) == 0
