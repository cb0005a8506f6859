"""Parts on machines of their own whose network breaks without a word: packets vanish, and no connection is closed.

What is lost is always a part of the paths alone: somebody can still serve, and does while the rest stays lost.
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
from tests.support.stack import Stack, is_serving, num_connected

__all__ = ["models", "reference"]

pytestmark = pytest.mark.skipif(bool(why := unable()), reason=why)

PARTS = ("coordinator", "coordinator2", "target", "target2", "draft")
OPTIONS = {
    "prompt_token_ids": PROMPT, "temperature": 0.0, "ignore_eos": True, "max_new_tokens": 4 * NUM_TOKENS, "gamma": 1
}  # fmt: skip

#: Of what would otherwise wait for ever, in seconds: some times what any of these takes.
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
    """Both coordinators, the first one first."""
    return f"ipv4:{stack.parts['coordinator'].address},{stack.parts['coordinator2'].address}"


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + _PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)


async def texts_while(stack: Stack, broken: AbstractContextManager[None]) -> list[list[int]]:
    """Texts of streams of both clients that have begun before something breaks, and of one that begins afterwards; all
    end while it is broken."""
    with Client(endpoint_of(stack)) as blocking:
        async with (
            AsyncClient(endpoint_of(stack)) as client,
            client.generate(stream=True, **OPTIONS) as stream,
            asyncio.timeout(_PATIENCE_S),
        ):
            with blocking.generate(stream=True, **OPTIONS) as other:
                await anext(stream)
                await asyncio.to_thread(next, other)
                with broken:
                    later = asyncio.create_task(client.generate(**OPTIONS))
                    outputs = [
                        await stream.result(), await asyncio.to_thread(other.result), await later
                    ]  # fmt: skip
    return [list(output.token_ids) for output in outputs]


async def test_what_a_coordinator_without_its_store_had_begun_goes_on_at_another(
    machines: Machines, stack: Stack, reference: list[int]
) -> None:
    first = stack.parts["coordinator"]
    with machines.parted("coordinator", "redis"):
        until(lambda: not is_serving(first.address))
    until(lambda: is_serving(first.address))
    texts = await texts_while(stack, machines.parted("coordinator", "redis"))
    assert texts == [reference] * 3
    assert is_serving(stack.parts["coordinator2"].address)
    # Its readers were told before it tried to give their leases back, for which it waited as long again.
    before, told, _ = first.log.partition("request failed")
    assert told
    assert "generation clean-up failed" not in before
    until(lambda: is_serving(first.address))


async def test_what_a_coordinator_without_targets_had_begun_goes_on_at_another(
    machines: Machines, stack: Stack, reference: list[int]
) -> None:
    texts = await texts_while(stack, machines.parted("coordinator", "target", "target2"))
    assert texts == [reference] * 3
    until(lambda: is_serving(stack.parts["coordinator"].address))


async def test_what_a_coordinator_that_its_clients_lost_had_begun_goes_on_at_another(
    machines: Machines, stack: Stack, reference: list[int]
) -> None:
    """It is well, and holds their sessions until it takes them for gone."""
    texts = await texts_while(stack, machines.parted(HERE, "coordinator"))
    assert texts == [reference] * 3


async def test_targets_and_drafts_whose_machines_are_lost_are_done_without_and_used_again(
    machines: Machines, stack: Stack, reference: list[int]
) -> None:
    address = stack.parts["coordinator"].address
    for lost in ("target", "target2", "draft"):
        assert await texts_while(stack, machines.without(lost)) == [reference] * 3
        until(lambda: num_connected(address) == 3)


def test_a_machine_whose_cable_is_pulled_hears_nothing(machines: Machines, stack: Stack) -> None:
    """Negative control of the rest: nothing goes around the network."""
    address = stack.parts["coordinator2"].address
    with machines.without("coordinator2"):
        assert not is_serving(address)
    with machines.parted(HERE, "coordinator2"):
        assert not is_serving(address)
    until(lambda: is_serving(address))
