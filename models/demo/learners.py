"""Trainable modules of the demo target's heads: Medusa, EAGLE-3 and the adapter of an early exit, in PyTorch.

Each module computes the logits of every draft position for whole rows of text, and the tensors to save under the
formats' own names. `train_heads.py` trains them and `specdec.engine.heads` serves them. A learner's `logits(view)`
yields, for draft depth i = 0, 1, ..., logits [B, T, V] and the offset of what they predict: row t speaks of the token
after position t + offset, and the target's own logits of position t + offset are what it learns.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.functional import linear, scaled_dot_product_attention, silu
from transformers import LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaRMSNorm, LlamaRotaryEmbedding, apply_rotary_pos_emb

EARLY_EXIT_LAYERS = 3
#: Hidden states of the target that the head reads, numbered as in Transformers: what enters layer j, the last layer's
#: output at L.
EAGLE3_STATES = [2, 4, 6]


@dataclass(frozen=True)
class View:
    """Output of the target for a batch of rows."""

    token_ids: torch.Tensor  # [B, T]
    states: list[torch.Tensor]
    """L + 1 of [B, T, H]: what enters each layer, and at last what leaves the last one, before the norm."""
    logits: torch.Tensor  # [B, T, V]


class Target:
    """The frozen target."""

    def __init__(self, model: LlamaForCausalLM, bf16: bool) -> None:
        self.model, self._bf16 = model.requires_grad_(False).eval(), bf16
        self._outputs: list[torch.Tensor] = []
        for layer in model.model.layers:
            layer.register_forward_hook(lambda _module, _inputs, output: self._outputs.append(output))

    @torch.no_grad()
    def look(self, token_ids: torch.Tensor) -> View:
        """One forward pass.  [B, T]"""
        self._outputs.clear()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=self._bf16):
            logits = self.model(token_ids, use_cache=False).logits.float()
        outputs = [output[0] if isinstance(output, tuple) else output for output in self._outputs]
        return View(token_ids, [self.model.model.embed_tokens(token_ids), *(o.float() for o in outputs)], logits)


class MedusaLearner(nn.Module):
    """Heads of one residual block each on the last hidden state; they share one head of the logits, copied from the
    target's, so that four of them take 1.6 MB. As they begin, each says what the target's head says one token late."""

    name = "medusa"

    def __init__(self, target: LlamaForCausalLM, num_heads: int = 4) -> None:
        super().__init__()
        width = target.config.hidden_size
        self._norm = target.model.norm
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(num_heads))
        for block in self.layers:
            nn.init.zeros_(block.weight)
        self.lm_head = nn.Parameter(target.lm_head.weight.detach().clone())

    def logits(self, view: View) -> Iterator[tuple[torch.Tensor, int]]:
        """Yield logits head by head."""
        last = self._norm(view.states[-1])
        for depth, block in enumerate(self.layers):
            yield linear(last + silu(block(last)), self.lm_head), depth + 1

    def tensors(self) -> dict[str, torch.Tensor]:
        """Under vLLM's names, with the one head of the logits."""
        blocks = {f"blocks.{index}.layers.0.weight": block.weight for index, block in enumerate(self.layers)}
        return blocks | {"lm_heads.0.weight": self.lm_head}

    def config(self) -> dict:
        """Its `config.json`."""
        rows, width = self.lm_head.shape
        return {
            "model_type": "medusa",
            "architectures": ["MedusaModel"],
            "hidden_size": width,
            "num_heads": len(self.layers),
            "num_hidden_layers": 1,
            "vocab_size": rows,
            "truncated_vocab_size": rows,
            "original_lm_head": True,
        }


