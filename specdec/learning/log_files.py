"""Read and write the files of the learning log: the target's distributions on users' text, used to train drafts.

A segment is one safetensors file. It holds the tokens of several turns, one after the other, and for each output token
the target's distribution as its round recorded it: the top entries, with integer weights out of 2^31. The weight
missing to 2^31 is the tail mass. A process that can write to the log can influence a trained draft, so segments are
never pickles, and the reader checks every value before it returns any.

`coordinator.learning` writes and deletes segments; `samples` reads them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import save

from specdec.contract.errors import InvalidRequest
from specdec.contract.tenant import check_tenant
from specdec.contract.types import WEIGHT_TOTAL, TokenIds

SUFFIX = ".safetensors"

#: Beginning of the name of each tenant's folder.
TENANT_PREFIX = "tenant-"

#: Maximum number of top entries that are kept of a distribution. Other tokens go into the tail mass.
MAX_ENTRIES = 64

#: Maximum size of a segment. Larger files are refused without being read.
MAX_SEGMENT_BYTES = 64 << 20

_FORMAT = "specdec-learning-log"
_VERSION = "1"
_DTYPES = {
    "token_ids": "uint32", "num_tokens": "uint32", "starts": "uint32", "sessions": "uint64", "temperatures": "float32",
    "num_entries": "uint8", "entry_ids": "uint32", "entry_weights": "uint32",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class LogFacts:
    """The target model and the vocabulary of a segment."""

    target_fingerprint: str
    """Fingerprint of the target that computed the distributions."""
    vocabulary_fingerprint: str
    vocabulary_size: int


@dataclass(frozen=True, slots=True)
class LoggedTurn:
    """A part of a session with the target's distributions of the tokens at its end."""

    session: int
    """Hash of the session's id; equal for all turns of a session."""
    temperature: float
    """Temperature of the distributions; 0: greedy."""
    token_ids: TokenIds
    """uint32 [N]: tokens of the turn, with the context before it."""
    start: int
    """Index of the first token whose distribution is known; less than N."""
    num_entries: NDArray[np.uint8]
    """uint8 [N - start]: number of entries of each distribution, at most `MAX_ENTRIES`."""
    entry_ids: TokenIds
    """uint32 [sum of num_entries]: token ids of the entries, distinct within a distribution."""
    entry_weights: NDArray[np.uint32]
    """uint32 [sum of num_entries]: weights of the entries, above 0 and at most 2^31 in total per distribution."""

    @property
    def num_bytes(self) -> int:
        """Approximate size in memory and in a file."""
        return 4 * len(self.token_ids) + 8 * len(self.entry_ids) + len(self.num_entries)


def tenant_folder(log: Path, tenant: str) -> Path:
    """Return the folder of a tenant's segments. The tenant's name is checked, so it cannot lead to another folder."""
    return log / f"{TENANT_PREFIX}{check_tenant(tenant)}"


def encode_segment(facts: LogFacts, turns: Sequence[LoggedTurn]) -> bytes:
    """Return the content of a segment's file; `turns` must not be empty."""
    tensors = {
        "token_ids": np.concatenate([turn.token_ids for turn in turns]),
        "num_tokens": [len(turn.token_ids) for turn in turns],
        "starts": [turn.start for turn in turns],
        "sessions": [turn.session for turn in turns],
        "temperatures": [turn.temperature for turn in turns],
        "num_entries": np.concatenate([turn.num_entries for turn in turns]),
        "entry_ids": np.concatenate([turn.entry_ids for turn in turns]),
        "entry_weights": np.concatenate([turn.entry_weights for turn in turns]),
    }
    metadata = {
        "format": _FORMAT,
        "version": _VERSION,
        "target_fingerprint": facts.target_fingerprint,
        "vocabulary_fingerprint": facts.vocabulary_fingerprint,
        "vocabulary_size": str(facts.vocabulary_size),
    }
    return save({name: np.asarray(tensor, _DTYPES[name]) for name, tensor in tensors.items()}, metadata)


def read_segment(path: Path) -> tuple[LogFacts, list[LoggedTurn]]:
    """Read one segment.

    Raises:
        InvalidRequest: the file is not a segment, is damaged or has impossible values. The message names the file.
        FileNotFoundError: the segment was deleted because it expired.
    """
    if path.stat().st_size > MAX_SEGMENT_BYTES:
        raise InvalidRequest(f"{path} is not a learning log segment: it has more than {MAX_SEGMENT_BYTES} bytes")
    try:
        metadata, tensors = _read_tensors(path)
        facts = _facts(metadata)
        return facts, _turns(tensors, facts.vocabulary_size)
    except _Refused as refused:
        raise InvalidRequest(f"{path} is not a learning log segment: {refused}") from None


