"""Make the local drafts of a worker, early exits and heads, before the model is taken apart.

What they compute is in `specdec.engine.model.early_exit` and `specdec.engine.heads`. Called by
`specdec.engine.load_pipeline`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import cast

from torch import nn
from transformers import PreTrainedModel

from specdec.contract.errors import Unsupported
from specdec.engine.heads.factory import load_head
from specdec.engine.heads.interface import DraftHead, TargetParts
from specdec.engine.heads.paged_head import PagedHead, layers_of
from specdec.engine.model.early_exit import EarlyExit, decoder_of, load_early_exit, shortened
from specdec.engine.model.kv_cache import KvCache, LayerShape
from specdec.engine.model.llama_stack import LlamaStack
from specdec.engine.model.model_runner import ForwardPass, TransformersForward
from specdec.settings.draft_specs import EARLY_EXIT, LocalDraftSpec


@dataclass(frozen=True, slots=True)
class LocalDrafting:
    """Local drafts of one worker."""

    names: tuple[str, ...] = ()
    """Names of all drafts."""
    exits: Mapping[str, EarlyExit] = field(default_factory=dict)
    heads: Mapping[str, DraftHead] = field(default_factory=dict)

    @property
    def gammas(self) -> tuple[int, ...]:
        """Most draft tokens of each draft; 0 if there is no limit."""
        return tuple(self.heads[name].max_draft_tokens if name in self.heads else 0 for name in self.names)

    @property
    def layers(self) -> list[LayerShape]:
        """Cache layers of the heads, which follow the model's own layers."""
        return [shape for head in self.heads.values() for shape in layers_of(head)]

    @property
    def fingerprints(self) -> tuple[str, ...]:
        """Fingerprints of the heads, which are part of the KV layout: other heads cache other numbers."""
        return tuple(head.fingerprint for head in self.heads.values())

    def paged_heads(self, cache: KvCache) -> dict[str, PagedHead]:
        """Return the heads with their part of the worker's cache, its last layers."""
        paged, first_layer = {}, len(cache.layers) - len(self.layers)
        for name, head in self.heads.items():
            paged[name] = PagedHead(head, cache, first_layer, dtype=cache.layers[first_layer].rows.dtype)
            first_layer += len(layers_of(head))
        return paged


def load_local_drafts(
    specs: Sequence[LocalDraftSpec], model: PreTrainedModel, vocabulary_size: int, max_context_tokens: int
) -> LocalDrafting:
    """Load the local drafts of a model.

    Args:
        specs: drafts with different names.
        model: loaded model, not yet taken apart.
        vocabulary_size: number of the model's tokens.
        max_context_tokens: longest sequence that is served.

    Raises:
        InvalidRequest: a draft does not fit the model, or its file is missing or damaged.
        Unsupported: the kind of draft is unknown, or does not support a model of this type.
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
    """Return the forward passes of early exits' draft steps, by name; `forward` is that of full steps."""
    if isinstance(forward, LlamaStack):
        return {name: forward.early_exit(early_exit) for name, early_exit in exits.items()}
    return {name: TransformersForward(shortened(model, early_exit)) for name, early_exit in exits.items()}


def target_parts(model: PreTrainedModel, vocabulary_size: int, max_context_tokens: int) -> TargetParts:
    """Return the parts of a model that heads use. Raises Unsupported: its final norm is not in the usual place."""
    norm = getattr(decoder_of(model), "norm", None)
    if norm is None:
        raise Unsupported(
            f"local draft heads do not support a model of type {model.config.model_type}: it has no final norm",
            field="local_draft",
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
