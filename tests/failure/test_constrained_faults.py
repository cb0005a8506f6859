"""A coordinator or a target dies at every token of a JSON text: one text, no token lost or twice, and it is valid.

One session is held at each token, so that a single fault meets all positions: within names, texts, numbers, white space
and lists, and before the end. Table models with a tokenizer of bytes; real gRPC.
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from typing import Any

import grpc
import pytest
from jsonschema import Draft202012Validator

from coordinator.replicas.replica import TARGET
from specdec.contract.constraint import Constraint
from specdec.contract.types import Verification, VerifyRequest
from specdec.rpc.status_mapping import from_rpc_error
from specdec.v1 import coordinator_pb2 as pb
from tests.support.coordinator_rig import PROMPT, Coordinator, Rig, eventually, request
from tests.support.masked_target import MaskedTarget
from tests.support.output import Output, read_rest, read_until
from tests.support.table_services import Service

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"a": {"type": "array", "items": {"type": "integer"}, "minItems": 2}, "b": {"type": "string"}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
CONSTRAINT = Constraint.json_schema(SCHEMA)
MAX_TOKENS = 48
SEED = 11
MODES: dict[str, dict[str, Any]] = {
    "greedy with drafts": {"mode": pb.SPECULATION_MODE_BLOCK, "gamma": 2},
    "coupled with drafts": {"mode": pb.SPECULATION_MODE_COUPLED, "gamma": 2, "temperature": 1.0, "seed": SEED},
    "coupled in runs": {"mode": pb.SPECULATION_MODE_OFF, "gamma": 0, "temperature": 1.0, "seed": SEED},
}
LONG_S = 600.0


class HeldEngine:
    """A target's engine that holds the calls of a session from a length on."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self.lengths: dict[str, int] = {}
        """Committed length from which a session's calls are held."""
        self.held: set[str] = set()
        self.changed = asyncio.Event()
        """Set once a call is held, or a stream has ended."""
        self.num_with_text = 0
        """Number of calls that brought the text of their constraint."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    async def verify(self, request: VerifyRequest, on_step: Any = None) -> Verification:
        position = request.position
        self.num_with_text += position.constraint is not None
        if position.committed_len >= self.lengths.get(position.session_id, 1 << 30):
            self.held.add(position.session_id)
            self.changed.set()
            await asyncio.Event().wait()
        verification: Verification = await self._engine.verify(request, on_step)
        return verification


def expected_tokens(rig: Rig, mode: str) -> list[int]:
    temperature = MODES[mode].get("temperature", 0.0)
    target = MaskedTarget(rig.target.worker, rig.directory, CONSTRAINT, PROMPT, temperature=temperature)
    return target.coupled(MAX_TOKENS, SEED) if temperature else target.greedy(MAX_TOKENS)


async def engine_of_new_target(rig: Rig, **options: Any) -> HeldEngine:
    """Start a target, and return what holds its calls."""
    engines: list[HeldEngine] = []

    def between(engine: Any) -> HeldEngine:
        engines.append(HeldEngine(engine))
        return engines[0]

    rig.services.append(await rig.start(TARGET, between=between, **options))
    return engines[0]


@dataclass
class Streamed:
    """A stream that is read as it comes."""

    output: Output
    reading: asyncio.Task[Output]


async def held_at_every_token(rig: Rig, coordinator: Coordinator, engine: HeldEngine, mode: str) -> dict[str, Streamed]:
    """Return streams, each of which waits for the call after another token, by session."""
    numbers = range(1, len(expected_tokens(rig, mode)))
    engine.lengths = {f"s{number}": len(PROMPT) + number for number in numbers}
    streams: dict[str, Streamed] = {}
    for session_id in engine.lengths:
        asked = request(constraint=CONSTRAINT, session_id=session_id, max_new_tokens=MAX_TOKENS, **MODES[mode])
        output = Output()
        reading = asyncio.create_task(read_rest(coordinator.stub.Generate(asked), output))
        reading.add_done_callback(lambda _: engine.changed.set())
        streams[session_id] = Streamed(output, reading)
    # An output whose last tokens come at once is over before its call could be held.
    while not all(name in engine.held or each.reading.done() for name, each in streams.items()):
        await engine.changed.wait()
        engine.changed.clear()
    assert len(engine.held) >= len(streams) - 4
    return streams


async def kill(rig: Rig, service: Service) -> None:
    await service.kill()
    rig.services.remove(service)


async def until_alive(coordinator: Coordinator, num_targets: int) -> None:
    """Poll until this number of targets is alive."""
    while sum(replica.is_alive for replica in coordinator.pools.targets()) != num_targets:
        await coordinator.pools.poll()


def check(output: Output, expected: list[int]) -> None:
    assert output.token_ids == expected
    assert output.finished is not None
    assert output.finished.reason == pb.FINISH_REASON_STOP
    assert Draft202012Validator(SCHEMA).is_valid(json.loads(output.text))


@pytest.mark.parametrize("mode", ["greedy with drafts", pytest.param("coupled in runs", marks=pytest.mark.full)])
async def test_another_target_goes_on_with_a_constrained_output_at_every_token(mode: str) -> None:
    """It has neither the tokens nor the constraint, and gets both again."""
    async with Rig(constrained=True, targets=0, max_run=1) as rig:
        engine, _ = await engine_of_new_target(rig), await engine_of_new_target(rig)
        first, second = rig.of_role(TARGET)
        coordinator = await rig.coordinator(max_running=64)
        expected = expected_tokens(rig, mode)
        assert len(expected) > 20
        await kill(rig, second)
        await until_alive(coordinator, 1)
        streams = await held_at_every_token(rig, coordinator, engine, mode)
        other = await engine_of_new_target(rig, listen=second.address)
        await until_alive(coordinator, 2)
        await kill(rig, first)
        for streamed in streams.values():
            check(await streamed.reading, expected)
        assert other.num_with_text >= 1


@pytest.mark.parametrize("mode", [pytest.param("coupled with drafts", marks=pytest.mark.full), "coupled in runs"])
async def test_another_coordinator_resumes_a_constrained_output_at_every_token(mode: str) -> None:
    async with Rig(constrained=True, targets=0, max_run=1) as rig:
        engine = await engine_of_new_target(rig)
        first, second = await rig.coordinator(max_running=64), await rig.coordinator(max_running=64)
        expected = expected_tokens(rig, mode)
        streams = await held_at_every_token(rig, first, engine, mode)
        await first.generations.drain(0.0)
        engine.lengths = {}
        for session_id, streamed in streams.items():
            output = streamed.output
            if session_id in engine.held:
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await streamed.reading
                assert from_rpc_error(caught.value).reason == "DRAINING"
                rest = await second.generate(request(None, session_id=session_id, resume_from=len(output.token_ids)))
                output.chunks += rest.chunks
                output.finished = rest.finished
            check(output, expected)
            assert (await rig.store.read_tokens(session_id)).tolist() == [*PROMPT, *expected]
        rig.target.engine.check_integrity()


async def test_a_target_that_starts_again_gets_the_constraints_of_its_sessions_again() -> None:
    mode = "coupled with drafts"
    async with Rig(constrained=True, targets=0, max_run=1) as rig:
        engine = await engine_of_new_target(rig)
        coordinator = await rig.coordinator(target_wait_s=LONG_S, max_running=64)
        watching = asyncio.create_task(coordinator.pools.watch())
        expected = expected_tokens(rig, mode)
        streams = await held_at_every_token(rig, coordinator, engine, mode)
        first = rig.target
        await kill(rig, first)
        again = await engine_of_new_target(rig, listen=first.address)
        for streamed in streams.values():
            check(await streamed.reading, expected)
        assert again.num_with_text >= 1
        watching.cancel()
        await asyncio.wait([watching])


@pytest.mark.parametrize("num_read", [4, 17])
async def test_an_output_leaves_a_target_whose_device_hangs_and_may_return_to_it(num_read: int) -> None:
    """The device goes on later: what its step and its masks had computed is of no effect."""
    async with Rig(constrained=True, targets=2, drafts=0, max_run=1) as rig:
        for service in rig.of_role(TARGET):
            await service.engine.warm_up()  # a hang is detected by comparison with earlier steps
        coordinator = await rig.coordinator()
        num_steps = {service.address: len(service.worker.steps) for service in rig.services}
        asked = request(constraint=CONSTRAINT, session_id="s", max_new_tokens=MAX_TOKENS, mode=pb.SPECULATION_MODE_OFF)
        stream = coordinator.stub.Generate(asked)
        output = await read_until(stream, num_read)
        hung = max(rig.services, key=lambda service: len(service.worker.steps) - num_steps[service.address])
        (other,) = (service for service in rig.services if service is not hung)
        hung.worker.gate.clear()
        try:
            check(await read_rest(stream, output), expected_tokens(rig, "greedy with drafts"))
        finally:
            hung.worker.gate.set()
        await eventually(lambda: not hung.engine.info().draining)
        await coordinator.pools.poll()
        await kill(rig, other)
        asked.session_id = "t"
        check(await coordinator.generate(asked), output.token_ids)
        hung.engine.check_integrity()
