"""Find each parameter of transformers' model among the tensors of a GGUF file.

A tensor may hold several parameters, and a parameter several tensors: their rows are put side by side and picked from
there. What the file lacks, has besides, or has in another shape is refused by its name. Nothing is read here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn

import numpy as np
from numpy.typing import NDArray

from specdec.checkpoints.gguf.architectures import known_architecture
from specdec.checkpoints.gguf.description import SHAPES, Architecture, sizes_of
from specdec.checkpoints.gguf.file import KINDS, GgufFile, StoredTensor
from specdec.checkpoints.gguf.rope import DIVISORS, LONG_DIVISORS, SHORT_DIVISORS
from specdec.contract.errors import InvalidRequest, Unsupported

_EMBEDDING, _HEAD = "token_embd", "output"
_QUERIES_KEYS_VALUES, _JOINED = ("attn_q", "attn_k", "attn_v"), "attn_qkv"
_EXPERT_PARTS, _JOINED_EXPERTS = ("ffn_gate_exps", "ffn_up_exps"), "ffn_gate_up_exps"
#: Parameters whose names do not end with `.weight`.
_BARE = re.compile(r".*\.(experts\.\w+|sinks|scale|per_expert_scale|layer_scalar)")
#: Types of tensors that hold no weights, or that no model uses for them.
_NOT_WEIGHTS = {"I8", "I16", "I32", "I64", "F64", "Q8_1", "Q8_K"}


@dataclass(frozen=True, slots=True, eq=False)
class Weight:
    """A parameter of a model: rows of one or more tensors, in another order, each number plus a constant.

    A row is the last dimension of a tensor; of a vector, and of a bias that experts have, it is a single number.
    """

    parts: tuple[StoredTensor, ...]
    """Tensors whose rows follow each other."""
    row_order: NDArray[np.int64] | None = None
    """Row r of the parameter is row `row_order[r]` of the parts, which may hold further rows; None: it has all of them
    in their order.  [rows]"""
    shift: float = 0.0
    """Number that is added to each number of the parts."""
    is_transposed: bool = False
    """True if the parameter has rows and columns swapped."""
    own_shape: tuple[int, ...] | None = None
    """Shape of the parameter; None: the shape of its parts side by side."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the parameter."""
        if self.own_shape is not None:
            return self.own_shape
        rows = sum(part.shape[0] for part in self.parts)
        return (rows, *self.parts[0].shape[1:])

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """Shape of the parameter before rows and columns are swapped."""
        if not self.is_transposed:
            return self.shape
        *outer, rows, columns = self.shape
        return (*outer, columns, rows)


def weights_of(file: GgufFile, config: Mapping[str, Any]) -> dict[str, Weight]:
    """Return the weights of a model by the names of its parameters.

    Args:
        file: the file.
        config: as `config_of` returns it for the file.

    Raises:
        InvalidRequest: a tensor is missing or has another shape.
        Unsupported: the file has a tensor that the model has not, or one whose type holds no weights.
    """
    return _Finder(file, config).weights()


class _Rows(NamedTuple):
    """Rows of tensors."""

    parts: tuple[StoredTensor, ...]
    order: NDArray[np.int64] | None = None


