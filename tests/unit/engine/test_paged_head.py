"""Features that full and draft steps of a worker pass to a head: their sessions and positions, in any batch.

The head of these tests computes nothing: its features are the hidden states of a layer, which Hugging Face's own model
also returns, and its arguments are recorded.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from specdec.engine import local_drafting
from specdec.engine.base import SequenceSlice, StepPlan, Worker
from specdec.engine.heads.interface import DraftHead, HeadDraft, HeadTokens, TargetParts
from specdec.engine.loader import load_worker
from specdec.engine.model.batch import AttentionKind
from specdec.engine.model.kv_cache import LayerShape
from specdec.engine.options import CompileOptions, LoadRequest
from specdec.settings.draft_specs import LocalDraftSpec
from tests.support.tiny_models import build_tiny_model

LAYERS = (0, 2)
WIDTH = 64
SPEC = LocalDraftSpec("notes", "eagle3", path="anywhere")


class NotingHead(DraftHead):
    """A head whose layer attends with token ids as keys and values, so that its output tells what it attended to."""

    feature_layers = LAYERS
    feature_size = 2 * WIDTH
    kv_layers = ((LayerShape(num_kv_heads=1, key_dim=8, value_dim=8), AttentionKind(None, 1, None)),)
    fingerprint = "notes"

    def __init__(self, vocabulary_size: int) -> None:
        self._vocabulary_size = vocabulary_size
        self.extended: list[HeadTokens] = []
        self.drafted: list[tuple[HeadTokens, torch.Tensor, torch.Tensor]] = []
        self.seen: list[torch.Tensor] = []
        """The mean of the token ids that each token attends to."""

    def features(self, hidden: Sequence[torch.Tensor]) -> torch.Tensor:
        return torch.cat(list(hidden), dim=-1)

    def extend(self, tokens: HeadTokens) -> None:
        self.extended.append(tokens)
        self._attend(tokens)

    def draft(self, tokens: HeadTokens, verified: torch.Tensor, draft_index: torch.Tensor) -> HeadDraft:
        self.drafted.append((tokens, verified, draft_index))
        self.seen.append(self._attend(tokens))
        logits = torch.zeros(len(tokens.token_ids), self._vocabulary_size)
        logits[torch.arange(len(logits)), tokens.token_ids] = 1.0
        return HeadDraft(torch.full((len(logits), self.feature_size), 7.0), logits)

    def _attend(self, tokens: HeadTokens) -> torch.Tensor:
        values = tokens.token_ids.float()[:, None].expand(-1, 8)
        rows = torch.cat((torch.zeros_like(values), values), dim=1)
        return tokens.attend(0, torch.zeros(len(values), 1, 8), rows, 1.0)[:, 0, 0]


class Rig:
    """A worker with such a head, and the model's own hidden states."""

    def __init__(self, directory: Path, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
        def load_head(spec: LocalDraftSpec, target: TargetParts) -> NotingHead:
            self.head = NotingHead(target.vocabulary_size)
            return self.head

        monkeypatch.setattr(local_drafting, "load_head", load_head)
        self.worker: Worker = load_worker(
            LoadRequest(
                str(directory),
                device="cpu",
                dtype="float32",
                num_kv_blocks=12,
                compiling=CompileOptions(backend),
                local_drafts=(SPEC,),
            )
        )
        self._model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()

    @torch.inference_mode()
    def features(self, token_ids: Sequence[int]) -> torch.Tensor:
        """[T, F]"""
        states = self._model(torch.tensor([list(token_ids)]), output_hidden_states=True).hidden_states
        return torch.cat([states[layer + 1][0] for layer in LAYERS], dim=-1)

    def run(self, *slices: SequenceSlice, draft: bool = False) -> torch.Tensor:
        return self.worker.execute(StepPlan(slices, local_draft=SPEC.name if draft else ""))


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_model("llama", tmp_path_factory.mktemp("model"), num_layers=4)


@pytest.fixture(params=["native", "eager"])
def rig(request: pytest.FixtureRequest, directory: Path, monkeypatch: pytest.MonkeyPatch) -> Rig:
    return Rig(directory, request.param, monkeypatch)


LONG = tuple(3 + 7 * index % 200 for index in range(40))
SHORT = (9, 8, 7, 50, 60)
LONG_BLOCKS, SHORT_BLOCKS = (5, 2, 9), (4,)


def read(rig: Rig) -> tuple[torch.Tensor, torch.Tensor]:
    """Run two sessions of different lengths in steps of two chunks, so that the batch is not in the plan's order."""
    rig.run(SequenceSlice(SHORT[:2], 0, SHORT_BLOCKS, 0), SequenceSlice(LONG[:18], 0, LONG_BLOCKS, 0))
    rig.run(SequenceSlice(LONG[18:39], 18, LONG_BLOCKS, 1), SequenceSlice(SHORT[2:4], 2, SHORT_BLOCKS, 1))
    return rig.features(SHORT), rig.features(LONG)


def close(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    return bool(torch.allclose(ours, theirs, rtol=1e-3, atol=1e-3))


def test_a_draft_starts_with_the_feature_of_the_position_before_its_token(rig: Rig) -> None:
    of_short, of_long = read(rig)
    rig.run(SequenceSlice((LONG[39],), 39, LONG_BLOCKS, 1), SequenceSlice((SHORT[4],), 4, SHORT_BLOCKS, 1), draft=True)
    tokens, verified, draft_index = rig.head.drafted[0]
    by_token = {int(token_id): row for row, token_id in enumerate(tokens.token_ids)}
    for token_id, feature in ((LONG[39], of_long[38]), (SHORT[4], of_short[3])):
        assert close(tokens.previous[by_token[token_id]], feature)
        assert close(verified[by_token[token_id]], feature)
    assert draft_index.tolist() == [0, 0]
    # Negative control: one position off is another vector.
    assert not close(tokens.previous[by_token[LONG[39]]], of_long[37])
    assert not close(tokens.previous[by_token[LONG[39]]], of_long[39])


def test_logits_have_the_order_of_the_plan(rig: Rig) -> None:
    read(rig)
    slices = (SequenceSlice((SHORT[4],), 4, SHORT_BLOCKS, 1), SequenceSlice((LONG[39],), 39, LONG_BLOCKS, 1))
    for order in (slices, slices[::-1]):
        chosen = rig.run(*order, draft=True).argmax(dim=-1).tolist()
        assert chosen == [part.token_ids[0] for part in order]


def test_later_draft_steps_read_the_heads_own_features_until_a_full_step_verifies_them(rig: Rig) -> None:
    _, of_long = read(rig)
    rig.run(SequenceSlice((LONG[39],), 39, LONG_BLOCKS, 1, 0), draft=True)
    rig.run(SequenceSlice((77,), 40, LONG_BLOCKS, 1, 1), draft=True)
    tokens, verified, draft_index = rig.head.drafted[1]
    assert close(tokens.previous[0], torch.full((2 * WIDTH,), 7.0))
    assert close(verified[0], of_long[38])
    assert draft_index.tolist() == [1]
    rig.run(SequenceSlice((LONG[39], 77), 39, LONG_BLOCKS, 2))
    rig.run(SequenceSlice((78,), 41, LONG_BLOCKS, 1, 0), draft=True)
    tokens, _, _ = rig.head.drafted[2]
    assert close(tokens.previous[0], rig.features([*LONG, 77])[40])


def test_a_full_step_writes_the_heads_kv_of_every_token_with_the_feature_before_it(rig: Rig) -> None:
    of_short, of_long = read(rig)
    seen: dict[tuple[int, int], torch.Tensor] = {}
    for tokens in rig.head.extended:
        for row, (token_id, position) in enumerate(
            zip(tokens.token_ids.tolist(), tokens.positions.tolist(), strict=True)
        ):
            seen[token_id, position] = tokens.previous[row]
    for token_ids, features in ((SHORT[:4], of_short), (LONG[:39], of_long)):
        assert not seen[token_ids[0], 0].any()
        for position in range(1, len(token_ids)):
            assert close(seen[token_ids[position], position], features[position - 1])


def test_the_head_attends_to_the_tokens_of_its_own_session(rig: Rig) -> None:
    read(rig)
    rig.run(SequenceSlice((LONG[39],), 39, LONG_BLOCKS, 1), SequenceSlice((SHORT[4],), 4, SHORT_BLOCKS, 1), draft=True)
    means = {sum(LONG) / len(LONG), sum(SHORT) / len(SHORT)}
    assert sorted(rig.head.seen[0].tolist()) == pytest.approx(sorted(means), rel=1e-4)


def test_block_copies_include_features_and_the_heads_kv(rig: Rig) -> None:
    """Forks and KV from the cold tier copy blocks."""
    _, of_long = read(rig)
    layout = rig.worker.shape.kv_layout
    assert layout is not None
    assert layout.rank == "tp1.0+notes"
    rig.worker.write_blocks([0, 1, 7], rig.worker.read_blocks([*LONG_BLOCKS]))
    rig.run(SequenceSlice((LONG[39],), 39, (0, 1, 7), 1), draft=True)
    tokens, _, _ = rig.head.drafted[0]
    assert close(tokens.previous[0], of_long[38])
    assert rig.head.seen[0].tolist() == pytest.approx([sum(LONG) / len(LONG)], rel=1e-4)
