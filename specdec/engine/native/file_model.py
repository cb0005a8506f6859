"""transformers' model of a GGUF file whose matrices stay in the file: a forward pass widens them layer by layer.

It is slow and takes little memory. Its forward pass is what a worker of the same file is compared with. Called by
`specdec.engine.loader`.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from specdec.checkpoints.gguf.file import KINDS, GgufFile, is_gguf
from specdec.checkpoints.gguf.weights import Weight, weights_of
from specdec.engine.model.layer_probe import PROBE_NAME, is_probing
from specdec.engine.native.file_layout import EMBEDDINGS, HEAD, FileLayout, FromFile
from specdec.engine.native.file_rows import FileRows, rows_of, widened
from specdec.engine.native.packing import PackedModel

#: Types of models whose modules have the names that `FileLayout` expects.
_TYPES = ("llama", "mistral", "qwen2", "qwen3")
#: Memory, as a multiple of the file, from which a user is told.
_WIDER = 1.3
_PLAIN_NAMES = {"F32", "F16", "BF16"}

_log = logging.getLogger(__name__)

#: Most numbers that are widened at once: 16 MB, which a processor's cache holds until they are multiplied.
_AT_ONCE = 1 << 22


@dataclass(frozen=True, slots=True)
class _Widening:
    """The kernels and the memory with which the matrices of a model widen their rows."""

    library: ctypes.CDLL
    numbers: torch.Tensor
    """Memory for the rows of one product. The next one uses it again, because new memory takes longer to get than to
    fill."""

    def rows(self, runs: Sequence[FileRows], begin: int, end: int) -> torch.Tensor:
        """Return rows of a matrix, float32, which are valid until the next call."""
        inputs = runs[0].inputs
        numbers = self.numbers[: (end - begin) * inputs].view(end - begin, inputs)
        at = 0
        for run in runs:
            first, last = max(0, begin - at), min(len(run), end - at)
            if first < last:
                into = numbers[at + first - begin : at + last - begin]
                FileRows(run.kind, inputs, run.addresses[first:last]).widened(self.library, into)
            at += len(run)
        return numbers


class _FileMatrix(nn.Module):
    """A matrix in a file. Its `weight` has the shape and no numbers."""

    def __init__(self, weight: Weight, widening: _Widening) -> None:
        super().__init__()
        # One NaN in the place of all numbers: a module that read them would be noticed.
        self.weight = nn.Parameter(torch.full((1, 1), torch.nan).expand(weight.shape), requires_grad=False)
        self._runs, self._widening = rows_of([weight]), widening


class FileLinear(_FileMatrix):
    """A linear layer."""

    def __init__(self, weight: Weight, bias: Weight | None, widening: _Widening) -> None:
        super().__init__(weight, widening)
        self.out_features, self.in_features = weight.shape
        self.bias = None if bias is None else nn.Parameter(widened(bias, widening.library), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return x [..., inputs] times the matrix, plus the bias."""
        if is_probing():  # which reads no numbers
            return x.new_zeros(*x.shape[:-1], self.out_features)
        y = x.new_empty(*x.shape[:-1], self.out_features)
        step = max(1, len(self._widening.numbers) // self.in_features)
        for begin in range(0, self.out_features, step):
            end = min(begin + step, self.out_features)
            y[..., begin:end] = nn.functional.linear(x, self._widening.rows(self._runs, begin, end))
        return y if self.bias is None else y + self.bias


class FileEmbedding(_FileMatrix):
    """A table of embeddings."""

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Return the rows of tokens, [..., hidden]."""
        rows = [self._widening.rows(self._runs, token, token + 1).clone() for token in token_ids.flatten().tolist()]
        return torch.cat(rows).view(*token_ids.shape, -1)


def tell_if_wider(path: Path, held_bytes: int) -> None:
    """Warn if a model from a GGUF file takes much more memory than its file, and name what runs it as it is."""
    if not is_gguf(path):
        return
    file = GgufFile(path)
    if held_bytes > _WIDER * file.num_bytes:
        kinds = ", ".join(sorted({KINDS[tensor.kind].name for tensor in file.tensors.values()} - _PLAIN_NAMES))
        _log.warning(
            "%s takes %.0f MB of memory instead of the file's %.0f MB, because not all of its weights (%s) are used "
            "as they are stored; llama.cpp does that: specdec up --target %s --backend llama-cpp",
            path.name, held_bytes / 1e6, file.num_bytes / 1e6, kinds, path,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class FileModel:
    """A model whose weights stay in a file."""

    file: GgufFile
    weights: Mapping[str, Weight]
    """Weights by the names that transformers gives them."""
    model: PreTrainedModel
    library: ctypes.CDLL

    def packed(self, from_file: FromFile, caches: Sequence[int]) -> PackedModel:
        """Return the model for the kernels; `caches`: address of each layer's KV pool."""
        packed = FileLayout(self.library, self.weights, from_file, caches).packed
        self.file.release()
        tell_if_wider(self.file.path, packed.packing.num_bytes - self.weights[EMBEDDINGS].parts[0].data.nbytes)
        return packed


def open_file_model(path: Path, config: PreTrainedConfig, library: ctypes.CDLL) -> FileModel | None:
    """Return the model of a GGUF file, with the probe as its attention; None for a file or folder of another kind.

    Args:
        path: the file.
        config: configuration of a model that may have any shape; only a Llama-shaped one can be packed.
        library: the kernels.

    Raises:
        InvalidRequest, Unsupported: the file is damaged, or does not hold what its header says.
    """
    if not is_gguf(path) or config.model_type not in _TYPES:
        return None
    file = GgufFile(path)
    weights = weights_of(file, config.to_dict())
    with torch.device("meta"):
        model = cast(PreTrainedModel, AutoModelForCausalLM.from_config(config, attn_implementation=PROBE_NAME))
    of_module = {HEAD: weights[EMBEDDINGS], **weights}
    longest = max(weight.shape[-1] for weight in weights.values())
    widening = _Widening(library, torch.empty(max(_AT_ONCE, longest)))
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.Linear):
            bias = of_module.get(f"{name}.bias")
            model.set_submodule(name, FileLinear(of_module[f"{name}.weight"], bias, widening))
        elif isinstance(module, nn.Embedding):
            model.set_submodule(name, FileEmbedding(of_module[f"{name}.weight"], widening))
        elif f"{name}.weight" in of_module:
            module.weight = nn.Parameter(widened(of_module[f"{name}.weight"], library), requires_grad=False)
    model.model.rotary_emb = type(model.model.rotary_emb)(config)
    model.eval()
    return FileModel(file, weights, model, library)
