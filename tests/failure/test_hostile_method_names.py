"""Calls of methods that nobody registered, with names that are no text: the port stays open, and streams go on."""

from __future__ import annotations

import asyncio
import os

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from specdec.client import AsyncClient
from tests.support.coordinator_rig import PROMPT, Rig
from tests.support.raw_http2 import answer_to

HOSTILE = (b"/specdec.v1.\xff\xfe/Generate", b"\xff", b"", b"/\0", b"/grpc.health.v1.Health/Ch\xc3", b"/a" * 60)
UNIMPLEMENTED = b"grpc-status\x0212"


def num_open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


async def is_open(address: str) -> bool:
    own = (("grpc.use_local_subchannel_pool", 1),)  # a new connection
    async with grpc.aio.insecure_channel(address, options=own) as channel:
        reply = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=60)
    return reply.status in (health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING)


@pytest.mark.parametrize("role", ["coordinator", "draft", "target"])
async def test_a_method_name_of_any_bytes_is_refused_and_the_port_stays_open(role: str) -> None:
    async with Rig() as rig:
        coordinator = await rig.coordinator()
        address = coordinator.server.address if role == "coordinator" else rig.of_role(role)[0].address
        for path in HOSTILE:
            await asyncio.to_thread(answer_to, address, path)
            assert await is_open(address), path
        for path in (HOSTILE[0], b"/specdec.v1.CoordinatorService/Nothing"):
            assert UNIMPLEMENTED in await asyncio.to_thread(answer_to, address, path), path


async def test_a_stream_goes_on_while_hostile_names_arrive_at_every_service() -> None:
    options = {"prompt_token_ids": PROMPT, "max_new_tokens": 40, "ignore_eos": True, "temperature": 0.0}
    async with Rig() as rig:
        coordinator = await rig.coordinator()
        addresses = [coordinator.server.address, rig.of_role("draft")[0].address, rig.of_role("target")[0].address]
        async with AsyncClient(coordinator.server.address) as client:
            expected = (await client.generate(**options)).token_ids
            received: list[int] = []
            async with client.generate(**options, stream=True) as stream:
                async for chunk in stream:
                    received += chunk.token_ids
                    for address in addresses:
                        await asyncio.to_thread(answer_to, address, HOSTILE[0])
        assert tuple(received) == expected


async def test_refused_calls_leave_no_descriptor_behind() -> None:
    async with Rig() as rig:
        address = (await rig.coordinator()).server.address
        await asyncio.to_thread(answer_to, address, HOSTILE[0])
        before = num_open_files()
        for _ in range(50):
            await asyncio.to_thread(answer_to, address, HOSTILE[0])
        for _ in range(600):  # the server notices each client's end a little later
            if num_open_files() <= before:
                break
            await asyncio.sleep(0.1)
        assert num_open_files() <= before
