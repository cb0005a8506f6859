"""What a worker is to draft with, made of the model before that is taken apart: early exits, heads, their place in the
cache.

Not here: what they compute (`specdec.engine.model.early_exit`, `specdec.engine.heads`). Called by
`specdec.engine.loader`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import cast

from torch import nn
from transformers import PreTrainedModel

from specdec.engine.heads.base import DraftHead, TargetParts
from specdec.engine.heads.factory import load_head
from specdec.engine.heads.paged_head import PagedHead, layers_of
from specdec.engine.model.early_exit import EarlyExit, load_early_exit, shortened
from specdec.engine.model.kv_cache import KvCache, LayerShape
from specdec.engine.model.llama_stack import LlamaStack
from specdec.engine.model.model_runner import ForwardPass, TransformersForward
from specdec.errors import Unsupported
from specdec.settings.draft_specs import EARLY_EXIT, LocalDraftSpec


@dataclass(frozen=True, slots=True)
class LocalDrafting:
    """The local drafts of one worker."""

    names: tuple[str, ...] = ()
    """Of all of them."""
    exits: Mapping[str, EarlyExit] = field(default_factory=dict)
    heads: Mapping[str, DraftHead] = field(default_factory=dict)

    @property
    def gammas(self) -> tuple[int, ...]:
        """Most draft tokens of each, 0 for as many as are asked for."""
        return tuple(self.heads[name].max_draft_tokens if name in self.heads else 0 for name in self.names)

    @property
    def layers(self) -> list[LayerShape]:
        """What is cached for heads, after the model's own layers."""
        return [shape for head in self.heads.values() for shape in layers_of(head)]

    @property
    def fingerprints(self) -> tuple[str, ...]:
        """Fingerprints of the heads, which are part of the KV layout: other heads cache other numbers."""
        return tuple(head.fingerprint for head in self.heads.values())

    def paged_heads(self, cache: KvCache) -> dict[str, PagedHead]:
        """The heads on their part of the worker's cache, its last layers."""
        paged, first_layer = {}, len(cache.layers) - len(self.layers)
        for name, head in self.heads.items():
            paged[name] = PagedHead(head, cache, first_layer, dtype=cache.layers[first_layer].rows.dtype)
            first_layer += len(layers_of(head))
        return paged


def load_local_drafts(
    specs: Sequence[LocalDraftSpec], model: PreTrainedModel, vocabulary_size: int, max_context_tokens: int
) -> LocalDrafting:
    """Makes the local drafts of a model that is whole.

    Args:
        specs: of different names.
        model: as it was loaded.
        vocabulary_size: of its tokens.
        max_context_tokens: longest sequence that is served.

    Raises:
        InvalidRequest: one does not fit the model, or its file is missing or broken.
        Unsupported: there is no such kind, or not for a model of this type.
    """
    exits: dict[str, EarlyExit] = {}
    heads: dict[str, DraftHead] = {}
    for spec in specs:
        if spec.kind == EARLY_EXIT:
            exits[spec.name] = load_early_exit(spec, model)
        else:
            heads[spec.name] = load_head(spec, target_parts(model, vocabulary_size, max_context_tokens))
    return LocalDrafting(tuple(spec.name for spec in specs), exits, heads)


def draft_passes(
    exits: Mapping[str, EarlyExit], model: PreTrainedModel, forward: ForwardPass
) -> dict[str, ForwardPass]:
    """The forward passes of draft steps of early exits, beside `forward` for full steps."""
    if isinstance(forward, LlamaStack):
        return {name: forward.early_exit(early_exit) for name, early_exit in exits.items()}
    return {name: TransformersForward(shortened(model, early_exit)) for name, early_exit in exits.items()}


def target_parts(model: PreTrainedModel, vocabulary_size: int, max_context_tokens: int) -> TargetParts:
    """What heads may take of a model. Raises Unsupported: its final norm is not where it is looked for."""
    norm = getattr(model.base_model, "norm", None)
    if norm is None:
        raise Unsupported(
            f"local draft heads are not known of a model of type {model.config.model_type}", field="local_draft"
        )
    return TargetParts(
        config=model.config.get_text_config(),
        embedding=cast(nn.Embedding, model.get_input_embeddings()).weight.detach(),
        norm=cast(nn.Module, norm),
        head=model.get_output_embeddings().weight.detach(),
        vocabulary_size=min(vocabulary_size, model.get_output_embeddings().weight.shape[0]),
        max_context_tokens=max_context_tokens,
        dtype=model.dtype,
        device=model.device,
        model=model,
    )
