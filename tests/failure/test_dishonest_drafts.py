"""Drafts whose tokens were not drawn from the distribution that they report: the draft is not used and the fault is
counted, wherever the draft was made. The text is then the target's own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from coordinator.replicas.replica import DRAFT, TARGET
from draft_service.fan_out_policy import Predraft
from specdec.contract.types import Proposal, ProposeRequest, Support, Verification, VerifyRequest
from specdec.core.random import DrawKey
from specdec.core.sparse import draw_from_support
from specdec.v1 import coordinator_pb2 as pb
from tests.support.coordinator_rig import Coordinator, Rig, request
from tests.support.table_services import start_service

Lie = Callable[[Proposal, Any], Proposal]
MODES = [pb.SPECULATION_MODE_REJECTION, pb.SPECULATION_MODE_BLOCK]
LOCAL = {"early-exit": 1}
NUM_TOKENS = 12


def drawn_with(proposal: Proposal, key_of: Callable[[int], DrawKey], shift: int = 0) -> Proposal:
    """Return the proposal with tokens that were drawn from its supports with other keys."""
    token_ids = [
        draw_from_support(support, key_of(index), index + shift) for index, support in enumerate(proposal.supports)
    ]
    return replace(proposal, draft_token_ids=np.array(token_ids, np.uint32))


def likeliest(proposal: Proposal, asked: Any) -> Proposal:
    best = [support.token_ids[support.weights.argmax()] for support in proposal.supports]
    return replace(proposal, draft_token_ids=np.array(best, np.uint32))


def first_likeliest(proposal: Proposal, asked: Any) -> Proposal:
    token_ids = proposal.draft_token_ids.copy()
    token_ids[0] = proposal.supports[0].token_ids[proposal.supports[0].weights.argmax()]
    return replace(proposal, draft_token_ids=token_ids)


def another_q(proposal: Proposal, asked: Any) -> Proposal:
    turned = tuple(Support(support.token_ids, support.weights[::-1].copy()) for support in proposal.supports)
    return replace(proposal, supports=turned)


def flat_q(proposal: Proposal, asked: Any) -> Proposal:
    flat = tuple(Support(support.token_ids, np.ones_like(support.weights)) for support in proposal.supports)
    return replace(proposal, supports=flat)


def last_q_changed(proposal: Proposal, asked: Any) -> Proposal:
    return replace(proposal, supports=(*proposal.supports[:-1], flat_q(proposal, asked).supports[-1]))


def another_seed(proposal: Proposal, asked: Any) -> Proposal:
    position = asked.position
    return drawn_with(proposal, lambda _: DrawKey(position.seed ^ 1, position.turn, position.committed_len))


def another_turn(proposal: Proposal, asked: Any) -> Proposal:
    position = asked.position
    return drawn_with(proposal, lambda _: DrawKey(position.seed, position.turn + 1, position.committed_len))


def another_start(proposal: Proposal, asked: Any) -> Proposal:
    position = asked.position
    return drawn_with(proposal, lambda at: DrawKey(position.seed, position.turn, position.committed_len + at + 1))


def another_index(proposal: Proposal, asked: Any) -> Proposal:
    position = asked.position
    return drawn_with(proposal, lambda _: DrawKey(position.seed, position.turn, position.committed_len), shift=1)


LIES = [
    likeliest, first_likeliest, another_q, flat_q, last_q_changed, another_seed, another_turn, another_start,
    another_index,
]  # fmt: skip


class Lying:
    """An engine whose drafts, its own or those of its verifications, are changed by a lie."""

    def __init__(self, engine: Any, lie: Lie) -> None:
        self._engine = engine
        self._lie = lie
        self.num_lies = 0
        self.num_right_tokens = 0
        """Tokens of drafts that are right by chance."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    async def propose(self, asked: ProposeRequest) -> Proposal:
        return self._changed(await self._engine.propose(asked), asked)

    async def verify(self, asked: VerifyRequest, on_step: Any = None) -> Verification:
        verification: Verification = await self._engine.verify(asked, on_step)
        if verification.drafted is None:
            return verification
        return replace(verification, drafted=self._changed(verification.drafted, asked))

    def _changed(self, honest: Proposal, asked: Any) -> Proposal:
        proposal, position = self._lie(honest, asked), asked.position
        right = drawn_with(proposal, lambda _: DrawKey(position.seed, position.turn, position.committed_len))
        if right.draft_token_ids.tolist() == proposal.draft_token_ids.tolist():
            self.num_right_tokens += len(proposal.draft_token_ids)
        else:
            self.num_lies += 1
        return proposal


