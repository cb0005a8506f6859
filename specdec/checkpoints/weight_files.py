"""Check from their headers that a checkpoint's weight files are complete, because downloads may stop halfway.

The header of every format states where in the file each tensor is. A file that ends before its last tensor is refused
here within milliseconds, instead of after everything else has been loaded. No weights are read. Called by
`specdec.checkpoints.preflight`.
"""

from __future__ import annotations

import json
from pathlib import Path

from specdec.checkpoints.text_weights import is_text_weight
from specdec.contract.errors import InvalidRequest

#: Limit of a safetensors header, set by the format.
_MOST_HEADER_BYTES = 100_000_000
_INDEX = "model.safetensors.index.json"


class DamagedHeader(Exception):
    """A file contradicts its header; the message says how."""


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


def _safetensors_length(path: Path) -> int:
    """Return the least size of a file in bytes. Raise DamagedHeader if its header is cut off."""
    with path.open("rb") as file:
        prefix = file.read(8)
        num_bytes = int.from_bytes(prefix, "little")
        header = file.read(num_bytes) if num_bytes <= _MOST_HEADER_BYTES else b""
    if len(prefix) < 8 or len(header) < num_bytes:
        raise DamagedHeader("it ends within its header")
    try:
        tensors = json.loads(header)
        tensors.pop("__metadata__", None)
        return 8 + num_bytes + max((int(tensor["data_offsets"][1]) for tensor in tensors.values()), default=0)
    except (ValueError, KeyError, IndexError, TypeError, AttributeError, RecursionError):
        raise DamagedHeader("its header is unreadable") from None
