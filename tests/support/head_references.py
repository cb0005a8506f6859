"""What draft heads compute, written down once more: slowly, over whole sequences, with dense attention.

From the papers and the formats' definitions, in float64 and without a line of `specdec.engine.heads`: a mistake there
is not repeated here. Hidden states are numbered as Transformers numbers them. Called by the tests of heads.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import silu, softmax
from transformers import PreTrainedModel

Tensors = dict[str, torch.Tensor]


def hidden_states(model: PreTrainedModel, token_ids: list[int]) -> list[torch.Tensor]:
    """[T, H] float64 for j in 0..L: what enters layer j, and at L what the last layer puts out, before the norm."""
    outputs: list[torch.Tensor] = []
    hooks = [layer.register_forward_hook(lambda _m, _i, output: outputs.append(output)) for layer in model.model.layers]
    with torch.no_grad():
        entered = model.get_input_embeddings()(torch.tensor([token_ids]))
        model(torch.tensor([token_ids]), use_cache=False)
    for hook in hooks:
        hook.remove()
    states = [entered, *(output[0] if isinstance(output, tuple) else output for output in outputs)]
    return [state[0].double() for state in states]


def medusa_logits(model: PreTrainedModel, tensors: Tensors, token_ids: list[int]) -> torch.Tensor:
    """[heads, T, V]: of original tensors; head i at position t speaks of the token at t + 2 + i."""
    with torch.no_grad():
        last = model.model.norm(hidden_states(model, token_ids)[-1].float()).double()
    num_layers = max(int(name.split(".")[1]) for name in tensors)
    rows = []
    for head in range(1 + max(int(name.split(".")[0]) for name in tensors)):
        x = last
        for layer in range(num_layers):
            name = f"{head}.{layer}.linear"
            x = x + silu(x @ tensors[f"{name}.weight"].double().T + tensors[f"{name}.bias"].double())
        rows.append(x @ tensors[f"{head}.{num_layers}.weight"].double().T)
    return torch.stack(rows)


class Eagle3Reference:
    """An EAGLE-3 head of original tensors and a flat configuration."""

    def __init__(self, config: dict[str, Any], tensors: Tensors, states: list[int], **settings: bool) -> None:
        """states: the hidden states that are its input. settings: as `speculators` calls them."""
        self._config, self._states, self._settings = config, states, settings
        self._w = {name: tensor.double() for name, tensor in tensors.items()}
        offsets = tensors.get("d2t")
        size = config["draft_vocab_size"]
        self.target_ids = torch.arange(size) if offsets is None else torch.arange(size) + offsets

    def features(self, hidden: list[torch.Tensor]) -> torch.Tensor:
        """[T, F]"""
        chosen = [hidden[state] for state in self._states]
        if self._settings.get("fc_norm"):
            chosen = [self._norm(part, f"fc_norm.{index}.weight") for index, part in enumerate(chosen)]
        joined = torch.cat(chosen, dim=-1)
        if self._settings.get("norm_before_fc"):
            joined = self._norm(joined, "input_norm.weight")
        return joined @ self._w["fc.weight"].T

    def draft(self, features: torch.Tensor, token_ids: list[int], num_drafts: int, shift: int = 1) -> torch.Tensor:
        """Greedy drafts behind a sequence whose last token the target has not run.

        Args:
            features: [len(token_ids) - 1, F] of all tokens but the last.
            token_ids: the sequence.
            num_drafts: draft tokens.
            shift: how far before its token a feature stands; 1 is right.

        Returns:
            [num_drafts, V] logits, -inf where the head names no token.
        """
        token_ids, features, logits = list(token_ids), features.clone(), []
        for _ in range(num_drafts):
            # Pairs (feature of j - 1, token j), from j = 1 on.
            previous = features if shift == 1 else torch.roll(features, shift - 1, dims=0)
            hidden = self._layers(previous, token_ids[1:])
            normed = self._norm(hidden[-1:], "norm.weight")
            wide = torch.full((self._config["vocab_size"],), -torch.inf, dtype=torch.float64)
            wide[self.target_ids] = (normed @ self._w["lm_head.weight"].T)[0]
            logits.append(wide)
            token_ids.append(int(wide.argmax()))
            features = torch.cat((features, normed if self._settings.get("norm_output") else hidden[-1:]))
        return torch.stack(logits)

    def _layers(self, hidden: torch.Tensor, token_ids: list[int]) -> torch.Tensor:
        embedded = self._w["embed_tokens.weight"][token_ids]
        for layer in range(self._config["num_hidden_layers"]):
            name = "midlayer" if layer == 0 else f"layers.{layer}"
            residual, normed = hidden, self._norm(hidden, f"{name}.input_layernorm.weight")
            if layer == 0:
                feature = self._norm(hidden, f"{name}.hidden_norm.weight")
                normed = torch.cat((self._norm(embedded, f"{name}.input_layernorm.weight"), feature), dim=-1)
                residual = feature if self._settings.get("norm_before_residual") else hidden
            hidden = residual + self._attention(normed, f"{name}.self_attn")
            x = self._norm(hidden, f"{name}.post_attention_layernorm.weight")
            gated = silu(x @ self._w[f"{name}.mlp.gate_proj.weight"].T) * (x @ self._w[f"{name}.mlp.up_proj.weight"].T)
            hidden = hidden + gated @ self._w[f"{name}.mlp.down_proj.weight"].T
        return hidden

    def _attention(self, x: torch.Tensor, name: str) -> torch.Tensor:
        dim, count = self._config["head_dim"], len(x)
        q, k, v = (
            (x @ self._w[f"{name}.{part}_proj.weight"].T).view(count, -1, dim).transpose(0, 1) for part in "qkv"
        )  # [heads, T, dim]
        if f"{name}.q_norm.weight" in self._w:
            q, k = self._norm(q, f"{name}.q_norm.weight"), self._norm(k, f"{name}.k_norm.weight")
        q, k = self._rotate(q), self._rotate(k)
        group = len(q) // len(k)
        scores = q @ k.repeat_interleave(group, 0).transpose(1, 2) / dim**0.5
        scores += torch.full((count, count), -torch.inf, dtype=torch.float64).triu(1)
        mixed = softmax(scores, dim=-1) @ v.repeat_interleave(group, 0)
        return mixed.transpose(0, 1).reshape(count, -1) @ self._w[f"{name}.o_proj.weight"].T

    def _rotate(self, x: torch.Tensor) -> torch.Tensor:
        half = x.shape[-1] // 2
        frequencies = self._config["rope_theta"] ** (-torch.arange(half, dtype=torch.float64) / half)
        angles = torch.arange(x.shape[1], dtype=torch.float64)[:, None] * frequencies
        cos, sin = angles.cos(), angles.sin()
        return torch.cat((x[..., :half] * cos - x[..., half:] * sin, x[..., half:] * cos + x[..., :half] * sin), dim=-1)

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return x / (x.square().mean(-1, keepdim=True) + self._config["rms_norm_eps"]).sqrt() * self._w[name]