class Eagle3Learner(nn.Module):
    """An EAGLE-3 head with the target's embeddings, all of its tokens and one layer of its own.

    It learns as it will draft (training-time test): at depth i the features are what it computed itself at depth i - 1,
    and keys of the last i positions come from such features, those before from the target's.
    """

    name = "eagle3"

    def __init__(self, target: LlamaForCausalLM, intermediate_size: int = 344, num_depths: int = 3) -> None:
        super().__init__()
        config = target.config
        width, dim, kv = config.hidden_size, config.head_dim, config.num_key_value_heads
        self._num_depths, self._heads, self._kv_heads, self._dim = num_depths, config.num_attention_heads, kv, dim
        self._embed, self._rotary = target.model.embed_tokens, LlamaRotaryEmbedding(config)
        sizes = {
            "self_attn.q_proj": (2 * width, self._heads * dim), "self_attn.k_proj": (2 * width, kv * dim),
            "self_attn.v_proj": (2 * width, kv * dim), "self_attn.o_proj": (self._heads * dim, width),
            "mlp.gate_proj": (width, intermediate_size), "mlp.up_proj": (width, intermediate_size),
            "mlp.down_proj": (intermediate_size, width), "fc": (len(EAGLE3_STATES) * width, width),
        }  # fmt: skip
        # Dots are no part of a module's name.
        self.layers = nn.ModuleDict(
            {name.replace(".", "/"): nn.Linear(*size, bias=False) for name, size in sizes.items()}
        )
        for name in ("self_attn/o_proj", "mlp/down_proj"):
            nn.init.normal_(self.layers[name].weight, std=0.01)
        self.norms = nn.ModuleDict(
            {name: LlamaRMSNorm(width, config.rms_norm_eps)
             for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm", "norm")}
        )  # fmt: skip
        self.lm_head = nn.Parameter(target.lm_head.weight.detach().clone())
        # Initialised to the output of the target's own head for the last feature, one token late.
        with torch.no_grad():
            self.norms["norm"].weight.copy_(target.model.norm.weight)
            self.layers["fc"].weight[:, -width:] += torch.eye(width)
        self._target_config = config
        self._intermediate_size = intermediate_size

    def logits(self, view: View) -> Iterator[tuple[torch.Tensor, int]]:
        """Yield logits depth by depth. Row t runs the pair (feature of t, token t + 1), so the last row has none."""
        hidden = self.layers["fc"](torch.cat([view.states[j] for j in EAGLE3_STATES], dim=-1))[:, :-1]
        embedded = self.norms["input_layernorm"](self._embed(view.token_ids[:, 1:]))  # [B, T - 1, H]
        rotary = self._rotary(embedded, torch.arange(embedded.shape[1])[None])
        kept: list[tuple[torch.Tensor, torch.Tensor]] = []
        for _ in range(self._num_depths):
            hidden = self._layer(embedded, hidden, rotary, kept)
            yield linear(self.norms["norm"](hidden), self.lm_head), 1
            # What was computed for position t + 1 stands for its feature: the pair of row t + 1 reads it.
            hidden = torch.cat((hidden.new_zeros(len(hidden), 1, hidden.shape[2]), hidden[:, :-1]), dim=1)

    def _layer(self, embedded: torch.Tensor, hidden: torch.Tensor, rotary: tuple, kept: list) -> torch.Tensor:
        joined = torch.cat((embedded, self.norms["hidden_norm"](hidden)), dim=-1)
        query, key, value = (
            self.layers[f"self_attn/{part}_proj"](joined).unflatten(-1, (-1, self._dim)).transpose(1, 2)
            for part in "qkv"
        )  # [B, heads, T, dim]
        query, key = apply_rotary_pos_emb(query, key, *rotary)
        group = self._heads // self._kv_heads
        kept.append((key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)))
        attended = self._attend(query, kept)
        hidden = hidden + self.layers["self_attn/o_proj"](attended.transpose(1, 2).flatten(2))
        x = self.norms["post_attention_layernorm"](hidden)
        return hidden + self.layers["mlp/down_proj"](
            silu(self.layers["mlp/gate_proj"](x)) * self.layers["mlp/up_proj"](x)
        )

    def _attend(self, query: torch.Tensor, kept: list[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
        """At depth i, row t sees the keys of depth 0 up to row t - i, and of a later depth j that of row t - i + j."""
        depth, rows = len(kept) - 1, query.shape[2]
        keys, values = kept[0]
        if depth == 0:
            return scaled_dot_product_attention(query, keys, values, is_causal=True)
        index = torch.arange(rows)
        scores = (query @ keys.transpose(2, 3)) * self._dim**-0.5
        scores = scores.masked_fill(index[None, :] > index[:, None] - depth, -1e9)
        late = []
        for later in range(1, depth + 1):
            back = depth - later
            late.append([torch.roll(part, back, dims=2) for part in kept[later]])
        extra = torch.stack([(query * key).sum(-1) for key, _ in late], dim=-1) * self._dim**-0.5
        # The first rows have no draft of this depth behind them: what they say is left out of the loss.
        shares = torch.cat((scores, extra), dim=-1).softmax(-1)
        output = shares[..., :rows] @ values
        for place, (_, value) in enumerate(late):
            output = output + shares[..., rows + place, None] * value
        return output

    def tensors(self) -> dict[str, torch.Tensor]:
        """Under the names of the `speculators` library."""
        named = {"fc.weight": self.layers["fc"].weight, "norm.weight": self.norms["norm"].weight}
        named["lm_head.weight"] = self.lm_head
        for name, module in (*self.layers.items(), *self.norms.items()):
            if name not in ("fc", "norm"):
                named[f"layers.0.{name.replace('/', '.')}.weight"] = module.weight
        return named

    def config(self) -> dict:
        """Its `config.json`, as the `speculators` library writes one."""
        config = self._target_config
        layer = {
            "model_type": "llama",
            "hidden_size": config.hidden_size,
            "intermediate_size": self._intermediate_size,
            "num_attention_heads": self._heads,
            "num_key_value_heads": self._kv_heads,
            "head_dim": self._dim,
            "num_hidden_layers": 1,
            "hidden_act": config.hidden_act,
            "rms_norm_eps": config.rms_norm_eps,
            "rope_parameters": dict(config.rope_parameters),
            "max_position_embeddings": config.max_position_embeddings,
            "vocab_size": config.vocab_size,
        }
        return {
            "architectures": ["Eagle3Speculator"],
            "speculators_model_type": "eagle3",
            "speculators_config": {"algorithm": "eagle3", "verifier": {"name_or_path": "models/demo/target"}},
            "transformer_layer_config": layer,
            "draft_vocab_size": config.vocab_size,
            "eagle_aux_hidden_state_layer_ids": EAGLE3_STATES,
            "norm_before_residual": False,
        }


class EarlyExitLearner(nn.Module):
    """The adapter between the target's norm, after its first layers, and its head: x -> A x + b."""

    name = "early_exit"

    def __init__(self, target: LlamaForCausalLM) -> None:
        super().__init__()
        self._norm, self._head = target.model.norm, target.lm_head.weight
        self.adapter = nn.Linear(target.config.hidden_size, target.config.hidden_size)
        nn.init.eye_(self.adapter.weight)
        nn.init.zeros_(self.adapter.bias)

    def logits(self, view: View) -> Iterator[tuple[torch.Tensor, int]]:
        """Yield logits of one depth: every draft token is drawn in the same way."""
        yield linear(self.adapter(self._norm(view.states[EARLY_EXIT_LAYERS])), self._head), 0

    def tensors(self) -> dict[str, torch.Tensor]:
        """As `adapter.safetensors` has them."""
        return {"weight": self.adapter.weight, "bias": self.adapter.bias}

    def config(self) -> None:
        """It has none: the file's metadata names the layers."""


LEARNERS = {kind.name: kind for kind in (MedusaLearner, Eagle3Learner, EarlyExitLearner)}
