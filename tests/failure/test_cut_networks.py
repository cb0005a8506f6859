"""Sameness and exactness over networks that cut 5 % of all answers: client, coordinator, target and draft.

After one piece of data in twenty the connection that carried it is reset, with every stream on it. Texts that a seed
decides stay the same, and sampled ones keep the target's distribution. False alarm of the statistical test: 1e-4; its
seeds are fixed, so a pass stays a pass up to the times of the cuts, which must not matter.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager

import numpy as np
import pytest

from specdec.client import AsyncClient, Budgets
from tests.support.chi_square import chi_square_p_value
from tests.support.coordinator_rig import PROMPT, Rig
from tests.support.fault_proxy import FaultProxy

CUT_SHARE = 0.05
FALSE_ALARM = 1e-4
NUM_STREAMS = 8
NUM_TOKENS = 60
NUM_SAMPLES = 1200
NUM_AT_ONCE = 16
#: Outcomes that are expected less often are pooled.
LEAST_EXPECTED = 8.0

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


@pytest.mark.full
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("mode", ["rejection", "block"])
async def test_sampled_tokens_keep_their_distribution_over_networks_that_cut_5_percent_of_the_answers(
    mode: str,
) -> None:
    gate = asyncio.Semaphore(NUM_AT_ONCE)

    async def sample(client: AsyncClient, seed: int) -> tuple[int, ...]:
        async with gate:
            output = await client.generate(
                prompt_token_ids=PROMPT, max_new_tokens=2, ignore_eos=True, gamma=2, mode=mode, seed=seed
            )
            return output.token_ids

    async with Rig() as rig:
        async with cut_client(rig) as (client, proxies):
            drawn = Counter(await asyncio.gather(*(sample(client, seed) for seed in range(NUM_SAMPLES))))
        assert all(proxy.num_cuts for proxy in proxies)
        assert p_value(drawn, joint_distribution(rig, 1.0)) > FALSE_ALARM
        # Negative control: the distribution of another temperature.
        assert p_value(drawn, joint_distribution(rig, 1.3)) < FALSE_ALARM


def joint_distribution(rig: Rig, temperature: float) -> dict[tuple[int, ...], float]:
    """Return the probability of each pair of first tokens, from the target's own logits."""

    def next_token(token_ids: Sequence[int]) -> np.ndarray:
        logits = np.asarray(rig.target.worker.logits_after(token_ids), np.float64) / temperature
        weights = np.exp(logits - logits.max())
        return weights / weights.sum()

    first = next_token(PROMPT)
    return {
        (one, two): float(first[one] * share)
        for one in range(len(first))
        for two, share in enumerate(next_token([*PROMPT, one]))
    }


def p_value(drawn: Counter[tuple[int, ...]], expected: dict[tuple[int, ...], float]) -> float:
    """Compare counts with probabilities; rare outcomes are one."""
    total = sum(drawn.values())
    common = [outcome for outcome, share in expected.items() if share * total >= LEAST_EXPECTED]
    counts = [drawn[outcome] for outcome in common]
    shares = [expected[outcome] * total for outcome in common]
    return chi_square_p_value([*counts, total - sum(counts)], [*shares, total - sum(shares)])
