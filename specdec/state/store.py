"""What the coordinator keeps outside itself: the contracts of the session store, the replica registry, the directory of
prefixes and the promotion of a draft pool.

Not here: Redis. Implementations: `redis_store`, `prefix_directory` and `promotions` (Redis 7, or the embedded
`fakeredis`); both pass the conformance tests in `tests/contract`. Called by the coordinator (sessions, discovery) and
by draft and target services (their own registration).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from specdec.errors import SpecdecError
from specdec.types import EngineInfo, FinishReason, TokenIds


@dataclass(frozen=True, slots=True)
class Lease:
    """The right to write one session, fenced by `epoch`."""

    session_id: str
    owner: str
    """Unique per acquisition (coordinator id plus a nonce)."""
    epoch: int
    ttl_s: float
    was_left: bool = False
    """Whether the session was left in order before it was taken (`SessionRecord.was_left`)."""


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """One Generate call, as any coordinator needs it to join, resume or answer it again."""

    request_id: str
    request_digest: str
    """Hash of what was asked: the same request_id with another digest is INVALID_REQUEST."""
    parameters_json: str
    """Sampling and speculation parameters, seed included, as the coordinator serialises them."""
    turn: int
    output_start: int
    """Position of the first output token."""
    finish_reason: FinishReason | None = None
    """None while running."""
    stats_json: str = "{}"


@dataclass(frozen=True, slots=True)
class KvLocation:
    """Where KV of a session was left: a hint, for the replica may have evicted it or be gone."""

    incarnation: str
    """Of the replica's process."""
    num_tokens: int
    """Leading tokens of the session that it held, at least 1."""


@dataclass(frozen=True, slots=True)
class SessionRecord:
    session_id: str
    epoch: int
    round_id: int
    """Rounds committed in this session, all turns together; the next round's id."""
    num_tokens: int
    request: RequestRecord | None
    """The last request; None before the first."""
    owner: str
    """Live lease owner, or ""."""
    expires_in_s: float
    was_left: bool = False
    """Whether the last owner gave it back in order; a dead owner did not, nor one whose last writes the store lost."""
    homes: tuple[KvLocation, ...] = ()
    """As the last owner that gave the session back said."""

    @property
    def status(self) -> str:
        return "running" if self.owner and self.request and self.request.finish_reason is None else "idle"


@dataclass(frozen=True, slots=True)
class Commit:
    """One round's outcome. Idempotent: the same (round_id, tokens) again is success, other tokens are LEASE_LOST."""

    round_id: int
    base_len: int
    """Token-log length the round started from."""
    token_ids: TokenIds
    """uint32 [n], n >= 0 (0 closes a request without a token)."""
    stats_json: str
    finish_reason: FinishReason | None
    """Set by the request's last commit."""


