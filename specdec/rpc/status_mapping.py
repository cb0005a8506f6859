"""The error tree on the wire: SpecdecError <-> google.rpc.Status with details <-> per-item `ItemStatus`.

Details follow the Google API guide (AIP-193): ErrorInfo (reason, domain `specdec`), BadRequest for the field at fault,
RetryInfo if retrying helps. Called by interceptors, links, servicers and the client. It loads gRPC and nothing heavier.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_right
from collections.abc import Mapping
from itertools import accumulate
from typing import TypeVar

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.protobuf.message import DecodeError, Message
from google.rpc import code_pb2, error_details_pb2, status_pb2
from grpc_status import rpc_status

from specdec.contract import errors
from specdec.contract.errors import SpecdecError
from specdec.v1 import common_pb2

MessageT = TypeVar("MessageT", bound=Message)

#: Longest text of an error on the wire, in bytes as gRPC writes it: a byte that is not printable ASCII takes three. The
#: text travels three times, and gRPC may refuse an answer with more than 8 KiB of metadata.
MAX_MESSAGE_BYTES = 1800
MAX_FIELD_BYTES = 200

#: Room for the words that a cut text ends with.
_CUT_BYTES = 40

#: Longest time to wait that is believed of another process.
_MOST_RETRY_S = 3600.0

#: Trailing metadata key of the serialised google.rpc.Status.
DETAILS_KEY = "grpc-status-details-bin"

#: `ItemStatus.retry_after_ms` of an error after which the same call never succeeds.
_NEVER_MS = (1 << 32) - 1

# Class of a status whose reason is unknown here.
_BY_CODE: dict[str, type[SpecdecError]] = {
    "INVALID_ARGUMENT": errors.InvalidRequest,
    "OUT_OF_RANGE": errors.InvalidRequest,
    "NOT_FOUND": errors.NotFound,
    "RESOURCE_EXHAUSTED": errors.ResourceExhausted,
    "UNAVAILABLE": errors.Unavailable,
    "DEADLINE_EXCEEDED": errors.Unavailable,
    "CANCELLED": errors.Unavailable,
    "UNAUTHENTICATED": errors.Unauthenticated,
    "PERMISSION_DENIED": errors.Forbidden,
    "UNIMPLEMENTED": errors.Unsupported,
    "DATA_LOSS": errors.SessionLost,
}

# Statuses of gRPC itself or of a proxy that refuse the call. Any other one, INTERNAL for instance, says that an answer
# was lost on its way.
_REFUSALS = frozenset(
    (
        grpc.StatusCode.INVALID_ARGUMENT,
        grpc.StatusCode.OUT_OF_RANGE,
        grpc.StatusCode.NOT_FOUND,
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        grpc.StatusCode.UNAUTHENTICATED,
        grpc.StatusCode.PERMISSION_DENIED,
        grpc.StatusCode.UNIMPLEMENTED,
    )
)

# Digits of 2^64 and one more.
_MAX_DIGITS = 21

# gRPC's message about a reset stream. The HTTP/2 code decides the status: INADEQUATE_SECURITY gives PERMISSION_DENIED,
# ENHANCE_YOUR_CALM gives RESOURCE_EXHAUSTED, most others give INTERNAL.
_RESET = re.compile(r"RST_STREAM with error code (?P<http2_code>\d+)")

# gRPC's message, which begins with the side that found the message too large.
_OVERSIZED = re.compile(r"(?P<by_us>CLIENT: )?\w+ message larger than max \((?P<size>\d+) vs\. (?P<limit>\d+)\)")


def to_status(error: SpecdecError, *, request_id: str = "") -> status_pb2.Status:
    """Return the status with all its details; `request_id` lets the caller find the error in the server's log."""
    metadata = {name: str(number) for name, number in error.numbers.items()}
    if request_id:
        metadata["request_id"] = request_id
    if isinstance(error, errors.KvMiss):
        metadata["have"] = str(error.have)
    details = [error_details_pb2.ErrorInfo(reason=error.reason, domain=errors.DOMAIN, metadata=metadata)]
    message = bounded(error.message)
    status = status_pb2.Status(code=code_pb2.Code.Value(error.code), message=message)
    if error.field:
        violation = error_details_pb2.BadRequest.FieldViolation(
            field=bounded(error.field, MAX_FIELD_BYTES), description=message
        )
        details.append(error_details_pb2.BadRequest(field_violations=[violation]))
    if error.retryable:
        delay = duration_pb2.Duration()
        delay.FromNanoseconds(int((error.retry_after_s or 0.0) * 1e9))
        details.append(error_details_pb2.RetryInfo(retry_delay=delay))
    for detail in details:
        packed = any_pb2.Any()
        packed.Pack(detail)
        status.details.append(packed)
    return status


