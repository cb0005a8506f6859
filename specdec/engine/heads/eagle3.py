"""EAGLE-3 (Li et al. 2025, arXiv:2503.01840): decoder layers on the features of the target's layers.

For a token at position j the head reads the token's embedding and the feature of position j - 1. The feature of a
verified token is `fc` of three layers' outputs; that of a drafted token is the head's own output there. The first layer
reads both concatenated, so its queries, keys and values come from twice the width. `eagle3_format` reads
configurations.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import embedding, rms_norm, silu
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from specdec.engine.heads.draft_vocabulary import DraftVocabulary
from specdec.engine.heads.eagle3_format import Eagle3Format, read_format
from specdec.engine.heads.first_position_mask import MARK, UNSEEN, attend_after_first, marked_shape
from specdec.engine.heads.head_file import HeadFile, refusal
from specdec.engine.heads.interface import DraftHead, HeadDraft, HeadTokens, TargetParts
from specdec.engine.linear.projection import Projection
from specdec.engine.model.batch import AttentionKind
from specdec.engine.model.feature_layer import FeatureLayer, Weights
from specdec.engine.model.kv_cache import LayerShape


class Eagle3(DraftHead):
    """`engine.heads.interface.DraftHead` of an EAGLE-3 head."""

    def __init__(self, file: HeadFile, target: TargetParts) -> None:
        """Make the head of a file for a target.

        Raises:
            InvalidRequest: the configuration or a tensor does not fit; the message names it.
        """
        form = read_format(file, target)
        self.fingerprint = file.fingerprint()
        file.rename(_plain_name)
        self.feature_layers = form.feature_layers
        self.feature_size = form.layer.hidden_size
        self._eps, self._norms_output = form.layer.rms_norm_eps, form.norms_output
        self._fc = _FeatureProjection(file, target, form)
        self._embedding = _embedding(file, target, form)
        self._layers = [_Layer(file, target, form, index) for index in range(form.layer.num_hidden_layers)]
        self._gains = file.weight(target, "norm.weight", self.feature_size)
        num_logits = file.take("lm_head.weight", form.draft_size, self.feature_size).shape[0]
        self._vocabulary = DraftVocabulary.of_offsets(file, num_logits, target)
        self._head = target.project(file.weight(target, "lm_head.weight", num_logits, self.feature_size), None)
        self._rotary = _Rotary(file, form, target)
        first = self._layers[0]
        shape = marked_shape(LayerShape(first.num_kv_heads, first.head_dim, first.head_dim))
        self.kv_layers = ((shape, AttentionKind(None, first.num_heads // first.num_kv_heads, None)),) * len(
            self._layers
        )

    def features(self, hidden: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the features [T, F] for the target layers' outputs."""
        return self._fc(hidden)

    def extend(self, tokens: HeadTokens) -> None:
        """Write the KV of verified tokens; see `DraftHead.extend`."""
        place = self._place(tokens)
        hidden = tokens.previous
        for layer in self._layers[:-1]:
            hidden = layer(hidden, place)
        self._layers[-1].store(hidden, place)

    def draft(self, tokens: HeadTokens, verified: torch.Tensor, draft_index: torch.Tensor) -> HeadDraft:
        """Run one draft step; see `DraftHead.draft`."""
        place = self._place(tokens)
        hidden = tokens.previous
        for layer in self._layers:
            hidden = layer(hidden, place)
        normed = rms_norm(hidden, (self.feature_size,), self._gains, self._eps)
        return HeadDraft(normed if self._norms_output else hidden, self._vocabulary.widen(self._head(normed)))

    @property
    def layer(self) -> FeatureLayer | None:
        """See `DraftHead.layer`; None if the head has several layers or normalises around `fc`."""
        features = self._fc.plain
        if features is None or len(self._layers) > 1:
            return None
        return FeatureLayer(
            features=features, head=_weights(self._head), final_gains=self._gains, epsilon=self._eps,
            embedding=self._embedding, cosines=self._rotary.cosines, sines=self._rotary.sines,
            mark=MARK, unseen=UNSEEN, keeps_normed=self._norms_output, widen=self._vocabulary.widen,
            **self._layers[0].plain(),
        )  # fmt: skip

    def _place(self, tokens: HeadTokens) -> _Place:
        return _Place(tokens, embedding(tokens.token_ids, self._embedding), self._rotary.at(tokens.positions))


