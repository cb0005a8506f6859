"""Draft heads on a worker's paged cache: a draft step depends on the session's own tokens alone, as its format says.

Whole steps of real workers, run in every way, against `tests.support.head_references`: through chunks, rejections,
shared blocks and other sessions in the batch. What a head computes by itself is shown in
tests/unit/engine/test_draft_heads.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from specdec.engine.base import SequenceSlice, StepPlan, Worker
from specdec.engine.loader import load_worker
from specdec.engine.options import CompileOptions, LoadRequest
from specdec.settings.draft_specs import LocalDraftSpec
from tests.support.head_checkpoints import (
    as_speculators,
    eagle3_config,
    eagle3_tensors,
    medusa_tensors,
    write_eagle3,
    write_medusa,
)
from tests.support.head_references import Eagle3Reference, hidden_states, medusa_logits
from tests.support.interpreted_kernels import WAYS, running
from tests.support.process_template import run_like
from tests.support.tiny_models import build_tiny_model

VOCABULARY_SIZE, WIDTH, STATES = 256, 64, [1, 3, 4]
TOKENS = [(7 * i * i + 3 * i) % 251 + 2 for i in range(40)]
BLOCKS = (5, 2, 9, 11)
GAMMA = 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a target of four layers and heads for it."""
    folder = tmp_path_factory.mktemp("heads")
    build_tiny_model("llama", folder / "target", num_layers=4)
    config = eagle3_config(WIDTH, VOCABULARY_SIZE, 80)
    write_eagle3(folder / "eagle3", as_speculators(config, STATES), eagle3_tensors(config))
    write_medusa(folder / "medusa", medusa_tensors(WIDTH, VOCABULARY_SIZE, num_heads=GAMMA))
    return folder


class Rig:
    """A worker with both heads, and the expected logits of each."""

    def __init__(self, folder: Path, compiling: CompileOptions) -> None:
        specs = tuple(LocalDraftSpec(kind, kind, path=str(folder / kind)) for kind in ("eagle3", "medusa"))
        self.worker: Worker = load_worker(
            LoadRequest(
                str(folder / "target"),
                device="cpu",
                dtype="float32",
                num_kv_blocks=16,
                num_threads=1,
                compiling=compiling,
                local_drafts=specs,
                self_check=False,  # the references take its place
            )
        )
        self._model = AutoModelForCausalLM.from_pretrained(folder / "target", dtype=torch.float32).eval()
        config = eagle3_config(WIDTH, VOCABULARY_SIZE, 80)
        self._eagle3 = Eagle3Reference(config, eagle3_tensors(config), STATES)
        self._medusa = medusa_tensors(WIDTH, VOCABULARY_SIZE, num_heads=GAMMA)

    def expected(self, kind: str, token_ids: Sequence[int]) -> torch.Tensor:
        """Return the logits [GAMMA, V] of greedy drafts after a sequence."""
        token_ids = list(token_ids)
        if kind == "medusa":
            return medusa_logits(self._model, self._medusa, token_ids[:-1])[:, -1]
        features = self._eagle3.features(hidden_states(self._model, token_ids[:-1]))
        return self._eagle3.draft(features, token_ids, GAMMA)

    def full(self, token_ids: Sequence[int], start: int, blocks: tuple[int, ...] = BLOCKS) -> None:
        self.worker.execute(StepPlan((SequenceSlice(tuple(token_ids), start, blocks, 1),)))

    def draft(self, kind: str, token_ids: Sequence[int], blocks: tuple[int, ...] = BLOCKS) -> torch.Tensor:
        """Return the logits [GAMMA, V] of greedy drafts after a sequence whose last token has not run yet."""
        token, rows = token_ids[-1], []
        for index in range(GAMMA):
            piece = SequenceSlice((token,), len(token_ids) - 1 + index, blocks, 1, index)
            rows.append(self.worker.execute(StepPlan((piece,), local_draft=kind))[0])
            token = int(rows[-1].argmax())
        return torch.stack(rows)

    def agrees(self, kind: str, token_ids: Sequence[int], blocks: tuple[int, ...] = BLOCKS) -> bool:
        drafted, expected = self.draft(kind, token_ids, blocks).double(), self.expected(kind, token_ids)
        named = expected.isfinite()
        assert torch.equal(drafted.isfinite(), named)
        return bool(torch.allclose(drafted[named], expected[named], atol=2e-3, rtol=2e-3))


