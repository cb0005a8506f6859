"""Learns from one forward pass what each layer of a model caches and how it attends.

Not a table of architectures: the model itself says it, in the arguments it hands to transformers' attention interface.
Called once per model by `engine.hf_adapter`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers import AttentionInterface, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface

from specdec.engine.batch import AttentionKind
from specdec.engine.kv_cache import LayerShape
from specdec.errors import Unsupported

PROBE_NAME = "specdec_probe"

# Arguments that would change the result and that the paged attention does not compute.
_UNKNOWN_ARGUMENTS = ("s_aux", "position_bias", "alibi")


@dataclass(frozen=True, slots=True)
class ProbedLayer:
    shape: LayerShape
    kind: AttentionKind


def register_probe() -> None:
    """Makes `PROBE_NAME` known to transformers. Idempotent."""
    AttentionInterface.register(PROBE_NAME, _probe_attention)
    AttentionMaskInterface.register(PROBE_NAME, _no_mask)


def probe_layers(model: PreTrainedModel) -> list[ProbedLayer]:
    """Runs two tokens through a model loaded with `PROBE_NAME` attention.

    Raises:
        Unsupported: some layer does not attend, or in a way that the paged attention does not compute.
    """
    found: dict[int, ProbedLayer] = {}
    tokens = torch.zeros((1, 2), dtype=torch.int64, device=model.device)
    positions = torch.arange(2, device=model.device).unsqueeze(0)
    with torch.inference_mode():
        model(input_ids=tokens, position_ids=positions, use_cache=False, probed_layers=found)
    num_layers = model.config.get_text_config().num_hidden_layers
    if sorted(found) != list(range(num_layers)):
        raise Unsupported(f"{len(found)} of the {num_layers} layers of {model.config.model_type} have a KV cache")
    return [found[index] for index in range(num_layers)]


def _probe_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    softcap: float | None = None,
    sliding_window: int | None = None,
    probed_layers: dict[int, ProbedLayer] | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    if probed_layers is None:
        raise RuntimeError(f"{PROBE_NAME} attention was called outside the probe")
    unknown = [name for name in _UNKNOWN_ARGUMENTS if others.get(name) is not None]
    if attention_mask is not None or unknown or not getattr(module, "is_causal", True):
        raise Unsupported(f"{type(module).__name__} attends in a way this engine does not compute")
    group = query.shape[1] // key.shape[1]
    shape = LayerShape(num_kv_heads=key.shape[1], key_dim=key.shape[3], value_dim=value.shape[3])
    probed_layers[module.layer_idx] = ProbedLayer(shape, AttentionKind(sliding_window, group, softcap))
    return value.repeat_interleave(group, dim=1).transpose(1, 2), None


def _no_mask(*_: Any, **__: Any) -> None:
    return None
