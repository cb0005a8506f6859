"""Streams that a proxy resets in the middle, with each HTTP/2 code: between client and coordinator, and behind it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import pytest

from specdec.client import AsyncClient, Budgets, Client
from specdec.contract.errors import SpecdecError, Unavailable
from tests.support.coordinator_rig import PROMPT, Coordinator, Rig
from tests.support.http2_resets import HTTP2_CODES, ResettingProxy

#: More than two for each of the frames after which a stream is reset.
NUM_TOKENS = 28

#: As long as a loaded machine may take.
PATIENT = Budgets(connect_s=60.0, resume_s=120.0)


def options(number: int) -> dict[str, object]:
    """Return a request of its own for each number; greedy ones and coupled ones have one text each."""
    coupled = {"temperature": 1.0, "seed": number, "mode": "coupled"}
    return {
        "prompt_token_ids": [PROMPT[0] + number % 8, *PROMPT[1:]],
        "max_new_tokens": NUM_TOKENS,
        "ignore_eos": True,
        "gamma": 1,
        **(coupled if number % 2 else {"temperature": 0.0}),
    }


async def texts(client: AsyncClient, numbers: Sequence[int]) -> list[tuple[int, ...]]:
    return [(await client.generate(**options(number))).token_ids for number in numbers]


@asynccontextmanager
async def watched(coordinator: Coordinator) -> AsyncIterator[None]:
    """Poll the coordinator's replicas, as a process does."""
    watching = asyncio.create_task(coordinator.pools.watch())
    try:
        yield
    finally:
        watching.cancel()
        await asyncio.wait([watching])


async def test_both_clients_resume_a_stream_that_is_reset_with_any_http2_code() -> None:
    """Each code has a proxy and a client of its own, side by side."""
    async with Rig() as rig:
        coordinator = await rig.coordinator()
        async with AsyncClient(coordinator.server.address) as direct:
            expected = await texts(direct, list(HTTP2_CODES))

        async def resumed(code: int) -> None:
            async with (
                ResettingProxy(coordinator.server.address, after_frames=10) as proxy,
                AsyncClient(proxy.address, budgets=PATIENT) as client,
            ):
                proxy.reset_with(code)
                assert (await client.generate(**options(code))).token_ids == expected[code]
                assert proxy.num_resets > 0
                if code not in (0x2, 0xC):
                    return
                proxy.reset_with(code)
                with Client(proxy.address, budgets=PATIENT) as blocking:
                    output = await asyncio.to_thread(blocking.generate, **options(code))
                assert output.token_ids == expected[code]
                assert proxy.num_resets > 0

        await asyncio.gather(*map(resumed, HTTP2_CODES))


@pytest.mark.parametrize("role", ["target", "draft"])
async def test_generations_continue_when_the_stream_to_a_replica_is_reset_with_any_http2_code(role: str) -> None:
    async with Rig() as rig:
        direct = await rig.coordinator()
        async with AsyncClient(direct.server.address) as client:
            expected = await texts(client, list(HTTP2_CODES))
        (service,) = rig.of_role(role)
        async with ResettingProxy(service.address, after_frames=10) as proxy:
            behind = await rig.coordinator(addresses={service.address: proxy.address}, target_wait_s=600.0)
            async with watched(behind), AsyncClient(behind.server.address, budgets=PATIENT) as client:
                for code, text in zip(HTTP2_CODES, expected, strict=True):
                    proxy.reset_with(code)
                    output = await client.generate(**options(code))
                    assert output.token_ids == text
                    assert proxy.num_resets > 0


async def test_a_stream_that_is_always_reset_before_its_first_token_ends_with_a_clear_error() -> None:
    async with Rig() as rig:
        coordinator = await rig.coordinator()
        async with (
            ResettingProxy(coordinator.server.address, after_frames=1) as proxy,
            AsyncClient(proxy.address, budgets=Budgets(connect_s=0.5, resume_s=0.5)) as client,
        ):
            proxy.reset_with(0x2)
            with pytest.raises(SpecdecError) as caught:
                await client.generate(**options(0))
        assert (type(caught.value), caught.value.reason) == (Unavailable, "COORDINATOR_UNAVAILABLE")
        assert "was reset on its way, with HTTP/2 code 2" in caught.value.message
        assert proxy.num_resets > 1