@pytest.fixture(scope="module", params=WAYS)
def rig(request: pytest.FixtureRequest, folder: Path) -> Iterator[Rig]:
    with running(request.param) as compiling:
        yield Rig(folder, compiling)


@pytest.mark.parametrize("kind", ["eagle3", "medusa"])
@pytest.mark.parametrize("chunk", [7, 40])
def test_drafts_after_a_prompt_follow_the_format(rig: Rig, kind: str, chunk: int) -> None:
    for start in range(0, len(TOKENS) - 1, chunk):
        rig.full(TOKENS[start : min(start + chunk, len(TOKENS) - 1)], start)
    assert rig.agrees(kind, TOKENS)


@pytest.mark.parametrize("kind", ["eagle3", "medusa"])
def test_only_verified_features_remain_after_a_rejection(rig: Rig, kind: str) -> None:
    """The verifying step overwrites the draft's own features in every round."""
    tokens = list(TOKENS[:20])
    rig.full(tokens[:-1], 0)
    for accepted, corrected in ((0, 77), (1, 5), (GAMMA, 130), (2, 9)):
        drafted = [int(row.argmax()) for row in rig.draft(kind, tokens)]
        rig.full([tokens[-1], *drafted], len(tokens) - 1)
        tokens += [*drafted[:accepted], corrected]
        assert rig.agrees(kind, tokens)


def test_approximate_features_would_remain_without_the_verifying_step(rig: Rig) -> None:
    """Negative control of the test above: only the head's own features are wrong."""
    tokens = list(TOKENS[:20])
    rig.full(tokens[:-1], 0)
    tokens += [int(row.argmax()) for row in rig.draft("eagle3", tokens)]
    assert not rig.agrees("eagle3", tokens)


@pytest.mark.parametrize("kind", ["eagle3", "medusa"])
def test_a_block_shared_by_two_sessions_is_right_for_both(rig: Rig, kind: str) -> None:
    """A head's state in a block depends on the tokens up to the block's end, not on the next token, which differs."""
    shared, ours, theirs = TOKENS[:16], TOKENS[16:30], TOKENS[20:38]
    rig.full([*shared, *ours[:-1]], 0)
    rig.full(theirs[:-1], 16, (BLOCKS[0], 3, 4))
    assert rig.agrees(kind, [*shared, *theirs], (BLOCKS[0], 3, 4))
    assert rig.agrees(kind, [*shared, *ours])


def test_sessions_in_one_step_draft_as_they_would_alone(rig: Rig) -> None:
    sessions = [(TOKENS[::2], (1, 3)), (TOKENS[1::2], (4, 6)), (TOKENS, BLOCKS)]
    rig.worker.execute(StepPlan(tuple(SequenceSlice(tuple(t[:-1]), 0, blocks, 1) for t, blocks in sessions)))
    plan = StepPlan(tuple(SequenceSlice((t[-1],), len(t) - 1, b, 1) for t, b in sessions), local_draft="eagle3")
    for row, (token_ids, _) in zip(rig.worker.execute(plan).double(), sessions, strict=True):
        expected = rig.expected("eagle3", token_ids)[0]
        named = expected.isfinite()
        torch.testing.assert_close(row[named], expected[named], atol=2e-3, rtol=2e-3)


WRONG: dict[str, tuple[Callable[[Path], str], str]] = {
    "nothing there": (lambda folder: "eagle3:/nothing/there", "is not a directory on this machine"),
    "another width": (
        lambda folder: f"medusa:{write_medusa(folder, medusa_tensors(32, VOCABULARY_SIZE))}",
        "the tensor 0.0.linear.weight has shape [32, 32], and this target and configuration need [64, 64]",
    ),
    "a head of no kind that is known": (
        lambda folder: f"eagle3:{write_eagle3(folder, {'speculators_model_type': 'dflash'}, {})}",
        "is a head of type dflash, not eagle3",
    ),
    "none in the checkpoint": (lambda folder: "mtp", "has no supported MTP layer"),
}


@pytest.mark.parametrize("fault", WRONG)
def test_a_target_whose_head_does_not_fit_ends_with_one_error_line(folder: Path, tmp_path: Path, fault: str) -> None:
    write, line = WRONG[fault]
    flags = ["--model", str(folder / "target"), "--listen", "127.0.0.1:0", "--redis-url", "memory://"]
    ended = run_like("target_service", *flags, "--local-draft", write(tmp_path))
    assert ended.returncode == 1
    last = (ended.stdout + ended.stderr).strip().splitlines()[-1]
    assert last.startswith("error: ")
    assert line in last
    assert "listening" not in ended.stdout
