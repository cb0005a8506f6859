"""MTP: multi-token prediction layers that a checkpoint contains (DeepSeek-V3 2024, arXiv:2412.19437, section 2.2).

A decoder layer of the model's own kind reads a token's embedding and the hidden state of the position before it, each
normalised, through one projection of both. Transformers' `MtpModel` knows which models have such weights, their names
and the order of concatenation; this module runs its layer over the paged cache, one position at a time. If there are
several layers, the first one drafts every token, with its own output as the next hidden state.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import cast

import torch
from transformers import PreTrainedModel
from transformers.modeling_layers import MtpModel

from specdec.contract.errors import InvalidRequest, Unsupported
from specdec.engine.heads.first_position_mask import attend_after_first, marked_shape
from specdec.engine.heads.head_file import FIELD
from specdec.engine.heads.interface import DraftHead, HeadDraft, HeadTokens, TargetParts
from specdec.engine.model.attention import ATTENTION_NAME, attending
from specdec.engine.model.checkpoint_model import first_line, quietly
from specdec.engine.model.layer_probe import PROBE_NAME, probing, refusing_failures
from specdec.settings.draft_specs import LocalDraftSpec


class Mtp(DraftHead):
    """`engine.heads.interface.DraftHead` of a checkpoint's own MTP layer."""

    fingerprint = "mtp"  # the checkpoint's own fingerprint covers its weights

    def __init__(self, model: PreTrainedModel, target: TargetParts) -> None:
        """Read the layer from the checkpoint that `model` was loaded from.

        Raises:
            Unsupported: models of this type have none, or it attends in a way that heads do not support.
            InvalidRequest: the checkpoint lacks the layer's weights.
        """
        config = model.config.get_text_config()
        if not getattr(config, "num_mtp_layers", None):
            raise Unsupported(f"a model of type {config.model_type} has no supported MTP layer", field=FIELD)
        self.feature_layers = (config.num_hidden_layers - 1,)
        self.feature_size = target.embedding.shape[1]
        self._norm, self._vocabulary_size = target.norm, target.vocabulary_size
        self._mtp = _read_layers(model)
        with refusing_failures(config), probing(config.model_type) as layers, torch.inference_mode():
            self._set_attention(PROBE_NAME)
            zeros = torch.zeros(2, self.feature_size, dtype=target.dtype, device=target.device)
            tokens = torch.zeros(2, dtype=torch.int64, device=target.device)
            self._forward(tokens, torch.arange(2, device=target.device), zeros)
        if any(layer.kind.softcap is not None or layer.kind.has_sinks for layer in layers):
            raise Unsupported(
                f"the MTP layer of type {config.model_type} uses a softcap or attention sinks, which are not supported",
                field=FIELD,
            )
        self._set_attention(ATTENTION_NAME)
        self.kv_layers = tuple((marked_shape(layer.shape), layer.kind) for layer in layers)

    def features(self, hidden: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the last hidden state [T, H] as the model's own head reads it."""
        return self._norm(hidden[0])

    def extend(self, tokens: HeadTokens) -> None:
        """Write the KV of verified tokens; see `DraftHead.extend`."""
        self._run(tokens)

    def draft(self, tokens: HeadTokens, verified: torch.Tensor, draft_index: torch.Tensor) -> HeadDraft:
        """Run one draft step; see `DraftHead.draft`."""
        hidden = self._run(tokens)
        # The model's own projection: some models divide first, and some have rows that belong to no token.
        logits = self._mtp._project_to_logits(hidden)
        return HeadDraft(hidden, logits[:, : self._vocabulary_size].float())

    def _run(self, tokens: HeadTokens) -> torch.Tensor:
        with attending(_HeadAttention(tokens)):
            return self._forward(tokens.token_ids, tokens.positions, tokens.previous)

    def _forward(self, token_ids: torch.Tensor, positions: torch.Tensor, previous: torch.Tensor) -> torch.Tensor:
        """Return the layer's output [T, H]."""
        hidden: torch.Tensor = self._mtp.forward_layer(
            0, previous.unsqueeze(0), positions.unsqueeze(0), None, input_ids=token_ids.unsqueeze(0)
        )
        return hidden[0]

    def _set_attention(self, name: str) -> None:
        self._mtp.config._attn_implementation = name


def load_mtp(spec: LocalDraftSpec, target: TargetParts) -> Mtp:
    """Read the MTP layer of the target's checkpoint. Raises as `Mtp`."""
    if target.model is None:
        raise Unsupported("an MTP layer needs its target loaded as a whole model", field=FIELD)
    return Mtp(target.model, target)


def _read_layers(model: PreTrainedModel) -> MtpModel:
    # A model whose weights were computed does not name its files; see `checkpoint_model.reading`.
    if not Path(str(model.config.name_or_path)).is_dir():
        raise Unsupported(
            "the MTP layer of a quantised checkpoint or a GGUF file is not read; use another draft", field=FIELD
        )
    try:
        with quietly():
            return cast(MtpModel, MtpModel.from_pretrained(model, device_map={"": model.device}).eval())
    except Exception as error:  # transformers and safetensors raise many kinds of errors for missing weights
        raise InvalidRequest(
            f"{model.config.name_or_path}: its MTP layer cannot be read: {first_line(error)[:300]}", field=FIELD
        ) from error


@dataclass(frozen=True, slots=True)
class _HeadAttention:
    """`engine.model.attention.LayerContext` of the layer's modules."""

    tokens: HeadTokens
    calls: Iterator[int] = field(default_factory=count)

    def attend_layer(
        self,
        layer_index: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scale: float,
        softcap: float | None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attend as `PagedContext.attend_layer`, without softcap or sinks."""
        return attend_after_first(self.tokens, layer_index, query, key, value, scale)
