"""Descriptions of loaded checkpoints, and checkpoints that are refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    BloomForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

from specdec.contract.errors import InvalidRequest, Unsupported
from specdec.contract.types import BLOCK_TOKENS
from specdec.engine.base import SequenceSlice, StepPlan
from specdec.engine.loader import load_worker
from specdec.engine.options import LoadRequest
from tests.support.tiny_models import build_tiny_model


def load(directory: Path, **options: object):
    return load_worker(
        LoadRequest(str(directory), **({"device": "cpu", "dtype": "float32", "num_kv_blocks": 8} | options))
    )


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_model("llama", tmp_path_factory.mktemp("llama"), vocabulary_size=50, context=256, padded_rows=14)


@pytest.fixture
def editable(checkpoint: Path, tmp_path: Path) -> Path:
    for file in checkpoint.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    return tmp_path


def edit_json(path: Path, **changes: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_a_worker_describes_its_model(checkpoint: Path) -> None:
    shape = load(checkpoint, num_kv_blocks=None).shape
    assert shape.vocabulary_size == 50
    assert shape.max_context_tokens == 256
    assert shape.eos_token_ids == (1,)
    assert (shape.dtype, shape.device) == ("float32", "cpu")
    assert shape.num_kv_blocks == 64 * 256 // BLOCK_TOKENS


def test_a_worker_with_int8_weights_reports_that_dtype(checkpoint: Path) -> None:
    assert load(checkpoint, dtype="int8").shape.dtype == "int8"


def test_several_eos_ids_come_from_the_generation_config(editable: Path) -> None:
    edit_json(editable / "generation_config.json", eos_token_id=[1, 9])
    assert load(editable).shape.eos_token_ids == (1, 9)


def test_the_eos_id_comes_from_the_model_without_a_generation_config(editable: Path) -> None:
    (editable / "generation_config.json").unlink()
    edit_json(editable / "config.json", eos_token_id=7)
    assert load(editable).shape.eos_token_ids == (7,)


@pytest.mark.parametrize(
    "values",
    [
        {"eos_token_id": [9, 151_645]}, {"eos_token_id": [9, None], "pad_token_id": [1]}, {"max_new_tokens": "x"},
        {"cache_implementation": "none", "bos_token_id": "x"}, {"temperature": "hot", "top_k": None}, ["no", "object"],
    ],
    ids=str,
)  # fmt: skip
def test_a_model_loads_whatever_its_generation_config_says_of_other_things(values: object, editable: Path) -> None:
    (editable / "generation_config.json").write_text(json.dumps(values))
    named = isinstance(values, dict) and "eos_token_id" in values
    assert load(editable).shape.eos_token_ids == ((9,) if named else (1,))


@pytest.mark.parametrize("padding", [64, 151_643, -1])
def test_a_padding_token_that_the_vocabulary_lacks_changes_nothing(
    padding: int, checkpoint: Path, editable: Path
) -> None:
    plan = StepPlan((SequenceSlice((3, 4, 5), 0, (1,), 3),))
    edit_json(editable / "config.json", pad_token_id=padding)
    torch.testing.assert_close(load(editable).execute(plan), load(checkpoint).execute(plan), rtol=0, atol=0)


def test_the_context_is_limited_by_the_pool(checkpoint: Path) -> None:
    assert load(checkpoint, num_kv_blocks=3).shape.max_context_tokens == 3 * BLOCK_TOKENS


def test_the_pool_can_be_sized_in_bytes(checkpoint: Path) -> None:
    bytes_per_token = 3 * 2 * 2 * 16 * 4  # layers, keys and values, KV heads, head width, float32
    worker = load(checkpoint, num_kv_blocks=None, kv_cache_bytes=5 * BLOCK_TOKENS * bytes_per_token + 1)
    assert worker.shape.num_kv_blocks == 5
    with pytest.raises(InvalidRequest, match="no room for one block"):
        load(checkpoint, num_kv_blocks=None, kv_cache_bytes=10)


_LONG = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 8,
         "long_factor": [4.0 + index for index in range(8)], "original_max_position_embeddings": 100}  # fmt: skip
_DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
_PLAIN = {"rope_type": "default", "rope_theta": 1e4}
#: An architecture, changes of its configuration, and the longest sequence whose length changes no earlier token.
_STEADY = {
    "longrope": ("llama", {"rope_parameters": _LONG}, 100),
    "longrope beside the parameters": ("phi3", {"original_max_position_embeddings": 90, "rope_parameters": _LONG}, 90),
    "longrope by its old name": ("llama", {"rope_parameters": None, "rope_scaling": _LONG}, 100),
    "longrope in layers of one type": (
        "gemma3",
        {"rope_parameters": {"full_attention": _LONG, "sliding_attention": _PLAIN}},
        100,
    ),
    "longrope in layers of both types": (
        "gemma3",
        {
            "rope_parameters": {
                "full_attention": _LONG,
                "sliding_attention": _LONG | {"original_max_position_embeddings": 70},
            }
        },
        70,
    ),
    "dynamic": ("llama", {"rope_parameters": _DYNAMIC}, 256),
    "dynamic in layers of one type": (
        "gemma3",
        {"rope_parameters": {"full_attention": _DYNAMIC, "sliding_attention": _PLAIN}},
        256,
    ),
    "yarn": (
        "llama",
        {"rope_parameters": {**_PLAIN, "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}},
        256,
    ),
}


@pytest.mark.parametrize("case", _STEADY)
def test_sessions_end_before_their_length_changes_rotary_frequencies(case: str, tmp_path: Path) -> None:
    """A sequence of the longest length has the logits of transformers, and changes those of no other sequence."""
    architecture, changes, longest = _STEADY[case]
    sizes = {"head_dim": 16} if architecture == "gemma3" else {}
    build_tiny_model(architecture, tmp_path, vocabulary_size=50, context=256, logit_spread=1.0, gain=1.0,
                     config_overrides=sizes)  # fmt: skip
    edit_json(tmp_path / "config.json", **changes)
    worker = load(tmp_path, num_kv_blocks=32, max_context_tokens=None)
    assert worker.shape.max_context_tokens == longest
    tokens, short = [3 + index % 40 for index in range(longest)], [7, 5, 9, 11]
    both = (SequenceSlice(tuple(tokens), 0, tuple(range(16)), 1), SequenceSlice(tuple(short), 0, (20,), 1))
    model = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager").eval()
    with torch.no_grad():
        expected = torch.stack([model(torch.tensor([ids])).logits[0, -1, :50] for ids in (tokens, short)])
    torch.testing.assert_close(worker.execute(StepPlan(both)), expected, rtol=0, atol=1e-4)


def test_a_requested_limit_below_the_models_own_is_kept(editable: Path) -> None:
    edit_json(editable / "config.json", rope_parameters=_LONG)
    assert load(editable, num_kv_blocks=32, max_context_tokens=40).shape.max_context_tokens == 40
    assert load(editable, num_kv_blocks=32, max_context_tokens=400).shape.max_context_tokens == 100


def test_callers_may_write_to_logits(checkpoint: Path) -> None:
    logits = load(checkpoint).execute(StepPlan((SequenceSlice((3, 4), 0, (2,), 2),)))
    logits[0, 0] = 1.0
    assert logits.shape == (2, 50)


def test_two_workers_of_one_checkpoint_share_nothing(checkpoint: Path) -> None:
    plan = StepPlan((SequenceSlice((3, 4, 5), 0, (1,), 1),))
    left, right = load(checkpoint), load(checkpoint)
    before = left.execute(plan)
    right.execute(StepPlan((SequenceSlice((9, 9, 9), 0, (1,), 1),)))
    torch.testing.assert_close(left.execute(StepPlan((SequenceSlice((5,), 2, (1,), 1),))), before)


def test_an_encoder_decoder_is_unsupported(editable: Path) -> None:
    sizes = {"vocab_size": 50, "d_model": 16, "d_kv": 4, "d_ff": 16, "num_layers": 1, "num_heads": 4}
    T5ForConditionalGeneration(T5Config(**sizes)).save_pretrained(editable)
    with pytest.raises(Unsupported, match="type t5, which is not a decoder-only"):
        load(editable)


def test_a_state_space_model_is_unsupported(editable: Path) -> None:
    MambaForCausalLM(MambaConfig(vocab_size=50, hidden_size=16, num_hidden_layers=1)).save_pretrained(editable)
    with pytest.raises(Unsupported, match="computes mamba_inner_fn in layers of class MambaMixer"):
        load(editable)


def test_layers_of_an_unknown_type_are_unsupported(editable: Path) -> None:
    edit_json(editable / "config.json", layer_types=["full_attention", "compressed_sparse_attention", "full_attention"])
    with pytest.raises(Unsupported, match="has layers of type compressed_sparse_attention"):
        load(editable)


def test_attention_that_cannot_be_replaced_is_unsupported(editable: Path) -> None:
    sizes = {"vocab_size": 50, "hidden_size": 16, "n_layer": 1, "n_head": 2}
    BloomForCausalLM(BloomConfig(**sizes)).save_pretrained(editable)
    with pytest.raises(Unsupported, match="type bloom, whose attention cannot be replaced"):
        load(editable)


def test_a_checkpoint_that_lacks_weights_is_refused(editable: Path, capfd: pytest.CaptureFixture[str]) -> None:
    edit_json(editable / "config.json", num_hidden_layers=4)
    with pytest.raises(InvalidRequest, match=r"lacks the weight model\.layers\.3"):
        load(editable)
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda directory: (directory / "model.safetensors").write_bytes(b"no"), "damaged model.safetensors: it ends"),
        (lambda directory: (directory / "model.safetensors").unlink(), "cannot be loaded"),
        (lambda directory: (directory / "config.json").unlink(), "has no config.json"),
        (lambda directory: (directory / "config.json").write_text("{"), "unreadable config.json"),
        (lambda directory: edit_json(directory / "config.json", model_type="nonsense"), "unreadable config.json"),
    ],
)
def test_a_damaged_checkpoint_is_refused_in_one_line(
    editable: Path, damage, message: str, capfd: pytest.CaptureFixture[str]
) -> None:
    damage(editable)
    with pytest.raises(InvalidRequest, match=message) as raised:
        load(editable)
    assert "\n" not in raised.value.message
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"dtype": "float8"}, InvalidRequest, "dtype 'float8'"),
        ({"device": "toaster"}, InvalidRequest, "device 'toaster' is unknown"),
        ({"device": "mps"}, InvalidRequest, "neither cpu nor cuda"),
        ({"device": "cuda:99"}, InvalidRequest, "not present"),
    ],
)
def test_an_impossible_device_or_dtype_is_refused(checkpoint: Path, options: dict, error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        load(checkpoint, **options)
