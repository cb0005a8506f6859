"""The losslessness audit on real services: it passes right systems, finds injured ones, and disturbs no live round."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest

from coordinator.replicas.replica import DRAFT, TARGET
from coordinator.round import runner
from specdec.contract.errors import Internal
from specdec.contract.types import Proposal, ProposeRequest, Support, Verification, VerifyRequest
from specdec.core.random import DrawKey, DrawStream
from specdec.core.rejection import decision_of
from specdec.v1 import coordinator_pb2 as pb
from tests.support.coordinator_rig import Coordinator, Rig, eventually, request
from tests.support.output import Output, read_rest, read_until
from tests.support.table_services import VOCABULARY, start_service

GREEDY = {"temperature": 0.0}
SAMPLED = {"temperature": 1.0, "seed": 7}
CASES = {
    "greedy": ("greedy", pb.SPECULATION_MODE_REJECTION, {**GREEDY, "repetition_penalty": 1.3}),
    "greedy, drafted in the target": ("greedy", pb.SPECULATION_MODE_BLOCK, {**GREEDY, "draft_pool": "early-exit"}),
    "rejection": ("rejection", pb.SPECULATION_MODE_REJECTION, SAMPLED),
    "rejection, cut": ("rejection", pb.SPECULATION_MODE_REJECTION, {**SAMPLED, "top_p": 0.8, "presence_penalty": 0.5}),
    "rejection, drafted in the target": (
        "rejection", pb.SPECULATION_MODE_REJECTION, {**SAMPLED, "draft_pool": "early-exit"},
    ),
    "rejection without drafts": ("rejection", pb.SPECULATION_MODE_REJECTION, {**SAMPLED, "gamma": 0}),
    "block": ("block", pb.SPECULATION_MODE_BLOCK, {**SAMPLED, "top_k": 9}),
    "coupled": ("coupled", pb.SPECULATION_MODE_COUPLED, {**SAMPLED, "min_p": 0.02}),
    "off": ("coupled", pb.SPECULATION_MODE_OFF, SAMPLED),
}  # fmt: skip

Change = Callable[[Verification], Verification]


def is_audit(request: VerifyRequest) -> bool:
    return request.position.session_id.startswith("audit-")


def targets_with(answer: Callable[[VerifyRequest, Any], Any]) -> Callable[[Any], Any]:
    """Return a change of engines whose `verify` is `answer(request, verify)`; `verify` takes what receives steps."""

    class Changed:
        def __init__(self, engine: Any) -> None:
            self._engine = engine

        def __getattr__(self, name: str) -> Any:
            return getattr(self._engine, name)

        async def verify(self, request: VerifyRequest, on_step: Any = None) -> Verification:
            verification: Verification = await answer(request, partial(self._engine.verify, on_step=on_step))
            return verification

    return Changed


def injured_once(change: Change) -> Callable[[Any], Any]:
    """Return a change of engines whose third answer to live rounds is wrong."""
    live_rounds = iter(range(1_000_000))

    def changed(verification: Verification) -> Verification:
        return change(verification) if next(live_rounds) == 2 else verification

    async def answer(request: VerifyRequest, verify: Any) -> Verification:
        if is_audit(request):
            verification: Verification = await verify(request)
            return verification
        on_step = verify.keywords["on_step"]
        return changed(await verify(request, on_step=on_step and (lambda step: on_step(changed(step)))))

    return targets_with(answer)


def another_choice(verification: Verification) -> Verification:
    choices = verification.choice_token_ids.copy()
    choices[0] = (choices[0] + 1) % VOCABULARY
    return replace(verification, choice_token_ids=choices)


def another_distribution(verification: Verification) -> Verification:
    first, *others = verification.rows
    turned = replace(first, weights=np.append(first.weights[-2::-1], first.weights[-1:]))
    return replace(verification, rows=(turned, *others))


def another_bonus(verification: Verification) -> Verification:
    *others, last = verification.rows
    changed = replace(last, tail_token_id=(last.tail_token_id + VOCABULARY // 2) % VOCABULARY)
    return replace(verification, rows=(*others, changed))


def counted(coordinator: Coordinator, result: str, mode: str = "") -> float:
    """Return the audited rounds of a mode, or of all modes, with this result."""
    names = [mode] if mode else ["greedy", "coupled", "rejection", "block"]
    return sum(sample(coordinator, "audit_rounds_total", mode=name, result=result) for name in names)


def dropped(coordinator: Coordinator, reason: str) -> float:
    return sample(coordinator, "audit_rounds_dropped_total", reason=reason)


def sample(coordinator: Coordinator, name: str, **labels: str) -> float:
    value = coordinator.metrics.registry.get_sample_value(f"specdec:{name}", {"model_name": "table", **labels})
    assert value is not None, (name, labels)
    return value


async def ask(coordinator: Coordinator, mode: int, options: dict[str, Any], **others: Any) -> Output:
    """Run one request to its end, and its audits."""
    output = await coordinator.generate(request(mode=mode, **{**options, **others}))
    await coordinator.audits_settled()
    return output


async def with_target(rig: Rig, between: Callable[[Any], Any]) -> None:
    """Put another target in the place of the rig's own."""
    await rig.target.kill()
    rig.services.remove(rig.target)
    rig.services.append(await start_service(TARGET, salt=0, between=between))


