"""New sessions are divided among the target models by their replicas or by an operator; a session keeps its model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import grpc
import pytest

from coordinator.replicas.replica import TARGET
from specdec.rpc.status_mapping import from_rpc_error
from specdec.v1 import coordinator_pb2 as pb
from tests.support.coordinator_rig import PROMPT, Coordinator, Rig, request
from tests.support.output import Output
from tests.support.table_services import EOS, start_service
from tests.support.table_worker import TableWorker

NUM_SESSIONS = 120
#: Model of the target replicas that a rig starts with, and of those that come later.
OLD, NEW = 0, 5


async def add_target(rig: Rig, salt: int) -> None:
    rig.services.append(await start_service(TARGET, salt=salt))


async def ask(coordinator: Coordinator, session_id: str) -> Output:
    return await coordinator.generate(request(session_id=session_id, max_new_tokens=2))


async def models_of(coordinator: Coordinator, session_ids: Iterable[str]) -> dict[str, str]:
    """Run a turn of each session and return the fingerprint of its model."""
    outputs = {session_id: await ask(coordinator, session_id) for session_id in session_ids}
    return {session_id: output.started.target_fingerprint for session_id, output in outputs.items() if output.started}


def fingerprint_of(rig: Rig, salt: int) -> str:
    (fingerprint,) = {
        service.engine.info().model_fingerprint for service in rig.of_role(TARGET) if service.worker.salt == salt
    }
    return str(fingerprint)


def names(prefix: str, count: int = NUM_SESSIONS) -> list[str]:
    """Return session ids. The draw depends on them alone, so the same tests draw the same models."""
    return [f"{prefix}-{number}" for number in range(count)]


async def test_new_sessions_get_models_by_replicas_and_keep_them() -> None:
    async with Rig(targets=2, drafts=0) as rig:
        await add_target(rig, NEW)
        first, second = await rig.coordinator(), await rig.coordinator()
        new = fingerprint_of(rig, NEW)
        got = await models_of(first, names("by-replicas"))
        share = Counter(got.values())[new] / NUM_SESSIONS
        print(f"{share:.2f} of the new sessions for 1 of 3 replicas")
        assert abs(share - 1 / 3) < 0.1
        # The draw is the session's alone: a coordinator that has not seen a session draws the same model.
        assert (await first.stub.GetInfo(pb.GetInfoRequest())).target_models == (
            await second.stub.GetInfo(pb.GetInfoRequest())
        ).target_models
        assert await models_of(second, names("by-replicas")) == got


async def test_a_session_leaves_its_model_only_when_no_replica_serves_it() -> None:
    async with Rig(targets=1, drafts=0) as rig:
        coordinator = await rig.coordinator()
        old = fingerprint_of(rig, OLD)
        assert (await ask(coordinator, "stays")).started.target_fingerprint == old
        await add_target(rig, NEW)
        both = await rig.coordinator()
        new = fingerprint_of(rig, NEW)
        await both.stub.Promote(pb.PromoteRequest(target_fingerprint=new, share=1.0))
        assert await models_of(both, ["stays", "begins"]) == {"stays": old, "begins": new}
        rig.target.servicer.drain()
        await both.pools.poll()
        output = await ask(both, "stays")
        assert (output.started.target_fingerprint, output.started.target_changed) == (new, True)


async def test_an_output_ends_at_an_end_token_of_its_own_model() -> None:
    async with Rig(targets=1, drafts=0) as rig:
        text = TableWorker(salt=NEW).greedy_continuation(PROMPT, 24)
        end = next(token_id for token_id in text if token_id != EOS)
        rig.services.append(await start_service(TARGET, salt=NEW, eos_token_ids=(EOS, end)))
        coordinator = await rig.coordinator()
        await coordinator.stub.Promote(pb.PromoteRequest(target_fingerprint=fingerprint_of(rig, NEW), share=1.0))
        output = await coordinator.generate(request(ignore_eos=False))
        assert output.token_ids == text[: text.index(end) + 1]
        # The log is read with the end tokens of the request's model, whichever model the coordinator knows first.
        again = request(None, session_id=output.started.session_id, resume_from=0)
        assert (await coordinator.generate(again)).token_ids == output.token_ids


@pytest.mark.parametrize(
    ("share", "low", "high"),
    [
        pytest.param(0.0, 0.0, 0.0, marks=pytest.mark.full),
        (0.2, 0.1, 0.3),
        pytest.param(1.0, 1.0, 1.0, marks=pytest.mark.full),
    ],
)
async def test_an_operators_share_holds_at_every_coordinator_until_it_is_taken_back(
    share: float, low: float, high: float
) -> None:
    async with Rig(targets=1, drafts=0) as rig:
        await add_target(rig, NEW)
        first, second = await rig.coordinator(), await rig.coordinator()
        new = fingerprint_of(rig, NEW)
        answer = await first.stub.Promote(pb.PromoteRequest(target_fingerprint=new, share=share))
        assert {model.fingerprint: model.share for model in answer.target_models}[new] == pytest.approx(share)
        await second.target_models.sync_with_store()
        for number, coordinator in enumerate((first, second)):
            got = Counter((await models_of(coordinator, names(f"given-{number}"))).values())
            assert low <= got[new] / NUM_SESSIONS <= high
        answer = await first.stub.Promote(pb.PromoteRequest(target_fingerprint=""))
        assert [model.share for model in answer.target_models] == [0.5, 0.5]


async def test_a_share_for_a_model_that_is_not_served_is_refused_and_one_that_left_has_no_effect() -> None:
    async with Rig(targets=1, drafts=0) as rig:
        await add_target(rig, NEW)
        coordinator = await rig.coordinator()
        for asked, reason in (
            (pb.PromoteRequest(target_fingerprint="other", share=0.5), "MODEL_NOT_FOUND"),
            (pb.PromoteRequest(target_fingerprint=fingerprint_of(rig, NEW), share=1.5), "INVALID_REQUEST"),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await coordinator.stub.Promote(asked)
            assert from_rpc_error(refused.value).reason == reason
        await coordinator.stub.Promote(pb.PromoteRequest(target_fingerprint=fingerprint_of(rig, NEW), share=1.0))
        rig.of_role(TARGET)[1].servicer.drain()
        await coordinator.pools.poll()
        old = fingerprint_of(rig, OLD)
        assert set((await models_of(coordinator, names("left", 10))).values()) == {old}
