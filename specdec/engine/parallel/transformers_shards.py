"""One rank's part of a model that is not Llama-shaped, by transformers' own tensor parallelism.

The process group must exist before the model is loaded: without one, transformers gives every rank the whole model, and
the logits are still right. So `engine.parallel.rank_loader` checks how much a rank holds.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig

from specdec.checkpoints.rank_checks import FLAG, require_even_heads, require_even_kv_heads
from specdec.contract.errors import Unsupported
from specdec.contract.version import install_command
from specdec.engine.model.checkpoint_model import load_weights
from specdec.engine.model.model_runner import ForwardPass, TransformersForward
from specdec.engine.options import CompileOptions
from specdec.engine.parallel.group import RankGroup


class TransformersShards:
    """A rank's part of a model that transformers can divide."""

    def __init__(
        self, name: str, directory: Path, config: PreTrainedConfig, dtype: torch.dtype | str, ranks: RankGroup
    ) -> None:
        """Load this rank's part of the weights; the arguments are those of `ShardedLlama`.

        Raises:
            InvalidRequest: the heads cannot be divided, or the weights cannot be read.
            Unsupported: transformers cannot divide a model of this type, or a package for it is missing.
        """
        _require_plan(config, ranks.num_ranks)
        from transformers.distributed import DistributedConfig  # type: ignore[attr-defined]  # lazily exported

        self.model = load_weights(
            name, AutoModelForCausalLM, directory, config=config, dtype=dtype, trust_remote_code=False,
            distributed_config=DistributedConfig(tp_size=ranks.num_ranks),
        )  # fmt: skip
        self.num_head_rows = int(self.model.get_output_embeddings().weight.shape[0])

    def hold_in_int8(self) -> None:
        """Raise Unsupported: transformers' parts cannot be rounded as the whole weights would be."""
        raise Unsupported(f"{FLAG} does not divide int8 weights of a model of type {self.model.config.model_type}",
                          field="dtype")  # fmt: skip

    def forward_pass(self, compiling: CompileOptions, *, is_int8: bool) -> ForwardPass:
        """Return transformers' own forward pass; every rank gets all logits."""
        return TransformersForward(self.model)

    @contextmanager
    def joined(self) -> Iterator[None]:
        """Change nothing: the model's own forward pass computes the whole model's logits."""
        yield


def _require_plan(config: PreTrainedConfig, num_ranks: int) -> None:
    text = config.get_text_config()
    if not getattr(text, "base_model_tp_plan", None):
        raise Unsupported(
            f"{FLAG}: transformers cannot divide a model of type {config.model_type}",
            field="tensor_parallel",
        )
    heads = text.num_attention_heads
    kv_heads = getattr(text, "num_key_value_heads", None) or heads
    require_even_heads(heads, num_ranks)
    require_even_kv_heads(kv_heads, num_ranks, may_share=False)
    if find_spec("accelerate") is None:
        raise Unsupported(
            f"{FLAG} for a model of type {config.model_type} needs the package accelerate, which is not installed: run "
            f"{install_command('gguf')}",
            field="tensor_parallel",
        )