@pytest.mark.parametrize("case", CASES)
async def test_a_right_system_has_no_mismatch_and_keeps_nothing_of_the_audits(case: str) -> None:
    mode, asked_mode, options = CASES[case]
    async with Rig(local_drafts={"early-exit": 1}) as rig:
        coordinator = await rig.coordinator(audit_share=1.0)
        output = await ask(coordinator, asked_mode, options)
        num_rounds = output.finished.stats.num_rounds

        assert counted(coordinator, "equal", mode) > 0
        assert counted(coordinator, "mismatch") == counted(coordinator, "tie") == 0
        assert counted(coordinator, "equal") + dropped(coordinator, "queue_full") == num_rounds
        info = await coordinator.pools.targets()[0].link.info()
        assert info.num_sessions == 1  # the live one
        await coordinator.stub.DeleteSession(pb.DeleteSessionRequest(session_id=output.started.session_id))
        assert (await coordinator.pools.targets()[0].link.info()).num_sessions == 0
        rig.target.engine.check_integrity()


@pytest.mark.parametrize("case", ["greedy", "rejection", "block", "coupled"])
async def test_audits_do_not_change_the_output(case: str) -> None:
    _, mode, options = CASES[case]
    async with Rig() as rig:
        without, audited = await rig.coordinator(), await rig.coordinator(audit_share=1.0)
        expected = await without.generate(request(mode=mode, **options))
        output = await ask(audited, mode, options)
        assert output.token_ids == expected.token_ids
        assert counted(audited, "equal") > 0


@pytest.mark.parametrize(
    ("case", "change", "difference"),
    [
        ("greedy", another_choice, "choice"),
        ("coupled", another_choice, "choice"),
        ("rejection", another_distribution, "distribution"),
        ("block", another_distribution, "distribution"),
        ("rejection without drafts", another_bonus, "final_token"),
    ],
)
async def test_one_wrong_decision_of_a_target_is_found_and_logged(
    case: str, change: Change, difference: str, caplog: pytest.LogCaptureFixture
) -> None:
    mode, asked_mode, options = CASES[case]
    async with Rig() as rig:
        await with_target(rig, injured_once(change))
        coordinator = await rig.coordinator(audit_share=1.0)
        with caplog.at_level(logging.ERROR):
            await ask(coordinator, asked_mode, options, session_id="s", request_id="r")

        lines = [record for record in caplog.records if record.message == "audit mismatch"]
        assert counted(coordinator, "mismatch", mode) == counted(coordinator, "mismatch") == len(lines)
        line = lines[0]
        if "without drafts" not in case:  # a run goes on from the token that the target itself drew
            assert len(lines) == 1
        logged = {name: getattr(line, name) for name in ("session_id", "request_id", "difference", "mode")}
        assert logged == {"session_id": "s", "request_id": "r", "difference": difference, "mode": mode}
        assert line.position >= 4  # the prompt's length


