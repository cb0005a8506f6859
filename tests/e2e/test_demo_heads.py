"""The demo target's heads emit as many tokens per round through running services as they should.

A head that is computed wrongly still gives exact text; only its rounds are short. So these tests check the length of
rounds, which is the same in every run of a greedy output.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from specdec.engine.base import SequenceSlice, StepPlan
from specdec.engine.heads import paged_head
from specdec.engine.heads.paged_head import PagedHead
from specdec.engine.loader import load_worker
from specdec.engine.options import CompileOptions, LoadRequest
from specdec.settings.draft_specs import LocalDraftSpec
from tests.support.model_stack import ModelStack

pytestmark = pytest.mark.full

ROOT = Path(__file__).resolve().parents[2]
DEMO = ROOT / "models" / "demo"
KINDS = ("eagle3", "medusa")
GAMMA, NUM_TOKENS, NUM_PROMPTS = 4, 48, 6


async def tokens_a_round(kind: str, backend: str = "auto") -> tuple[float, list[list[int]]]:
    """Tokens that a round of `kind` emits, and the outputs. Heads of `eager` steps run in PyTorch, all of them."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(DEMO / "target")
    prompts = [
        tokenizer(path.read_text("utf-8")).input_ids for path in sorted((ROOT / "bench" / "prompts").glob("*.txt"))
    ]
    worker = load_worker(
        LoadRequest(
            str(DEMO / "target"),
            device="cpu",
            dtype="float32",
            num_kv_blocks=256,
            num_threads=1,
            self_check=False,
            compiling=CompileOptions(backend),
            local_drafts=tuple(LocalDraftSpec(name, name, path=str(DEMO / name)) for name in KINDS),
        )
    )
    num_rounds, outputs = 0, []
    async with ModelStack(DEMO / "target", worker, {}) as stack:
        for prompt in prompts[:NUM_PROMPTS]:
            output = await stack.generate(
                prompt, max_new_tokens=NUM_TOKENS, temperature=0.0, gamma=GAMMA, ignore_eos=True, draft_pool=kind
            )
            outputs.append(list(output.token_ids))
            num_rounds += output.stats.num_rounds
    return NUM_TOKENS * len(outputs) / num_rounds, outputs


def one_position_off(monkeypatch: pytest.MonkeyPatch) -> None:
    slots: Callable[[Sequence[SequenceSlice], int], object] = paged_head._slots
    monkeypatch.setattr(paged_head, "_slots", lambda slices, shift: slots(slices, -2 if shift == -1 else shift))


def approximated_features_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    note_step = PagedHead.note_step

    def keep(
        self: PagedHead, plan: StepPlan, hidden: Sequence[torch.Tensor], slots: torch.Tensor | None = None
    ) -> None:
        if len(plan.slices[0].token_ids) != GAMMA + 1:  # a prompt's
            note_step(self, plan, hidden, slots)

    monkeypatch.setattr(PagedHead, "note_step", keep)


async def test_a_good_heads_rounds_are_long_and_a_wrongly_run_ones_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    told = {kind: await tokens_a_round(kind) for kind in KINDS}
    for name, injure in (("one off", one_position_off), ("approximated kept", approximated_features_kept)):
        with monkeypatch.context() as patch:
            injure(patch)
            told[name] = await tokens_a_round("eagle3", backend="eager")
    print({name: round(length, 2) for name, (length, _) in told.items()})
    assert len({str(outputs) for _, outputs in told.values()}) == 1, "the output is the target's whatever drafts"
    lengths = {name: length for name, (length, _) in told.items()}
    # What they reach: 2.27 and 1.25, and 1.67 and 1.39 with the injuries.
    assert lengths["eagle3"] > 2.1
    assert lengths["medusa"] > 1.2
    assert lengths["one off"] < 0.92 * lengths["eagle3"]
    assert lengths["approximated kept"] < 0.85 * lengths["eagle3"]
