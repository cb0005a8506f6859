"""A replica's record in the registry: JSON, bounded, and checked when it is written and when it is read.

Other programs can write to Redis, and one bad record must not stop the reading of the others. Where the services share
a key, a record is signed and says until when it holds, so that neither a record of another program nor an old one makes
a coordinator dial an address. Called by `redis_store`.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, fields
from functools import cache
from typing import Any, Protocol, get_type_hints

from specdec.contract.engine_api import WIRE_NAMES, EngineInfo
from specdec.contract.errors import InvalidRequest
from specdec.core.limits import MAX_NAME_CHARACTERS, check_description
from specdec.settings.addresses import check_dialable
from specdec.settings.cluster_names import DEFAULT_CLUSTER
from specdec.state.store import ReplicaRecord

MAX_RECORD_BYTES = 32 << 10
MAX_REPLICA_ID_BYTES = 256
_MAX_EOS_TOKEN_IDS = 1024
_MAX_NAMES = 64
_MAX_COUNT = (1 << 63) - 1
_MAX_REASON_CHARACTERS = 200

#: Tolerated difference between the clocks of two machines, by which a signed record holds longer than its heartbeat.
CLOCK_TOLERANCE_S = 30.0


class Signer(Protocol):
    """Signs records and checks signatures (`specdec.access.service_key.ServiceKey`)."""

    def sign(self, record: bytes) -> str: ...

    def verify(self, record: bytes, signature: str) -> bool: ...


def encode_record(
    record: ReplicaRecord, *, ttl_s: float = 0.0, signer: Signer | None = None, cluster: str = DEFAULT_CLUSTER
) -> str:
    """Return the record as JSON.

    Args:
        record: the replica.
        ttl_s: time for which a signed record holds.
        signer: signs the record; None: it is not signed.
        cluster: the only cluster in which the signature is valid.

    Raises:
        InvalidRequest: readers would skip it; the message states why.
    """
    try:
        engine = {WIRE_NAMES.get(name, name): value for name, value in asdict(record.engine).items()}
        values: dict[str, Any] = {"address": _address(record.address), "engine": engine}
        if signer is not None:
            values["expires_at_s"] = round(time.time() + ttl_s + CLOCK_TOLERANCE_S, 3)
            values["signature"] = signer.sign(_signed_bytes(values, cluster))
        text = json.dumps(values, separators=(",", ":"), allow_nan=False)
        _check_size(len(text.encode()), len(record.engine.replica_id.encode()))
        decode_record(text.encode())
    except ValueError as error:
        raise InvalidRequest(f"the replica cannot be published: {error}", field="address") from error
    return text


def decode_record(text: bytes, *, signer: Signer | None = None, cluster: str = DEFAULT_CLUSTER) -> ReplicaRecord:
    """Read a record of this or a newer version; unknown fields are ignored.

    Args:
        text: the stored record.
        signer: checks the signature and the time until which the record holds; None: neither is read.
        cluster: the cluster whose record it is.

    Raises:
        ValueError: the record is invalid; the message is one short line of ASCII.
    """
    _check_size(len(text), 0)
    try:
        record = json.loads(text)
        if signer is not None:
            _check_signature(record, signer, cluster)
        address, engine = record["address"], record["engine"]
        values = {
            field: read(wire_name, engine[wire_name])
            for field, (wire_name, read) in _engine_fields().items()
            if wire_name in engine
        }
        info = EngineInfo(**values)
        check_description(info)
        return ReplicaRecord(_address(address), info)
    except ValueError as error:
        raise ValueError(_plain(str(error))) from error
    except (AttributeError, IndexError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(_plain(f"{type(error).__name__}: {error}")) from error


def _check_signature(record: dict[str, Any], signer: Signer, cluster: str) -> None:
    """Raise ValueError unless the record is signed with a key of this system for its cluster, and holds still."""
    signature = record.pop("signature", None)
    if not isinstance(signature, str) or not signer.verify(_signed_bytes(record, cluster), signature):
        raise ValueError("it is not signed with the service key of this system")
    if _share("expires_at_s", record["expires_at_s"]) < time.time():
        raise ValueError("its signature has expired: the record is an old one, or the clocks of two machines differ")


def _signed_bytes(record: Mapping[str, Any], cluster: str) -> bytes:
    """Return what is signed: the cluster and every field but the signature, in one form."""
    return json.dumps([cluster, record], separators=(",", ":"), sort_keys=True).encode()


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
    if not isinstance(value, str) or len(value) > MAX_NAME_CHARACTERS:
        raise ValueError(f"{field} is not a text of at most {MAX_NAME_CHARACTERS} characters")
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
