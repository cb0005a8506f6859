"""Check from their headers that a checkpoint's weight files are complete, because downloads may stop halfway.

The header of every format states where in the file each tensor is. A file that ends before its last tensor is refused
here within milliseconds, instead of after everything else has been loaded. No weights are read. Called by
`specdec.checkpoints.preflight`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specdec.checkpoints.text_weights import is_text_weight
from specdec.contract.errors import InvalidRequest

#: Limit of a safetensors header, set by the format.
_MOST_HEADER_BYTES = 100_000_000
_INDEX = "model.safetensors.index.json"


class DamagedHeader(Exception):
    """A file contradicts its header; the message says how."""


@dataclass(frozen=True, slots=True)
class TensorHeader:
    """Place and form of a tensor in a safetensors file."""

    file: Path
    dtype: str
    """Name of the dtype in the format, such as BF16, F8_E4M3 or I32."""
    shape: tuple[int, ...]
    start: int
    """Offset of its first byte in the file."""


def require_whole_weights(model: str, directory: Path, *, text_only: bool = False) -> None:
    """Check the headers of the files that a checkpoint's weights are loaded from.

    Args:
        model: name of the checkpoint, as the user gave it.
        directory: its directory.
        text_only: only the text half is loaded, so files that hold nothing else may be absent.

    Raises:
        InvalidRequest: a file is missing or ends before its last tensor. The message has its name and both lengths.
    """
    for path in safetensors_files(model, directory, text_only=text_only):
        if not path.is_file():
            raise InvalidRequest(f"model {model!r} has no {path.name}, which its {_INDEX} names", field="model")
        try:
            _require_length(path.stat().st_size, _safetensors_length(path))
        except (DamagedHeader, OSError) as error:
            raise InvalidRequest(
                f"model {model!r} has a damaged {path.name}: {error}; was the download cut short?", field="model"
            ) from error


def _require_length(size: int, least: int) -> None:
    if size < least:
        raise DamagedHeader(f"it has {size} of {least} bytes")


def safetensors_files(model: str, directory: Path, *, text_only: bool = False) -> list[Path]:
    """Return the safetensors files that are loaded; the directory may hold others.

    With `text_only`, files that hold no tensor of the text half are left out.
    """
    if (whole := directory / "model.safetensors").is_file():
        return [whole]
    if not (index := directory / _INDEX).is_file():
        return []
    try:
        stored = json.loads(index.read_bytes())["weight_map"]
        names = {str(name) for tensor, name in stored.items() if not text_only or is_text_weight(tensor)}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise InvalidRequest(f"model {model!r} has an unreadable {_INDEX}: {error}", field="model") from error
    return [directory / name for name in sorted(names)]


def tensor_headers(model: str, directory: Path, *, text_only: bool = False) -> dict[str, TensorHeader]:
    """Return the tensors of the safetensors files that are loaded, by name; arguments are those of `safetensors_files`.

    Raises:
        InvalidRequest: a file is missing, unless `text_only`, or its header is damaged.
    """
    found: dict[str, TensorHeader] = {}
    for path in safetensors_files(model, directory, text_only=text_only):
        if text_only and not path.is_file():  # its names alone seemed to be the text half's
            continue
        try:
            found |= _tensors_of(path)
        except (DamagedHeader, OSError) as error:
            raise InvalidRequest(f"model {model!r} has a damaged {path.name}: {error}", field="model") from error
    return found


def _tensors_of(path: Path) -> dict[str, TensorHeader]:
    length, tensors = _safetensors_header(path)
    try:
        return {
            name: TensorHeader(
                path, str(entry["dtype"]), tuple(map(int, entry["shape"])), 8 + length + int(entry["data_offsets"][0])
            )
            for name, entry in tensors.items()
        }
    except (ValueError, KeyError, IndexError, TypeError):
        raise DamagedHeader("its header is unreadable") from None


def _safetensors_length(path: Path) -> int:
    """Return the least size of a file in bytes. Raise DamagedHeader if its header is cut off."""
    length, tensors = _safetensors_header(path)
    try:
        return 8 + length + max((int(tensor["data_offsets"][1]) for tensor in tensors.values()), default=0)
    except (ValueError, KeyError, IndexError, TypeError, AttributeError):
        raise DamagedHeader("its header is unreadable") from None


def _safetensors_header(path: Path) -> tuple[int, dict[str, Any]]:
    """Return the length of a file's header in bytes and its tensors. Raise DamagedHeader if it is cut off."""
    with path.open("rb") as file:
        prefix = file.read(8)
        num_bytes = int.from_bytes(prefix, "little")
        header = file.read(num_bytes) if num_bytes <= _MOST_HEADER_BYTES else b""
    if len(prefix) < 8 or len(header) < num_bytes:
        raise DamagedHeader("it ends within its header")
    try:
        tensors: dict[str, Any] = json.loads(header)
        tensors.pop("__metadata__", None)
    except (ValueError, TypeError, AttributeError, RecursionError):
        raise DamagedHeader("its header is unreadable") from None
    return num_bytes, tensors
