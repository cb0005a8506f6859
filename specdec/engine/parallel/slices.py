"""Read parts of a checkpoint's tensors from its files, without reading the other parts.

`engine.parallel.splitting` says which part a rank holds. Called by `engine.parallel.sharded_llama`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from safetensors import safe_open

from specdec.engine.parallel.splitting import Cut
from specdec.errors import InvalidRequest, Unsupported

_INDEX = "model.safetensors.index.json"
_WHOLE = "model.safetensors"
# Prefix that checkpoints of a model without its head leave out.
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
        self._file_of: dict[str, Any] = {}
        files = _files(model, directory)
        for path in files:
            try:
                file = self._open_files.enter_context(safe_open(path, framework="pt"))
            except Exception as error:  # safetensors raises many kinds of errors
                raise InvalidRequest(f"model {model!r} cannot be loaded: {error}", field="model") from error
            self._file_of |= dict.fromkeys(file.keys(), file)
        self.all_bytes = sum(path.stat().st_size for path in files)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open_files.close()

    def read(self, name: str, shape: Sequence[int], cut: Cut | None) -> torch.Tensor:
        """Read a part of a tensor, in the dtype of its file.

        Args:
            name: parameter name in the model.
            shape: required shape of the whole tensor.
            cut: part to read, which must not be empty; None reads all of it.

        Raises:
            InvalidRequest: the tensor is missing or has another shape.
        """
        key = name if name in self._file_of else name.removeprefix(_PREFIX)
        if key not in self._file_of:
            raise InvalidRequest(f"model {self._model!r} lacks the weight {name}", field="model")
        stored = self._file_of[key].get_slice(key)
        if list(stored.get_shape()) != list(shape):
            raise InvalidRequest(
                f"model {self._model!r} cannot be loaded: tensor {name} has shape {stored.get_shape()}, and its "
                f"configuration needs {list(shape)}",
                field="model",
            )
        if cut is None:
            part = stored[:]
        else:
            part = stored[cut.start : cut.end] if cut.axis == 0 else stored[:, cut.start : cut.end]
        self.num_bytes += part.nbytes
        tensor: torch.Tensor = part
        return tensor


def _files(model: str, directory: Path) -> list[Path]:
    index = directory / _INDEX
    if not index.is_file():
        if (directory / _WHOLE).is_file():
            return [directory / _WHOLE]
        raise Unsupported(f"model {model!r} has no {_WHOLE}: a rank cannot read a part of other weight files")
    try:
        names = set(json.loads(index.read_bytes())["weight_map"].values())
        return [directory / Path(name).name for name in sorted(names)]
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise InvalidRequest(f"model {model!r} has an unreadable {_INDEX}: {error}", field="model") from error
