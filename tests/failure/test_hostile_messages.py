"""Hostile messages: small ones that would become millions of objects, and malformed bytes.

They are sent as bytes over real gRPC, so the service is the first program that parses them.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.rpc import code_pb2
from hypothesis import example, given, settings
from hypothesis import strategies as st

from specdec.contract.errors import Unavailable
from specdec.rpc import interceptors
from specdec.rpc.client import open_link
from specdec.rpc.framing import MAX_FRAME_ITEMS
from specdec.rpc.status_mapping import from_rpc_error
from specdec.v1 import common_pb2, draft_pb2, target_pb2
from tests.support.coordinator_rig import PROMPT, Coordinator, Rig, request, started_coordinator
from tests.support.honest_messages import honest_frames
from tests.support.hostile_messages import Damage, damaged, damages, field
from tests.support.stack import Stack

PROPOSE, VERIFY = "/specdec.v1.DraftService/Propose", "/specdec.v1.TargetService/Verify"
GENERATE = "/specdec.v1.CoordinatorService/Generate"

UNARY = [
    "/specdec.v1.CoordinatorService/GetSession",
    "/specdec.v1.CoordinatorService/DeleteSession",
    "/specdec.v1.CoordinatorService/Tokenize",
    "/specdec.v1.CoordinatorService/Detokenize",
    "/specdec.v1.CoordinatorService/GetInfo",
    "/specdec.v1.DraftService/Release",
    "/specdec.v1.DraftService/GetEngineInfo",
    "/specdec.v1.TargetService/Release",
    "/specdec.v1.TargetService/GetEngineInfo",
    "/grpc.health.v1.Health/Check",
]

#: A field 1 whose length exceeds the message.
BROKEN = b"\x0a\xff"


#: A message of up to 1 MB each, as field 1 of a frame, of TokenizeRequest and so on: what it would be read as.
MANY = 1 << 19
SESSION = field(1, b"s") + field(6, b"\x05")
EXPLOSIONS = {
    VERIFY: {
        "empty items": b"\x0a\x00" * MANY,
        "unknown fields": b"\x78\x00" * MANY,
        "unknown fields of an item": field(1, field(2, SESSION) + b"\x78\x00" * (MANY - 32)),
        "fields in unknown groups": field(1, b"\x7b\x12\x02\xff\xff\x7c" + b"\x22\x00" * (MANY - 32)),
        "draft tokens one by one": field(1, field(2, SESSION) + b"\x18\x00" * (MANY - 32)),
        "draft tokens, packed one by one": field(1, field(2, SESSION) + b"\x1a\x01\x00" * (MANY // 2)),
        "supports again and again": field(1, field(2, SESSION) + b"\x22\x00" * (MANY - 32)),
        "biases": field(1, field(2, SESSION + field(7, b"\x42\x00" * (MANY - 64)))),
        "a round again and again": field(1, b"\x12\x00" * (MANY - 32)),
        "ids of supports": field(1, field(2, SESSION) + field(4, field(1, b"\x01" * (MANY - 64)))),
        "draft tokens": field(1, field(2, SESSION) + field(3, b"\x01" * (MANY - 64))),
    },
    GENERATE: {
        "stop strings": field(3, b"p") + field(6, b"\x62\x00" * (MANY - 32)),
        "messages": field(5, b"\x0a\x00" * (MANY - 32)),
        "biases": field(3, b"p") + field(6, b"\x52\x00" * (MANY - 32)),
        "sampling again and again": field(3, b"p") + b"\x32\x00" * (MANY - 32),
        "inputs in turn": b"\x2a\x00\x22\x00" * (MANY // 2 - 32),
        "stop tokens": field(3, b"p") + field(6, field(13, b"\x01" * (MANY - 64))),
    },
    "/specdec.v1.CoordinatorService/Tokenize": {"messages": field(2, b"\x0a\x00" * (MANY - 32))},
    "/specdec.v1.CoordinatorService/Detokenize": {"ids one by one": b"\x08\x01" * MANY},
    "/specdec.v1.TargetService/Release": {
        "sessions": b"\x0a\x00" * MANY,
        "some sessions": b"\x0a\x00" * 100_000,
    },
}


async def ask(address: str, method: str, content: bytes, *, is_stream: bool = False) -> list[bytes]:
    """Send one message and return the answer. Raises AioRpcError."""
    options = (("grpc.max_send_message_length", -1),)
    async with grpc.aio.insecure_channel(address, options=options) as channel:
        if method == GENERATE:
            return [answer async for answer in channel.unary_stream(method)(content)]
        if not is_stream:
            return [await channel.unary_unary(method)(content)]
        call: Any = channel.stream_stream(method)()
        await call.write(content)
        await call.done_writing()
        return [answer async for answer in call]


def address_of(method: str, rig: Rig, coordinator: Coordinator) -> str:
    if "Draft" in method:
        return rig.draft.address
    return rig.target.address if "Target" in method else coordinator.server.address


async def outcome(rig: Rig, coordinator: Coordinator, method: str, content: bytes) -> tuple[str, str]:
    """Return code and reason of the call, or of the only item of a served frame."""
    try:
        answers = await ask(address_of(method, rig, coordinator), method, content, is_stream=method == VERIFY)
    except grpc.aio.AioRpcError as error:
        return error.code().name, from_rpc_error(error).reason
    (item,) = target_pb2.VerificationFrame.FromString(answers[0]).verifications
    return code_pb2.Code.Name(item.status.code), item.status.reason


async def refusal(rig: Rig, coordinator: Coordinator, method: str, content: bytes) -> tuple[str, str, str]:
    """Return code, reason and message."""
    is_stream = method in (PROPOSE, VERIFY)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await ask(address_of(method, rig, coordinator), method, content, is_stream=is_stream)
    error = from_rpc_error(caught.value)
    return caught.value.code().name, error.reason, error.message


EXPLOSION_CASES = [
    pytest.param(method, content, id=f"{method.rpartition('/')[2]}: {name}")
    for method, cases in EXPLOSIONS.items()
    for name, content in cases.items()
]


@pytest.mark.parametrize(("method", "content"), EXPLOSION_CASES)
async def test_a_small_message_of_too_many_fields_is_refused_and_other_calls_are_served(
    method: str, content: bytes
) -> None:
    async with started_coordinator() as (rig, coordinator):
        assert await outcome(rig, coordinator, method, content) == ("INVALID_ARGUMENT", "INVALID_REQUEST")
        assert rig.target.engine.info().num_sessions == 0
        output = await coordinator.generate(request())
        assert output.token_ids == rig.target.worker.greedy_continuation(PROMPT, 24)


@pytest.mark.parametrize("role", ["draft", "target"])
@pytest.mark.parametrize(
    "description",
    [
        pytest.param(b"\xaa\x01\x00" * 2_000_000, id="names of what it drafts with"),
        pytest.param(b"\x50\x00" * 2_000_000, id="EOS tokens one by one"),
        pytest.param(b"\x0a\x00" * 2_000_000, id="its version again and again"),
    ],
)
async def test_an_answer_of_too_many_fields_is_refused_with_the_replicas_name_before_it_is_read(
    role: str, description: bytes
) -> None:
    async def describe(request: bytes, context: Any) -> bytes:
        return description

    server = grpc.aio.server()
    handlers: Any = {"GetEngineInfo": grpc.unary_unary_rpc_method_handler(describe)}
    service = f"specdec.v1.{role.capitalize()}Service"
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(service, handlers)])
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    link = open_link(role, f"127.0.0.1:{port}")
    try:
        with pytest.raises(Unavailable) as refusal:
            await link.info()
        assert refusal.value.message == (
            f"127.0.0.1:{port}: the replica sent an invalid answer to GetEngineInfo: more than 131072 fields"
        )
    finally:
        await link.close()
        await server.stop(0)


@pytest.mark.parametrize("method", [PROPOSE, VERIFY])
async def test_a_frame_of_more_items_than_the_limit_is_refused_whole(method: str) -> None:
    async with started_coordinator() as (rig, coordinator):
        code, _, message = await refusal(rig, coordinator, method, b"\x0a\x00" * (MAX_FRAME_ITEMS + 1))
        assert (code, message) == ("INVALID_ARGUMENT", f"a frame of {MAX_FRAME_ITEMS + 1} items; the limit is 1024")
        assert len(await ask(address_of(method, rig, coordinator), method, b"\x0a\x00" * MAX_FRAME_ITEMS,
                             is_stream=True)) >= 1  # fmt: skip


@pytest.mark.parametrize("method", [*UNARY, GENERATE, PROPOSE, VERIFY])
async def test_malformed_bytes_are_an_invalid_argument_and_one_line_in_the_log(
    method: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(interceptors, "_malformed_log", interceptors._MalformedLog())  # nothing was logged so far
    monkeypatch.setattr(interceptors, "LOG_INTERVAL_S", 3600.0)  # however slow the machine is
    async with started_coordinator() as (rig, coordinator):
        caplog.clear()
        for _ in range(5):
            code, reason, message = await refusal(rig, coordinator, method, BROKEN)
            assert (code, reason) == ("INVALID_ARGUMENT", "INVALID_REQUEST")
            assert "the request is not a valid " in message
        (line,) = (record.getMessage() for record in caplog.records if record.name == interceptors.__name__)
        assert "127.0.0.1" in line
        monkeypatch.setattr(interceptors, "LOG_INTERVAL_S", 0.0)  # as if it had passed
        await refusal(rig, coordinator, method, BROKEN)
    assert sum(record.name == interceptors.__name__ for record in caplog.records) == 2
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


async def test_text_that_is_not_unicode_is_an_invalid_argument() -> None:
    async with started_coordinator() as (rig, coordinator):
        content = field(3, b"\xff\xfe")
        assert (await refusal(rig, coordinator, GENERATE, content))[0] == "INVALID_ARGUMENT"


def test_a_damaged_frame_is_refused_or_answered_item_by_item_and_nothing_else(
    caplog: pytest.LogCaptureFixture,
) -> None:
    gc.collect()  # what earlier tests left is reported now, and not while this one counts errors
    caplog.clear()
    loop = asyncio.new_event_loop()
    running = started_coordinator()
    rig, coordinator = loop.run_until_complete(running.__aenter__())

    outcomes: set[str] = set()
    frames = honest_frames()

    @settings(max_examples=300, deadline=None, derandomize=True)
    @given(st.sampled_from(frames), damages)
    @example(frames[0], _spoiled_name(frames[0][1]))  # other examples may depend on what is imported
    @example(frames[1], _spoiled_name(frames[1][1]))
    def check(frame: tuple[str, bytes], damage: list[Damage]) -> None:
        method, content = frame
        asking = ask(address_of(method, rig, coordinator), method, damaged(content, damage), is_stream=True)
        try:
            answers = loop.run_until_complete(asyncio.wait_for(asking, 30))
        except grpc.aio.AioRpcError as error:
            outcomes.add(error.code().name)
            return
        outcomes.update(item.status.reason for answer in answers for item in _replies_of(method, answer))

    try:
        check()
    finally:
        loop.run_until_complete(running.__aexit__(None, None, None))
        loop.close()
    assert {"INVALID_ARGUMENT", "INVALID_REQUEST", ""} <= outcomes
    assert outcomes <= {"INVALID_ARGUMENT", "INVALID_REQUEST", "", "KV_MISS", "STALE_EPOCH", "CONTEXT_TOO_LONG"}
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


def _spoiled_name(content: bytes) -> list[Damage]:
    """Return a damage that puts a space into one session's id."""
    return [("set", (content.index(b"s1") + 0.5) / len(content), ord(" "))]


