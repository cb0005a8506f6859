"""A real Envoy between client and coordinators that loses its upstream while streams run."""

from __future__ import annotations

import asyncio

import pytest

from specdec.client import AsyncClient, Budgets
from specdec.contract.errors import SpecdecError
from tests.support.coordinator_rig import PROMPT, Rig
from tests.support.envoy import Envoy, unable
from tests.support.fault_proxy import FaultProxy

pytestmark = pytest.mark.skipif(bool(why := unable()), reason=why)

NUM_STREAMS = 4
NUM_TOKENS = 240
PATIENT = Budgets(connect_s=60.0, resume_s=120.0)


def options(number: int) -> dict[str, object]:
    prompt = [PROMPT[0] + number, *PROMPT[1:]]
    return {
        "prompt_token_ids": prompt, "temperature": 0.0, "max_new_tokens": NUM_TOKENS, "ignore_eos": True, "gamma": 1
    }  # fmt: skip


async def test_streams_through_envoy_resume_when_it_loses_its_upstream() -> None:
    async with Rig() as rig:
        coordinator = await rig.coordinator()
        async with FaultProxy(coordinator.server.address) as network:
            with Envoy([network.address]) as envoy:
                async with AsyncClient(envoy.address, budgets=PATIENT) as client:

                    async def read(number: int) -> tuple[tuple[int, ...], int]:
                        """Return the text of a stream whose upstream is lost twice, and how often it was."""
                        num_cuts = 0
                        async with client.generate(stream=True, **options(number)) as stream:
                            async for _ in stream:
                                if number == 0 and num_cuts < 2 and network.num_open:
                                    network.cut()
                                    num_cuts += 1
                            return (await stream.result()).token_ids, num_cuts

                    answers = await asyncio.gather(*(read(number) for number in range(NUM_STREAMS)))
        for number, (text, _) in enumerate(answers):
            prompt = [PROMPT[0] + number, *PROMPT[1:]]
            assert list(text) == rig.target.worker.greedy_continuation(prompt, NUM_TOKENS)
        assert answers[0][1] == 2


async def test_a_call_through_envoy_without_an_upstream_ends_within_its_budget() -> None:
    async with Rig() as rig:
        coordinator = await rig.coordinator()
        async with FaultProxy(coordinator.server.address) as network:
            network.faults.is_refusing = True
            with Envoy([network.address]) as envoy:
                async with AsyncClient(envoy.address, budgets=Budgets(connect_s=0.5)) as client:
                    with pytest.raises(SpecdecError) as caught:
                        await client.generate(**options(0))
        assert caught.value.reason == "COORDINATOR_UNAVAILABLE"
