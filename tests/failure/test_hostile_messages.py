"""What hostile messages leave in a process: log lines and memory; and hostile answers of a replica.

They are sent as bytes over real gRPC, so the service is the first program that parses them. Every port gets them in
`test_hostile_ports.py`.
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
from tests.support.coordinator_rig import Coordinator, Rig, started_coordinator
from tests.support.hostile.catalogue import BROKEN, GENERATE, PROPOSE, SESSION, VERIFY, honest_frames
from tests.support.hostile.strategies import Damage, damaged, damages, message_field
from tests.support.stack import Stack


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


async def test_malformed_bytes_are_an_invalid_argument_and_one_line_in_the_log(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(interceptors, "_malformed_log", interceptors._MalformedLog())  # nothing was logged so far
    monkeypatch.setattr(interceptors, "LOG_INTERVAL_S", 3600.0)  # however slow the machine is
    async with started_coordinator() as (rig, coordinator):
        caplog.clear()
        for _ in range(5):
            code, reason, message = await refusal(rig, coordinator, VERIFY, BROKEN)
            assert (code, reason) == ("INVALID_ARGUMENT", "INVALID_REQUEST")
            assert "the request is not a valid " in message
        (line,) = (record.getMessage() for record in caplog.records if record.name == interceptors.__name__)
        assert "127.0.0.1" in line
        monkeypatch.setattr(interceptors, "LOG_INTERVAL_S", 0.0)  # as if it had passed
        await refusal(rig, coordinator, VERIFY, BROKEN)
    assert sum(record.name == interceptors.__name__ for record in caplog.records) == 2
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


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


TOKENS = b"\x05" * 1_000_000


@pytest.mark.parametrize(
    ("method", "content"),
    [
        (VERIFY, message_field(1, message_field(2, message_field(1, b"s") + message_field(6, TOKENS)))),
        (VERIFY, message_field(1, message_field(2, SESSION) + message_field(3, TOKENS))),
        (GENERATE, message_field(3, b"p") + message_field(6, message_field(13, TOKENS))),
    ],
    ids=["committed tokens", "draft tokens", "stop tokens"],
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
