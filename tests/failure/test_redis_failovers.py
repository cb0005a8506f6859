"""Generations while a Redis primary is killed and replaced: every client gets the tokens of an undisturbed run."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from specdec.client import AsyncClient
from tests.support.process_rig import NUM_TOKENS, PROMPT, models, reference
from tests.support.redis_systems import TcpRedis, await_true, redis_cluster, sentinel_system
from tests.support.stack import Stack

__all__ = ["models", "reference"]

pytestmark = pytest.mark.full

NUM_CLIENTS = 4


@contextlib.contextmanager
def sentinels(directory: Path) -> Iterator[tuple[str, TcpRedis, Callable[[], bool]]]:
    """Return the URL, the primary, and whether another server has taken its place."""
    with sentinel_system(directory, down_after_ms=1000) as system:
        primary = system.primary
        yield system.url, primary, lambda: system.primary is not primary


@contextlib.contextmanager
def cluster(directory: Path) -> Iterator[tuple[str, TcpRedis, Callable[[], bool]]]:
    with redis_cluster(directory, has_replica=True, node_timeout_ms=2000) as system:
        yield system.url, system.nodes[0], lambda: system.owner_of(0) == 3


@pytest.mark.parametrize("system", [sentinels, cluster])
async def test_generations_outlive_the_failover_of_a_killed_primary(
    system: Callable[[Path], contextlib.AbstractContextManager[tuple[str, TcpRedis, Callable[[], bool]]]],
    models: tuple[Path, Path],
    reference: list[int],
    tmp_path: Path,
) -> None:
    with (
        system(tmp_path) as (url, primary, is_replaced),
        Stack(*models, redis_url=url, num_coordinators=2, coordinator_arguments=["--cluster", "failover"]) as stack,
    ):
        endpoint = f"ipv4:{stack.endpoint},{stack.parts['coordinator2'].address}"
        is_over = asyncio.Event()
        async with AsyncClient(endpoint) as client, asyncio.TaskGroup() as group:
            running = [group.create_task(generate(client, is_over)) for _ in range(NUM_CLIENTS)]
            await asyncio.sleep(1.0)
            primary.kill()
            await asyncio.to_thread(await_true, is_replaced)
            await asyncio.sleep(1.0)
            is_over.set()
        outputs = [output for task in running for output in task.result()]
    assert len(outputs) >= 2 * NUM_CLIENTS
    assert all(output == reference[:NUM_TOKENS] for output in outputs)


async def generate(client: AsyncClient, is_over: asyncio.Event) -> list[list[int]]:
    """Return the tokens of generations, one after another until the failover is over and one more."""
    options = {"prompt_token_ids": PROMPT, "temperature": 0.0, "ignore_eos": True, "max_new_tokens": NUM_TOKENS}
    outputs = []
    was_over = False
    while not was_over:
        was_over = is_over.is_set()
        async with client.generate(stream=True, gamma=1, **options) as stream:
            output = await stream.result()
        outputs.append(list(output.token_ids))
    return outputs
