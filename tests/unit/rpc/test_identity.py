"""The handshake of a stream: only the model that is meant, from a replica that states it, answers calls."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from coordinator.replicas.replica import TARGET
from specdec.contract.engine_api import EngineInfo
from specdec.contract.errors import Unavailable
from specdec.contract.types import Verification, VerifyRequest
from specdec.rpc.client import TargetLink
from target_service.servicer import TargetServicer
from tests.support.arithmetic_engines import GREEDY, ArithmeticTarget, make_round
from tests.support.table_services import linked

#: Model that the arithmetic engine states.
MODEL = "model"


class Counting(ArithmeticTarget):
    """An engine that records its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.num_run = 0

    async def verify(self, request: VerifyRequest, on_step: Any = None) -> Verification:
        self.num_run += 1
        return await super().verify(request, on_step)


class Silent(TargetServicer):
    """A replica that neither checks the model a stream is meant for nor states its own."""

    async def serve(self, frames: AsyncIterator[Any], context: Any) -> None:
        await self._frames.serve(frames, context.write)


@asynccontextmanager
async def counted(servicer_type: type[TargetServicer] = TargetServicer) -> AsyncIterator[tuple[TargetLink, Counting]]:
    engine = Counting()
    async with linked(TARGET, engine, servicer_type) as link:
        yield link, engine


def verification() -> VerifyRequest:
    return VerifyRequest(make_round(filters=GREEDY), np.empty(0, np.uint32), ())


async def test_the_model_that_is_meant_answers_and_states_its_process() -> None:
    async with counted() as (link, engine):
        met: list[str] = []
        link.on_handshake = met.append
        for model in (MODEL, MODEL, ""):
            await link.verify(verification(), model=model)
        incarnation = (await link.info()).incarnation
        assert incarnation
        assert met == [incarnation] * 2  # once per stream
        assert engine.num_run == 3


class WithAdapter(Counting):
    """An engine with one adapter, which records the models of its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.models: list[str] = []

    def info(self) -> EngineInfo:
        return replace(super().info(), adapter_names=("sql",), adapter_fingerprints=("sql-model",))

    async def verify(self, request: VerifyRequest, on_step: Any = None) -> Verification:
        self.models.append(request.model)
        return await super().verify(request, on_step)


async def test_a_stream_for_an_adapter_reaches_the_engine_with_it_and_is_closed_once_the_adapter_is_gone() -> None:
    engine, met = WithAdapter(), []
    async with linked(TARGET, engine) as link:
        link.on_handshake = met.append
        for model in (MODEL, "sql-model", ""):
            await link.verify(verification(), model=model)
        assert engine.models == ["", "sql-model", ""]
        link.leave_models([MODEL])
        for model in (MODEL, "sql-model"):
            await link.verify(verification(), model=model)
        assert len(met) == 3 + 1


async def test_another_model_runs_nothing_and_the_error_names_both_models() -> None:
    async with counted() as (link, engine):
        with pytest.raises(Unavailable, match=f"serves model {MODEL}, the call is meant for model another") as caught:
            await link.verify(verification(), model="another")
        assert caught.value.reason == "REPLICA_UNAVAILABLE"
        assert engine.num_run == 0
        await link.verify(verification(), model=MODEL)


async def test_the_reason_of_a_refusal_outlives_a_write_that_fails_because_of_it() -> None:
    """The first frame is written while the refusal arrives. gRPC loses the reason of about one such call in ten."""
    async with counted() as (link, _):
        for _ in range(60):
            with pytest.raises(Unavailable, match="the call is meant for model another"):
                await link.verify(verification(), model="another")


async def test_answers_of_a_replica_that_does_not_state_its_model_are_dropped() -> None:
    async with counted(Silent) as (link, _):
        with pytest.raises(Unavailable, match=f"meant for model {MODEL}"):
            await link.verify(verification(), model=MODEL)


async def test_calls_meant_for_two_models_do_not_disturb_each_other() -> None:
    async with counted() as (link, engine):
        held = VerifyRequest(make_round("hold", filters=GREEDY), np.empty(0, np.uint32), ())
        pending = asyncio.create_task(link.verify(held, model=MODEL))
        with pytest.raises(Unavailable):
            await link.verify(verification(), model="another")
        engine.release_held.set()
        assert (await pending).kv_len


async def test_two_processes_of_one_replica_id_have_two_incarnations() -> None:
    incarnations = set()
    for _ in range(2):
        async with counted() as (link, _engine):
            incarnations.add((await link.info()).incarnation)
    assert len(incarnations) == 2
