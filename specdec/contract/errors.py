"""The error tree. One interceptor maps errors to gRPC statuses with details; the client maps them back.

SpecdecError
├── InvalidRequest        INVALID_ARGUMENT     INVALID_REQUEST, CONTEXT_TOO_LONG, NO_CHAT_TEMPLATE, CONSTRAINT_INVALID,
│                                              NO_LEGAL_TOKEN
│   └── InvalidSetting    (at the start of a process, which ends with exit code 2)
├── NotFound              NOT_FOUND            SESSION_NOT_FOUND, POOL_NOT_FOUND, MODEL_NOT_FOUND,
│                                              REPLICA_NOT_FOUND
├── SessionBusy           FAILED_PRECONDITION  SESSION_BUSY
├── VocabularyMismatch    FAILED_PRECONDITION  VOCABULARY_MISMATCH
├── KvMiss                FAILED_PRECONDITION  KV_MISS            (draft and target links only)
├── ConstraintMiss        FAILED_PRECONDITION  CONSTRAINT_MISS    (target links only)
├── SessionLost           DATA_LOSS            SESSION_LOST
├── StaleEpoch            ABORTED              STALE_EPOCH
├── LeaseLost             ABORTED              LEASE_LOST
├── ResourceExhausted     RESOURCE_EXHAUSTED   QUEUE_FULL, KV_EXHAUSTED, QUOTA_EXCEEDED, REPLICA_BUSY (draft link only)
├── Unavailable           UNAVAILABLE          REPLICA_UNAVAILABLE, STORE_UNAVAILABLE, DRAINING, SCHEMA_TOO_NEW; in the
│                                              SDK alone COORDINATOR_UNAVAILABLE; at the command line
│                                              alone ADDRESS_IN_USE
├── DeadlineExceeded      DEADLINE_EXCEEDED    DEADLINE_EXCEEDED  (in the SDK alone)
├── ClientClosed          CANCELLED            CLIENT_CLOSED      (in the SDK alone)
├── Unauthenticated       UNAUTHENTICATED      UNAUTHENTICATED
├── Forbidden             PERMISSION_DENIED    FORBIDDEN
├── Unsupported           UNIMPLEMENTED        UNSUPPORTED
└── Internal              INTERNAL             INTERNAL
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

DOMAIN = "specdec"


@dataclass(frozen=True, slots=True)
class PartialOutput:
    """Output that a client had received when its stream failed."""

    session_id: str
    resume_from: int
    """Output token from which `Client.resume(session_id, resume_from)` continues."""
    text: str
    token_ids: tuple[int, ...]


class SpecdecError(Exception):
    """Base of every error a caller may see.

    Attributes:
        code: the gRPC status code's name.
        reason: the `ErrorInfo` reason; docs/reference/errors.md says what to do about each.
        field: the request field at fault, in proto spelling (`sampling.top_p`), or "".
        retry_after_s: time to wait before a retry; None if a retry cannot help.
        numbers: numbers of the message by their names, for programs; of CONTEXT_TOO_LONG `max_context_tokens`,
            `num_prompt_tokens` (or `min_prompt_tokens`, if they were not counted) and `max_new_tokens`.
        partial: output received before this error ended a stream of the SDK; else None.
    """

    code: ClassVar[str] = "INTERNAL"
    default_reason: ClassVar[str] = "INTERNAL"
    default_retry_after_s: ClassVar[float | None] = None

    def __init__(
        self,
        message: str,
        *,
        reason: str = "",
        field: str = "",
        retry_after_s: float | None = None,
        numbers: Mapping[str, int] | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.reason = reason or self.default_reason
        self.field = field
        self.retry_after_s = self.default_retry_after_s if retry_after_s is None else retry_after_s
        self.numbers = dict(numbers or {})
        self.partial: PartialOutput | None = None

    @property
    def retryable(self) -> bool:
        """Return whether the same call may succeed later."""
        return self.retry_after_s is not None


class InvalidRequest(SpecdecError):
    """The request can never succeed unchanged; the message names the field and the limit."""

    code = "INVALID_ARGUMENT"
    default_reason = "INVALID_REQUEST"


class InvalidSetting(InvalidRequest):
    """A setting of this process does not fit what it names, such as a file or a server; the message names the flag."""


class NotFound(SpecdecError):
    """A named session, pool, model or response does not exist."""

    code = "NOT_FOUND"
    default_reason = "SESSION_NOT_FOUND"


class SessionBusy(SpecdecError):
    """Another request is running on the session."""

    code = "FAILED_PRECONDITION"
    default_reason = "SESSION_BUSY"
    default_retry_after_s = 0.1


class VocabularyMismatch(SpecdecError):
    """Two parts of the system have different vocabularies; the message contains both fingerprints."""

    code = "FAILED_PRECONDITION"
    default_reason = "VOCABULARY_MISMATCH"


class KvMiss(SpecdecError):
    """The replica needs the tokens from `have` on (docs/protocol.md section 5)."""

    code = "FAILED_PRECONDITION"
    default_reason = "KV_MISS"

    def __init__(
        self, message: str, *, have: int = 0, reason: str = "", field: str = "", retry_after_s: float | None = None
    ) -> None:
        super().__init__(message, reason=reason, field=field, retry_after_s=retry_after_s)
        self.have = have


class ConstraintMiss(SpecdecError):
    """The replica needs the text of the constraint (docs/protocol.md section 11)."""

    code = "FAILED_PRECONDITION"
    default_reason = "CONSTRAINT_MISS"


class SessionLost(SpecdecError):
    """The token log is shorter than what the caller holds."""

    code = "DATA_LOSS"
    default_reason = "SESSION_LOST"


class StaleEpoch(SpecdecError):
    """The replica has seen a newer epoch or round of the session."""

    code = "ABORTED"
    default_reason = "STALE_EPOCH"

    def __init__(
        self, message: str, *, epoch: int = 0, reason: str = "", field: str = "", retry_after_s: float | None = None
    ) -> None:
        super().__init__(message, reason=reason, field=field, retry_after_s=retry_after_s)
        self.epoch = epoch
        """Newest epoch of the session that the replica has seen; 0: it did not state one."""


class LeaseLost(SpecdecError):
    """Another coordinator owns the session now."""

    code = "ABORTED"
    default_reason = "LEASE_LOST"
    default_retry_after_s = 0.1


class ResourceExhausted(SpecdecError):
    """A queue, such as that of a stream's unread tokens, the KV pool or a quota is full."""

    code = "RESOURCE_EXHAUSTED"
    default_reason = "QUEUE_FULL"
    default_retry_after_s = 0.5