async def test_a_choice_between_equal_logits_is_a_tie() -> None:
    def another_of_the_best(verification: Verification) -> Verification:
        assert verification.choice_token_ids[0] == 9  # the lower id of the two
        return replace(verification, choice_token_ids=np.append(np.uint32(10), verification.choice_token_ids[1:]))

    async with Rig() as rig:
        await with_target(rig, injured_once(another_of_the_best))
        logits_after = rig.target.worker.logits_after

        def two_best(*arguments: Any) -> np.ndarray:
            logits = logits_after(*arguments)
            logits[[9, 10]] = logits.max() + 1.0
            return logits

        rig.target.worker.logits_after = two_best  # type: ignore[method-assign]
        coordinator = await rig.coordinator(audit_share=1.0)
        await ask(coordinator, pb.SPECULATION_MODE_REJECTION, GREEDY)
        assert counted(coordinator, "tie", "greedy") == 1
        assert counted(coordinator, "mismatch") == 0


@pytest.mark.parametrize(("top_k", "result"), [(10, "tie"), (20, "mismatch")])
async def test_only_a_token_at_the_edge_of_the_cut_makes_a_tie(top_k: int, result: str) -> None:
    """The request asks for the top nine; one answer is cut elsewhere."""
    live_rounds = iter(range(1_000_000))

    async def answer(request: VerifyRequest, verify: Any) -> Any:
        if not is_audit(request) and next(live_rounds) == 2:
            filters = replace(request.position.filters, top_k=top_k)
            request = replace(request, position=replace(request.position, filters=filters))
        return await verify(request)

    async with Rig() as rig:
        await with_target(rig, targets_with(answer))
        coordinator = await rig.coordinator(audit_share=1.0)
        await ask(coordinator, pb.SPECULATION_MODE_REJECTION, {**SAMPLED, "temperature": 2.0, "top_k": 9})
        assert counted(coordinator, result) == 1
        assert counted(coordinator, "mismatch") + counted(coordinator, "tie") == 1


async def test_the_accepted_tokens_of_a_right_rule_are_the_expected_ones() -> None:
    async with Rig() as rig:
        coordinator = await rig.coordinator(audit_share=1.0)
        for seed in range(6):
            await ask(coordinator, pb.SPECULATION_MODE_REJECTION, SAMPLED, seed=seed)
            await ask(coordinator, pb.SPECULATION_MODE_BLOCK, SAMPLED, seed=seed)
        for mode in ("rejection", "block"):
            accepted = sample(coordinator, "audit_accepted_tokens_total", mode=mode)
            expected = sample(coordinator, "audit_expected_accepted_tokens_total", mode=mode)
            variance = sample(coordinator, "audit_acceptance_variance_total", mode=mode)
            assert variance > 1.0
            assert abs(accepted - expected) < 5.0 * variance**0.5  # a false alarm in 1.7 million
            z = sample(coordinator, "audit_acceptance_z", mode=mode)
            assert z == pytest.approx((accepted - expected) / variance**0.5)


async def test_a_rule_that_accepts_too_much_moves_z_or_is_impossible(monkeypatch: pytest.MonkeyPatch) -> None:
    def accept_all(draft_token_ids: Any, supports: Any, rows: Any, key: Any) -> Any:
        return decision_of(draft_token_ids, supports, rows, len(draft_token_ids), 0)

    monkeypatch.setattr(runner, "verify_rejection", accept_all)
    async with Rig() as rig:
        coordinator = await rig.coordinator(audit_share=1.0)
        for seed in range(6):
            await ask(coordinator, pb.SPECULATION_MODE_REJECTION, {**SAMPLED, "top_k": 3}, seed=seed)
        assert sample(coordinator, "audit_acceptance_z", mode="rejection") > 5.0
        assert counted(coordinator, "mismatch", "rejection") > 0  # tokens outside the top three


