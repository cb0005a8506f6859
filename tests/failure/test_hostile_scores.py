"""Hostile requests for scores and local drafts are refused with the name of their field, or served without a draft."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest

from specdec.rpc.status_mapping import from_rpc_error
from specdec.v1 import common_pb2, target_pb2
from specdec.v1 import coordinator_pb2 as pb
from tests.failure.test_hostile_messages import ask
from tests.support.coordinator_rig import request, started_coordinator
from tests.support.hostile.catalogue import VERIFY

SCORE = "/specdec.v1.DraftService/Score"


def a_round(num_tokens: int = 3, **fields: Any) -> common_pb2.Round:
    return common_pb2.Round(**{"session_id": "s", "token_ids": [5] * num_tokens, "draw_rule": 1, **fields})


SCORES = {
    "nothing": (common_pb2.ScoreRequest(), "token_ids"),
    "no tokens to score": (common_pb2.ScoreRequest(round=a_round()), "token_ids"),
    "too many tokens": (common_pb2.ScoreRequest(round=a_round(), token_ids=[5] * 65), "token_ids"),
    "far too many tokens": (common_pb2.ScoreRequest(round=a_round(), token_ids=[5] * 1_000_000), "token_ids"),
    "a token that does not exist": (common_pb2.ScoreRequest(round=a_round(), token_ids=[24]), "token_ids"),
    "the largest token": (common_pb2.ScoreRequest(round=a_round(), token_ids=[5, 2**32 - 1]), "token_ids"),
    "after a token that does not exist": (
        common_pb2.ScoreRequest(round=a_round(token_ids=[24]), token_ids=[5]),
        "round.token_ids",
    ),
    "after no token": (common_pb2.ScoreRequest(round=a_round(0), token_ids=[5]), "round.token_ids"),
    "beyond the context": (common_pb2.ScoreRequest(round=a_round(500), token_ids=[5] * 64), "round.token_ids"),
    "from the middle on": (
        common_pb2.ScoreRequest(round=a_round(start=3, prefix_hash=b"." * 16), token_ids=[5]),
        "round.start",
    ),
    "from nowhere on": (
        common_pb2.ScoreRequest(round=a_round(start=2**32 - 1, prefix_hash=b"." * 16), token_ids=[5]),
        "round.start",
    ),
    "an output from beyond the end on": (
        common_pb2.ScoreRequest(round=a_round(output_start=4), token_ids=[5]),
        "round.output_start",
    ),
    "no draw rule": (common_pb2.ScoreRequest(round=a_round(draw_rule=7), token_ids=[5]), "round.draw_rule"),
    "another's session": (
        common_pb2.ScoreRequest(round=a_round(session_id="{score-0}"), token_ids=[5]),
        "round.session_id",
    ),
    "no temperature": (
        common_pb2.ScoreRequest(round=a_round(law=common_pb2.LawParams(temperature=float("nan"))), token_ids=[5]),
        "round.law.temperature",
    ),
}


async def test_a_span_that_cannot_be_scored_is_refused_with_its_field_and_leaves_nothing() -> None:
    async with started_coordinator() as (rig, coordinator):
        for name, (asked, named) in SCORES.items():
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await ask(rig.draft.address, SCORE, asked.SerializeToString())
            error = from_rpc_error(caught.value)
            assert (caught.value.code().name, error.field) == ("INVALID_ARGUMENT", named), name
            assert len(error.message) < 300, name
        assert rig.draft.engine.info().num_sessions == 0
        rig.draft.engine.check_integrity()
        assert not rig.draft.worker.steps
        output = await coordinator.generate(request())
        assert output.finished.stats.num_accepted_tokens


async def test_a_flood_of_spans_costs_a_stream_no_token_and_leaves_nothing() -> None:
    asked = common_pb2.ScoreRequest(round=a_round(400), token_ids=[5] * 64).SerializeToString()
    async with started_coordinator() as (rig, coordinator):
        alone = await coordinator.generate(request(max_new_tokens=60, temperature=1.0, seed=7))
        await coordinator.stub.DeleteSession(pb.DeleteSessionRequest(session_id=alone.started.session_id))
        flood = [asyncio.create_task(ask(rig.draft.address, SCORE, asked)) for _ in range(200)]
        beside = await coordinator.generate(request(max_new_tokens=60, temperature=1.0, seed=7))
        answers = await asyncio.gather(*flood, return_exceptions=True)
        assert beside.token_ids == alone.token_ids
        assert beside.finished.stats.num_target_only_steps == alone.finished.stats.num_target_only_steps
        assert {from_rpc_error(a).reason for a in answers if isinstance(a, grpc.aio.AioRpcError)} == {"REPLICA_BUSY"}
        assert not [a for a in answers if isinstance(a, BaseException) and not isinstance(a, grpc.aio.AioRpcError)]
        await coordinator.stub.DeleteSession(pb.DeleteSessionRequest(session_id=beside.started.session_id))
        rig.draft.engine.check_integrity()
        assert (rig.draft.engine.info().num_sessions, rig.draft.engine.info().num_running) == (0, 0)


LOCAL = {"early-exit": 1}
LOCAL_DRAFTS = {
    "a pool of no name": (target_pb2.LocalDraft(gamma=3), ""),
    "a pool that is not there": (target_pb2.LocalDraft(pool="mtp", gamma=3), ""),
    "a pool of a name as long as the message": (target_pb2.LocalDraft(pool="m" * 1_000_000, gamma=3), ""),
    "as many tokens as there are": (target_pb2.LocalDraft(pool="early-exit", gamma=2**32 - 1), ""),
    "no token": (target_pb2.LocalDraft(pool="early-exit"), "local_draft.gamma"),
    "nothing said": (target_pb2.LocalDraft(), "local_draft.gamma"),
}


async def test_an_impossible_local_draft_is_refused_or_verified_without_a_draft() -> None:
    async with started_coordinator(drafts=0, local_drafts=LOCAL) as (rig, coordinator):
        greedy = rig.target.worker.greedy_continuation([5] * 3, 9)
        for index, (name, (local, named)) in enumerate(LOCAL_DRAFTS.items()):
            committed: list[int] = []
            for round_id in range(3):
                asked = a_round(token_ids=[5, 5, 5, *committed], session_id=f"s{index}", round_id=round_id)
                frame = target_pb2.VerifyFrame(requests=[{"call_id": 1, "round": asked, "local_draft": local}])
                (content,) = await ask(rig.target.address, VERIFY, frame.SerializeToString(), is_stream=True)
                (answer,) = target_pb2.VerificationFrame.FromString(content).verifications
                assert answer.status.message.startswith(named) if named else not answer.status.code, name
                if named:
                    continue
                assert len(answer.drafted.draft_token_ids) <= 8, name  # the replica's limit
                assert list(answer.choice_token_ids)[:1] == greedy[len(committed) :][:1], name
                committed.append(answer.choice_token_ids[0])
        with_both = target_pb2.VerifyFrame(
            requests=[
                {"call_id": 1, "round": a_round(), "draft_token_ids": [5], "local_draft": LOCAL_DRAFTS["no token"][0]}
            ]
        )
        with_both.requests[0].local_draft.gamma = 2
        (content,) = await ask(rig.target.address, VERIFY, with_both.SerializeToString(), is_stream=True)
        (answer,) = target_pb2.VerificationFrame.FromString(content).verifications
        assert answer.status.message.startswith("local_draft: ")
        rig.target.engine.check_integrity()
        output = await coordinator.generate(request())
        assert output.finished.stats.num_accepted_tokens
