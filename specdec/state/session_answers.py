"""The errors that answers of the session scripts mean. Called by `redis_store`."""

from __future__ import annotations

from typing import Any

from specdec.contract.errors import Internal, LeaseLost, NotFound, SessionLost, SpecdecError
from specdec.state.connection import DamagedValue
from specdec.state.store import Commit, Lease

_MAX_REASON_CHARACTERS = 300


def damage_of(session_id: str, error: Exception | str) -> SessionLost:
    """Return the error for a session whose keys hold what specdec never writes there."""
    reason = f"{error.args[0]!r} is missing" if isinstance(error, KeyError) else str(error)
    return SessionLost(
        f"the record of session {session_id!r} in the store is damaged; delete the session, or use another: "
        f"{reason[:_MAX_REASON_CHARACTERS]}",
        field="session_id",
    )


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
