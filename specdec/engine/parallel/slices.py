"""Parts of a checkpoint's tensors, read from its files without the rest of them.

Not here: which parts (`engine.parallel.splitting`). Called by `engine.parallel.sharded_llama`.
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
# Checkpoints of a model without its head leave it out.
_PREFIX = "model."


class SliceReader:
    """The tensors of one checkpoint, open until the end of its `with` block."""

    def __init__(self, model: str, directory: Path) -> None:
        """
        Args:
            model: as it was named.
            directory: where it lies.

        Raises:
            Unsupported: its weights are in files of which no part can be read.
            InvalidRequest: the files are damaged.
        """
        self.num_bytes = 0
        """Of the tensors that were read."""
        self._model = model
        self._open_files = ExitStack()
        self._file_of: dict[str, Any] = {}
        files = _files(model, directory)
        for path in files:
            try:
                file = self._open_files.enter_context(safe_open(path, framework="pt"))
            except Exception as error:  # safetensors has an error of its own for each fault
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
        """A part of a tensor, in the dtype of its file.

        Args:
            name: as the model calls it.
            shape: that the whole tensor must have.
            cut: the part, not an empty one; None: all of it.

        Raises:
            InvalidRequest: it is not there, or of another shape.
        """
        key = name if name in self._file_of else name.removeprefix(_PREFIX)
        if key not in self._file_of:
            raise InvalidRequest(f"model {self._model!r} lacks weights, {name} for one", field="model")
        stored = self._file_of[key].get_slice(key)
        if list(stored.get_shape()) != list(shape):
            raise InvalidRequest(
                f"model {self._model!r} cannot be loaded: {name} has the shape {stored.get_shape()}, not {list(shape)}",
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
        raise Unsupported(f"model {model!r} has no {_WHOLE}: of other files no rank can read its part alone")
    try:
        names = set(json.loads(index.read_bytes())["weight_map"].values())
        return [directory / Path(name).name for name in sorted(names)]
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise InvalidRequest(f"model {model!r} has an unreadable {_INDEX}: {error}", field="model") from error
