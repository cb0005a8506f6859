"""A packed model as a file, so that a later start needs neither the checkpoint's weights nor the code that packs them.

The file begins with a JSON header: facts for the caller, the structures of `structures` with numbers of pieces in the
place of addresses, and where each piece is. Weights are read into large pages, in which steps read them fastest. Tables
of which a step reads a few rows are mapped, so only rows that were used take memory. A file appears whole or not at
all, and other users cannot have written it (`specdec.checkpoints.artifact_cache`). Called by `engine.kept_worker`.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import json
import mmap
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from specdec.checkpoints import artifact_cache
from specdec.engine.native.packing import PackedModel, Packing
from specdec.engine.native.structures import Layer, Model

_MAGIC = b"specdec packed 1"
_LENGTH_BYTES = 8
#: Pieces begin at multiples of this, because a part of a file can be mapped from there on.
_ALIGNMENT = mmap.ALLOCATIONGRANULARITY
#: Bytes that are read or written between two reports of progress.
_AT_ONCE = 64 << 20
#: The same for tables that are mapped: Linux caches a file in units of the size that it was written in, and maps the
#: whole unit if one row is read.
_TABLE_AT_ONCE = 16 << 10
#: Tables of which a step reads the rows of its tokens and positions.
_MAPPED = ("embeddings", "cosines", "sines")
#: Fields that belong to a worker: where its KV is, and what its local drafts read; and those of GGUF files alone.
_OF_A_WORKER = ("cache", "tapped", "num_tapped", "draft_heads", "num_draft_heads", "rest", "rest_from")

Note = Callable[[float], None]
"""Takes the share of the bytes that are read or written, 0..1."""


class Unreadable(Exception):
    """There is no such file, or it is damaged, of another version, or not safe to use."""


@dataclass(frozen=True, slots=True)
class KeptLayout:
    """A file of which only the header has been read."""

    path: Path
    header: Mapping[str, Any]

    @property
    def facts(self) -> Mapping[str, Any]:
        """Return the facts that were passed to `keep`."""
        facts: Mapping[str, Any] = self.header["facts"]
        return facts

    @property
    def has_weights(self) -> bool:
        """Return whether `load` finds a model; the file of a model whose weights stay elsewhere has none."""
        return self.header["model"] is not None

    def arrays(self) -> list[NDArray[np.float32]]:
        """Return the arrays [rows, columns] that were passed to `keep`. Raises Unreadable."""
        with _reporting(), self.path.open("rb") as file:
            arrays = []
            for offset, rows, columns in self.header["arrays"]:
                file.seek(offset)
                arrays.append(np.fromfile(file, np.float32, rows * columns).reshape(rows, columns))
            return arrays

    def load(self, library: ctypes.CDLL, caches: Sequence[int], note: Note) -> PackedModel:
        """Read and map the model.

        Args:
            library: the kernels for which it was packed.
            caches: address of each layer's KV pool.
            note: takes the share that is read.

        Raises:
            Unreadable: the file cannot be read.
        """
        packing = Packing(library, is_compact=True)
        described = self.header["model"]
        mapped = {described[name] for name in _MAPPED}
        read_bytes = [0 if number in mapped else size for number, (_, size) in enumerate(self.header["pieces"])]
        addresses, done = [], 0
        with _reporting(), self.path.open("rb") as file:
            for number, (offset, num_bytes) in enumerate(self.header["pieces"]):
                if number in mapped:
                    memory = mmap.mmap(file.fileno(), num_bytes, access=mmap.ACCESS_READ, offset=offset)
                    addresses.append(packing.hold(np.frombuffer(memory, np.uint8)))
                    continue
                room = packing.take(num_bytes)
                file.seek(offset)
                for first in range(0, num_bytes, _AT_ONCE):
                    part = room.data[first : first + _AT_ONCE]
                    if file.readinto(part) != len(part):
                        raise Unreadable("its end is missing")
                    done += len(part)
                    note(done / sum(read_bytes))
                addresses.append(room.ctypes.data)
        layers = (Layer * len(described["layers"]))()
        for layer, from_file, cache in zip(layers, described["layers"], caches, strict=True):
            _fill(layer, from_file, addresses)
            layer.cache = cache
        model = Model(layers=layers)
        _fill(model, described, addresses)
        return PackedModel(packing, model, self.header["num_embeddings"])


def open_kept(path: Path) -> KeptLayout:
    """Read the header of a kept layout. Raises Unreadable."""
    with _reporting(), path.open("rb") as file:
        if not artifact_cache.is_own(path):
            raise Unreadable("other users could have written it")
        if file.read(len(_MAGIC)) != _MAGIC:
            raise Unreadable("it is of another version")
        header = json.loads(file.read(int.from_bytes(file.read(_LENGTH_BYTES), "little")))
        if path.stat().st_size != header["num_bytes"]:
            raise Unreadable("its end is missing")
        artifact_cache.note_use(path)
        return KeptLayout(path, header)


def keep(
    path: Path, packed: PackedModel | None, facts: Mapping[str, Any], arrays: Sequence[NDArray[np.float32]], note: Note
) -> None:
    """Write a model without its local drafts, unless another process is writing the same.

    Args:
        path: the file, in a folder of `artifact_cache`.
        packed: the model; None if its weights are packed from another file at each start.
        facts: what the caller wants back; JSON.
        arrays: float32 [rows, columns] that the caller wants back.
        note: takes the share that is written.

    Raises:
        OSError: the file cannot be written.
    """
    pieces: Mapping[int, NDArray[np.uint8]] = {} if packed is None else packed.packing.pieces()
    described = None if packed is None else _described(packed.model, {address: at for at, address in enumerate(pieces)})
    contents = [*pieces.values(), *(array.reshape(-1).view(np.uint8) for array in arrays)]
    header: dict[str, Any] = {"facts": facts, "model": described}
    if packed is not None:
        header["num_embeddings"] = packed.num_embeddings
    places = _places([content.nbytes for content in contents], len(json.dumps(header)))
    header["pieces"] = places[: len(pieces)]
    header["arrays"] = [(place[0], *array.shape) for place, array in zip(places[len(pieces) :], arrays, strict=True)]
    header["num_bytes"] = total = sum(places[-1])
    encoded = json.dumps(header).encode()
    artifact_cache.make_folder(path.parent)
    artifact_cache.make_room(path.parent, total)
    unfinished = path.with_name(f"{path.name}.unfinished")
    tables = set() if described is None else {described[name] for name in _MAPPED}
    with unfinished.open("ab", buffering=0) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # until it is closed, also by the process's end
        except BlockingIOError:
            return
        if not unfinished.exists() or not os.path.samestat(os.fstat(file.fileno()), unfinished.stat()):
            return  # another process has finished it meanwhile, and this is its file
        try:
            file.truncate(0)  # a process that was killed may have left some of it
            file.write(_MAGIC + len(encoded).to_bytes(_LENGTH_BYTES, "little") + encoded)
            for number, (content, (offset, _)) in enumerate(zip(contents, places, strict=True)):
                file.write(bytes(offset - file.tell()))
                at_once = _TABLE_AT_ONCE if number in tables else _AT_ONCE
                for first in range(0, len(content), at_once):
                    _write_all(file, content[first : first + at_once].data)
                    note(file.tell() / total)
            unfinished.chmod(0o600)
            unfinished.replace(path)
        except OSError:
            unfinished.unlink(missing_ok=True)  # it may fill the disk
            raise


def _write_all(file: BinaryIO, content: memoryview) -> None:
    """Write to a file that has no buffer, which may take a part at a time."""
    while len(content):
        content = content[file.write(content) :]


@contextlib.contextmanager
def _reporting() -> Iterator[None]:
    """Turn what a damaged file or its disk can cause into Unreadable."""
    try:
        yield
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise Unreadable(str(error)) from error


def _places(sizes: Sequence[int], header_bytes: int) -> list[tuple[int, int]]:
    """Return the offset and size of each content, behind a header that also says these."""
    # Two numbers of at most 20 digits and their separators for each content, and the keys.
    offset = _aligned(len(_MAGIC) + _LENGTH_BYTES + header_bytes + 48 * len(sizes) + 200)
    places = []
    for size in sizes:
        places.append((offset, size))
        offset = _aligned(offset + size)
    return places


def _aligned(offset: int) -> int:
    return -(-offset // _ALIGNMENT) * _ALIGNMENT


def _described(structure: ctypes.Structure, number_of: Mapping[int, int]) -> dict[str, Any]:
    """Return the fields of a structure as JSON, with the piece's number in the place of each address."""
    fields: dict[str, Any] = {}
    for name, kind in structure._fields_:  # type: ignore[misc]  # none of ours has bit fields
        value = getattr(structure, name)
        if name in _OF_A_WORKER:
            continue
        if isinstance(value, ctypes.Structure):
            fields[name] = _described(value, number_of)
        elif name == "layers":
            fields[name] = [_described(value[index], number_of) for index in range(structure.num_layers)]
        elif kind is ctypes.c_void_p:
            fields[name] = None if value is None else number_of[value]
        else:
            fields[name] = value
    return fields


def _fill(structure: ctypes.Structure, described: Mapping[str, Any], addresses: Sequence[int]) -> None:
    """Set the fields that `_described` returned, except for the layers."""
    for name, kind in structure._fields_:  # type: ignore[misc]
        if name in _OF_A_WORKER or name == "layers":
            continue
        value = described[name]
        if isinstance(value, dict):
            _fill(getattr(structure, name), value, addresses)
        else:
            setattr(structure, name, addresses[value] if kind is ctypes.c_void_p and value is not None else value)
