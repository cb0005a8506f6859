"""The fields of a session's hash in Redis, and their conversion to and from records. Called by `redis_store`."""

from __future__ import annotations

from collections.abc import Sequence

from specdec.contract.types import FinishReason
from specdec.state.store import KvLocation, LogSeal, RequestRecord

#: `finish_reason` of a running request.
RUNNING = 0

#: Largest numbers of a session's fields; epochs are exact in Lua up to theirs.
MAX_NUMBER = (1 << 32) - 1
MAX_EPOCH = (1 << 53) - 1
_MAX_DIGITS = 16

#: Limits of a session's stored KV locations: their number, a target and a draft, and the digits of a token count.
_MAX_LOCATIONS = 2
_MAX_COUNT_DIGITS = 9


def read_number(meta: dict[str, str], name: str, most: int = MAX_NUMBER) -> int:
    """Return a field that is a whole number. Raises KeyError or ValueError."""
    text = meta[name]
    if not (text.isascii() and text.isdigit() and len(text) <= _MAX_DIGITS and int(text) <= most):
        raise ValueError(f"{name} is {text[:40]!r}, and must be a whole number up to {most}")
    return int(text)


def write_finish_reason(reason: FinishReason | None) -> int:
    """Return the stored finish reason; None: the request runs."""
    return RUNNING if reason is None else int(reason)


def request_fields(request: RequestRecord) -> list[str | bytes | int]:
    """Return the names and values of a request's fields, one after the other."""
    return [
        *("request_id", request.request_id),
        *("request_digest", request.request_digest),
        *("parameters_json", request.parameters_json),
        *("turn", request.turn),
        *("output_start", request.output_start),
        *("finish_reason", write_finish_reason(request.finish_reason)),
        *("stats_json", request.stats_json),
    ]


def read_request(meta: dict[str, str]) -> RequestRecord | None:
    """Return the request in a session's fields; None before the first one."""
    if "request_id" not in meta:
        return None
    finish_reason = read_number(meta, "finish_reason")
    return RequestRecord(
        request_id=meta["request_id"],
        request_digest=meta["request_digest"],
        parameters_json=meta["parameters_json"],
        turn=read_number(meta, "turn"),
        output_start=read_number(meta, "output_start"),
        finish_reason=None if finish_reason == RUNNING else FinishReason(finish_reason),
        stats_json=meta["stats_json"],
    )


def read_seal(meta: dict[str, str]) -> LogSeal | None:
    """Return the seal of the log; None if a version that writes none has written the session since."""
    if meta.get("length_at") != f"{meta.get('turn')}:{meta.get('round')}":
        return None
    return LogSeal(read_number(meta, "length"), bytes.fromhex(meta["chain_hash"]))


def write_locations(locations: Sequence[KvLocation]) -> str:
    """Return the stored text of KV locations."""
    return " ".join(f"{location.incarnation}:{location.num_tokens}" for location in locations)


def read_locations(text: str) -> tuple[KvLocation, ...]:
    """Return the locations in a stored text; invalid parts are skipped, because locations are hints."""
    parts = (part.rpartition(":") for part in text.split(" ")[:_MAX_LOCATIONS])
    return tuple(
        KvLocation(incarnation, int(count))
        for incarnation, _, count in parts
        if incarnation and count.isascii() and count.isdigit() and len(count) <= _MAX_COUNT_DIGITS
    )
