"""Find a Llama-shaped model that computes the same as the text half of another model, with the same weights.

Native kernels, CUDA graphs and tensor parallelism know Llama-shaped models by their classes. The text half of many
models is one of them under another name: the position coding that such a model has for images is the plain one for
text. Whether it is one is not looked up but tried: names and shapes of all weights, what the layers cache, and the bits
of the logits at both ends and in the middle of the context. Called by `engine.loader`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from typing import Any, cast

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from specdec.engine.model.checkpoint_model import model_context, quietly
from specdec.engine.model.layer_probe import PROBE_NAME, probe_layers
from specdec.engine.model.llama_stack import LLAMA_CLASSES

#: Tokens of each sequence that is tried.
_TRIAL_TOKENS = 8


def llama_twin(model: PreTrainedModel) -> PreTrainedModel:
    """Return a Llama-shaped model that shares the weights of a text half and gives the same bits, or `model` itself.

    Args:
        model: a text half with its weights, whose attention is the probe.
    """
    if model.get_output_embeddings() is None:
        return model
    weights = _weights(model)
    with quietly():
        for twin in _candidates(model.config, weights):
            twin.load_state_dict(weights, strict=False, assign=True)
            twin.tie_weights()
            twin.model.rotary_emb = type(twin.model.rotary_emb)(config=twin.config).to(model.device)
            if probe_layers(twin) == probe_layers(model) and torch.equal(_trial_logits(twin), _trial_logits(model)):
                twin.eval()
                return twin
    return model


def _weights(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Return the weights under the names of a Llama-shaped model."""
    weights = {f"model.{name}": weight for name, weight in model.get_decoder().state_dict(keep_vars=True).items()}
    return weights | {"lm_head.weight": model.get_output_embeddings().weight}


def _candidates(config: PreTrainedConfig, weights: dict[str, torch.Tensor]) -> Iterator[PreTrainedModel]:
    """Yield Llama-shaped models on the meta device that have weights of these names and shapes and no others."""
    shapes = {name: weight.shape for name, weight in weights.items()}
    is_tied = weights["lm_head.weight"] is weights.get("model.embed_tokens.weight")
    for kind in LLAMA_CLASSES:
        try:
            config_class = cast(type[PreTrainedConfig], kind.config_class)
            own = config_class(**_settings(config, config_class) | {"tie_word_embeddings": is_tied})
            with torch.device("meta"):
                twin = kind._from_config(own, attn_implementation=PROBE_NAME, dtype=config.dtype)  # type: ignore[no-untyped-call]
        except Exception:  # numbers that this class refuses
            continue
        if {name: weight.shape for name, weight in twin.state_dict().items()} == shapes:
            yield twin


def _settings(config: PreTrainedConfig, kind: type[PreTrainedConfig]) -> dict[str, Any]:
    """Return the settings of a text configuration that another class has, too."""
    text = config.get_text_config().to_dict()
    settings = {field.name: text[field.name] for field in fields(kind) if field.name in text}
    rope = {name: value for name, value in (text.get("rope_parameters") or {}).items() if not name.startswith("mrope")}
    ends = text.get("eos_token_id") if getattr(config, "eos_token_id", None) is None else config.eos_token_id
    return settings | {"rope_parameters": rope, "eos_token_id": ends}


def _trial_logits(model: PreTrainedModel) -> torch.Tensor:
    """Return logits of sequences that begin at the first, a middle and the last positions of the context."""
    last = max(0, model_context(model.config) - _TRIAL_TOKENS)
    starts = torch.tensor([0, last // 2, last], device=model.device)
    positions = starts[:, None] + torch.arange(_TRIAL_TOKENS, device=model.device)
    num_rows = cast(nn.Embedding, model.get_input_embeddings()).num_embeddings
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(num_rows, tuple(positions.shape), generator=generator).to(model.device)
    model.set_attn_implementation("eager")
    with torch.inference_mode():
        logits: torch.Tensor = model(input_ids=tokens, position_ids=positions, use_cache=False).logits
    model.set_attn_implementation(PROBE_NAME)
    return logits
