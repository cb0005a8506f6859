"""Offer the parts of a checkpoint's tensors that a rank holds to transformers, which reads them without the others.

A part is read when transformers asks for it. So transformers decides, as it does for a whole model, which tensor of the
files belongs to which parameter, what is missing, and whether embedding and head are one matrix.
`engine.parallel.splitting` says which part a rank holds. Called by `engine.parallel.sharded_llama`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from math import prod
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from safetensors import safe_open

from specdec.checkpoints.gguf.file import is_gguf
from specdec.checkpoints.weight_files import safetensors_files
from specdec.contract.errors import InvalidRequest, Unsupported
from specdec.engine.model.gguf_state import gguf_state
from specdec.engine.parallel.splitting import Cut

# Prefix of the names of all weights except the head's. transformers adds or removes it if files differ.
_PREFIX = "model."


class SliceReader:
    """Tensors of one checkpoint, whose files are open until the end of the `with` block."""

    def __init__(self, model: str, directory: Path) -> None:
        """
        Args:
            model: name that the user gave.
            directory: directory of the checkpoint.

        Raises:
            Unsupported: the format of its files does not allow reading parts.
            InvalidRequest: the files are damaged.
        """
        self.num_bytes = 0
        """Bytes of the tensors that were read."""
        self._model = model
        self._open_files = ExitStack()
        if is_gguf(path := Path(model).expanduser()):
            self._stored: dict[str, Any] = gguf_state(path)
            self.all_bytes = sum(torch.float32.itemsize * prod(weight.shape) for weight in self._stored.values())
        else:
            self._stored, self.all_bytes = self._open(model, directory)

    def _open(self, model: str, directory: Path) -> tuple[dict[str, Any], int]:
        """Return the tensors of safetensors files, which have not been read, and the size of the files."""
        stored: dict[str, Any] = {}
        paths = safetensors_files(model, directory)
        if not paths:
            raise Unsupported(f"model {model!r} has no safetensors: a rank cannot read a part of other weight files")
        for path in paths:
            try:
                file = self._open_files.enter_context(safe_open(path, framework="pt"))
            except Exception as error:  # safetensors raises many kinds of errors
                raise InvalidRequest(f"model {model!r} cannot be loaded: {error}", field="model") from error
            names: list[str] = file.keys()
            stored |= {name: file.get_slice(name) for name in names}
        return stored, sum(path.stat().st_size for path in paths)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open_files.close()

    def parts(self, shapes: Mapping[str, Sequence[int]], cut_of: Callable[[str], Cut | None]) -> dict[str, TensorPart]:
        """Return this rank's part of every tensor, by its name in the files.

        Args:
            shapes: shapes of the whole model's parameters, by name.
            cut_of: returns this rank's part of a parameter; None if the rank holds all of it.

        Raises:
            InvalidRequest: a tensor has another shape than its parameter.
        """
        return {key: self._part(key, stored, shapes, cut_of) for key, stored in self._stored.items()}

    def _part(
        self, key: str, stored: Any, shapes: Mapping[str, Sequence[int]], cut_of: Callable[[str], Cut | None]
    ) -> TensorPart:
        names = (key, _PREFIX + key, key.removeprefix(_PREFIX))
        name = next((name for name in names if name in shapes), None)
        if name is None:  # no parameter of this model, or one that transformers renames
            return TensorPart(stored, None, self._count)
        if list(stored.get_shape()) != list(shapes[name]):
            raise InvalidRequest(
                f"model {self._model!r} cannot be loaded: tensor {name} has shape {stored.get_shape()}, and its "
                f"configuration needs {list(shapes[name])}",
                field="model",
            )
        return TensorPart(stored, cut_of(name), self._count)

    def _count(self, num_bytes: int) -> None:
        self.num_bytes += num_bytes


class TensorPart:
    """A part of a stored tensor, with the operations that transformers uses on a tensor that it is to load."""

    def __init__(self, stored: Any, cut: Cut | None, count: Callable[[int], None]) -> None:
        """
        Args:
            stored: safetensors' slice of the whole tensor, or a weight of a GGUF file.
            cut: range to read; None for the whole tensor.
            count: called with the number of bytes of each tensor that was read.
        """
        self._stored, self._cut, self._count = stored, cut, count

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the file."""
        dtype: torch.dtype = self._stored[:0].dtype
        return dtype

    def is_floating_point(self) -> bool:
        return self.dtype.is_floating_point

    def __getitem__(self, _everything: object) -> torch.Tensor:
        """Read the part, followed by zeros up to the width of the rank's weight."""
        cut, stored = self._cut, self._stored
        if cut is None:
            return self._counted(stored[:])
        part = self._counted(stored[cut.start : cut.end] if cut.axis == 0 else stored[:, cut.start : cut.end])
        missing = cut.width - part.shape[cut.axis]
        if not missing:
            return part
        shape = list(part.shape)
        shape[cut.axis] = missing
        return torch.cat((part, part.new_zeros(shape)), dim=cut.axis)

    def _counted(self, part: torch.Tensor) -> torch.Tensor:
        self._count(part.nbytes)
        return part
