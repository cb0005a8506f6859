"""A seed gives the same text, whatever else is served and however it is drafted (float32)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from draft_service.proposer import Proposer
from specdec.contract.types import Proposal, ProposeRequest
from specdec.engine.loader import load_worker
from specdec.engine.options import CompileOptions, LoadRequest
from tests.support.model_stack import ModelStack
from tests.support.tiny_models import DRAFT_PERTURBATION, build_tiny_pair

NUM_SESSIONS = 16
GAMMA = 4

#: The pool whose draft service drafts the next round before it is asked for.
AHEAD = "ahead"

#: Mode and whether it is greedy.
DRAFTED = {
    "greedy": ("rejection", True),
    "coupled": ("coupled", False),
    "rejection": ("rejection", False),
    "block": ("block", False),
}

#: Sixteen requests cycle through these: no two sessions at once ask for quite the same.
FILTERS: tuple[dict[str, Any], ...] = (
    {"temperature": 1.0},
    {"temperature": 0.7, "top_k": 20},
    {"temperature": 1.0, "top_p": 0.8, "repetition_penalty": 1.2},
    {"temperature": 1.3, "min_p": 0.02, "frequency_penalty": 0.3, "logit_bias": {7: 2.0}},
)


@asynccontextmanager
async def stack_of(
    pair: tuple[Path, Path],
    *,
    dtype: str = "float32",
    backend: str = "auto",
    max_support: int | None = None,
    patience: int = 0,
    proposer_type: type[Proposer] = Proposer,
    **drafts: Path,
) -> AsyncIterator[ModelStack]:
    """The pair, its draft a second time as pool "ahead", and further drafts by name."""

    def worker(path: Path) -> Any:
        compiling = CompileOptions(backend)
        return load_worker(LoadRequest(str(path), device="cpu", dtype=dtype, num_kv_blocks=1024, compiling=compiling))

    workers = {name: worker(path) for name, path in {"default": pair[1], AHEAD: pair[1], **drafts}.items()}
    async with ModelStack(
        pair[0], worker(pair[0]), workers, max_support=max_support, predrafting=(AHEAD,), patience=patience,
        proposer_type=proposer_type,
    ) as stack:  # fmt: skip
        yield stack


def request_of(index: int, mode: str, *, greedy: bool) -> dict[str, Any]:
    prompt = np.random.default_rng(index).integers(2, 256, 4 + 9 * index).tolist()
    sampling = {"temperature": 0.0} if greedy else FILTERS[index % len(FILTERS)]
    return {
        "prompt_token_ids": prompt, "max_new_tokens": 16 + 2 * index, "seed": 1000 + index, "gamma": 1 + index % 8,
        "mode": mode, "ignore_eos": True, **sampling,
    }  # fmt: skip


async def check_company(pair: tuple[Path, Path], mode: str, *, greedy: bool, **options: Any) -> None:
    """Each session alone, drafted when it is asked for; then all at once, half of them drafted ahead.

    Where the text may not depend on gamma, the coordinator chooses it for those drafted ahead.
    """
    requests = [
        request_of(index, mode, greedy=greedy) | {"max_new_tokens": 12 + index} for index in range(NUM_SESSIONS)
    ]
    ahead = {"draft_pool": AHEAD, **({"gamma": None} if greedy or mode == "coupled" else {})}
    # Of each filter and of each gamma, one of two.
    changes = [ahead if mode != "off" and (index // 4 + index // 8) % 2 else {} for index in range(NUM_SESSIONS)]
    async with stack_of(pair, **options) as stack:
        alone = [(await stack.generate(**request)).token_ids for request in requests]
        at_once = await asyncio.gather(
            *(stack.generate(**(request | changed)) for request, changed in zip(requests, changes, strict=True))
        )
        assert [completion.token_ids for completion in at_once] == alone
        num_hits, num_misses = (stack.num_predrafted(AHEAD, *names) for names in (("hit", "extended"), ("miss",)))
    print(f"{mode}: {num_hits:.0f} branch hits, {num_misses:.0f} misses")
    assert len({ids[:12] for ids in alone}) == NUM_SESSIONS, "sessions that are all alike would prove nothing"


@pytest.mark.parametrize(("mode", "greedy"), [*DRAFTED.values(), ("off", False)], ids=[*DRAFTED, "off"])
async def test_sixteen_sessions_at_once_emit_what_each_emits_alone(
    llama_pair: tuple[Path, Path], mode: str, greedy: bool
) -> None:
    await check_company(llama_pair, mode, greedy=greedy)


@pytest.mark.full
@pytest.mark.parametrize(("mode", "greedy"), [*DRAFTED.values(), ("off", False)], ids=[*DRAFTED, "off"])
@pytest.mark.parametrize(
    "options", [{"backend": "eager"}, {"dtype": "int8"}, {"max_support": 16}], ids=["eager", "int8", "cut"]
)
async def test_sixteen_sessions_at_once_emit_what_each_emits_alone_however_steps_are_computed(
    llama_pair: tuple[Path, Path], mode: str, greedy: bool, options: dict[str, Any]
) -> None:
    await check_company(llama_pair, mode, greedy=greedy, **options)


async def check_hits_and_misses(pair: tuple[Path, Path], mode: str, *, greedy: bool, **options: Any) -> None:
    requests = [request_of(index, mode, greedy=greedy) | {"gamma": GAMMA} for index in range(2 * len(FILTERS))]
    async with stack_of(pair, patience=GAMMA + 1, **options) as stack:
        for request in requests:
            late, ahead = [await stack.generate(**request, draft_pool=pool) for pool in ("default", AHEAD)]
            assert ahead.token_ids == late.token_ids
            assert ahead.stats.num_rounds == late.stats.num_rounds
            assert ahead.stats.accepted_per_position == late.stats.accepted_per_position
        num_hits, num_misses = (stack.num_predrafted(AHEAD, name) for name in ("hit", "miss"))
        print(f"{mode}: {num_hits:.0f} branch hits, {num_misses:.0f} misses")
    assert num_hits > len(requests)
    assert num_misses > 0


@pytest.mark.parametrize(("mode", "greedy"), DRAFTED.values(), ids=DRAFTED)
async def test_a_branch_hit_and_a_miss_give_the_same_tokens(
    llama_pair: tuple[Path, Path], mode: str, greedy: bool
) -> None:
    await check_hits_and_misses(llama_pair, mode, greedy=greedy)


class ShortensHits(Proposer):
    """Answers branch hits without their last draft token."""

    async def propose(self, request: ProposeRequest) -> Proposal:
        proposal = await super().propose(request)
        if proposal.num_cached_tokens < request.position.committed_len or len(proposal.draft_token_ids) < 2:
            return proposal
        shorter = {name: getattr(proposal, name)[:-1] for name in ("draft_token_ids", "supports", "lost_mass")}
        return replace(proposal, **shorter)


async def test_hits_that_draft_otherwise_would_be_noticed(llama_pair: tuple[Path, Path]) -> None:
    """Negative control of the test above."""
    with pytest.raises(AssertionError):
        await check_hits_and_misses(llama_pair, "rejection", greedy=False, proposer_type=ShortensHits)


@pytest.mark.full
@pytest.mark.parametrize(("mode", "greedy"), DRAFTED.values(), ids=DRAFTED)
@pytest.mark.parametrize(
    ("architecture", "options"),
    [
        ("llama", {"max_support": 16}),
        ("llama", {"backend": "eager"}),
        ("llama", {"dtype": "int8"}),
        ("mistral", {}),
        ("gpt2", {}),
        ("gemma2", {}),
    ],
    ids=["llama cut", "llama eager", "llama int8", "mistral", "gpt2", "gemma2"],
)
async def test_a_branch_hit_and_a_miss_give_the_same_tokens_whatever_the_draft_is(
    tmp_path: Path, mode: str, greedy: bool, architecture: str, options: dict[str, Any]
) -> None:
    # Twice as far from the target as drafts are elsewhere: greedy text of the usual ones may never miss.
    pair = build_tiny_pair(architecture, tmp_path, perturb=2 * DRAFT_PERTURBATION[architecture])
    await check_hits_and_misses(pair, mode, greedy=greedy, **options)


async def check_coupled(llama_pair: tuple[Path, Path], other_draft: Path, sampling: dict[str, Any]) -> None:
    """One text for every gamma and draft, and for none."""
    request: dict[str, Any] = {
        "prompt_token_ids": [9, 8, 7, 6], "max_new_tokens": 40, "seed": 11, "ignore_eos": True, **sampling
    }  # fmt: skip
    async with stack_of(llama_pair, other=other_draft) as stack:
        off = await stack.generate(**request, mode="off")
        coupled = await asyncio.gather(
            *(
                stack.generate(**request, mode="coupled", gamma=gamma, draft_pool=pool)
                for pool in ("default", "other", AHEAD)
                for gamma in (1, 2, 4, 8, None)
            )
        )
        other_seed = await stack.generate(**{**request, "seed": 12}, mode="off")
    assert [completion.token_ids for completion in coupled] == [off.token_ids] * len(coupled)
    assert [completion.text for completion in coupled] == [off.text] * len(coupled)
    assert sum(completion.stats.num_accepted_tokens for completion in coupled) > 0
    assert other_seed.token_ids != off.token_ids


@pytest.mark.parametrize("sampling", [FILTERS[0], FILTERS[2]], ids=["plain", "top_p"])
async def test_coupled_output_is_one_text_for_every_gamma_and_draft_and_for_none(
    llama_pair: tuple[Path, Path], other_draft: Path, sampling: dict[str, Any]
) -> None:
    await check_coupled(llama_pair, other_draft, sampling)


@pytest.mark.full
@pytest.mark.parametrize("sampling", [FILTERS[1], FILTERS[3]], ids=["top_k", "min_p"])
async def test_coupled_output_is_one_text_with_filters_that_cut_by_number_and_by_ratio(
    llama_pair: tuple[Path, Path], other_draft: Path, sampling: dict[str, Any]
) -> None:
    await check_coupled(llama_pair, other_draft, sampling)


async def test_another_gamma_shows_another_draw_of_the_same_law(llama_pair: tuple[Path, Path]) -> None:
    """Negative control of the tests above: rejection mode is not one text over gamma."""
    request = {"prompt_token_ids": [9, 8, 7, 6], "max_new_tokens": 64, "seed": 11, "ignore_eos": True}
    async with stack_of(llama_pair) as stack:
        texts = {(await stack.generate(**request, mode="rejection", gamma=gamma)).token_ids for gamma in (1, 2, 4, 8)}
    assert len(texts) > 1