class Unavailable(SpecdecError):
    """A part of the system cannot be reached or is shutting down."""

    code = "UNAVAILABLE"
    default_reason = "REPLICA_UNAVAILABLE"
    default_retry_after_s = 0.5


class DeadlineExceeded(SpecdecError):
    """A call took longer than its caller's `timeout`."""

    code = "DEADLINE_EXCEEDED"
    default_reason = "DEADLINE_EXCEEDED"


class ClientClosed(SpecdecError):
    """The client was closed before or during the call."""

    code = "CANCELLED"
    default_reason = "CLIENT_CLOSED"


class Unauthenticated(SpecdecError):
    """No valid credentials."""

    code = "UNAUTHENTICATED"
    default_reason = "UNAUTHENTICATED"


class Forbidden(SpecdecError):
    """The credentials are valid, but do not permit the call."""

    code = "PERMISSION_DENIED"
    default_reason = "FORBIDDEN"


class Unsupported(SpecdecError):
    """The request is valid, but this build or model does not support it."""

    code = "UNIMPLEMENTED"
    default_reason = "UNSUPPORTED"


class Internal(SpecdecError):
    """A fault of specdec; the log contains the traceback with the request id."""


#: Class of each reason: an error that crossed a process boundary is rebuilt from its reason.
_TYPES_BY_REASON: dict[str, type[SpecdecError]] = {
    "INVALID_REQUEST": InvalidRequest,
    "CONTEXT_TOO_LONG": InvalidRequest,
    "NO_CHAT_TEMPLATE": InvalidRequest,
    "CONSTRAINT_INVALID": InvalidRequest,
    "NO_LEGAL_TOKEN": InvalidRequest,
    "CONSTRAINT_MISS": ConstraintMiss,
    "SESSION_NOT_FOUND": NotFound,
    "POOL_NOT_FOUND": NotFound,
    "MODEL_NOT_FOUND": NotFound,
    "REPLICA_NOT_FOUND": NotFound,
    "SESSION_BUSY": SessionBusy,
    "VOCABULARY_MISMATCH": VocabularyMismatch,
    "KV_MISS": KvMiss,
    "SESSION_LOST": SessionLost,
    "STALE_EPOCH": StaleEpoch,
    "LEASE_LOST": LeaseLost,
    "QUEUE_FULL": ResourceExhausted,
    "KV_EXHAUSTED": ResourceExhausted,
    "QUOTA_EXCEEDED": ResourceExhausted,
    "REPLICA_BUSY": ResourceExhausted,
    "REPLICA_UNAVAILABLE": Unavailable,
    "STORE_UNAVAILABLE": Unavailable,
    "DRAINING": Unavailable,
    "SCHEMA_TOO_NEW": Unavailable,
    "COORDINATOR_UNAVAILABLE": Unavailable,
    "ADDRESS_IN_USE": Unavailable,
    "DEADLINE_EXCEEDED": DeadlineExceeded,
    "CLIENT_CLOSED": ClientClosed,
    "UNAUTHENTICATED": Unauthenticated,
    "FORBIDDEN": Forbidden,
    "UNSUPPORTED": Unsupported,
    "INTERNAL": Internal,
}

_ERROR_LINE = re.compile(r"(?:error: )?(?P<message>.+) \((?P<reason>[A-Z_]+)\)")


def type_of_reason(reason: str) -> type[SpecdecError] | None:
    """Return the class of errors that have this reason; None for a reason that this version does not know."""
    return _TYPES_BY_REASON.get(reason)


def error_line(error: SpecdecError) -> str:
    """Return the line that a program writes to stderr about an error: the sentence first, the reason last."""
    return f"error: {' '.join(error.message.split())} ({error.reason})"


def parse_error_line(line: str) -> SpecdecError | None:
    """Return the error that a line of `error_line` tells, with or without "error: "; None for any other line."""
    found = _ERROR_LINE.fullmatch(line.strip())
    error_type = type_of_reason(found["reason"]) if found else None
    if found is None or error_type is None:
        return None
    return error_type(found["message"], reason=found["reason"])
