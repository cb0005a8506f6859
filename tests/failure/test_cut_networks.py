"""Texts that a seed decides are the same over networks that cut 5 % of all answers: client, coordinator and replicas.

After one piece of data in twenty the connection that carried it is reset, with every stream on it. That sampled tokens
keep the target's distribution is a row of `tests/statistical/test_first_tokens.py`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

from specdec.client import AsyncClient, Budgets
from tests.support.coordinator_rig import PROMPT, Rig
from tests.support.fault_proxy import FaultProxy

CUT_SHARE = 0.05
NUM_STREAMS = 8
NUM_TOKENS = 60

PATIENT = Budgets(connect_s=120.0, resume_s=240.0)


@asynccontextmanager
async def cut_client(rig: Rig) -> AsyncIterator[tuple[AsyncClient, list[FaultProxy]]]:
    """Give a client whose way to the coordinator is cut again and again, as the coordinator's to its replicas."""
    async with AsyncExitStack() as opened:

        async def network(upstream: str, seed: int) -> FaultProxy:
            proxy = await opened.enter_async_context(FaultProxy(upstream, seed=seed))
            proxy.faults.cut_share = CUT_SHARE
            return proxy

        inner = [await network(service.address, seed) for seed, service in enumerate(rig.services)]
        addresses = {service.address: proxy.address for service, proxy in zip(rig.services, inner, strict=True)}
        coordinator = await rig.coordinator(addresses=addresses, target_wait_s=600.0)
        watching = asyncio.create_task(coordinator.pools.watch())
        outer = await network(coordinator.server.address, len(inner))
        async with AsyncClient(outer.address, budgets=PATIENT) as client:
            yield client, [*inner, outer]
        watching.cancel()
        await asyncio.wait([watching])


async def test_texts_that_a_seed_decides_are_the_same_over_networks_that_cut_5_percent_of_the_answers() -> None:
    def options(number: int) -> dict[str, object]:
        coupled = {"temperature": 1.0, "seed": number, "mode": "coupled"}
        return {
            "prompt_token_ids": [PROMPT[0] + number, *PROMPT[1:]],
            "max_new_tokens": NUM_TOKENS,
            "ignore_eos": True,
            "gamma": 1,
            **(coupled if number % 2 else {"temperature": 0.0}),
        }

    async def texts(client: AsyncClient) -> list[tuple[int, ...]]:
        outputs = await asyncio.gather(*(client.generate(**options(number)) for number in range(NUM_STREAMS)))
        return [output.token_ids for output in outputs]

    async with Rig() as rig:
        direct = await rig.coordinator()
        async with AsyncClient(direct.server.address) as client:
            expected = await texts(client)
        async with cut_client(rig) as (client, proxies):
            assert await texts(client) == expected
        assert all(proxy.num_cuts for proxy in proxies)
