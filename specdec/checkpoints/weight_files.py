"""Whether a checkpoint's files of weights are whole, as far as their headers tell: downloads stop halfway.

Every format says at its beginning where in the file each tensor lies; a file that ends before that is refused here, in
milliseconds, instead of after everything else has been loaded. Reads no weights. Not here: what the tensors mean
(`specdec.engine.loader`). Called by `specdec.checkpoints.preflight`.
"""

from __future__ import annotations

import json
import mmap
import struct
from pathlib import Path

from specdec.errors import InvalidRequest

#: More than any header; the format's own limit.
_MOST_HEADER_BYTES = 100_000_000
_INDEX = "model.safetensors.index.json"

#: Of GGUF's metadata, by type number: sizes of numbers. Strings are 8, arrays 9.
_SCALAR_BYTES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
_STRING, _ARRAY = 8, 9
#: Of ggml's types, by number: weights in a block and bytes of it. Tensors of others are taken for one byte.
_BLOCKS = {
    0: (1, 4), 1: (1, 2), 2: (32, 18), 3: (32, 20), 6: (32, 22), 7: (32, 24), 8: (32, 34), 9: (32, 40),
    10: (256, 84), 11: (256, 110), 12: (256, 144), 13: (256, 176), 14: (256, 210), 15: (256, 292),
    16: (256, 66), 17: (256, 74), 18: (256, 98), 19: (256, 50), 20: (32, 18), 21: (256, 110), 22: (256, 82),
    23: (256, 136), 29: (256, 56), 34: (256, 54), 35: (256, 66), 39: (32, 17), 40: (64, 36), 41: (128, 18),
    24: (1, 1), 25: (1, 2), 26: (1, 4), 27: (1, 8), 28: (1, 8), 30: (1, 2),
}  # fmt: skip
_MOST_DIMENSIONS = 8


class _Damaged(Exception):
    """A file that is not what its header says; how."""


def require_whole_weights(model: str, directory: Path) -> None:
    """Looks at the headers of the files that a checkpoint's weights are read from.

    Args:
        model: as it was named.
        directory: where it lies.

    Raises:
        InvalidRequest: one is missing, or ends before its last tensor; the message has its name and both lengths.
    """
    for path in _safetensors_files(model, directory):
        if not path.is_file():
            raise InvalidRequest(f"model {model!r} has no {path.name}, which its {_INDEX} names", field="model")
        try:
            _require_length(path.stat().st_size, _safetensors_length(path))
        except (_Damaged, OSError) as error:
            raise InvalidRequest(
                f"model {model!r} has a damaged {path.name}: {error}; was the download cut short?", field="model"
            ) from error


def require_whole_gguf(path: Path) -> None:
    """Looks at the header of a GGUF file.

    Raises:
        InvalidRequest: it ends before its last tensor; the message has both lengths.
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


def _safetensors_files(model: str, directory: Path) -> list[Path]:
    """Those that are loaded; a folder may hold others."""
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
    """Bytes that a file must have. Raises _Damaged: it ends within its header, or that makes no sense."""
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
    """Bytes that a file must have; 0 for a version that is not known here. Raises _Damaged as `_safetensors_length`."""
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
    except (struct.error, OverflowError):  # a length of more bytes than there are
        raise _Damaged("it ends within its header") from None
    if not alignment:
        raise _Damaged("its header is unreadable")
    return -(-at // alignment) * alignment + max(ends)


def _string(held: mmap.mmap, at: int) -> tuple[bytes, int]:
    """A string, or its first bytes, and where it ends."""
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
    for _ in range(count):  # a quarter of a million tokens take a tenth of a second
        at += 8 + length_at(held, at)[0]
    return int(at)


def _tensor_end(held: mmap.mmap, at: int) -> tuple[int, int]:
    """Where a tensor's weights end, from where all weights begin, and where its entry does."""
    (num_dimensions,) = struct.unpack_from("<I", held, at)
    if num_dimensions > _MOST_DIMENSIONS:
        raise _Damaged("its header is unreadable")
    *sizes, kind, offset = struct.unpack_from(f"<{num_dimensions}QIQ", held, at + 4)
    num_weights = 1
    for size in sizes:
        num_weights *= size
    weights_in_block, block_bytes = _BLOCKS.get(kind, (max(1, num_weights), 1))
    return offset + -(-num_weights // weights_in_block) * block_bytes, at + 4 + 8 * num_dimensions + 12
