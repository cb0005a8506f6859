"""Drafts that a target makes by itself for constrained requests: they are drawn from the tokens that are legal."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import pytest

from coordinator.replicas.replica import TARGET
from specdec.structured.mask_threads import MaskThreads
from tests.integration.test_constrained_requests import (
    CASES,
    CONSTRAINTS,
    LOCAL,
    MODES,
    SAMPLINGS,
    check_texts,
    texts_of,
)
from tests.support.byte_tokenizer import TOKENS
from tests.support.coordinator_rig import Output, Rig, request
from tests.support.round_rig import NotedEngine

#: The target's own logits as its draft.
ITSELF = {"early-exit": 0}


async def texts_with(rig: Rig) -> list[Output]:
    """Return the outputs of requests that have one text, and check them."""
    coordinator = await rig.coordinator()
    cases = CASES[: 2 * len(SAMPLINGS)] + CASES[4 * len(SAMPLINGS) : 6 * len(SAMPLINGS)]
    outputs = await texts_of(coordinator, [case.asked(mode=MODES["coupled"], gamma=4) for case in cases])
    check_texts(cases, outputs, rig)
    return outputs


def drafted_and_accepted(outputs: Sequence[Output]) -> tuple[int, int]:
    stats = [output.finished.stats for output in outputs]
    return sum(each.num_draft_tokens for each in stats), sum(each.num_accepted_tokens for each in stats)


async def test_a_target_that_drafts_for_itself_accepts_all_that_it_drafts() -> None:
    async with Rig(constrained=True, drafts=0, local_drafts=ITSELF) as rig:
        drafted, accepted = drafted_and_accepted(await texts_with(rig))
    assert drafted > 100
    assert accepted == drafted


async def test_a_draft_ends_where_it_has_none_of_the_legal_tokens() -> None:
    """A head with a small vocabulary, which lacks the tokens that some positions of the texts need."""
    noted: list[NotedEngine] = []

    def between(engine: Any) -> NotedEngine:
        noted.append(NotedEngine(engine))
        return noted[-1]

    async with Rig(constrained=True, targets=0, drafts=0, local_drafts=ITSELF) as rig:
        rig.services.append(await rig.start(TARGET, between=between))
        rig.target.worker.local_tokens = tuple(TOKENS.index(token) for token in (b"a", b"ab", b"c", b"{", b'"'))
        await texts_with(rig)
        rig.target.engine.check_integrity()
    asked = [request for request in noted[0].asked if request.local_draft is not None]
    drafts = [answer.drafted for answer in noted[0].answered if answer.drafted is not None]
    assert len(drafts) > 20
    assert len(asked) > len(drafts)  # some have no legal token at their first position
    assert {int(token_id) for draft in drafts for token_id in draft.draft_token_ids} <= {
        *rig.target.worker.local_tokens
    }


async def test_late_masks_do_not_change_the_text_of_a_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the modes rejection and block a draft without its mask, or a shorter one, would change the text."""
    asked: list[dict[str, Any]] = [
        {"constraint": CONSTRAINTS["schema"], "mode": MODES[mode], "temperature": 1.0, "seed": seed, "gamma": 3}
        for mode in ("rejection", "block")
        for seed in range(3)
    ]
    compute, texts = MaskThreads._compute, list[list[list[int]]]()

    def compute_late(*arguments: Any) -> Any:
        time.sleep(0.005)
        return compute(*arguments)

    for is_late in (False, True):
        if is_late:
            monkeypatch.setattr(MaskThreads, "_compute", compute_late)
        async with Rig(constrained=True, drafts=0, local_drafts=LOCAL) as rig:
            coordinator = await rig.coordinator()
            outputs = await texts_of(coordinator, [request(**each) for each in asked])
            assert drafted_and_accepted(outputs)[1] > 10
            texts.append([output.token_ids for output in outputs])
    assert texts[0] == texts[1]
