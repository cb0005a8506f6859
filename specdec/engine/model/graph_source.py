"""What every way of running a model's steps needs of the loaded model.

Made by the loaders; read by `engine.cuda_graphs`, `engine.native` and `engine.torch_compile`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from transformers import PreTrainedModel

from specdec.engine.model.batch import AttentionKind
from specdec.engine.model.kv_cache import KvCache


@dataclass(frozen=True, slots=True)
class GraphSource:
    """A loaded model with its layers' attention kinds and its KV cache."""

    model: PreTrainedModel
    layer_kinds: Sequence[AttentionKind]
    cache: KvCache
