"""The fields of a session's hash in Redis as records, and the errors that answers of the session scripts mean.

Called by `redis_store`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from specdec.contract.errors import Internal, LeaseLost, NotFound, SessionLost, SpecdecError, Unavailable
from specdec.contract.payer import Payer
from specdec.contract.types import FinishReason
from specdec.state.connection import DamagedValue
from specdec.state.store import Commit, KvLocation, Lease, LogSeal, RequestRecord

#: Schema of the sessions that this version stores. It rises when an older coordinator would misread them. Sessions
#: without one are of schema 1, as versions up to 0.2.0 store them.
SCHEMA = 1

_MAX_REASON_CHARACTERS = 300


def damage_of(session_id: str, error: Exception | str) -> SessionLost:
    """Return the error for a session whose keys hold what specdec never writes there."""
    reason = f"{error.args[0]!r} is missing" if isinstance(error, KeyError) else str(error)
    return SessionLost(
        f"the record of session {session_id!r} in the store is damaged; delete the session, or use another: "
        f"{reason[:_MAX_REASON_CHARACTERS]}",
        field="session_id",
    )


def check_schema(session_id: str, stored: bytes) -> None:
    """Check that this version can read a session, before its other fields are read.

    Args:
        session_id: id of the session.
        stored: its field `schema`.

    Raises:
        Unavailable: a newer version stored it; another coordinator may be of that version (SCHEMA_TOO_NEW).
        ValueError: the field is damaged.
    """
    schema = read_number({"schema": stored.decode(errors="replace")}, "schema")
    if schema > SCHEMA:
        raise Unavailable(
            f"session {session_id!r} was stored by a newer specdec (schema {schema}; this coordinator reads up to "
            f"{SCHEMA}): upgrade this coordinator, or delete the session",
            reason="SCHEMA_TOO_NEW", field="session_id",
        )  # fmt: skip


def refusal_of(answer: Any, lease: Lease, commit: Commit) -> SpecdecError:
    """Return the error for a commit that was refused."""
    try:
        if isinstance(answer, DamagedValue):
            raise damage_of(lease.session_id, answer)
        if isinstance(answer, SpecdecError):
            raise answer
        check_owned(answer, lease)
        check_log(answer, lease, commit.base_len)
    except SpecdecError as error:
        return error
    return Internal(f"the store answered a commit with {answer!r}")


def loss_of(answer: Any, lease: Lease) -> SpecdecError | None:
    """Return the error for a renewal that was refused, or None."""
    if isinstance(answer, SpecdecError):
        return answer
    try:
        check_owned(answer, lease)
    except (LeaseLost, NotFound) as error:
        return error
    return None


def check_owned(answer: Any, lease: Lease) -> None:
    """Raise LeaseLost if the script says so, and NotFound if the session was deleted under the lease."""
    if answer[0] == b"LEASE_LOST":
        deleted_epoch = answer[1] if len(answer) > 1 else None
        if deleted_epoch is not None and deleted_epoch.isdigit() and lease.epoch <= int(deleted_epoch):
            raise NotFound(f"session {lease.session_id!r} was deleted", field="session_id")
        raise LeaseLost(f"the lease of session {lease.session_id!r} at epoch {lease.epoch} is lost")


def check_log(answer: Any, lease: Lease, expected: int) -> None:
    """Raise SessionLost if the script found fewer tokens in the log than `expected`."""
    if answer[0] == b"SESSION_LOST":
        raise SessionLost(
            f"the log of session {lease.session_id!r} holds {int(answer[1])} tokens where {expected} were committed"
        )


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
        *("schema", SCHEMA),
        *("request_id", request.request_id),
        *("request_digest", request.request_digest),
        *("parameters_json", request.parameters_json),
        *("turn", request.turn),
        *("output_start", request.output_start),
        *("finish_reason", write_finish_reason(request.finish_reason)),
        *("stats_json", request.stats_json),
        *("key_id", request.payer.key_id),
        *("model", request.payer.model),
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
        payer=Payer(meta.get("key_id", ""), meta.get("model", "")),  # absent in sessions of older versions
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
