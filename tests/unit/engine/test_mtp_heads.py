"""MTP layers of checkpoints, against Transformers' own modules over whole sequences."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.modeling_layers import MtpModel

from specdec.contract.errors import InvalidRequest, Unsupported
from specdec.engine.heads.factory import load_head
from specdec.engine.heads.interface import TargetParts
from specdec.engine.model.attention import register_attention
from specdec.engine.model.checkpoint_model import load_config, load_weights
from specdec.engine.model.layer_probe import PROBE_NAME, register_probe
from specdec.settings.draft_specs import LocalDraftSpec
from tests.support.head_drive import HeadDrive
from tests.support.head_references import hidden_states
from tests.support.mtp_checkpoints import MTP_TYPES, build_mtp_checkpoint
from tests.support.tiny_architectures import VOCABULARY_SIZE
from tests.support.tiny_models import build_tiny_model

#: Longer than the window and than two KV blocks.
TOKENS = [(7 * i * i + 3 * i) % 93 + 2 for i in range(41)]
MTP = LocalDraftSpec("mtp", "mtp")


def parts(directory: Path, vocabulary_size: int = VOCABULARY_SIZE) -> TargetParts:
    """Return the target parts that the loader passes to a head."""
    register_attention()
    register_probe()
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation=PROBE_NAME).eval()
    return TargetParts(
        config=model.config,
        embedding=model.get_input_embeddings().weight.detach(),
        norm=model.model.norm,
        head=model.lm_head.weight.detach(),
        vocabulary_size=vocabulary_size,
        max_context_tokens=256,
        dtype=torch.float32,
        device=torch.device("cpu"),
        model=model,
    )


@torch.no_grad()
def reference(model: PreTrainedModel, num_drafts: int) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Return the hidden states of all tokens except the last, and the logits [num_drafts, V] of greedy drafts."""
    mtp = MtpModel.from_pretrained(model).eval()
    states = hidden_states(model, TOKENS[:-1])
    token_ids, carried, rows = TOKENS[1:], model.model.norm(states[-1].float()), []
    for _ in range(num_drafts):
        positions = torch.arange(1, 1 + len(token_ids))[None]
        hidden = mtp.forward_layer(0, carried[None], positions, None, input_ids=torch.tensor([token_ids]))[0]
        rows.append(model.lm_head(hidden[-1]))
        token_ids = [*token_ids, int(rows[-1].argmax())]
        carried = torch.cat((carried, hidden[-1:]))
    return states, torch.stack(rows)


@pytest.mark.parametrize(
    "model_type", ["mellum", *(pytest.param(name, marks=pytest.mark.full) for name in MTP_TYPES if name != "mellum")]
)
def test_a_checkpoints_own_mtp_layer_drafts_as_transformers_computes_it(model_type: str, tmp_path: Path) -> None:
    directory = build_mtp_checkpoint(model_type, tmp_path)
    plain = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager").eval()
    states, expected = reference(plain, 4)
    head = load_head(MTP, parts(directory))
    for chunk in (5, 64):
        drafted = HeadDrive(head, TOKENS, states, chunk).draft(4)
        torch.testing.assert_close(drafted, expected, atol=2e-3, rtol=2e-3)
    shifted = HeadDrive(head, TOKENS, states, 64, shift=2).draft(1)
    assert (shifted - expected[:1]).abs().max() > 0.1, "features one position off are another draft"


def test_a_model_without_mtp_layers_is_refused_by_its_type(tmp_path: Path) -> None:
    directory = build_tiny_model("llama", tmp_path)
    with pytest.raises(Unsupported, match="a model of type llama has no supported MTP layer"):
        load_head(MTP, parts(directory, 256))


def test_the_mtp_layer_of_a_quantised_checkpoint_is_refused(tmp_path: Path) -> None:
    directory = build_mtp_checkpoint("mellum", tmp_path)
    target = parts(directory)
    config = json.loads((directory / "config.json").read_text()) | {"quantization_config": {"quant_method": "fp8"}}
    (directory / "config.json").write_text(json.dumps(config))
    settings = load_config("model", directory)
    model = load_weights("model", AutoModelForCausalLM, directory, config=settings, dtype=torch.float32)
    with pytest.raises(
        Unsupported, match="the MTP layer of a quantised checkpoint or a GGUF file is not read; use another draft"
    ):
        load_head(MTP, replace(target, model=model))


def test_a_checkpoint_that_lacks_its_mtp_weights_is_refused_in_one_line(tmp_path: Path) -> None:
    directory = build_mtp_checkpoint("mellum", tmp_path)
    stored = load_file(directory / "model.safetensors")
    save_file({name: t for name, t in stored.items() if "eh_proj" not in name}, directory / "model.safetensors",
              {"format": "pt"})  # fmt: skip
    with pytest.raises(InvalidRequest, match="its MTP layer cannot be read") as refused:
        load_head(MTP, parts(directory))
    assert "eh_proj" in refused.value.message
    assert "\n" not in refused.value.message
