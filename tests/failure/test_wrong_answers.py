"""Replicas with invalid answers or internal errors: the client gets text, or an error that names the faulty part."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import grpc
import numpy as np
import pytest

from coordinator.replicas.replica import DRAFT, TARGET
from specdec.contract import errors
from specdec.contract.errors import SpecdecError
from specdec.contract.types import Proposal, ProposeRequest, Verification, VerifyRequest
from specdec.rpc.status_mapping import from_rpc_error
from specdec.v1 import coordinator_pb2 as pb
from tests.support.coordinator_rig import PROMPT, Rig, request
from tests.support.output import read_rest, read_until
from tests.support.table_services import VOCABULARY, Service, start_service


class OutsideTheVocabulary:
    """An engine whose token ids are all too high by the size of the vocabulary."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    async def propose(self, request: ProposeRequest) -> Proposal:
        proposal = await self._engine.propose(request)
        return replace(
            proposal,
            draft_token_ids=proposal.draft_token_ids + np.uint32(VOCABULARY),
            supports=tuple(
                replace(support, token_ids=support.token_ids + np.uint32(VOCABULARY)) for support in proposal.supports
            ),
        )

    async def verify(self, request: VerifyRequest, on_step: Any = None) -> Verification:
        return self._beyond(await self._engine.verify(request, on_step and (lambda step: on_step(self._beyond(step)))))

    def _beyond(self, verification: Verification) -> Verification:
        return replace(
            verification,
            choice_token_ids=verification.choice_token_ids + np.uint32(VOCABULARY),
            rows=tuple(
                replace(row, tail_token_id=row.tail_token_id + VOCABULARY) if row.tail_token_id >= 0 else row
                for row in verification.rows
            ),
        )


def refusing(error: SpecdecError) -> Callable[[Any], Any]:
    """Return a change that replaces every verification of an engine by `error`."""

    class Refusing:
        def __init__(self, engine: Any) -> None:
            self._engine = engine

        def __getattr__(self, name: str) -> Any:
            return getattr(self._engine, name)

        async def verify(self, request: VerifyRequest, on_step: Any = None) -> Verification:
            raise error

    return Refusing


REFUSALS = [
    errors.InvalidRequest("temperature is 9", field="round.law.temperature"),
    errors.InvalidRequest("9 tokens", reason="CONTEXT_TOO_LONG"),
    errors.Unauthenticated("who are you?"),
    errors.Forbidden("not you"),
    errors.NotFound("no such session"),
    errors.Unsupported("no logprobs here"),
]


async def add_liar(rig: Rig, role: str) -> Service:
    liar = await start_service(role, salt=0, between=OutsideTheVocabulary)
    rig.services.append(liar)
    return liar


@pytest.mark.parametrize("temperature", [0.0, 1.0])
async def test_a_draft_of_tokens_outside_the_vocabulary_is_ignored(temperature: float) -> None:
    async with Rig(drafts=0) as rig:
        await add_liar(rig, DRAFT)
        coordinator = await rig.coordinator()
        output = await coordinator.generate(request(temperature=temperature, seed=1))
        assert len(output.token_ids) == 24
        assert max(output.token_ids) < VOCABULARY
        assert output.finished.stats.num_draft_tokens == 0


@pytest.mark.parametrize("mode", [pb.SPECULATION_MODE_REJECTION, pb.SPECULATION_MODE_COUPLED])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
async def test_a_target_that_answers_tokens_outside_the_vocabulary_is_named(mode: int, temperature: float) -> None:
    async with Rig(targets=0, drafts=0) as rig:
        liar = await add_liar(rig, TARGET)
        coordinator = await rig.coordinator()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await coordinator.generate(request(mode=mode, temperature=temperature, seed=1))
        error = from_rpc_error(caught.value)
        assert error.code == "INTERNAL"
        assert f"target {liar.address} answered token id " in error.message


@pytest.mark.parametrize("refusal", REFUSALS, ids=lambda error: error.reason)
async def test_a_targets_refusal_is_not_reported_as_the_clients_fault(
    refusal: SpecdecError, caplog: pytest.LogCaptureFixture
) -> None:
    async with Rig(targets=0, drafts=0) as rig:
        refuser = await start_service(TARGET, salt=0, between=refusing(refusal))
        rig.services.append(refuser)
        coordinator = await rig.coordinator()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await coordinator.generate(request())
        error = from_rpc_error(caught.value)
        assert (error.code, error.reason, error.field) == ("INTERNAL", "INTERNAL", "")
        assert refusal.message in error.message
        (warning,) = (record for record in caplog.records if record.name == "coordinator.round.target_calls")
        assert refuser.address in warning.getMessage()
        assert refusal.code in warning.getMessage()


async def test_a_newer_owner_of_the_session_is_reported_as_such() -> None:
    async with Rig(targets=0, drafts=0) as rig:
        rig.services.append(await start_service(TARGET, salt=0, between=refusing(errors.StaleEpoch("epoch 9"))))
        coordinator = await rig.coordinator()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await coordinator.generate(request())
        assert from_rpc_error(caught.value).reason == "STALE_EPOCH"


async def test_a_target_that_refuses_is_replaced_by_another() -> None:
    async with Rig() as rig:
        refuser = await start_service(TARGET, salt=0, between=refusing(errors.InvalidRequest("no")))
        rig.services.append(refuser)
        coordinator = await rig.coordinator()
        for index in range(8):
            output = await coordinator.generate(request(session_id=f"s{index}"))
            assert output.token_ids == rig.target.worker.greedy_continuation(PROMPT, 24)


async def test_a_target_with_wrong_answers_is_replaced_by_another() -> None:
    async with Rig() as rig:
        liar = await add_liar(rig, TARGET)
        coordinator = await rig.coordinator()
        # With this many sessions both replicas are chosen.
        for index in range(8):
            output = await coordinator.generate(request(session_id=f"s{index}"))
            assert output.token_ids == rig.target.worker.greedy_continuation(PROMPT, 24)
        assert liar.worker.steps


async def test_a_target_whose_device_fails_is_replaced_by_another() -> None:
    async with Rig(targets=2) as rig:
        coordinator = await rig.coordinator()
        stream = coordinator.stub.Generate(request(max_new_tokens=120, gamma=2))
        output = await read_until(stream, 10)
        serving = next(service for service in rig.of_role(TARGET) if service.engine.info().num_sessions)
        serving.worker.fail_always = RuntimeError("the device failed")
        await read_rest(stream, output)
        assert output.token_ids == rig.target.worker.greedy_continuation(PROMPT, 120)


async def test_a_lone_target_whose_device_fails_ends_the_request_with_its_error() -> None:
    async with Rig() as rig:
        coordinator = await rig.coordinator()
        rig.target.worker.fail_always = RuntimeError("the device failed")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await coordinator.generate(request())
        assert from_rpc_error(caught.value).code == "INTERNAL"
