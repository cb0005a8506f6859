"""Drafts of constrained requests that end, mislead or outdate the matchers of other engines."""

from __future__ import annotations

import json
import re

import pytest
from jsonschema import Draft202012Validator

from coordinator.replicas.replica import DRAFT
from specdec.contract.constraint import Constraint
from specdec.structured.known_constraints import KnownConstraints
from specdec.v1 import coordinator_pb2 as pb
from tests.integration.test_constrained_requests import CONSTRAINTS, MODES, SCHEMA
from tests.support.byte_tokenizer import EOS, VOCABULARY, ids_of
from tests.support.coordinator_rig import PROMPT, Rig, request


async def test_an_illegal_draft_ends_neither_the_engine_nor_the_output() -> None:
    """The draft model knows nothing of the constraint, so it often begins with an illegal token."""
    async with Rig(constrained=True) as rig:
        coordinator = await rig.coordinator()
        for mode in MODES.values():
            output = await coordinator.generate(
                request(constraint=CONSTRAINTS["schema"], mode=mode, max_new_tokens=120)
            )
            assert output.finished.stats.num_draft_tokens > output.finished.stats.num_accepted_tokens
            assert output.finished.reason == pb.FINISH_REASON_STOP
            assert Draft202012Validator(SCHEMA).is_valid(json.loads(output.text))
        assert (await coordinator.generate(request())).token_ids == rig.target.worker.greedy_continuation(PROMPT, 24)
        rig.target.engine.check_integrity()


async def test_drafts_that_are_found_in_the_text_are_accepted_again_after_an_illegal_one() -> None:
    """The prompt repeats what the constraint allows, and what it does not."""
    constraint = Constraint.regex("(ab|c){12}")
    prompt = ids_of("abcabcab1abcabcab{abcabc")
    async with Rig(constrained=True, drafts=0) as rig:
        coordinator = await rig.coordinator(lookup=("ngram",))
        output = await coordinator.generate(request(prompt, constraint=constraint, draft_pool="ngram", gamma=4))
        stats = output.finished.stats
        assert 0 < stats.num_accepted_tokens < stats.num_draft_tokens
        assert re.fullmatch("(ab|c){12}", output.text)


async def test_the_matcher_of_a_draft_follows_the_tokens_of_the_target() -> None:
    """Draft and target are one model, so a draft that follows each emitted token has all its tokens accepted."""
    async with Rig(constrained=True, drafts=0) as rig:
        known = KnownConstraints(str(rig.directory), (EOS,), VOCABULARY, is_authority=False)
        rig.services.append(await rig.start(DRAFT, salt=0, constraints=known))
        coordinator = await rig.coordinator()
        for constraint in (Constraint.regex("[abc12]{90,99}"), Constraint.regex("([ab]+[12]){30}")):
            output = await coordinator.generate(request(constraint=constraint, max_new_tokens=30, gamma=3))
            stats = output.finished.stats
            assert stats.num_accepted_tokens == stats.num_draft_tokens > 10
            assert stats.num_rounds < len(output.token_ids) / 2


@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
async def test_a_pool_that_did_not_draft_is_scored_with_the_masks_that_it_would_draft_with(mode: int) -> None:
    """The better pool has the target's model, so it would draft what the target says in any form of output."""
    constraint = Constraint.regex("(ab|[12c]|é){60,70}")
    async with Rig(constrained=True, drafts=0) as rig:
        for pool, salt in (("a_poor", 1), ("b_good", 0)):
            known = KnownConstraints(str(rig.directory), (EOS,), VOCABULARY, is_authority=False)
            rig.services.append(await rig.start(DRAFT, salt=salt, pool=pool, constraints=known))
        coordinator = await rig.coordinator(routes=True)
        asked = request(constraint=constraint, mode=mode, temperature=1.0, seed=5, max_new_tokens=60, gamma=2)
        output = await coordinator.generate(asked)
        # A draft whose session is gone expects no call of it, and may score at once.
        await coordinator.stub.DeleteSession(pb.DeleteSessionRequest(session_id=output.started.session_id))
        await coordinator.scores_settled()
        pools = {pool.name: pool for pool in (await coordinator.stub.GetInfo(pb.GetInfoRequest())).pools}
    assert pools["b_good"].alpha > 0.97 > pools["a_poor"].alpha
