"""EAGLE-3 heads in the native kernels: steps of native workers follow the head's format and do not use PyTorch.

Against `tests.support.head_references`. Workers that compute heads in PyTorch are shown in `test_heads_in_workers`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM

from specdec.engine.base import MultiStepDrafts, SequenceSlice, StepPlan, Worker
from specdec.engine.loader import load_worker
from specdec.engine.options import CompileOptions, LoadRequest
from specdec.settings.draft_specs import LocalDraftSpec
from tests.support.head_checkpoints import as_speculators, eagle3_config, eagle3_tensors, write_eagle3
from tests.support.head_references import Eagle3Reference, hidden_states
from tests.support.tiny_models import build_tiny_model

VOCABULARY_SIZE, WIDTH, STATES = 256, 64, [1, 3, 4]
TOKENS = [(7 * i * i + 3 * i) % 251 + 2 for i in range(40)]
BLOCKS = (5, 2, 9, 11)
GAMMA = 3

#: Settings of the head's layer, size of its vocabulary, what the format says beside.
FORMS: dict[str, tuple[dict[str, Any], int, dict[str, bool]]] = {
    "plain": ({}, 80, {}),
    "all_tokens": ({}, VOCABULARY_SIZE, {}),
    "norm_before_residual": ({}, 80, {"norm_before_residual": True}),
    "norm_output": ({}, 80, {"norm_output": True}),
    "qwen3_layer": ({"model_type": "qwen3"}, 80, {}),
    "wider_than_the_target": ({"intermediate_size": 416, "num_attention_heads": 16}, 80, {}),
}
#: Computed in PyTorch beside native steps.
OTHER_FORMS: dict[str, tuple[dict[str, Any], int, dict[str, bool]]] = {
    "two_layers": ({"num_hidden_layers": 2}, 80, {}),
    "fc_norm": ({}, 80, {"fc_norm": True}),
    "width_of_its_own": ({"hidden_size": 48, "head_dim": 12}, 80, {}),
}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("target")
    build_tiny_model("llama", folder, num_layers=4)
    return folder


class Rig:
    """A native worker with one head, and the head's expected logits."""

    def __init__(self, target: Path, folder: Path, form: str) -> None:
        layer, draft_size, settings = (FORMS | OTHER_FORMS)[form]
        config = eagle3_config(WIDTH, VOCABULARY_SIZE, draft_size, **layer)
        tensors = eagle3_tensors(config, len(STATES), extra_norms="fc_norm" in settings)
        settings = {"norm_before_residual": False, **settings}
        write_eagle3(folder, as_speculators(config, STATES, **settings), tensors)
        self.worker: Worker = load_worker(
            LoadRequest(
                str(target),
                device="cpu",
                dtype="auto",
                num_kv_blocks=16,
                num_threads=1,
                compiling=CompileOptions("native"),
                local_drafts=(LocalDraftSpec("eagle3", "eagle3", path=str(folder)),),
            )
        )
        assert self.worker.multi_step_drafts is MultiStepDrafts.NONE  # the head would miss its steps
        self._model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
        self._reference = Eagle3Reference(config, tensors, STATES, **settings)

    def full(self, token_ids: Sequence[int], start: int) -> None:
        self.worker.execute(StepPlan((SequenceSlice(tuple(token_ids), start, BLOCKS, 1),)))

    def draft(self, token_ids: Sequence[int]) -> torch.Tensor:
        """Return the logits [GAMMA, V] of a greedy draft after a sequence whose last token was not run."""
        token, rows = token_ids[-1], []
        for index in range(GAMMA):
            piece = SequenceSlice((token,), len(token_ids) - 1 + index, BLOCKS, 1, index)
            rows.append(self.worker.execute(StepPlan((piece,), local_draft="eagle3"))[0])
            token = int(rows[-1].argmax())
        return torch.stack(rows)

    def expected(self, token_ids: Sequence[int]) -> torch.Tensor:
        features = self._reference.features(hidden_states(self._model, list(token_ids[:-1])))
        return self._reference.draft(features, list(token_ids), GAMMA)


@pytest.mark.parametrize("form", [*FORMS, *OTHER_FORMS])
def test_a_head_of_any_form_drafts_as_its_format_defines_in_every_round(
    target: Path, tmp_path: Path, form: str
) -> None:
    rig, tokens = Rig(target, tmp_path, form), list(TOKENS[:30])
    rig.full(tokens[:7], 0)
    rig.full(tokens[7:-1], 7)
    for accepted, corrected in ((GAMMA, 77), (1, 5), (0, 130)):
        drafted, expected = rig.draft(tokens), rig.expected(tokens)
        named = expected.isfinite()
        assert torch.equal(drafted.isfinite(), named)
        torch.testing.assert_close(drafted.double()[named], expected[named], atol=2e-3, rtol=2e-3)
        choices = [int(row.argmax()) for row in drafted]
        rig.full([tokens[-1], *choices], len(tokens) - 1)
        tokens += [*choices[:accepted], corrected]


class Operations(TorchDispatchMode):
    """Collects the PyTorch operations that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **kwargs or {})


@pytest.mark.parametrize(("form", "is_native"), [("all_tokens", True), ("two_layers", False)])
def test_steps_with_a_head_run_in_the_kernels_alone(target: Path, tmp_path: Path, form: str, is_native: bool) -> None:
    """A target that only verifies pays for its head too, in every step: dozens of PyTorch's operations would show.
    A head that the kernels do not compute is the control."""
    rig, tokens = Rig(target, tmp_path, form), TOKENS[:20]
    rig.full(tokens[:-1], 0)
    for plan in (
        StepPlan((SequenceSlice((tokens[-1],), 19, BLOCKS, 1),)),
        StepPlan((SequenceSlice((tokens[-1],), 19, BLOCKS, 1, 0),), local_draft="eagle3"),
    ):
        with Operations() as operations:
            rig.worker.execute(plan)
        computing = set(operations.names) - {"empty", "slice", "clone", "detach", "view", "alias"}
        assert (not computing) == is_native, sorted(computing)


def test_threads_change_no_bit_of_a_draft(target: Path, tmp_path: Path) -> None:
    rig, tokens, drafts = Rig(target, tmp_path, "plain"), TOKENS[:30], []
    before = torch.get_num_threads()
    try:
        for num_threads in (1, 2):
            torch.set_num_threads(num_threads)
            rig.full(tokens[:-1], 0)
            drafts.append(rig.draft(tokens))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(*drafts)
