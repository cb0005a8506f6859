"""Decide how a Llama-shaped model is divided among ranks: which rows or columns of each weight a rank holds.

    queries, keys, values, gate, up: by outputs, whole heads      attention's output, down: by inputs
    embedding, head: by vocabulary                                normalisations: whole on every rank

Sizes that do not divide evenly are padded with zeros, which do not change a sum. If there are more ranks than KV heads,
ranks share them: rank r holds head r * heads // ranks, the one that its queries use. Biases that are added once after a
sum over ranks belong to the first rank. Called by `engine.parallel.sharded_llama`.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Self

from transformers import PreTrainedConfig

from specdec.checkpoints.rank_checks import require_even_heads, require_even_kv_heads


@dataclass(frozen=True, slots=True)
class Cut:
    """Range of rows or columns of one weight."""

    axis: int
    """0 for rows, 1 for columns."""
    start: int
    end: int
    """End of the range, exclusive; not above `start` if the range is empty."""
    width: int
    """Rows or columns of the rank's weight. Those beyond the range are zero."""


@dataclass(frozen=True, slots=True)
class Splitting:
    """Sizes of a model and one rank's part of it."""

    rank: int
    num_ranks: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    hidden_size: int
    mlp_width: int
    num_tokens: int
    """Rows of the embedding and of the head."""

    @classmethod
    def of(cls, config: PreTrainedConfig, rank: int, num_ranks: int) -> Self:
        """Return a rank's part of a model. Raises InvalidRequest: the heads cannot be divided among the ranks."""
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        require_even_heads(heads, num_ranks)
        require_even_kv_heads(kv_heads, num_ranks, may_share=True)
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
        return cls(
            rank, num_ranks, heads, kv_heads, head_dim, config.hidden_size, config.intermediate_size, config.vocab_size
        )

    @property
    def own_heads(self) -> int:
        return self.num_heads // self.num_ranks

    @property
    def own_kv_heads(self) -> int:
        return max(1, self.num_kv_heads // self.num_ranks)

    @property
    def own_tokens(self) -> int:
        """Rows of this rank's embedding, zero rows included."""
        return _share(self.num_tokens, self.num_ranks)

    @property
    def first_token(self) -> int:
        return self.rank * self.own_tokens

    def config_of(self, whole: PreTrainedConfig) -> PreTrainedConfig:
        """Return the configuration of a model of this rank's size."""
        own = copy.deepcopy(whole)
        own.head_dim = self.head_dim  # otherwise transformers divides the hidden size by this rank's number of heads
        own.num_attention_heads, own.num_key_value_heads = self.own_heads, self.own_kv_heads
        own.intermediate_size = _share(self.mlp_width, self.num_ranks)
        own.vocab_size = self.own_tokens
        own.pad_token_id = None  # the token may belong to another rank
        return own

    def cut_of(self, name: str) -> Cut | None:
        """Return this rank's part of a weight; None if the rank holds all of it.

        Args:
            name: parameter name, such as `model.layers.3.self_attn.q_proj.weight`.
        """
        module, kind = name.split(".")[-2:]
        match module:
            case "q_proj":
                return self._even(0, self.own_heads * self.head_dim)
            case "k_proj" | "v_proj":
                first = self.rank * self.num_kv_heads // self.num_ranks * self.head_dim
                width = self.own_kv_heads * self.head_dim
                return Cut(0, first, first + width, width)
            case "gate_proj" | "up_proj":
                return self._filled(0, self.mlp_width)
            case "o_proj" | "down_proj" if kind == "bias":
                return None if self.rank == 0 else Cut(0, 0, 0, self.hidden_size)
            case "o_proj":
                return self._even(1, self.own_heads * self.head_dim)
            case "down_proj":
                return self._filled(1, self.mlp_width)
            case "embed_tokens" | "lm_head":
                return self._filled(0, self.num_tokens)
            case _:
                return None

    @staticmethod
    def cuts_inputs_of(module: str) -> bool:
        """Return whether a linear layer is divided by its inputs, instead of by its outputs."""
        return module in ("o_proj", "down_proj")

    def _even(self, axis: int, width: int) -> Cut:
        return Cut(axis, self.rank * width, (self.rank + 1) * width, width)

    def _filled(self, axis: int, size: int) -> Cut:
        width = _share(size, self.num_ranks)
        return Cut(axis, min(self.rank * width, size), min((self.rank + 1) * width, size), width)


def _share(size: int, num_ranks: int) -> int:
    return -(-size // num_ranks)
