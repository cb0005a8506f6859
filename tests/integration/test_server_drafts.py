"""Drafts by a server of completions: exact at every temperature, and refused where the server is not suited."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from coordinator.replicas.replica import DRAFT
from draft_service.server_draft import open_server_draft
from specdec.contract.errors import InvalidSetting
from specdec.observability.engine_metrics import EngineMetrics
from specdec.settings.draft import DraftSettings
from specdec.v1 import coordinator_pb2 as pb
from tests.support.backend_rig import table_model, write_checkpoint
from tests.support.coordinator_rig import PROMPT, Coordinator, Rig, request
from tests.support.engine_server import EngineOptions, EngineServer
from tests.support.table_services import Service, serve_engine, start_service

MODES = (pb.SPECULATION_MODE_REJECTION, pb.SPECULATION_MODE_BLOCK, pb.SPECULATION_MODE_COUPLED)


async def start_draft(url: str, model: Path, **options: Any) -> Service:
    """Start a draft service in front of a server."""
    fields = {"model": str(model), "backend": "server", "backend_url": url, "redis_url": "memory://", "max_gamma": 8}
    metrics = EngineMetrics("table", role=DRAFT)
    engine = await open_server_draft(DraftSettings.model_validate(fields | options), "draft-server", metrics, {})
    return await serve_engine(DRAFT, engine, metrics, table_model())


@asynccontextmanager
async def drafted_system(salt: int) -> AsyncIterator[tuple[Coordinator, EngineServer]]:
    """Run a system with our own target and a draft by a server of the model with a salt."""
    async with (
        EngineServer(table_model(salt)) as server,
        Rig(targets=0, drafts=0, write_checkpoint=write_checkpoint, vocabulary="") as rig,
    ):
        target = await start_service("target", salt=0, vocabulary=rig.tokenizer.fingerprint)
        rig.services += [target, await start_draft(server.url, rig.directory)]
        yield await rig.coordinator(), server


@pytest.mark.parametrize("mode", MODES)
async def test_text_with_drafts_of_a_server_is_that_of_the_target(mode: int) -> None:
    """Greedy and coupled texts are the target's own; sampled ones repeat with their seed."""
    async with drafted_system(salt=1) as (coordinator, _):
        greedy = await coordinator.generate(request(mode=mode, gamma=4))
        assert greedy.token_ids == table_model().greedy_continuation(PROMPT, 24)
        assert greedy.finished is not None
        stats = greedy.finished.stats
        assert 0 < stats.num_accepted_tokens < stats.num_draft_tokens
        asked = request(mode=mode, gamma=4, temperature=0.9, seed=3)
        first, second = [(await coordinator.generate(asked)).token_ids for _ in range(2)]
        assert first == second
        if mode == pb.SPECULATION_MODE_COUPLED:
            alone = request(mode=mode, gamma=0, temperature=0.9, seed=3)
            assert (await coordinator.generate(alone)).token_ids == first


async def test_a_draft_of_the_targets_own_model_is_always_accepted_in_greedy_rounds() -> None:
    async with drafted_system(salt=0) as (coordinator, _):
        output = await coordinator.generate(request(gamma=4))
    assert output.finished is not None
    assert output.finished.stats.num_accepted_tokens == output.finished.stats.num_draft_tokens > 0


async def test_without_its_server_the_text_goes_on_without_drafts() -> None:
    async with drafted_system(salt=0) as (coordinator, server):
        await server.stop()
        output = await coordinator.generate(request(gamma=4))
        assert output.token_ids == table_model().greedy_continuation(PROMPT, 24)


async def test_a_server_that_returns_no_token_ids_is_refused(tmp_path: Path) -> None:
    write_checkpoint(tmp_path)
    async with EngineServer(table_model(), EngineOptions(returns_token_ids=False)) as server:
        with pytest.raises(InvalidSetting, match=r"backend_url: .* returns no token ids"):
            await start_draft(server.url, tmp_path)


async def test_scores_are_unsupported(tmp_path: Path) -> None:
    from specdec.v1 import common_pb2, draft_pb2_grpc

    write_checkpoint(tmp_path)
    async with EngineServer(table_model()) as server:
        draft = await start_draft(server.url, tmp_path)
        async with grpc.aio.insecure_channel(draft.address) as channel:
            scored = common_pb2.ScoreRequest(
                round=common_pb2.Round(session_id="s", token_ids=[5, 6], draw_rule=common_pb2.DRAW_RULE_LAW),
                token_ids=[7],
            )
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await draft_pb2_grpc.DraftServiceStub(channel).Score(scored)
            assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
        await draft.kill()
