"""Two tenants on the same replicas and Redis share nothing: no session, no KV block, no observable time."""

from __future__ import annotations

from collections.abc import Sequence

import grpc
import numpy as np
import pytest

from specdec.contract.errors import InvalidRequest
from specdec.contract.tenant import DEFAULT_TENANT, session_on_replica
from specdec.contract.types import (
    BLOCK_TOKENS,
    DrawRule,
    ProposeRequest,
    SamplingFilters,
    SessionPosition,
    VerifyRequest,
)
from specdec.engine.simulated.engines import SimulatedDraft, SimulatedTarget
from specdec.engine.simulated.simulated_pair import simulated_pair
from specdec.rpc import codec
from specdec.v1 import coordinator_pb2 as pb
from specdec.v1 import draft_pb2
from tests.support.coordinator_rig import Coordinator, Rig, request
from tests.support.output import Output
from tests.support.redis_fixture import redis_server, redis_url

__all__ = ["redis_server", "redis_url"]

PREFIX = tuple(2 + (5 * index + index // 7) % 20 for index in range(8 * BLOCK_TOKENS))
GREEDY = SamplingFilters(temperature=0.0)
TENANTS = (DEFAULT_TENANT, "acme", "ACME")


async def turn(coordinator: Coordinator, session_id: str, prompt: Sequence[int]) -> Output:
    return await coordinator.generate(request(prompt, session_id=session_id, max_new_tokens=12))


def num_cached(output: Output) -> int:
    assert output.finished is not None
    return output.finished.usage.num_cached_prompt_tokens


async def test_a_cached_prefix_is_reused_only_within_its_tenant(redis_url: str) -> None:
    async with Rig(store_url=redis_url) as rig:
        for tenant in TENANTS:
            coordinator = await rig.coordinator(tenant=tenant)
            prompts = [(*PREFIX, 4), (*PREFIX, 5)]
            outputs = [await turn(coordinator, f"s{index}", prompt) for index, prompt in enumerate(prompts)]
            assert [num_cached(output) for output in outputs] == [0, len(PREFIX)]
            assert [output.token_ids for output in outputs] == [
                rig.target.worker.greedy_continuation(prompt, 12) for prompt in prompts
            ]


async def test_two_tenants_may_use_the_same_session_id_for_separate_sessions(redis_url: str) -> None:
    async with Rig(store_url=redis_url) as rig:
        ours, theirs = await rig.coordinator(), await rig.coordinator(tenant="acme")
        said = [(ours, list(PREFIX[:20])), (theirs, list(PREFIX[20:50]))]
        for number in range(3):
            for coordinator, tokens in said:
                prompt = tokens if number == 0 else (2 + number, 3)
                if number:
                    tokens += prompt
                output = await turn(coordinator, "one", prompt)
                assert output.token_ids == rig.target.worker.greedy_continuation(tokens, 12)
                # Neither tenant displaces the other's KV: all but the last token is cached.
                assert num_cached(output) == (len(tokens) - 3 if number else 0)
                tokens += output.token_ids
        num_held = rig.target.engine.info().num_sessions
        await ours.stub.DeleteSession(pb.DeleteSessionRequest(session_id="one"))
        assert rig.target.engine.info().num_sessions == num_held - 1
        assert num_cached(await turn(theirs, "one", (5,))) == len(said[1][1]) - 1
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await ours.stub.GetSession(pb.GetSessionRequest(session_id="one"))
        assert refused.value.code() is grpc.StatusCode.NOT_FOUND
        await theirs.stub.DeleteSession(pb.DeleteSessionRequest(session_id="one"))
        assert rig.target.engine.info().num_sessions == num_held - 2


def position(tenant: str, session_id: str, token_ids: Sequence[int]) -> SessionPosition:
    return SessionPosition(
        session_id=session_on_replica(tenant, session_id),
        epoch=1,
        round_id=0,
        start=0,
        prefix_hash=b"",
        token_ids=np.array(token_ids, np.uint32),
        filters=GREEDY,
        seed=1,
        turn=0,
        output_start=len(token_ids),
        draw_rule=DrawRule.DISTRIBUTION,
        tenant=tenant,
    )


class Clock:
    """A clock that the steps of a simulated device advance."""

    def __init__(self) -> None:
        self.busy_s = 0.0

    def observe_step(self, *, num_sequences: int, num_tokens: int, seconds: float) -> None:
        self.busy_s += seconds

    def observe_queue(self, seconds: float) -> None:
        """Only steps are observed."""


@pytest.mark.parametrize("role", ["target", "draft"])
async def test_response_time_does_not_reveal_that_another_tenant_sent_a_prefix(role: str) -> None:
    """Step times are modelled, so equal times are exactly equal."""
    known, other = ([first + index % 1000 for index in range(30 * BLOCK_TOKENS + 1)] for first in (1, 5000))

    async def second_prompt_s(first: tuple[str, list[int]], second: tuple[str, list[int]]) -> float:
        """Return the busy time of a fresh replica for a prompt that is sent after another one."""
        clock, build = Clock(), SimulatedTarget if role == "target" else SimulatedDraft
        engine = build(simulated_pair("simulated:8b-0.6b,predraft=off"), max_gamma=8, observer=clock)
        for tenant, prompt in (first, second):
            before_s = clock.busy_s
            asked = position(tenant, "s" if (tenant, prompt) == first else "t", prompt)
            if isinstance(engine, SimulatedTarget):
                await engine.verify(VerifyRequest(asked, np.empty(0, np.uint32), ()))
            else:
                await engine.propose(ProposeRequest(asked, 1))
        await engine.close()
        return clock.busy_s - before_s

    for tenant in TENANTS:
        cold_s = await second_prompt_s((tenant, other), (tenant, known))
        assert await second_prompt_s((tenant, known), (tenant, known)) < 0.8 * cold_s
        for stranger in set(TENANTS) - {tenant}:
            assert await second_prompt_s((stranger, known), (tenant, known)) == pytest.approx(cold_s, rel=1e-9)


def test_the_wire_names_every_tenant_but_the_default_one() -> None:
    engine = SimulatedDraft(simulated_pair("simulated:8b-0.6b"), max_gamma=8)
    for tenant in TENANTS:
        request_ = ProposeRequest(position(tenant, "s", [1, 2]), 1)
        request_.position.session_id = "s"
        message = draft_pb2.ProposeRequest.FromString(codec.encode_propose_request(request_, 1).SerializeToString())
        assert message.round.tenant == ("" if tenant == DEFAULT_TENANT else tenant)
        assert message.round.session_id == "s"
        decoded = codec.decode_propose_request(message, engine.info()).position
        assert (decoded.tenant, decoded.session_id) == (tenant, "s" if tenant == DEFAULT_TENANT else f"{{{tenant}}}s")


@pytest.mark.parametrize(("field", "value"), [("tenant", "a/b"), ("tenant", "x" * 65), ("session_id", "{acme}s")])
def test_a_session_id_that_would_reach_another_tenant_is_refused_with_its_field(field: str, value: str) -> None:
    engine = SimulatedDraft(simulated_pair("simulated:8b-0.6b"), max_gamma=8)
    message = codec.encode_propose_request(ProposeRequest(position(DEFAULT_TENANT, "s", [1, 2]), 1), 1)
    setattr(message.round, field, value)
    with pytest.raises(InvalidRequest, match=field) as refused:
        codec.decode_propose_request(message, engine.info())
    assert refused.value.field == f"round.{field}"