@pytest.mark.parametrize("mode", ["rejection", pytest.param("block", marks=pytest.mark.full)])
async def test_a_draft_that_chooses_q_by_the_draws_that_follow_moves_z(mode: str) -> None:
    """It knows the round's key, and reports a point mass on its second choice whenever that will be accepted.

    With 6 seeds z is 11.7 to 13.7, in either mode and for any of four sets of seeds.
    """

    async def propose(asked: ProposeRequest, honest: Any) -> Proposal:
        proposal: Proposal = await honest(replace(asked, gamma=1))
        position, (support,) = asked.position, proposal.supports
        key = DrawKey(position.seed, position.turn, position.committed_len)
        place = int(np.argsort(support.weights)[-2])
        share = int(support.weights[place]) / int(support.weights.sum())  # its model is the target's
        if key.uniform(0, DrawStream.ACCEPT) > 0.9 * share:
            return proposal
        chosen = support.token_ids[place : place + 1]
        return replace(proposal, draft_token_ids=chosen, supports=(Support(chosen, np.ones(1, np.uint16)),))

    class Knowing:
        def __init__(self, engine: Any) -> None:
            self._engine = engine

        def __getattr__(self, name: str) -> Any:
            return getattr(self._engine, name)

        async def propose(self, asked: ProposeRequest) -> Proposal:
            return await propose(asked, self._engine.propose)

    async with Rig(drafts=0) as rig:
        rig.services.append(await start_service(DRAFT, salt=0, between=Knowing))
        coordinator = await rig.coordinator(audit_share=1.0)
        asked_mode = getattr(pb, f"SPECULATION_MODE_{mode.upper()}")
        for seed in range(6):
            await ask(coordinator, asked_mode, {**SAMPLED, "max_new_tokens": 100}, seed=seed)
        assert counted(coordinator, "mismatch") == 0  # each round alone is as p and q say
        assert sample(coordinator, "audit_acceptance_z", mode=mode) > 5.0


async def test_audits_are_dropped_while_the_target_is_busy_and_run_afterwards() -> None:
    may_answer = asyncio.Event()

    async def answer(request: VerifyRequest, verify: Any) -> Any:
        if request.position.session_id == "held" and request.position.round_id > 1:
            await may_answer.wait()
        return await verify(request)

    async with Rig() as rig:
        await with_target(rig, targets_with(answer))
        coordinator = await rig.coordinator(audit_share=1.0, audit_wait_s=0.01)
        held = coordinator.stub.Generate(request(session_id="held"))
        output = await read_until(held, 2)
        link = coordinator.pools.targets()[0].link
        await eventually(lambda: link.oldest_pending is not None)
        await coordinator.audits.settle()
        before = counted(coordinator, "equal")

        other = await coordinator.generate(request(max_new_tokens=96))
        assert len(other.token_ids) == 96
        await coordinator.audits.settle()
        assert counted(coordinator, "equal") == before
        assert dropped(coordinator, "queue_full") + dropped(coordinator, "busy") > 0

        may_answer.set()
        await read_rest(held, output)
        await coordinator.audits_settled()
        assert counted(coordinator, "equal") > before


async def test_an_audit_that_fails_is_counted_and_harms_no_request() -> None:
    async def answer(request: VerifyRequest, verify: Any) -> Any:
        if is_audit(request):
            raise Internal("no audits here")
        return await verify(request)

    async with Rig() as rig:
        await with_target(rig, targets_with(answer))
        coordinator = await rig.coordinator(audit_share=1.0)
        output = await ask(coordinator, pb.SPECULATION_MODE_REJECTION, GREEDY)
        assert len(output.token_ids) == 24
        assert dropped(coordinator, "failed") > 0
        assert counted(coordinator, "equal") == counted(coordinator, "mismatch") == 0