class SessionStore(Protocol):
    """Every method but `commit_all` and `renew_all` is one atomic step.

    All raise Unavailable (STORE_UNAVAILABLE) when the store cannot be reached. Where LeaseLost is said, NotFound is
    raised instead when the session was deleted under the lease a short while ago, whatever has been made of it since.
    """

    async def acquire(self, session_id: str, *, owner: str, ttl_s: float, create: bool) -> Lease:
        """Takes the session's lease and raises its epoch to max(stored + 1, deleted + 1, server time in µs).

        Raises:
            NotFound: no such session and not `create`.
            SessionBusy: another owner's lease is alive.
        """
        ...

    async def renew(self, lease: Lease) -> None:
        """Extends the lease. Raises LeaseLost when it is not ours any more."""
        ...

    async def renew_all(self, leases: Sequence[Lease]) -> list[SpecdecError | None]:
        """Renews any number of leases, sent together. Each is its own atomic step.

        Returns:
            For each, None or what `renew` would have raised.
        """
        ...

    async def release(self, lease: Lease, *, left: bool = True, homes: Sequence[KvLocation] = ()) -> None:
        """Gives the lease back; a lease that is not ours any more is left alone. Idempotent.

        Args:
            left: the session is in order: nothing that was shown is missing. Who did not write passes `was_left` on.
            homes: where the session's KV is now; none: what was said before stays.
        """
        ...

    async def begin_request(self, lease: Lease, request: RequestRecord, *, keep: int, token_ids: TokenIds) -> None:
        """Starts a turn: truncates the token log to `keep`, appends the prompt's new tokens, stores the request.

        Raises:
            LeaseLost: the lease is not ours any more.
            SessionLost: the log holds fewer tokens than `keep` (the store lost writes).
        """
        ...

    async def commit(self, lease: Lease, commit: Commit) -> None:
        """Appends a round's tokens. After it returns they may be shown to the client.

        Raises:
            LeaseLost: epoch, owner, round or log length do not fit.
            SessionLost: the log is shorter than `base_len` (the store lost writes).
        """
        ...

    async def commit_all(self, commits: Sequence[tuple[Lease, Commit]]) -> list[SpecdecError | None]:
        """Commits of any number of sessions, sent together. Each is its own atomic step.

        Returns:
            For each, None or what `commit` would have raised.
        """
        ...

    async def repair(self, lease: Lease, *, base_len: int, token_ids: TokenIds) -> None:
        """After the store lost writes: a live owner appends its tail again at `base_len`.

        What the log holds beyond `base_len` is replaced; the next commit may name a later round than is stored.

        Raises:
            LeaseLost: the lease is not ours any more.
            SessionLost: the log holds fewer tokens than `base_len`.
        """
        ...

    async def load(self, session_id: str) -> SessionRecord | None:
        """Reads a session's record; None when there is none."""
        ...

    async def read_tokens(self, session_id: str, start: int = 0) -> TokenIds:
        """Reads the token log from `start` on: uint32 [num_tokens - start]."""
        ...

    async def delete(self, session_id: str) -> None:
        """Forgets the session, whoever holds its lease; its holder is told so. Idempotent."""
        ...

    async def discard(self, lease: Lease) -> None:
        """Forgets the session as if it had never been. Raises LeaseLost when the lease is not ours any more."""
        ...

    async def ping(self) -> None:
        """Raises Unavailable when the store cannot serve."""
        ...

    def reopen(self) -> SessionStore:
        """The same store through connections of its own, for another event loop. Connects lazily; close it."""
        ...

    async def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class ReplicaRecord:
    address: str
    """host:port other services dial."""
    engine: EngineInfo
    """As of the last heartbeat: load, free KV and draining included."""


class ReplicaRegistry(Protocol):
    """Who serves. Entries vanish `ttl_s` after their last heartbeat."""

    async def publish(self, record: ReplicaRecord, *, ttl_s: float) -> None:
        """Puts a replica in for `ttl_s`. Raises InvalidRequest for a record that readers would leave out."""
        ...

    async def remove(self, replica_id: str) -> None: ...

    async def replicas(self, role: str) -> list[ReplicaRecord]:
        """Live replicas of a role ("draft" or "target"), ordered by replica id."""
        ...

    async def close(self) -> None: ...


class PrefixDirectory(Protocol):
    """Which replicas hold the KV of which prefixes, of one tenant. Entries vanish some time after they were last noted.

    Both raise Unavailable (STORE_UNAVAILABLE) when the directory cannot be reached.
    """

    async def note(self, chain_hashes: Sequence[bytes], num_held: Mapping[str, int]) -> None:
        """Notes what replicas hold of one chain. Idempotent.

        Args:
            chain_hashes: of prefixes of one chain, shortest first, at least one. The first decides where the chain is
                kept, so that all callers must begin a chain at the same length.
            num_held: by the replica's incarnation, how many of those prefixes it holds, from the first on.
        """
        ...

    async def holders(self, chain_hashes: Sequence[bytes]) -> list[list[str]]:
        """The incarnations that hold each of a chain's prefixes, given as for `note`; those noted last come first."""
        ...


class PromotionStatus(StrEnum):
    """Where a promotion stands."""

    RUNNING = "running"
    DONE = "done"
    """The share asked for is reached, and stays."""
    ROLLED_BACK = "rolled_back"
    """It made fewer tokens a second: no session gets it."""


@dataclass(frozen=True, slots=True)
class Promotion:
    """A draft pool that sessions get instead of the one they would have had."""

    pool: str
    share: float
    """Of the sessions, above 0, at most `most`."""
    most: float
    """The share that was asked for, at most 1."""
    status: PromotionStatus


class Promotions(Protocol):
    """The promotion of a tenant's coordinators: one at a time, kept until another one takes its place.

    All raise Unavailable (STORE_UNAVAILABLE) when the store cannot be reached, and Internal for a record that is none.
    """

    async def read(self) -> Promotion | None:
        """The one there is."""
        ...

    async def put(self, promotion: Promotion | None) -> Promotion | None:
        """Puts one there, or none, whatever there was; returns it."""
        ...

    async def swap(self, expected: Promotion, wanted: Promotion) -> Promotion | None:
        """Puts `wanted` in the place of `expected` where that is still there; returns the one that is there then."""
        ...
