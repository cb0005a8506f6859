"""The error tree. One interceptor maps errors to gRPC statuses with details; the client maps them back.

SpecdecError
├── InvalidRequest        INVALID_ARGUMENT     INVALID_REQUEST, CONTEXT_TOO_LONG, NO_CHAT_TEMPLATE
├── NotFound              NOT_FOUND            SESSION_NOT_FOUND, POOL_NOT_FOUND
├── SessionBusy           FAILED_PRECONDITION  SESSION_BUSY
├── VocabularyMismatch    FAILED_PRECONDITION  VOCABULARY_MISMATCH
├── KvMiss                FAILED_PRECONDITION  KV_MISS            (draft and target links only)
├── SessionLost           DATA_LOSS            SESSION_LOST
├── StaleEpoch            ABORTED              STALE_EPOCH
├── LeaseLost             ABORTED              LEASE_LOST
├── ResourceExhausted     RESOURCE_EXHAUSTED   QUEUE_FULL, KV_EXHAUSTED, QUOTA_EXCEEDED, REPLICA_BUSY (draft link only)
├── Unavailable           UNAVAILABLE          REPLICA_UNAVAILABLE, STORE_UNAVAILABLE, DRAINING, and in the SDK alone
│                                              COORDINATOR_UNAVAILABLE
├── DeadlineExceeded      DEADLINE_EXCEEDED    DEADLINE_EXCEEDED  (in the SDK alone)
├── ClientClosed          CANCELLED            CLIENT_CLOSED      (in the SDK alone)
├── Unauthenticated       UNAUTHENTICATED      UNAUTHENTICATED
├── Forbidden             PERMISSION_DENIED    FORBIDDEN
├── Unsupported           UNIMPLEMENTED        UNSUPPORTED
└── Internal              INTERNAL             INTERNAL
"""

from __future__ import annotations

from typing import ClassVar

DOMAIN = "specdec"


class SpecdecError(Exception):
    """Base of every error a caller may see.

    Attributes:
        code: the gRPC status code's name.
        reason: the `ErrorInfo` reason; docs/reference/errors.md says what to do about each.
        field: the request field at fault, in proto spelling (`sampling.top_p`), or "".
        retry_after_s: time to wait before a retry; None if a retry cannot help.
    """

    code: ClassVar[str] = "INTERNAL"
    default_reason: ClassVar[str] = "INTERNAL"
    default_retry_after_s: ClassVar[float | None] = None

    def __init__(self, message: str, *, reason: str = "", field: str = "", retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.reason = reason or self.default_reason
        self.field = field
        self.retry_after_s = self.default_retry_after_s if retry_after_s is None else retry_after_s

    @property
    def retryable(self) -> bool:
        """Return whether the same call may succeed later."""
        return self.retry_after_s is not None


class InvalidRequest(SpecdecError):
    """The request can never succeed unchanged; the message names the field and the limit."""

    code = "INVALID_ARGUMENT"
    default_reason = "INVALID_REQUEST"


class NotFound(SpecdecError):
    """A named session or pool does not exist."""

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

    def __init__(self, message: str, *, have: int) -> None:
        super().__init__(message)
        self.have = have


class SessionLost(SpecdecError):
    """The token log is shorter than what the caller holds."""

    code = "DATA_LOSS"
    default_reason = "SESSION_LOST"


class StaleEpoch(SpecdecError):
    """The replica has seen a newer epoch or round of the session."""

    code = "ABORTED"
    default_reason = "STALE_EPOCH"


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