class _Finder:
    """Tensors of a file, and which of them have been found."""

    def __init__(self, file: GgufFile, config: Mapping[str, Any]) -> None:
        self._file, self._config, self._sizes = file, config, sizes_of(config)
        self._architecture: Architecture = known_architecture(file)
        self._left = dict.fromkeys(file.tensors)

    def weights(self) -> dict[str, Weight]:
        architecture, config, found = self._architecture, self._config, dict[str, Weight]()
        by_layer = architecture.by_layer
        for parameter, tensor in (by_layer.outer(config) if by_layer else architecture.outer).items():
            self._add(found, parameter, tensor, "")
        if not config["tie_word_embeddings"]:
            self._add(found, "lm_head", _HEAD, "")
        for index in range(config["num_hidden_layers"]):
            layer = by_layer.layer(config, index) if by_layer else architecture.layer
            self._sizes = by_layer.sizes(config, index) if by_layer else self._sizes
            for parameter, tensor in layer.items():
                self._add(found, f"{architecture.layers}.{index}.{parameter}", tensor, f"blk.{index}.")
        self._require_none_left()
        return found

    def _add(self, found: dict[str, Weight], parameter: str, tensor: str, prefix: str) -> None:
        is_bare, (tensor, _, suffix) = _BARE.fullmatch(parameter) is not None, tensor.partition(".")
        name = parameter if is_bare else f"{parameter}.weight"
        found[name] = self._weight(tensor, prefix, f".{suffix or 'weight'}")
        if self._has_bias(tensor):
            found[f"{parameter}{'_' if is_bare else '.'}bias"] = self._weight(tensor, prefix, ".bias")

    def _has_bias(self, tensor: str) -> bool:
        return any(
            tensor in tensors and (not field or self._config[field])
            for field, tensors in self._architecture.biases.items()
        )

    def _weight(self, tensor: str, prefix: str, suffix: str) -> Weight:
        rows, shape = self._rows(tensor, prefix, suffix), self._shape(tensor, suffix)
        if self._architecture.is_paired and tensor in ("attn_q", "attn_k"):
            order = _unpaired(shape[0], self._sizes["D"])
            rows = rows._replace(order=order if rows.order is None else rows.order[order])
        is_norm = tensor.endswith("norm") and suffix == ".weight"
        is_transposed = tensor in self._architecture.transposed and suffix == ".weight"
        shift = -1.0 if is_norm and self._architecture.adds_one_to_norms else 0.0
        own_shape = (*shape[:-2], shape[-1], shape[-2]) if is_transposed else shape
        return Weight(rows.parts, rows.order, shift, is_transposed, own_shape)

    def _rows(self, tensor: str, prefix: str, suffix: str) -> _Rows:
        """Return the rows of a tensor, which a file may hold in one with others, or in its parts."""
        present = self._file.tensors.keys()
        if f"{prefix}{tensor}{suffix}" not in present:
            if tensor in _QUERIES_KEYS_VALUES and f"{prefix}{_JOINED}{suffix}" in present:
                return self._rows_of_joined(tensor, prefix, suffix)
            if tensor == _JOINED and f"{prefix}{_QUERIES_KEYS_VALUES[0]}{suffix}" in present:
                return _Rows(tuple(self._stored(part, prefix, suffix) for part in _QUERIES_KEYS_VALUES))
            if tensor == _JOINED_EXPERTS:
                parts = tuple(self._stored(part, prefix, suffix) for part in _EXPERT_PARTS)
                alternates = self._architecture.alternates_experts
                return _Rows(parts, _expert_by_expert(self._sizes["E"], self._sizes["X"], alternates=alternates))
        return _Rows((self._stored(tensor, prefix, suffix),))

    def _rows_of_joined(self, tensor: str, prefix: str, suffix: str) -> _Rows:
        joined = self._stored(_JOINED, prefix, suffix)
        lengths = [self._shape(part, suffix)[0] for part in _QUERIES_KEYS_VALUES]
        index = _QUERIES_KEYS_VALUES.index(tensor)
        first = sum(lengths[:index])
        return _Rows((joined,), np.arange(first, first + lengths[index]))

    def _stored(self, tensor: str, prefix: str, suffix: str) -> StoredTensor:
        """Return a tensor of the file."""
        name, shape = f"{prefix}{tensor}{suffix}", self._shape(tensor, suffix)
        stored = self._file.tensors.get(name)
        if stored is None:
            self._refuse(f"lacks the tensor {name}, which its model of type {self._config['model_type']} needs")
        if _significant(stored.shape) != _significant(shape):
            self._refuse(
                f"has the tensor {name} of the shape {list(stored.shape)}, and its metadata says {list(shape)}"
            )
        if (kind := KINDS[stored.kind].name) in _NOT_WEIGHTS:
            raise Unsupported(
                f"model {str(self._file.path)!r} has the tensor {name} of type {kind}, which models do not use for "
                "weights; serve it with --backend llama-cpp",
                field="model",
            )
        self._left.pop(name, None)
        return stored

    def _shape(self, tensor: str, suffix: str) -> tuple[int, ...]:
        stated = SHAPES.get(f"{tensor}{suffix}") or self._architecture.shapes.get(tensor, SHAPES[tensor])
        shape = tuple(_size(term, self._sizes) for term in stated.split(","))
        return shape[:-1] if suffix == ".bias" and len(shape) > 1 else shape

    def _require_none_left(self) -> None:
        rope = self._architecture.rope
        read = {DIVISORS: rope and (rope.reads_divisors or rope.is_proportional), LONG_DIVISORS: rope and rope.is_long,
                SHORT_DIVISORS: rope and rope.is_long}  # fmt: skip
        by_layer = self._architecture.by_layer
        left = [name for name in self._left if not read.get(name)]
        left = [name for name in left if by_layer is None or not by_layer.is_unused(self._config, name)]
        if left:
            raise Unsupported(
                f"model {str(self._file.path)!r} has the tensor {left[0]}, which no model of type "
                f"{self._config['model_type']} has ({len(left)} such in all): served as that type, it would be a "
                "different model; serve it with --backend llama-cpp",
                field="model",
            )

    def _refuse(self, fault: str) -> NoReturn:
        raise InvalidRequest(f"model {str(self._file.path)!r} {fault}: convert or download it again", field="model")


def _size(term: str, sizes: Mapping[str, int]) -> int:
    """Return a size such as `Q+2K`."""
    return sum(int(factor or 1) * sizes.get(letter, 1) for factor, letter in re.findall(r"(\d*)([A-Z]?)", term)
               if factor or letter)  # fmt: skip


def _significant(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return a shape without its outermost sizes of 1, which files may leave out."""
    return shape[1:] if len(shape) > 1 and shape[0] == 1 else shape


def _unpaired(num_rows: int, width: int) -> NDArray[np.int64]:
    """Return the order of rows that undoes llama.cpp's order of rotated pairs in heads of this width."""
    rows = np.arange(num_rows).reshape(-1, width // 2, 2)
    return np.ascontiguousarray(rows.swapaxes(1, 2).reshape(-1))


def _expert_by_expert(num_experts: int, width: int, *, alternates: bool) -> NDArray[np.int64]:
    """Return the order of rows that puts the gates of each expert before its other inputs, or each before its own."""
    rows = np.arange(2 * num_experts * width).reshape(2, num_experts, width)
    return np.ascontiguousarray(np.moveaxis(rows, 0, 2 if alternates else 1).reshape(-1))
