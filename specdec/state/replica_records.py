"""A replica's record in the registry: JSON, bounded, and checked when it is written and when it is read.

Other programs can write to Redis, and one bad record must not stop the reading of the others. Called by `redis_store`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, fields
from functools import cache
from typing import Any, get_type_hints

from specdec.errors import InvalidRequest
from specdec.settings.addresses import check_dialable
from specdec.state.store import ReplicaRecord
from specdec.types import WIRE_NAMES, EngineInfo

MAX_RECORD_BYTES = 32 << 10
MAX_REPLICA_ID_BYTES = 256
#: Longest other name; a model may be a long path.
_MAX_NAME_CHARACTERS = 4096
_MAX_EOS_TOKEN_IDS = 1024
_MAX_NAMES = 64
_MAX_COUNT = (1 << 63) - 1
_MAX_REASON_CHARACTERS = 200


def encode_record(record: ReplicaRecord) -> str:
    """Return the record as JSON.

    Raises:
        InvalidRequest: readers would skip it; the message states why.
    """
    try:
        engine = {WIRE_NAMES.get(name, name): value for name, value in asdict(record.engine).items()}
        values = {"address": _address(record.address), "engine": engine}
        text = json.dumps(values, separators=(",", ":"), allow_nan=False)
        _check_size(len(text.encode()), len(record.engine.replica_id.encode()))
        decode_record(text.encode())
    except ValueError as error:
        raise InvalidRequest(f"the replica cannot be published: {error}", field="address") from error
    return text


def decode_record(text: bytes) -> ReplicaRecord:
    """Read a record of this or a newer version; unknown fields are ignored.

    Raises:
        ValueError: the record is invalid; the message is one short line of ASCII.
    """
    _check_size(len(text), 0)
    try:
        record = json.loads(text)
        address, engine = record["address"], record["engine"]
        values = {
            field: read(wire_name, engine[wire_name])
            for field, (wire_name, read) in _engine_fields().items()
            if wire_name in engine
        }
        return ReplicaRecord(_address(address), EngineInfo(**values))
    except ValueError as error:
        raise ValueError(_plain(str(error))) from error
    except (AttributeError, IndexError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(_plain(f"{type(error).__name__}: {error}")) from error


def _plain(reason: str) -> str:
    return reason.encode("ascii", "backslashreplace").decode()[:_MAX_REASON_CHARACTERS]


def _address(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError("address is not a text")
    try:
        return check_dialable(value)
    except ValueError as error:
        raise ValueError(f"address {error}") from error


def _check_size(num_bytes: int, id_bytes: int) -> None:
    if num_bytes > MAX_RECORD_BYTES or id_bytes > MAX_REPLICA_ID_BYTES:
        raise ValueError(
            f"a record is limited to {MAX_RECORD_BYTES} bytes and a replica id to {MAX_REPLICA_ID_BYTES}, "
            f"not {num_bytes} and {id_bytes}"
        )


@cache
def _engine_fields() -> Mapping[str, tuple[str, Callable[[str, Any], Any]]]:
    """Return the stored name and the reader of each field of `EngineInfo`; the declared type chooses the reader."""
    hints = get_type_hints(EngineInfo)
    return {
        field.name: (WIRE_NAMES.get(field.name, field.name), _READERS[hints[field.name]])
        for field in fields(EngineInfo)
    }


def _name(field: str, value: Any) -> str:
    if not isinstance(value, str) or len(value) > _MAX_NAME_CHARACTERS:
        raise ValueError(f"{field} is not a text of at most {_MAX_NAME_CHARACTERS} characters")
    value.encode()  # raises for a lone surrogate, which cannot be encoded
    return value


def _count(field: str, value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= _MAX_COUNT:
        raise ValueError(f"{field} is not a count")
    return value


def _share(field: str, value: Any) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
        raise ValueError(f"{field} is not a finite number")
    return float(value)


def _truth(field: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"{field} is neither true nor false")
    return value


def _ids(field: str, value: Any) -> tuple[int, ...]:
    if not isinstance(value, list) or len(value) > _MAX_EOS_TOKEN_IDS:
        raise ValueError(f"{field} is not a list of at most {_MAX_EOS_TOKEN_IDS} ids")
    return tuple(_count(field, token_id) for token_id in value)


def _names(field: str, value: Any) -> tuple[str, ...]:
    if not isinstance(value, list) or len(value) > _MAX_NAMES:
        raise ValueError(f"{field} is not a list of at most {_MAX_NAMES} names")
    return tuple(_name(field, name) for name in value)


_READERS: dict[Any, Callable[[str, Any], Any]] = {
    str: _name,
    int: _count,
    float: _share,
    bool: _truth,
    tuple[int, ...]: _ids,
    tuple[str, ...]: _names,
}
