"""Published quantised checkpoints are served as the numbers that they mean."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel

from specdec.checkpoints.model_size import model_size
from specdec.checkpoints.preflight import require_servable
from specdec.checkpoints.quantised.statement import read_quantisation
from specdec.contract.errors import InvalidRequest, Unsupported
from specdec.engine.base import SequenceSlice, StepPlan
from specdec.engine.loader import load_worker
from specdec.engine.model.dequantise import QuantisedReader
from specdec.engine.options import LoadRequest
from specdec.learning.trained_model import load_model
from tests.support.quantised_checkpoints import BLOCK, FORMS, fp8_blocks, words, write_meant, write_quantised
from tests.support.tiny_architectures import build_tiny_architecture
from tests.support.tiny_models import build_tiny_model
from tools.model_list import PAGE
from tools.quantisation_table import section

TOKENS = tuple(range(2, 22))
#: Most of the logits' spread by which sums in another order differ.
NOISE = 1e-4


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_model("llama", tmp_path_factory.mktemp("plain"), vocabulary_size=64, num_layers=1)


def weights_of(directory: Path) -> dict[str, torch.Tensor]:
    """Return all tensors that transformers is offered."""
    settings = json.loads((directory / "config.json").read_text())["quantization_config"]
    quantisation = read_quantisation(str(directory), settings)
    assert quantisation is not None
    with QuantisedReader(str(directory), directory, quantisation) as reader:
        return {name: part[...] for name, part in reader.parts().items()}


def logits_of(model: Path) -> torch.Tensor:
    worker = load_worker(LoadRequest(str(model), device="cpu", dtype="float32", num_kv_blocks=4))
    return worker.execute(StepPlan((SequenceSlice(TOKENS, 0, (0, 1, 2, 3), len(TOKENS)),)))


def in_transformers(directory: Path, **options: Any) -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, **options)
    model.eval()
    return model


def require_same_logits(model: Path, oracle: PreTrainedModel) -> None:
    with torch.inference_mode():
        expected = oracle(torch.tensor([TOKENS])).logits[0]
    actual = logits_of(model)
    assert float((actual - expected).abs().max()) < NOISE * float(expected.std())
    assert torch.equal(actual.argmax(-1), expected.argmax(-1))


@pytest.mark.parametrize("form", FORMS)
def test_every_form_means_the_numbers_of_its_description(form: str, plain: Path, tmp_path: Path) -> None:
    meant = write_quantised(plain, tmp_path / "quantised", FORMS[form])
    weights = weights_of(tmp_path / "quantised")
    assert all(torch.equal(weights[name], weight) for name, weight in meant.items())
    assert not all(torch.equal(meant[name], weight) for name, weight in load_file(plain / "model.safetensors").items())


def test_experts_that_are_stored_in_one_tensor_have_their_own_blocks(plain: Path, tmp_path: Path) -> None:
    form = fp8_blocks(BLOCK)
    write_quantised(plain, tmp_path / "quantised", form)
    tensors = load_file(tmp_path / "quantised" / "model.safetensors")
    experts = [form.write(weight) for weight in torch.randn(2, 112, 64, generator=torch.Generator().manual_seed(0))]
    name = "model.layers.0.mlp.experts.gate_up_proj"
    tensors[name] = torch.stack([parts["weight"] for parts, _ in experts])
    tensors[f"{name}_scale_inv"] = torch.stack([parts["weight_scale_inv"] for parts, _ in experts])
    save_file(tensors, tmp_path / "quantised" / "model.safetensors", metadata={"format": "pt"})
    assert torch.equal(weights_of(tmp_path / "quantised")[name], torch.stack([meant for _, meant in experts]))


@pytest.mark.parametrize(("architecture", "form"), [("llama", "awq"), ("mixtral", "gptq, shuffled")])
def test_logits_are_those_of_the_plain_checkpoint_in_transformers(architecture: str, form: str, tmp_path: Path) -> None:
    """The experts of the second one are merged by transformers from weights that are computed when it asks."""
    plain = build_tiny_model(architecture, tmp_path / "plain", vocabulary_size=64, num_layers=1)
    meant = write_quantised(plain, tmp_path / "quantised", FORMS[form])
    require_same_logits(tmp_path / "quantised", in_transformers(write_meant(plain, tmp_path / "meant", meant)))


def test_the_text_half_of_a_quantised_model_that_reads_images_is_served(tmp_path: Path) -> None:
    build_tiny_architecture("qwen3_vl", tmp_path / "plain")
    meant = write_quantised(tmp_path / "plain", tmp_path / "quantised", FORMS["awq"])
    require_servable(str(tmp_path / "quantised"), flag="--target")
    assert model_size(str(tmp_path / "quantised")) == model_size(str(tmp_path / "plain"))
    whole = write_meant(tmp_path / "plain", tmp_path / "meant", meant)
    oracle = AutoModelForImageTextToText.from_pretrained(whole, dtype=torch.float32).eval()
    require_same_logits(tmp_path / "quantised", oracle)


@pytest.mark.parametrize("form", [name for name, form in FORMS.items() if form.has_oracle])
def test_weights_are_those_of_the_package_compressed_tensors(form: str, plain: Path, tmp_path: Path) -> None:
    """The package rounds them to the dtype of their scales, and nothing else differs."""
    write_quantised(plain, tmp_path / "quantised", FORMS[form])
    config = AutoConfig.from_pretrained(tmp_path / "quantised")
    config.quantization_config["dequantize"] = True
    oracle = in_transformers(tmp_path / "quantised", config=config).state_dict()
    stored = load_file(tmp_path / "quantised" / "model.safetensors")
    weights = weights_of(tmp_path / "quantised")
    for name, expected in oracle.items():
        rounding = stored.get(f"{name}_scale", expected).dtype
        assert torch.equal(weights[name].to(rounding).float(), expected)


def test_fp8_blocks_that_divide_all_weights_are_those_of_transformers(plain: Path, tmp_path: Path) -> None:
    form = fp8_blocks(16)
    write_quantised(plain, tmp_path / "quantised", form)
    oracle = in_transformers(tmp_path / "quantised")
    weights = weights_of(tmp_path / "quantised")
    assert all(torch.equal(weights[name], expected) for name, expected in oracle.state_dict().items())
    require_same_logits(tmp_path / "quantised", oracle)


def test_mxfp4_experts_are_those_of_transformers(tmp_path: Path) -> None:
    build_tiny_architecture("gpt_oss", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    generator = torch.Generator().manual_seed(0)
    for name in [name for name in tensors if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        experts, columns, rows = tensors.pop(name).shape
        shape = (experts, rows, columns // 32)
        tensors[f"{name}_blocks"] = torch.randint(256, (*shape, 16), dtype=torch.uint8, generator=generator)
        tensors[f"{name}_scales"] = torch.randint(118, 124, shape, dtype=torch.uint8, generator=generator)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "mxfp4"}}))
    oracle = in_transformers(tmp_path)
    weights = weights_of(tmp_path)
    assert all(torch.equal(weights[name].float(), expected) for name, expected in oracle.state_dict().items())
    require_same_logits(tmp_path, oracle)


def test_a_model_is_trained_from_the_numbers_that_a_checkpoint_means(plain: Path, tmp_path: Path) -> None:
    meant = write_quantised(plain, tmp_path / "quantised", FORMS["awq"])
    loaded = load_model(str(tmp_path / "quantised")).state_dict()
    assert all(torch.equal(loaded[name], weight) for name, weight in meant.items())


def test_the_page_says_how_many_bytes_a_weight_of_each_form_takes() -> None:
    assert section() in PAGE.read_text(), "run `make model-list`"


def test_rounded_activations_are_named_when_a_checkpoint_is_loaded(
    plain: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_quantised(plain, tmp_path / "quantised", FORMS["int-quantized"])
    with caplog.at_level(logging.WARNING):
        weights_of(tmp_path / "quantised")
    assert "says that activations are rounded to int8; they are not rounded here" in caplog.text


def test_a_zero_point_that_readers_of_gptq_understand_differently_is_refused(plain: Path, tmp_path: Path) -> None:
    write_quantised(plain, tmp_path / "quantised", FORMS["gptq"])
    tensors = load_file(tmp_path / "quantised" / "model.safetensors")
    name = next(name for name in tensors if name.endswith("qzeros"))
    tensors[name] = words(torch.full((len(tensors[name]), tensors[name].shape[1] * 8), 15), 4)
    save_file(tensors, tmp_path / "quantised" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(InvalidRequest, match=f"tensor {name} holds the zero point 15, .* as gptq_v2"):
        weights_of(tmp_path / "quantised")


def test_a_group_that_has_no_scales_is_refused(plain: Path, tmp_path: Path) -> None:
    write_quantised(plain, tmp_path / "quantised", FORMS["gptq, shuffled"])
    tensors = load_file(tmp_path / "quantised" / "model.safetensors")
    name = next(name for name in tensors if name.endswith("g_idx"))
    tensors[name][0] = -1
    save_file(tensors, tmp_path / "quantised" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(InvalidRequest, match=f"tensor {name} names groups -1 to "):
        weights_of(tmp_path / "quantised")


def test_a_file_that_is_cut_short_is_refused_when_it_is_loaded(plain: Path, tmp_path: Path) -> None:
    write_quantised(plain, tmp_path / "quantised", FORMS["awq"])
    file = tmp_path / "quantised" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(InvalidRequest, match="cannot be loaded"):
        load_worker(LoadRequest(str(tmp_path / "quantised"), device="cpu", dtype="float32"))


def test_quantised_layers_that_a_model_stores_transposed_are_refused(tmp_path: Path) -> None:
    plain = build_tiny_model("gpt2", tmp_path / "plain", vocabulary_size=64, num_layers=1)
    write_meant(plain, tmp_path / "quantised", load_file(plain / "model.safetensors"))
    config = json.loads((plain / "config.json").read_text()) | {"quantization_config": {"quant_method": "fp8"}}
    (tmp_path / "quantised" / "config.json").write_text(json.dumps(config))
    with pytest.raises(Unsupported, match="of type gpt2, whose quantised weights are not read"):
        load_worker(LoadRequest(str(tmp_path / "quantised"), device="cpu", dtype="float32"))