def from_status(status: status_pb2.Status) -> SpecdecError:
    """Return the error that `to_status` was given; a status from another source is mapped by its code."""
    reason, field, retry_after_s, have = "", "", None, 0
    numbers: dict[str, int] = {}
    for detail in status.details:
        if error_info := _unpack(detail, error_details_pb2.ErrorInfo):
            if error_info.domain == errors.DOMAIN:
                reason = error_info.reason
                have = _count(error_info.metadata.get("have", ""))
                numbers = _numbers(error_info.metadata)
        elif bad_request := _unpack(detail, error_details_pb2.BadRequest):
            field = next((violation.field for violation in bad_request.field_violations), "")
        elif retry_info := _unpack(detail, error_details_pb2.RetryInfo):
            retry_after_s = retry_info.retry_delay.ToNanoseconds() / 1e9
    error = _build(status.code, reason, status.message, field=field, retry_after_s=retry_after_s, have=have)
    error.numbers = numbers
    if reason and retry_after_s is None:
        error.retry_after_s = None  # our servers say whether a retry can help
    return error


def from_rpc_error(error: grpc.RpcError, *, peer: str = "") -> SpecdecError:
    """Return the error of the tree for an exception of a gRPC call; errors made on the way name `peer`.

    A status without our ErrorInfo is not the server's verdict: unless it refuses the call, it becomes Unavailable.
    """
    if not isinstance(error, grpc.aio.AioRpcError | grpc.Call):
        return errors.Internal(str(error))
    status = _carried_status(error)
    if status is not None and _is_ours(status):
        return from_status(status)
    details = bounded(error.details() or "")
    message = f"{peer}: {details}" if peer else details
    if oversized := _OVERSIZED.search(details):
        return _oversized_message(oversized, peer)
    if error.code() not in _REFUSALS or _RESET.search(details):
        return errors.Unavailable(message)
    return _build(error.code().value[0], "", message)


def bounded(text: str, most_bytes: int = MAX_MESSAGE_BYTES) -> str:
    """Return a text that is short enough for an error on the wire; its end says how much was cut."""
    if len(text) <= most_bytes // 12:  # no character takes more than twelve bytes
        return text
    kept = text[:most_bytes]
    num_bytes = list(accumulate(map(_num_wire_bytes, kept)))
    if len(kept) == len(text) and num_bytes[-1] <= most_bytes:
        return text
    kept = kept[: bisect_right(num_bytes, most_bytes - _CUT_BYTES)]
    return f"{kept} ... ({len(text) - len(kept)} more characters)"


def _num_wire_bytes(character: str) -> int:
    """Return the bytes of a character in gRPC's status message, which escapes all but printable ASCII."""
    if " " <= character <= "~" and character != "%":
        return 1
    return 3 * len(character.encode("utf-8", "replace"))


def is_ours(error: grpc.RpcError) -> bool:
    """Return whether a service of specdec made the error, and not gRPC or a proxy on the way to it."""
    status = _carried_status(error) if isinstance(error, grpc.aio.AioRpcError | grpc.Call) else None
    return status is not None and _is_ours(status)


def http2_reset_code(details: str) -> int | None:
    """Return the HTTP/2 code with which a stream was reset, from gRPC's message; None if it was not reset."""
    found = _RESET.search(details)
    return int(found["http2_code"]) if found else None