def num_faults(coordinator: Coordinator, role: str) -> float:
    labels = {"model_name": "table", "role": role, "pool": "default"}
    return coordinator.metrics.registry.get_sample_value("specdec:replica_faults_total", labels) or 0.0


def sampled(index: int, mode: int, **options: Any) -> pb.GenerateRequest:
    return request(session_id=f"s{index}", mode=mode, temperature=1.5, seed=index, max_new_tokens=NUM_TOKENS, **options)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("lie", LIES, ids=lambda lie: lie.__name__)
async def test_a_draft_that_was_not_drawn_from_its_q_is_never_verified(lie: Lie, mode: int) -> None:
    engines: list[Lying] = []

    def between(engine: Any) -> Lying:
        engines.append(Lying(engine, lie))
        return engines[-1]

    async with Rig(drafts=0) as rig:
        rig.services.append(await start_service(DRAFT, salt=0, between=between))
        coordinator = await rig.coordinator()
        num_verified = 0
        for index in range(3):
            output = await coordinator.generate(sampled(index, mode))
            assert len(output.token_ids) == NUM_TOKENS
            num_verified += output.finished.stats.num_draft_tokens
        (liar,) = engines
        assert num_faults(coordinator, DRAFT) == liar.num_lies > 0
        assert num_verified == liar.num_right_tokens


@pytest.mark.parametrize("mode", MODES)
async def test_the_text_beside_a_lying_draft_is_the_text_without_a_draft(mode: int) -> None:
    async with Rig(drafts=0) as rig:
        coordinator = await rig.coordinator()
        alone = [(await coordinator.generate(sampled(index, mode))).token_ids for index in range(4)]
        rig.services.append(await start_service(DRAFT, salt=3, between=lambda engine: Lying(engine, unlikeliest)))
        coordinator = await rig.coordinator()
        for index in range(4):
            await coordinator.stub.DeleteSession(pb.DeleteSessionRequest(session_id=f"s{index}"))
            assert (await coordinator.generate(sampled(index, mode))).token_ids == alone[index]
        assert num_faults(coordinator, DRAFT) >= 4


def unlikeliest(proposal: Proposal, asked: Any) -> Proposal:
    """A token that the support draws once in a million rounds, so that no lie is right by chance."""
    rare = tuple(
        Support(support.token_ids, np.where(support.token_ids == support.token_ids[-1], 1, 65_535).astype(np.uint16))
        for support in proposal.supports
    )
    last = np.array([support.token_ids[-1] for support in rare], np.uint32)
    return replace(proposal, draft_token_ids=last, supports=rare)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("lie", [likeliest, flat_q, another_seed], ids=lambda lie: lie.__name__)
async def test_a_target_that_lies_about_its_own_draft_is_replaced_and_counted(lie: Lie, mode: int) -> None:
    async with Rig(drafts=0, local_drafts=LOCAL) as rig:
        liar = await start_service(TARGET, salt=0, local_drafts=LOCAL, between=lambda engine: Lying(engine, lie))
        rig.services.append(liar)
        coordinator = await rig.coordinator()
        for index in range(6):  # with this many sessions both replicas are chosen
            output = await coordinator.generate(sampled(index, mode, draft_pool="early-exit"))
            assert len(output.token_ids) == NUM_TOKENS
        assert liar.worker.steps
        assert num_faults(coordinator, TARGET) >= 1


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("temperature", [0.3, 1.0, 3.0])
async def test_honest_drafts_are_verified_and_count_no_fault(mode: int, temperature: float) -> None:
    async with Rig(drafts=0, local_drafts=LOCAL) as rig:
        for salt, predraft in ((0, Predraft.OFF), (1, Predraft.ON)):
            rig.services.append(await start_service(DRAFT, salt=salt, pool=f"draft-{salt}", predraft=predraft))
        coordinator = await rig.coordinator()
        for pool in ("draft-0", "draft-1", "early-exit"):
            for turn in range(2):  # two turns of one session have draws of their own
                asked = request(
                    session_id=pool, mode=mode, temperature=temperature, seed=turn, draft_pool=pool, gamma=5
                )
                output = await coordinator.generate(asked)
                assert output.finished.stats.num_draft_tokens > 0, pool
        families = [family for family in coordinator.metrics.registry.collect() if "replica_faults" in family.name]
        assert [sample.value for family in families for sample in family.samples if sample.value] == []
