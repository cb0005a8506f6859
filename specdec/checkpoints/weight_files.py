"""Check from their headers that a checkpoint's weight files are complete, because downloads may stop halfway.

The header of every format states where in the file each tensor is. A file that ends before its last tensor is refused
here within milliseconds, instead of after everything else has been loaded. No weights are read. Called by
`specdec.checkpoints.preflight`.
"""

from __future__ import annotations

import json
import mmap
import struct
from pathlib import Path

from specdec.errors import InvalidRequest

#: Limit of a safetensors header, set by the format.
_MOST_HEADER_BYTES = 100_000_000
_INDEX = "model.safetensors.index.json"

#: Bytes of a number in GGUF's metadata, by type number. Type 8 is a string, type 9 an array.
_SCALAR_BYTES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
_STRING, _ARRAY = 8, 9
#: Number of weights and of bytes in a block, by ggml's type number. A tensor of any other type counts as one byte.
_BLOCKS = {
    0: (1, 4), 1: (1, 2), 2: (32, 18), 3: (32, 20), 6: (32, 22), 7: (32, 24), 8: (32, 34), 9: (32, 40),
    10: (256, 84), 11: (256, 110), 12: (256, 144), 13: (256, 176), 14: (256, 210), 15: (256, 292),
    16: (256, 66), 17: (256, 74), 18: (256, 98), 19: (256, 50), 20: (32, 18), 21: (256, 110), 22: (256, 82),
    23: (256, 136), 29: (256, 56), 34: (256, 54), 35: (256, 66), 39: (32, 17), 40: (64, 36), 41: (128, 18),
    24: (1, 1), 25: (1, 2), 26: (1, 4), 27: (1, 8), 28: (1, 8), 30: (1, 2),
}  # fmt: skip
_MOST_DIMENSIONS = 8


class _Damaged(Exception):
    """A file contradicts its header; the message says how."""


def require_whole_weights(model: str, directory: Path) -> None:
    """Check the headers of the files that a checkpoint's weights are loaded from.

    Args:
        model: name of the checkpoint, as the user gave it.
        directory: its directory.

    Raises:
        InvalidRequest: a file is missing or ends before its last tensor. The message has its name and both lengths.
    """
    for path in safetensors_files(model, directory):
        if not path.is_file():
            raise InvalidRequest(f"model {model!r} has no {path.name}, which its {_INDEX} names", field="model")
        try:
            _require_length(path.stat().st_size, _safetensors_length(path))
        except (_Damaged, OSError) as error:
            raise InvalidRequest(
                f"model {model!r} has a damaged {path.name}: {error}; was the download cut short?", field="model"
            ) from error


def require_whole_gguf(path: Path) -> None:
    """Check the header of a GGUF file.

    Raises:
        InvalidRequest: the file ends before its last tensor. The message has both lengths.
    """
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as held:
            _require_length(len(held), _gguf_length(held))
    except (_Damaged, OSError, ValueError) as error:
        raise InvalidRequest(
            f"model {str(path)!r} is damaged: {error}; was the download cut short?", field="model"
        ) from error


def _require_length(size: int, least: int) -> None:
    if size < least:
        raise _Damaged(f"it has {size} of {least} bytes")


def safetensors_files(model: str, directory: Path) -> list[Path]:
    """Return the safetensors files that are loaded; the directory may hold others."""
    if (whole := directory / "model.safetensors").is_file():
        return [whole]
    if not (index := directory / _INDEX).is_file():
        return []
    try:
        names = {str(name) for name in json.loads(index.read_bytes())["weight_map"].values()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise InvalidRequest(f"model {model!r} has an unreadable {_INDEX}: {error}", field="model") from error
    return [directory / name for name in sorted(names)]


def _safetensors_length(path: Path) -> int:
    """Return the least size of a file in bytes. Raise _Damaged if its header is cut off or unreadable."""
    with path.open("rb") as file:
        prefix = file.read(8)
        num_bytes = int.from_bytes(prefix, "little")
        header = file.read(num_bytes) if num_bytes <= _MOST_HEADER_BYTES else b""
    if len(prefix) < 8 or len(header) < num_bytes:
        raise _Damaged("it ends within its header")
    try:
        tensors = json.loads(header)
        tensors.pop("__metadata__", None)
        return 8 + num_bytes + max((int(tensor["data_offsets"][1]) for tensor in tensors.values()), default=0)
    except (ValueError, KeyError, IndexError, TypeError, AttributeError, RecursionError):
        raise _Damaged("its header is unreadable") from None


def _gguf_length(held: mmap.mmap) -> int:
    """Return the least size of a file in bytes; 0 for an unknown version. Raise _Damaged as `_safetensors_length`."""
    try:
        version, num_tensors, num_entries = struct.unpack_from("<IQQ", held, 4)
        if version not in (2, 3):
            return 0
        at, alignment = 24, 32
        for _ in range(num_entries):
            key, at = _string(held, at)
            (kind,) = struct.unpack_from("<I", held, at)
            if key == b"general.alignment" and kind == 4:
                (alignment,) = struct.unpack_from("<I", held, at + 4)
            at = _end_of_value(held, at + 4, kind)
        ends = [0]
        for _ in range(num_tensors):
            _, at = _string(held, at)
            end, at = _tensor_end(held, at)
            ends.append(end)
    except (struct.error, OverflowError):  # a length points past the end of the file
        raise _Damaged("it ends within its header") from None
    if not alignment:
        raise _Damaged("its header is unreadable")
    return -(-at // alignment) * alignment + max(ends)


def _string(held: mmap.mmap, at: int) -> tuple[bytes, int]:
    """Return the first 64 bytes of a string and the offset of its end."""
    (length,) = struct.unpack_from("<Q", held, at)
    return held[at + 8 : at + 8 + min(length, 64)], at + 8 + length


def _end_of_value(held: mmap.mmap, at: int, kind: int) -> int:
    if kind in _SCALAR_BYTES:
        return at + _SCALAR_BYTES[kind]
    if kind == _STRING:
        return at + 8 + int(struct.unpack_from("<Q", held, at)[0])
    if kind != _ARRAY:
        raise _Damaged("its header is unreadable")
    of, count = struct.unpack_from("<IQ", held, at)
    at += 12
    if of in _SCALAR_BYTES:
        return int(at + count * _SCALAR_BYTES[of])
    if of != _STRING:
        raise _Damaged("its header is unreadable")
    length_at = struct.Struct("<Q").unpack_from
    for _ in range(count):  # 256k tokens take 0.1 s
        at += 8 + length_at(held, at)[0]
    return int(at)


def _tensor_end(held: mmap.mmap, at: int) -> tuple[int, int]:
    """Return the end of a tensor's weights, relative to the start of all weights, and the offset of its entry's end."""
    (num_dimensions,) = struct.unpack_from("<I", held, at)
    if num_dimensions > _MOST_DIMENSIONS:
        raise _Damaged("its header is unreadable")
    *sizes, kind, offset = struct.unpack_from(f"<{num_dimensions}QIQ", held, at + 4)
    num_weights = 1
    for size in sizes:
        num_weights *= size
    weights_in_block, block_bytes = _BLOCKS.get(kind, (max(1, num_weights), 1))
    return offset + -(-num_weights // weights_in_block) * block_bytes, at + 4 + 8 * num_dimensions + 12
