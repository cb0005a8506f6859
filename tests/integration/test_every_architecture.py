"""Every decoder-only architecture of the installed transformers is computed right or refused in one line.

Right: logits of the paged engine are those of the model's own eager forward, and greedy text is that of `generate()`
(`tests.support.architecture_rig`). Nothing else passes, and `docs/reference/models.md` says which is which. A slice
runs in `make test`, all of them in `make test-full`.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from specdec.checkpoints.model_size import model_size
from specdec.contract.errors import Unsupported
from specdec.engine.loader import load_worker
from specdec.engine.model import batch
from specdec.engine.options import LoadRequest
from tests.support.architecture_rig import TOLERANCE, compare_logits, judge
from tests.support.tiny_architectures import MODEL_TYPES, MULTIMODAL_TYPES, CannotBuild, build_tiny_architecture
from tools.model_list import documented_rows, is_documented_version, row

#: Computed wrongly or not at all before windows came from masks and attention calls had caches of their own, and one of
#: each other reason to refuse.
_ONCE_WRONG = (
    *("afmoe", "camembert", "data2vec-text", "diffllama", "gpt_oss", "hrm_text", "hunyuan_v1_moe", "jetmoe"),
    *("longcat_flash", "moshi", "nemotron", "phimoe", "qwen2_moe", "roberta", "xlm-roberta", "xmod"),
)
_OTHERS = (
    "bloom",
    "doge",
    "gemma3n_text",
    "gemma4",
    "gemma4_unified",
    "kimi_k25",
    "llama4",
    "mamba",
    "minicpm3",
    "minicpm_ocr",
    "mistral3",
    "mllama",
    "qwen3_next",
    "qwen3_vl",
    "mixtral",
)
SLICE = (*_ONCE_WRONG, *_OTHERS)
#: Types whose checkpoints do not tell their halves by names.
_NAMED_ALIKE = ("cosmos3_omni", "ernie4_5_vl_moe", "phi4_multimodal")
_DTYPES = ("bfloat16", "float16", "int8")
#: Architectures of the quick selection, tested in every dtype.
_IN_EVERY_DTYPE = ("diffllama", "gpt_oss", "jetmoe", "mixtral", "qwen2_moe")


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def cases(in_test: tuple[str, ...]) -> list:
    return [pytest.param(name, marks=() if name in in_test else pytest.mark.full) for name in MODEL_TYPES]


@pytest.mark.parametrize("model_type", cases(SLICE))
def test_an_architecture_is_computed_right_or_refused_in_one_line(model_type: str, tmp_path: Path) -> None:
    problem = ""
    try:
        verdict = judge(model_type, tmp_path)
    except CannotBuild as error:
        problem = str(error)
    if problem:
        assert model_type not in SLICE, problem
        said = row(model_type, problem, is_built=False)
    else:
        assert "\n" not in verdict.refusal
        assert not verdict.refusal or " of type " in verdict.refusal
        said = row(model_type, verdict.refusal, is_cache_right=verdict.is_cache_right)
    if is_documented_version():
        assert said in documented_rows()
    if problem:
        pytest.skip(f"transformers makes no tiny {model_type}: {problem}")


@pytest.mark.parametrize("model_type", [name for name in cases(SLICE) if name.values[0] in MULTIMODAL_TYPES])
def test_the_names_of_weights_tell_which_half_they_belong_to(model_type: str, tmp_path: Path) -> None:
    if model_type in _NAMED_ALIKE or row(model_type) not in documented_rows():
        pytest.skip("it is not served, or parts of its decoder look at images")
    build_tiny_architecture(model_type, tmp_path / "text").save_pretrained(tmp_path / "whole")
    with safe_open(tmp_path / "text" / "model.safetensors", "pt") as file:
        num_weights = sum(file.get_tensor(name).numel() for name in file.keys())  # noqa: SIM118
    assert model_size(str(tmp_path / "whole")).num_parameters == num_weights


def test_the_quick_selection_names_types_of_transformers() -> None:
    assert set(SLICE) <= set(MODEL_TYPES)
    assert len(SLICE) == 31


@pytest.mark.parametrize("dtype", _DTYPES)
@pytest.mark.parametrize("model_type", cases(_IN_EVERY_DTYPE))
def test_models_accepted_in_float32_are_accepted_in_other_dtypes(model_type: str, dtype: str, tmp_path: Path) -> None:
    for seed in range(2):
        try:
            build_tiny_architecture(model_type, tmp_path, seed=seed)
            load_worker(LoadRequest(str(tmp_path), device="cpu", dtype="float32", num_kv_blocks=16))
        except (CannotBuild, Unsupported):
            pytest.skip("not computed in float32 either")
        load_worker(LoadRequest(str(tmp_path), device="cpu", dtype=dtype, num_kv_blocks=16))


def ignore_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    build_mask = batch._build_mask

    def without_window(positions, first, length, kind, dtype, device):
        everything = batch.AttentionKind(None, kind.queries_per_kv_head, kind.softcap)
        return build_mask(positions, first, length, everything, dtype, device)

    monkeypatch.setattr(batch, "_build_mask", without_window)


def misplace_a_position(monkeypatch: pytest.MonkeyPatch) -> None:
    """Store keys and values of positions 21 and 23 in the slots of positions 20 and 22."""
    slots = batch._slots

    def misplaced(piece, count):
        right = slots(piece, count).copy()
        for position in {21, 23} & set(range(piece.start, piece.start + count)):
            right[position - piece.start] -= 1
        return right

    monkeypatch.setattr(batch, "_slots", misplaced)


@pytest.mark.parametrize("breaking", [ignore_windows, misplace_a_position])
@pytest.mark.parametrize("model_type", ["gemma2", "qwen2_moe"])
def test_a_broken_attention_plan_is_detected_and_refused_at_load(
    model_type: str, breaking, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control of this file and of the self-check of services."""
    model = build_tiny_architecture(model_type, tmp_path)
    worker = load_worker(LoadRequest(str(tmp_path), device="cpu", dtype="float32", num_kv_blocks=16))
    assert compare_logits(worker, model) < TOLERANCE
    breaking(monkeypatch)
    assert compare_logits(worker, model) > 10 * TOLERANCE
    for dtype in ("float32", *_DTYPES):
        with pytest.raises(Unsupported, match=f"type {model_type} is computed differently here"):
            load_worker(LoadRequest(str(tmp_path), device="cpu", dtype=dtype, num_kv_blocks=16))
    load_worker(LoadRequest(str(tmp_path), device="cpu", dtype="float32", num_kv_blocks=16, self_check=False))
