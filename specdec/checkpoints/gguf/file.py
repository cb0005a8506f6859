"""Read a GGUF file: its metadata, and its tensors as parts of the mapped file.

A file may consist of several parts, which are read together. Nothing is copied: a tensor's bytes are read from the disk
when they are used. A header of 256k tokens is walked in 0.2 s. Called by the other modules of this package.

Source: the specification of GGUF in https://github.com/ggml-org/ggml/tree/master/docs
"""

from __future__ import annotations

import mmap
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import numpy as np
from numpy.typing import NDArray

from specdec.checkpoints.counts import MOST, is_count
from specdec.contract.errors import InvalidRequest, SpecdecError, Unsupported

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
#: Format of a number in the metadata, by type number. Type 8 is a string, type 9 an array.
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_MOST_DIMENSIONS = 4
#: Longest list in the metadata; the largest vocabularies have a tenth of this.
_MOST_ELEMENTS = 4_000_000
_PART = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")


class Kind(NamedTuple):
    """A type of tensors."""

    name: str
    """Name that llama.cpp gives it."""
    num_weights: int
    """Weights in a block."""
    num_bytes: int
    """Bytes of a block."""


#: Kinds by ggml's type number.
KINDS = {
    0: Kind("F32", 1, 4), 1: Kind("F16", 1, 2), 2: Kind("Q4_0", 32, 18), 3: Kind("Q4_1", 32, 20),
    6: Kind("Q5_0", 32, 22), 7: Kind("Q5_1", 32, 24), 8: Kind("Q8_0", 32, 34), 9: Kind("Q8_1", 32, 40),
    10: Kind("Q2_K", 256, 84), 11: Kind("Q3_K", 256, 110), 12: Kind("Q4_K", 256, 144), 13: Kind("Q5_K", 256, 176),
    14: Kind("Q6_K", 256, 210), 15: Kind("Q8_K", 256, 292), 16: Kind("IQ2_XXS", 256, 66), 17: Kind("IQ2_XS", 256, 74),
    18: Kind("IQ3_XXS", 256, 98), 19: Kind("IQ1_S", 256, 50), 20: Kind("IQ4_NL", 32, 18), 21: Kind("IQ3_S", 256, 110),
    22: Kind("IQ2_S", 256, 82), 23: Kind("IQ4_XS", 256, 136), 24: Kind("I8", 1, 1), 25: Kind("I16", 1, 2),
    26: Kind("I32", 1, 4), 27: Kind("I64", 1, 8), 28: Kind("F64", 1, 8), 29: Kind("IQ1_M", 256, 56),
    30: Kind("BF16", 1, 2), 34: Kind("TQ1_0", 256, 54), 35: Kind("TQ2_0", 256, 66), 39: Kind("MXFP4", 32, 17),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor as it lies in the file."""

    name: str
    shape: tuple[int, ...]
    """Outermost dimension first, as in PyTorch."""
    kind: int
    """Key of `KINDS`."""
    data: NDArray[np.uint8]
    """Mapped bytes, uint8 [rows, bytes of a row]; a row is the last dimension of `shape`."""

    @property
    def num_weights(self) -> int:
        """Number of weights."""
        return prod(self.shape)


class _StringsAt(NamedTuple):
    """An array of strings that has not been read."""

    held: mmap.mmap
    at: int
    length: int


class _CutOff(Exception):
    """A length points past the end of the file."""


@dataclass(slots=True)
class _Part:
    """One file, while its header is read."""

    path: Path
    held: mmap.mmap
    metadata: dict[str, Any] = field(default_factory=dict)
    tensors: dict[str, StoredTensor] = field(default_factory=dict)


#: Sizes of recurrent states; every architecture with recurrent layers has one of these keys.
_RECURRENT_KEYS = ("ssm.conv_kernel", "shortconv.l_cache", "wkv.head_size", "kda.head_dim")


class GgufFile:
    """A GGUF file, or all parts of one, with mapped tensors."""

    def __init__(self, path: Path) -> None:
        """Read the header of every part.

        Args:
            path: the file; of a file in parts, any of them.

        Raises:
            InvalidRequest: a part is missing, cut off or damaged, or a key or a tensor is there twice. The message has
                the file and the key, tensor or length at fault.
            Unsupported: the version of the format or the kind of a tensor is unknown.
        """
        self.path = path
        self._parts = [_read(part) for part in parts_of(path)]
        self.metadata: Mapping[str, Any] = self._parts[0].metadata
        """Numbers, strings and lists of numbers by their keys; `strings` returns lists of strings."""
        self.tensors: Mapping[str, StoredTensor] = self._joined()
        """Tensors of all parts by their names."""

    @property
    def num_parts(self) -> int:
        """Number of files."""
        return len(self._parts)

    @property
    def num_weights(self) -> int:
        """Number of weights of all tensors."""
        return sum(tensor.num_weights for tensor in self.tensors.values())

    @property
    def num_bytes(self) -> int:
        """Size of all files together."""
        return sum(len(part.held) for part in self._parts)

    @property
    def architecture(self) -> str:
        """Value of `general.architecture`, the prefix of the keys of the model."""
        return str(self.metadata.get("general.architecture", "none"))

    @property
    def is_recurrent(self) -> bool:
        """True if the keys of the architecture state recurrent layers."""
        return any(self.of_model(key) is not None for key in _RECURRENT_KEYS)

    def of_model(self, key: str) -> Any:
        """Return the value of a key of the file's architecture; None without it."""
        return self.metadata.get(f"{self.architecture}.{key}")

    def strings(self, key: str) -> list[str]:
        """Return a list of strings; an empty one without the key. Raises InvalidRequest: it is another value."""
        value = self.metadata.get(key)
        if value is None:
            return []
        if not isinstance(value, _StringsAt):
            self._refuse(f"{key} is no list of strings")
        held, at, length = value
        found = []
        for _ in range(length):
            text, at = _string(held, at)
            found.append(text)
        return found

    def release(self) -> None:
        """Let the system take back memory of mapped bytes; they are read again when they are used."""
        for part in self._parts:
            part.held.madvise(mmap.MADV_DONTNEED)

    def _joined(self) -> dict[str, StoredTensor]:
        tensors: dict[str, StoredTensor] = {}
        for number, part in enumerate(self._parts):
            for key, own in (("split.no", number), ("general.architecture", self.architecture)):
                if self.num_parts > 1 and part.metadata.get(key, own) != own:
                    self._refuse(f"{part.path.name} has {key} {part.metadata[key]!r:.80} instead of {own!r}")
            stated = part.metadata.get("split.count", self.num_parts)
            if not (
                is_count(stated, self.num_parts, self.num_parts) or (self.num_parts == 1 and is_count(stated, 0, 1))
            ):
                self._refuse(
                    f"split.count is {stated!r:.80}, and by its name it has {self.num_parts} parts: name every part as "
                    "in model-00001-of-00002.gguf, or join them with llama-gguf-split --merge"
                )
            for name, tensor in part.tensors.items():
                if name in tensors:
                    self._refuse(f"tensor {name!r:.80} is in two parts")
                tensors[name] = tensor
        return tensors

    def _refuse(self, message: str) -> NoReturn:
        raise InvalidRequest(f"model {str(self.path)!r}: {message}", field="model")


def is_gguf(path: Path) -> bool:
    """Return whether the file starts with the GGUF magic bytes; its name does not matter."""
    try:
        with path.open("rb") as file:
            return file.read(len(_MAGIC)) == _MAGIC
    except OSError:
        return False


def parts_of(path: Path) -> list[Path]:
    """Return the files of a model in parts, the first part first; the file itself if it is whole.

    Raises:
        InvalidRequest: a part is missing.
    """
    found = _PART.fullmatch(path.name)
    if found is None or not path.is_file() or not 1 <= int(found[2]) <= int(found[3]):
        return [path]
    stem, _, count = found.groups()
    parts = [path.with_name(f"{stem}-{number:05}-of-{count}.gguf") for number in range(1, int(count) + 1)]
    for part in parts:
        if not part.is_file():
            raise InvalidRequest(f"model {str(path)!r} has {int(count)} parts, and {part.name} is missing",
                                 field="model")  # fmt: skip
    return parts


def _read(path: Path) -> _Part:
    try:
        with path.open("rb") as file:
            part = _Part(path, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
        _read_header(part)
    except (_CutOff, struct.error):
        raise _damaged(path, "it ends within its header; was the download cut short?") from None
    except (OSError, ValueError, OverflowError) as error:
        raise _damaged(path, str(error)) from error
    return part


def _damaged(path: Path, reason: str) -> SpecdecError:
    return InvalidRequest(f"model {str(path)!r} is damaged: {reason}", field="model")


def _read_header(part: _Part) -> None:
    version, num_tensors, num_entries = struct.unpack_from("<IQQ", part.held, len(_MAGIC))
    if version not in _VERSIONS:
        raise Unsupported(
            f"model {str(part.path)!r} is in version {version} of the GGUF format, and versions 2 and 3 in the byte "
            "order of x86 and ARM are supported: convert it again",
            field="model",
        )
    at = 24
    for _ in range(num_entries):
        key, at = _string(part.held, at)
        (kind,) = struct.unpack_from("<I", part.held, at)
        if key in part.metadata:
            raise _damaged(part.path, f"the key {key!r:.80} is there twice")
        part.metadata[key], at = _value(part, key, at + 4, kind)
    alignment = part.metadata.get("general.alignment", 32)
    if not is_count(alignment, 1, MOST):
        reason = f"general.alignment is {alignment!r:.80}, which must be a whole number from 1 to {MOST}"
        raise _damaged(part.path, reason)
    _read_tensors(part, num_tensors, at, alignment)


def _read_tensors(part: _Part, num_tensors: int, at: int, alignment: int) -> None:
    entries: dict[str, tuple[tuple[int, ...], int, int]] = {}
    for _ in range(num_tensors):
        name, at = _string(part.held, at)
        (num_dimensions,) = struct.unpack_from("<I", part.held, at)
        if not 1 <= num_dimensions <= _MOST_DIMENSIONS:
            raise _damaged(part.path, f"tensor {name!r:.80} has {num_dimensions} dimensions instead of 1 to 4")
        if name in entries:
            raise _damaged(part.path, f"tensor {name!r:.80} is there twice")
        *sizes, kind, offset = struct.unpack_from(f"<{num_dimensions}QIQ", part.held, at + 4)
        at += 4 + 8 * num_dimensions + 12
        entries[name] = tuple(reversed(sizes)), kind, offset
    begin = -(-at // alignment) * alignment
    num_bytes = {name: _num_bytes(part, name, shape, kind) for name, (shape, kind, _) in entries.items()}
    least = max((begin + offset + num_bytes[name] for name, (_, _, offset) in entries.items()), default=at)
    if least > len(part.held):
        raise _damaged(part.path, f"it has {len(part.held)} of {least} bytes; was the download cut short?")
    for name, (shape, kind, offset) in entries.items():
        data = np.frombuffer(part.held, np.uint8, num_bytes[name], begin + offset)
        part.tensors[name] = StoredTensor(name, shape, kind, data.reshape(prod(shape[:-1]), -1))


def _num_bytes(part: _Part, name: str, shape: tuple[int, ...], number: int) -> int:
    """Return the size of a tensor."""
    kind = KINDS.get(number)
    if kind is None:
        raise Unsupported(
            f"model {str(part.path)!r}: tensor {name!r:.80} is stored as type {number}, which is newer than this "
            "version: quantise the model to another type, or serve it with --backend llama-cpp",
            field="model",
        )
    if not all(is_count(size, 1, MOST) for size in shape) or shape[-1] % kind.num_weights:
        raise _damaged(
            part.path,
            f"tensor {name!r:.80} has the shape {shape}, whose rows must be whole blocks of {kind.num_weights} "
            f"weights of type {kind.name}",
        )
    return prod(shape) // kind.num_weights * kind.num_bytes


def _string(held: mmap.mmap, at: int) -> tuple[str, int]:
    """Return a string and the offset of its end."""
    (length,) = struct.unpack_from("<Q", held, at)
    end = at + 8 + length
    if end > len(held):
        raise _CutOff
    return held[at + 8 : end].decode("utf-8", errors="replace"), end


def _value(part: _Part, key: str, at: int, kind: int) -> tuple[Any, int]:
    """Return a value and the offset of its end."""
    held = part.held
    if kind in _SCALARS:
        number = struct.Struct(f"<{_SCALARS[kind]}")
        return number.unpack_from(held, at)[0], at + number.size
    if kind == _STRING:
        return _string(held, at)
    of, count = struct.unpack_from("<IQ", held, at) if kind == _ARRAY else (None, 0)
    at += 12
    if count > _MOST_ELEMENTS:
        raise _damaged(part.path, f"{key!r:.80} is a list of {count} values, and at most {_MOST_ELEMENTS} are read")
    if of in _SCALARS:
        end = at + count * struct.calcsize(f"<{_SCALARS[of]}")
        if end > len(held):
            raise _CutOff
        return np.frombuffer(held, np.dtype(_SCALARS[of]).newbyteorder("<"), count, at).tolist(), end
    if of != _STRING:
        raise _damaged(part.path, f"{key!r:.80} is of an unknown type")
    first, length_at = at, struct.Struct("<Q").unpack_from
    for _ in range(count):
        at += 8 + length_at(held, at)[0]
    if at > len(held):
        raise _CutOff
    return _StringsAt(held, first, count), int(at)