def _oversized_message(found: re.Match[str], peer: str) -> SpecdecError:
    """Return the error for a message that gRPC refused by its size: RESOURCE_EXHAUSTED, but no retry can help."""
    peer, size, limit = peer or "the server", found["size"], found["limit"]
    if found["by_us"]:
        return errors.Internal(f"the answer of {peer} has {size} bytes; the limit is {limit}")
    return errors.InvalidRequest(
        f"the request has {size} bytes; the limit of {peer} is {limit} (its --max-message-bytes)"
    )


def _is_ours(status: status_pb2.Status) -> bool:
    infos = (_unpack(detail, error_details_pb2.ErrorInfo) for detail in status.details)
    return any(info is not None and info.domain == errors.DOMAIN for info in infos)


def _unpack(detail: any_pb2.Any, message_type: type[MessageT]) -> MessageT | None:
    """Return a detail as a message of a type; None if it is of another type, or another program damaged it."""
    try:
        return message_type.FromString(detail.value) if detail.TypeName() == message_type.DESCRIPTOR.full_name else None
    except DecodeError:
        return None


def _numbers(metadata: Mapping[str, str]) -> dict[str, int]:
    """Return the numbers of an error among the metadata of its status."""
    others = ("have", "request_id")
    return {
        name: int(value)
        for name, value in metadata.items()
        if name not in others and value.isascii() and value.isdigit() and len(value) < _MAX_DIGITS
    }


def _count(digits: str) -> int:
    """Return a count of tokens in a detail; 0 for a text that is none."""
    return int(digits) if digits.isascii() and digits.isdigit() and len(digits) < 10 else 0


def _carried_status(error: grpc.aio.AioRpcError | grpc.Call) -> status_pb2.Status | None:
    for key, value in error.trailing_metadata() or ():
        if key == DETAILS_KEY:
            try:
                return status_pb2.Status.FromString(value)
            except DecodeError:
                return None
    return None


def trailing_metadata(status: status_pb2.Status) -> tuple[tuple[str, bytes], ...]:
    """Return the metadata that carries a status's details to the caller."""
    return tuple(rpc_status.to_status(status).trailing_metadata)


def to_item_status(error: SpecdecError) -> common_pb2.ItemStatus:
    """Return the error of one item of a frame."""
    have = error.have if isinstance(error, errors.KvMiss) else 0
    epoch = error.epoch if isinstance(error, errors.StaleEpoch) else 0
    code = code_pb2.Code.Value(error.code)
    if error.retry_after_s == error.default_retry_after_s:
        retry_after_ms = 0
    else:
        retry_after_ms = _NEVER_MS if error.retry_after_s is None else math.ceil(1e3 * error.retry_after_s)
    return common_pb2.ItemStatus(
        code=code,
        reason=error.reason,
        message=bounded(error.message),
        have=have,
        retry_after_ms=retry_after_ms,
        epoch=epoch,
    )


def from_item_status(status: common_pb2.ItemStatus) -> SpecdecError:
    """Return the error in an item's status; an unknown reason becomes the class of its code."""
    retry_after_s = status.retry_after_ms / 1e3 if status.retry_after_ms else None
    error = _build(status.code, status.reason, status.message, have=status.have, retry_after_s=retry_after_s)
    if status.retry_after_ms == _NEVER_MS:
        error.retry_after_s = None
    if isinstance(error, errors.StaleEpoch):
        error.epoch = status.epoch
    return error


def _build(
    code: int, reason: str, message: str, *, field: str = "", retry_after_s: float | None = None, have: int = 0
) -> SpecdecError:
    known, message = errors.type_of_reason(reason), bounded(message)
    if retry_after_s is not None:
        retry_after_s = min(max(0.0, retry_after_s), _MOST_RETRY_S)
    if known is errors.KvMiss:
        return errors.KvMiss(message, have=have)
    name = code_pb2.Code.Name(code) if code in code_pb2.Code.values() else "INTERNAL"
    error_type = known or _BY_CODE.get(name, errors.Internal)
    return error_type(message, reason=reason if known else "", field=field, retry_after_s=retry_after_s)