def _replies_of(method: str, answer: bytes) -> Any:
    if method == PROPOSE:
        return draft_pb2.ProposalFrame.FromString(answer).proposals
    return target_pb2.VerificationFrame.FromString(answer).verifications


def resident_bytes(process_id: int) -> int:
    """Return the resident memory of a process."""
    return int(Path(f"/proc/{process_id}/statm").read_text().split()[1]) * 4096


async def test_a_process_serves_other_calls_among_hostile_messages_and_its_memory_returns() -> None:
    stack = Stack("simulated:8b-0.6b", replica_arguments=(), num_coordinators=0)
    with stack:
        target = stack.parts["target"]
        assert target.process is not None
        content = b"\x0a\x00" * 2_000_000
        levels = []
        async with grpc.aio.insecure_channel(target.address) as channel:
            describe = channel.unary_unary("/specdec.v1.TargetService/GetEngineInfo")
            for _ in range(8):
                attack = asyncio.create_task(ask(target.address, VERIFY, content, is_stream=True))
                while not attack.done():
                    assert common_pb2.EngineInfo.FromString(await describe(b"", timeout=10)).role == "target"
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await attack
                assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
                levels.append(resident_bytes(target.process.pid))
        assert levels[-1] - levels[1] < 24 << 20, [level >> 20 for level in levels]


@pytest.mark.parametrize(
    ("method", "content"),
    [
        pytest.param(VERIFY, field(1, field(2, field(1, b"s") + field(6, b"\x05" * 1_000_000))), id="committed tokens"),
        pytest.param(VERIFY, field(1, field(2, SESSION) + field(3, b"\x05" * 1_000_000)), id="draft tokens"),
        pytest.param(GENERATE, field(3, b"p") + field(6, field(13, b"\x05" * 1_000_000)), id="stop tokens"),
    ],
)
async def test_a_refused_message_is_freed_once_it_is_answered(method: str, content: bytes) -> None:
    """The garbage collector rarely runs in a service with few calls, so garbage could be any number of messages."""
    async with started_coordinator() as (rig, coordinator):
        levels = []
        gc.collect()
        gc.disable()
        try:
            for _ in range(12):
                assert await outcome(rig, coordinator, method, content) == ("INVALID_ARGUMENT", "INVALID_REQUEST")
                levels.append(resident_bytes(os.getpid()))
        finally:
            gc.enable()
        assert levels[-1] - levels[1] < 24 << 20, [level >> 20 for level in levels]