class _Refused(Exception):
    """Reason for which a file is refused."""


def _read_tensors(path: Path) -> tuple[dict[str, str], dict[str, NDArray[Any]]]:
    from safetensors import safe_open

    try:
        with safe_open(path, framework="numpy") as file:
            metadata = file.metadata() or {}
            if set(file.keys()) != set(_DTYPES):
                raise _Refused("its arrays are not those of the format")
            tensors = {name: file.get_tensor(name) for name in _DTYPES}
    except FileNotFoundError:
        raise
    except (OSError, SafetensorError, ValueError, TypeError, KeyError, MemoryError) as error:
        raise _Refused(str(error).splitlines()[0][:200] if str(error) else type(error).__name__) from None
    for name, tensor in tensors.items():
        if tensor.ndim != 1 or tensor.dtype != _DTYPES[name]:
            raise _Refused(f"{name} is not a one-dimensional array of {_DTYPES[name]}")
    return metadata, tensors


def _facts(metadata: dict[str, str]) -> LogFacts:
    if metadata.get("format") != _FORMAT or metadata.get("version") != _VERSION:
        raise _Refused(f"it is not of format {_FORMAT} {_VERSION}")
    size = metadata.get("vocabulary_size", "")
    if not (size.isascii() and size.isdigit() and len(size) < 10 and int(size)):
        raise _Refused("its vocabulary size is missing or invalid")
    return LogFacts(metadata.get("target_fingerprint", ""), metadata.get("vocabulary_fingerprint", ""), int(size))


def _turns(tensors: dict[str, NDArray[Any]], vocabulary_size: int) -> list[LoggedTurn]:
    counts, starts = (tensors[name].astype(np.int64) for name in ("num_tokens", "starts"))
    num_known = counts - starts
    num_entries = tensors["num_entries"].astype(np.int64)
    ids, weights = tensors["entry_ids"], tensors["entry_weights"].astype(np.int64)
    if not len(counts) or any(len(tensors[name]) != len(counts) for name in ("starts", "sessions", "temperatures")):
        raise _Refused("its arrays of turns differ in length")
    if num_known.min() < 1 or starts.min() < 1 or counts.sum() != len(tensors["token_ids"]):
        raise _Refused("its turns do not match its tokens")
    if num_known.sum() != len(num_entries) or num_entries.sum() != len(ids) or len(ids) != len(weights):
        raise _Refused("its distributions do not match its turns")
    if max(int(np.max(tensors[name], initial=0)) for name in ("token_ids", "entry_ids")) >= vocabulary_size:
        raise _Refused(f"a token id is outside its vocabulary of {vocabulary_size}")
    if num_entries.max() > MAX_ENTRIES or (weights < 1).any():
        raise _Refused("a distribution has too many entries or an entry of weight 0")
    ends = np.concatenate([[0], np.cumsum(num_entries)])
    totals = np.concatenate([[0], np.cumsum(weights)])
    if (totals[ends[1:]] - totals[ends[:-1]]).max() > WEIGHT_TOTAL:
        raise _Refused("a distribution sums to more than 1")
    position_of = np.repeat(np.arange(len(num_entries)), num_entries)
    if len(np.unique(position_of * vocabulary_size + ids.astype(np.int64))) != len(ids):
        raise _Refused("a distribution names a token twice")
    if not all(math.isfinite(value) and 0.0 <= value <= 100.0 for value in tensors["temperatures"].tolist()):
        raise _Refused("a temperature is not a number from 0 to 100")
    return _divide(tensors, counts, starts, ends)


def _divide(
    tensors: dict[str, NDArray[Any]], counts: NDArray[np.int64], starts: NDArray[np.int64],
    ends: NDArray[np.int64],
) -> list[LoggedTurn]:  # fmt: skip
    tokens = [0, *np.cumsum(counts).tolist()]
    known = [0, *np.cumsum(counts - starts).tolist()]
    turns = []
    for index, ((begin, end), (first, last)) in enumerate(zip(pairwise(tokens), pairwise(known), strict=True)):
        entries = slice(int(ends[first]), int(ends[last]))
        turns.append(
            LoggedTurn(
                session=int(tensors["sessions"][index]),
                temperature=float(tensors["temperatures"][index]),
                token_ids=tensors["token_ids"][begin:end],
                start=int(starts[index]),
                num_entries=tensors["num_entries"][first:last],
                entry_ids=tensors["entry_ids"][entries],
                entry_weights=tensors["entry_weights"][entries],
            )
        )
    return turns
