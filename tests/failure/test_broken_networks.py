"""Services on separate machines whose network fails silently: packets are lost and no connection is closed.

Only a part of the paths is lost in each test: the services that can still be reached serve while the loss lasts.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from specdec.client import AsyncClient, Client
from tests.support.machines import HERE, Machines, unable
from tests.support.process_rig import NUM_TOKENS, PROMPT, models, reference
from tests.support.redis_fixture import RedisServer
from tests.support.stack import START_TIMEOUT_S, Stack, is_serving, num_connected

__all__ = ["models", "reference"]

pytestmark = pytest.mark.skipif(bool(why := unable()), reason=why)

PARTS = ("coordinator", "coordinator2", "target", "target2", "draft")
OPTIONS = {
    "prompt_token_ids": PROMPT, "temperature": 0.0, "ignore_eos": True, "max_new_tokens": 4 * NUM_TOKENS, "gamma": 1
}  # fmt: skip

#: Time limit, in seconds, of operations that could wait for ever; several times the duration of any of them.
_PATIENCE_S = 60.0


@pytest.fixture(scope="module")
def machines() -> Iterator[Machines]:
    with Machines("redis", *PARTS) as machines:
        yield machines


@pytest.fixture(scope="module")
def stack(machines: Machines, models: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    arguments = ["--port", "6379", "--bind", "0.0.0.0", "--protected-mode", "no"]
    redis = RedisServer(tmp_path_factory.mktemp("redis"), arguments=arguments, machine=machines.command("redis"))
    redis.start()
    try:
        with Stack(*models, num_targets=2, num_coordinators=2, redis_url=f"redis://{machines.address('redis')}:6379",
                   coordinator_arguments=("--target-wait-s", "5"), machines=machines) as stack:  # fmt: skip
            yield stack
    finally:
        redis.stop()


def endpoint_of(stack: Stack) -> str:
    """Return both coordinators, the first one first."""
    return f"ipv4:{stack.parts['coordinator'].address},{stack.parts['coordinator2'].address}"


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + _PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)


async def texts_while(stack: Stack, broken: AbstractContextManager[None]) -> list[list[int]]:
    """Return the texts of four streams that began before the break, and of one that begins afterwards.

    All of them end during the break. Each client spreads its streams, so both coordinators have two.
    """
    with Client(endpoint_of(stack)) as blocking:
        async with (
            AsyncClient(endpoint_of(stack)) as client,
            client.generate(stream=True, **OPTIONS) as one,
            client.generate(stream=True, **OPTIONS) as two,
            asyncio.timeout(_PATIENCE_S),
        ):
            with (
                blocking.generate(stream=True, **OPTIONS) as three,
                blocking.generate(stream=True, **OPTIONS) as four,
            ):
                for stream in (one, two):
                    await anext(stream)
                for other in (three, four):
                    await asyncio.to_thread(next, other)
                with broken:
                    later = asyncio.create_task(client.generate(**OPTIONS))
                    outputs = [
                        *[await stream.result() for stream in (one, two)],
                        *[await asyncio.to_thread(other.result) for other in (three, four)],
                        await later,
                    ]
    return [list(output.token_ids) for output in outputs]


@pytest.mark.full
async def test_requests_of_a_coordinator_without_its_store_continue_at_another(
    machines: Machines, stack: Stack, reference: list[int]
) -> None:
    first = stack.parts["coordinator"]
    with machines.parted("coordinator", "redis"):
        until(lambda: not is_serving(first.address))
    until(lambda: is_serving(first.address))
    texts = await texts_while(stack, machines.parted("coordinator", "redis"))
    assert texts == [reference] * 5
    assert is_serving(stack.parts["coordinator2"].address, timeout_s=START_TIMEOUT_S)
    # The readers were informed before it tried to give the leases back, for which it waited as long again.
    before, told, _ = first.log.partition("request failed")
    assert told
    assert "generation clean-up failed" not in before
    until(lambda: is_serving(first.address))


async def test_requests_of_a_coordinator_without_targets_continue_at_another(
    machines: Machines, stack: Stack, reference: list[int]
) -> None:
    texts = await texts_while(stack, machines.parted("coordinator", "target", "target2"))
    assert texts == [reference] * 5
    until(lambda: is_serving(stack.parts["coordinator"].address))


async def test_requests_of_a_coordinator_that_clients_cannot_reach_continue_at_another(
    machines: Machines, stack: Stack, reference: list[int]
) -> None:
    """The coordinator works, and keeps the sessions until it detects that the clients are gone."""
    texts = await texts_while(stack, machines.parted(HERE, "coordinator"))
    assert texts == [reference] * 5


async def test_requests_continue_without_lost_targets_and_drafts_which_are_used_again_later(
    machines: Machines, stack: Stack, reference: list[int]
) -> None:
    address = stack.parts["coordinator"].address
    for lost in ("target", "target2", "draft"):
        assert await texts_while(stack, machines.without(lost)) == [reference] * 5
        until(lambda: num_connected(address) == 3)


def test_a_disconnected_machine_receives_no_packets(machines: Machines, stack: Stack) -> None:
    """Negative control of the other tests: no packet bypasses the network."""
    address = stack.parts["coordinator2"].address
    with machines.without("coordinator2"):
        assert not is_serving(address)
    with machines.parted(HERE, "coordinator2"):
        assert not is_serving(address)
    until(lambda: is_serving(address))