class _Rotary:
    """Rotary encodings of all positions that the target serves, computed once."""

    def __init__(self, file: HeadFile, form: Eagle3Format, target: TargetParts) -> None:
        try:
            rotary = LlamaRotaryEmbedding(form.layer).to(target.device)
        except Exception as error:  # an invalid configuration may raise any error
            raise refusal(
                f"{file.path}: its config.json has invalid rotary parameters ({type(error).__name__})"
            ) from error
        positions = torch.arange(target.max_context_tokens, device=target.device).unsqueeze(0)
        with torch.no_grad():
            cos, sin = rotary(torch.empty(0, dtype=target.dtype, device=target.device), positions)
        half = sin.shape[-1] // 2
        # rotate_half(x) = (-x2, x1): the sign is applied to the sines once.
        self._cos, self._sin = cos[0], torch.cat((-sin[0, :, :half], sin[0, :, half:]), dim=-1)  # [P, head_dim]

    @property
    def cosines(self) -> torch.Tensor:
        """Cosines [positions, head_dim]."""
        cosines: torch.Tensor = self._cos
        return cosines

    @property
    def sines(self) -> torch.Tensor:
        """Sines [positions, head_dim], without the sign of `rotate_half`."""
        half = self._sin.shape[-1] // 2
        return torch.cat((-self._sin[:, :half], self._sin[:, half:]), dim=-1)

    def at(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cosines and signed sines, each [T, 1, head_dim]."""
        return self._cos[positions].unsqueeze(1), self._sin[positions].unsqueeze(1)


@dataclass(frozen=True, slots=True)
class _Place:
    """Inputs of all layers for a step's tokens."""

    tokens: HeadTokens
    embedded: torch.Tensor  # [T, F]
    rotary: tuple[torch.Tensor, torch.Tensor]

    def rotate(self, heads: torch.Tensor) -> torch.Tensor:
        """Encode positions in [T, heads, head_dim]."""
        cos, signed_sin = self.rotary
        return torch.addcmul(heads * cos, heads.roll(heads.shape[-1] // 2, -1), signed_sin)


class _FeatureProjection:
    """`fc`: projection of the outputs of the target's layers to one vector a token."""

    def __init__(self, file: HeadFile, target: TargetParts, form: Eagle3Format) -> None:
        count, width = len(form.feature_layers), target.embedding.shape[1]
        self._fc = target.project(file.weight(target, "fc.weight", form.layer.hidden_size, count * width), None)
        self._eps = form.layer.rms_norm_eps
        self._whole = self._each = None
        if file.config.get("norm_before_fc"):
            self._whole = file.weight(target, "input_norm.weight", count * width)
        if file.config.get("fc_norm"):
            self._each = [file.weight(target, f"fc_norm.{index}.weight", width) for index in range(count)]

    @property
    def plain(self) -> Weights | None:
        """Weights of the projection; None if it also normalises."""
        return _weights(self._fc) if self._whole is None and self._each is None else None

    def __call__(self, hidden: Sequence[torch.Tensor]) -> torch.Tensor:
        if self._each is not None:
            hidden = [
                rms_norm(part, gains.shape, gains, self._eps) for part, gains in zip(hidden, self._each, strict=True)
            ]
        joined = torch.cat(tuple(hidden), dim=-1)  # [T, layers * H]
        if self._whole is not None:
            joined = rms_norm(joined, self._whole.shape, self._whole, self._eps)
        feature: torch.Tensor = self._fc(joined)
        return feature


class _Layer:
    """One of the head's decoder layers; the first reads the embedding and the feature."""

    def __init__(self, file: HeadFile, target: TargetParts, form: Eagle3Format, index: int) -> None:
        config, name = form.layer, f"layers.{index}"
        self._index, self._width, self._eps = index, config.hidden_size, config.rms_norm_eps
        self._norms_before_residual = form.norms_before_residual
        self.num_heads, self.num_kv_heads, self.head_dim = config.num_attention_heads, form.num_kv_heads, form.head_dim
        width, mlp = self._width, config.intermediate_size
        heads, kv = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        reader = _LayerReader(file, target, name)
        self._qkv = reader.product("self_attn", {"q_proj": heads, "k_proj": kv, "v_proj": kv},
                                   2 * width if index == 0 else width)  # fmt: skip
        self._output = reader.product("self_attn", {"o_proj": width}, heads)
        self._gate_up = reader.product("mlp", {"gate_proj": mlp, "up_proj": mlp}, width)
        self._down = reader.product("mlp", {"down_proj": width}, mlp)
        self._input_gains = reader.gains("input_layernorm", width)
        self._mlp_gains = reader.gains("post_attention_layernorm", width)
        self._feature_gains = reader.gains("hidden_norm", width) if index == 0 else None
        self._qk_gains = None
        if f"{name}.self_attn.q_norm.weight" in file.tensors:
            q, k = (reader.gains(f"self_attn.{part}_norm", self.head_dim) for part in "qk")
            self._qk_gains = torch.cat((q.expand(self.num_heads, -1), k.expand(self.num_kv_heads, -1)))

    def __call__(self, hidden: torch.Tensor, place: _Place) -> torch.Tensor:
        normed, residual = self._read(hidden, place)
        hidden = self._output.add_to(residual, self._attend(normed, place))
        gate, up = self._gate_up(self._norm(hidden, self._mlp_gains)).chunk(2, dim=-1)
        return self._down.add_to(hidden, silu(gate) * up)

    def plain(self) -> dict[str, Any]:
        """Return the fields of `FeatureLayer` that describe this layer, the head's first."""
        return {
            "qkv": _weights(self._qkv), "output": _weights(self._output), "gate_up": _weights(self._gate_up),
            "down": _weights(self._down), "embedding_gains": self._input_gains, "feature_gains": self._feature_gains,
            "mlp_gains": self._mlp_gains, "qk_gains": self._qk_gains, "num_heads": self.num_heads,
            "num_kv_heads": self.num_kv_heads, "head_dim": self.head_dim, "adds_normed": self._norms_before_residual,
        }  # fmt: skip

    def store(self, hidden: torch.Tensor, place: _Place) -> None:
        """Write this layer's KV without computing the rest of the layer."""
        self._attend(self._read(hidden, place)[0], place)

    def _read(self, hidden: torch.Tensor, place: _Place) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the input of attention, and the residual that its output is added to."""
        if self._feature_gains is None:
            return self._norm(hidden, self._input_gains), hidden
        feature = self._norm(hidden, self._feature_gains)
        normed = torch.cat((self._norm(place.embedded, self._input_gains), feature), dim=-1)
        return normed, feature if self._norms_before_residual else hidden

    def _attend(self, normed: torch.Tensor, place: _Place) -> torch.Tensor:
        """Return the output [T, heads * head_dim] of attention."""
        heads, dim = self.num_heads, self.head_dim
        both, value = (
            self._qkv(normed).view(len(normed), -1, dim).split((heads + self.num_kv_heads, self.num_kv_heads), dim=1)
        )  # queries and keys [T, heads + kv_heads, dim], values [T, kv_heads, dim]
        rotated = place.rotate(
            both if self._qk_gains is None else rms_norm(both, (dim,), None, self._eps) * self._qk_gains
        )
        query, key = rotated.split((heads, self.num_kv_heads), dim=1)
        return attend_after_first(place.tokens, self._index, query, key, value, dim**-0.5).flatten(1)

    def _norm(self, x: torch.Tensor, gains: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, gains.shape, gains, self._eps)


@dataclass(frozen=True, slots=True)
class _LayerReader:
    """Reader of one decoder layer's weights."""

    file: HeadFile
    target: TargetParts
    name: str

    def gains(self, part: str, size: int) -> torch.Tensor:
        """Return the gains [size] of a norm."""
        return self.file.weight(self.target, f"{self.name}.{part}.weight", size)

    def product(self, group: str, sizes: dict[str, int], inputs: int) -> Projection:
        """Return one projection for several that share their input, with outputs in the order of `sizes`."""
        names = {f"{self.name}.{group}.{part}": size for part, size in sizes.items()}
        weights = [self.file.weight(self.target, f"{name}.weight", size, inputs) for name, size in names.items()]
        biased = {name: size for name, size in names.items() if f"{name}.bias" in self.file.tensors}
        if len(biased) not in (0, len(names)):
            raise refusal(f"{self.file.path}: only some of {', '.join(names)} have a bias")
        biases = [self.file.weight(self.target, f"{name}.bias", size) for name, size in biased.items()]
        return self.target.project(torch.cat(weights), torch.cat(biases) if biases else None)


def _weights(projection: Projection) -> Weights:
    return Weights(projection.weight, projection.bias)


def _plain_name(name: str) -> str:
    return re.sub(r"^midlayer\.", "layers.0.", name.removeprefix("model."))


def _embedding(file: HeadFile, target: TargetParts, form: Eagle3Format) -> torch.Tensor:
    """Return the embedding [rows, F]: the head's own table, or else the target's."""
    if "embed_tokens.weight" in file.tensors:
        table = file.weight(target, "embed_tokens.weight", None, form.layer.hidden_size)
        if len(table) < target.vocabulary_size:
            raise refusal(
                f"{file.path}: the tensor embed_tokens.weight is {list(table.shape)}, and the target has "
                f"{target.vocabulary_size} tokens"
            )
        return table
    if target.embedding.shape[1] != form.layer.hidden_size:
        raise refusal(
            f"{file.path} lacks the tensor embed_tokens.weight, and the target's own has shape "
            f"{list(target.embedding.shape)}, where the head needs {form.layer.hidden_size} columns"
        )
    return target.embedding
