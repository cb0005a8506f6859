"""Contracts of the stores: sessions, the replica registry, the directory of prefixes, and decisions of operators.

`redis_store`, `prefix_directory` and `shared_decisions` implement them on Redis 7 or the embedded `fakeredis`; both
pass the conformance tests in `tests/contract`. All services register; the coordinator also keeps sessions here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from specdec.contract.engine_api import EngineInfo
from specdec.contract.errors import SpecdecError
from specdec.contract.payer import NO_PAYER, Payer
from specdec.contract.tenant import DEFAULT_TENANT, SessionKey
from specdec.contract.types import FinishReason, TokenIds


@dataclass(frozen=True, slots=True)
class Lease:
    """The right to write one session, fenced by `epoch`."""

    session_id: str
    owner: str
    """Unique per acquisition (coordinator id plus a nonce)."""
    epoch: int
    ttl_s: float
    was_left: bool = False
    """Set if the previous owner gave the session back in order (`SessionRecord.was_left`)."""
    tenant: str = DEFAULT_TENANT
    """Tenant that owns the session."""

    @property
    def key(self) -> SessionKey:
        return SessionKey(self.tenant, self.session_id)


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """One Generate call, with the values that a coordinator needs to join, resume or repeat it."""

    request_id: str
    request_digest: str
    """Hash of the request: the same request_id with another digest is INVALID_REQUEST."""
    parameters_json: str
    """Sampling and speculation parameters with the seed, as the coordinator serialises them."""
    turn: int
    output_start: int
    """Position of the first output token."""
    finish_reason: FinishReason | None = None
    """None while running."""
    stats_json: str = "{}"
    payer: Payer = NO_PAYER


@dataclass(frozen=True, slots=True)
class KvLocation:
    """A replica that held KV of a session. It is a hint: the replica may have evicted the KV or have ended."""

    incarnation: str
    """Incarnation of the replica's process."""
    num_tokens: int
    """Number of leading tokens of the session that it held, at least 1."""


@dataclass(frozen=True, slots=True)
class LogSeal:
    """Length and hash of the token log after the last write. They reveal a log that a damaged store has changed."""

    num_tokens: int
    """Length of the log. What stands beyond it is left from writes that the store has lost."""
    chain_hash: bytes
    """Chain hash of the log after the last commit; empty before the first commit of a turn."""


@dataclass(frozen=True, slots=True)
class SessionRecord:
    session_id: str
    epoch: int
    round_id: int
    """Rounds committed in all turns of this session; equals the next round's id."""
    num_tokens: int
    request: RequestRecord | None
    """The last request; None before the first."""
    owner: str
    """Owner of the live lease, or ""."""
    expires_in_s: float
    was_left: bool = False
    """Set if the last owner gave the session back in order; unset if it died or the store lost its last writes."""
    locations: tuple[KvLocation, ...] = ()
    """KV locations that the last owner stated when it gave the session back."""
    seal: LogSeal | None = None
    """None before the first turn, and for a session that an older version has written."""

    @property
    def status(self) -> str:
        return "running" if self.owner and self.request and self.request.finish_reason is None else "idle"


@dataclass(frozen=True, slots=True)
class Commit:
    """The outcome of one round, or of consecutive ones. Idempotent: the same (round_id, tokens) succeed again, other
    tokens are LEASE_LOST."""

    round_id: int
    """Id of the first round."""
    base_len: int
    """Length of the token log at its start."""
    token_ids: TokenIds
    """uint32 [n], n >= 0; n = 0 ends a request without a token."""
    stats_json: str
    finish_reason: FinishReason | None
    """Set in the request's last commit."""
    chain_hash: bytes
    """Chain hash (`specdec.core.chain`) of the log with these rounds."""
    num_rounds: int = 1


class SessionStore(Protocol):
    """Sessions of one tenant and their token logs. Every method but `commit_all` and `renew_all` is one atomic step.

    A method that takes a lease works on the tenant of the lease, whichever that is, so that leases and commits of
    several tenants can be sent together.

    All methods raise Unavailable (STORE_UNAVAILABLE) if the store cannot be reached. In place of LeaseLost they raise
    NotFound if the session was deleted under the lease a short time ago, even if it has been created again since.
    """

    async def acquire(self, session_id: str, *, owner: str, ttl_s: float, create: bool) -> Lease:
        """Take the session's lease and raise its epoch to max(stored + 1, deleted + 1, server time in µs).

        If a replica has seen a newer epoch, `raise_epoch` follows.

        Raises:
            NotFound: the session does not exist and `create` is false.
            SessionBusy: another owner's lease is alive.
        """
        ...

    async def renew(self, lease: Lease) -> None:
        """Extend the lease. Raises LeaseLost if another owner has it or it has expired."""
        ...

    async def raise_epoch(self, lease: Lease, *, above: int) -> Lease:
        """Return the lease with an epoch above `above`, and renew it. Its older epochs are fenced.

        For a replica that has seen a newer epoch than the store gave: the server's clock was set back, or the session
        moved to a server whose clock is behind.

        Raises:
            LeaseLost: another owner has the lease or it has expired.
        """
        ...

    async def renew_all(self, leases: Sequence[Lease]) -> list[SpecdecError | None]:
        """Renew any number of leases in one message; each renewal is an atomic step of its own.

        Returns:
            For each lease, None or the error that `renew` would raise.
        """
        ...

    async def release(
        self, lease: Lease, *, left: bool = True, num_tokens: int = 0, locations: Sequence[KvLocation] = ()
    ) -> None:
        """Give the lease back; without effect on a lease that is lost. Idempotent.

        Args:
            lease: the lease.
            left: whether the log holds every token that was shown. An owner that wrote nothing passes `was_left` on.
            num_tokens: number of tokens that the log must hold after the owner's turn; with fewer of them, or without
                that turn, the store has lost writes and the session is not left in order. 0: the owner wrote no turn.
            locations: replicas that hold the session's KV now; if empty, the stored ones stay.
        """
        ...

    async def begin_request(
        self, lease: Lease, request: RequestRecord, *, keep: int, token_ids: TokenIds, round_id: int | None = None
    ) -> None:
        """Start, take over or repair a turn: truncate the token log to `keep`, append `token_ids`, store the request.

        Every owner calls this before its first commit.

        Args:
            lease: the lease.
            request: the request, stored in the place of the last one.
            keep: number of leading tokens of the log that the turn begins with.
            token_ids: uint32 [n]; the prompt's new tokens, or those that the store has lost.
            round_id: id of the next round, which a store that lost writes does not know. None: the stored one.

        Raises:
            LeaseLost: the lease is lost.
            SessionLost: the log holds fewer tokens than `keep` (the store lost writes).
        """
        ...

    async def commit(self, lease: Lease, commit: Commit) -> None:
        """Append a round's tokens. After this they may be shown to the client.

        Raises:
            LeaseLost: epoch, owner, round or log length do not match.
            SessionLost: the log is shorter than `base_len`, or lacks the turn (the store lost writes).
        """
        ...

    async def commit_all(self, commits: Sequence[tuple[Lease, Commit]]) -> list[SpecdecError | None]:
        """Commit rounds of any number of sessions in one message; each commit is an atomic step of its own.

        Returns:
            For each commit, None or the error that `commit` would raise.
        """
        ...

    async def load(self, session_id: str) -> SessionRecord | None:
        """Return the record, or None if there is none. Raises SessionLost (damage) or Unavailable (SCHEMA_TOO_NEW)."""
        ...

    async def read_tokens(self, session_id: str, start: int = 0) -> TokenIds:
        """Return the token log from `start` on: uint32 [n].

        It may hold more than `SessionRecord.num_tokens`; those beyond are left from writes that the store has lost.
        """
        ...

    async def delete(self, session_id: str) -> None:
        """Delete the session, even if another owner holds its lease, whose next call raises NotFound. Idempotent."""
        ...

    async def discard(self, lease: Lease) -> None:
        """Remove the session without a deletion mark. Raises LeaseLost if the lease is lost."""
        ...

    async def ping(self) -> None:
        """Raise Unavailable if the store is not available."""

    def of_tenant(self, tenant: str) -> SessionStore:
        """Return the sessions of a tenant, on the connections of this store. Closing either one closes both."""
        ...

    def reopen(self) -> SessionStore:
        """Return the same store with new connections, for another event loop. The caller closes it."""
        ...

    async def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class ReplicaRecord:
    address: str
    """host:port that other services dial."""
    engine: EngineInfo
    """Description at the last heartbeat, with load, free KV and draining."""


class ReplicaRegistry(Protocol):
    """The serving replicas, and the coordinators that clients may call. Entries expire `ttl_s` after their last
    heartbeat."""

    async def publish(self, record: ReplicaRecord, *, ttl_s: float) -> None:
        """Add a replica for `ttl_s`. Raises InvalidRequest for a record that readers would skip."""
        ...

    async def remove(self, replica_id: str) -> None: ...

    async def replicas(self, role: str) -> list[ReplicaRecord]:
        """Return the live replicas of a role ("draft", "target" or "coordinator"), ordered by replica id."""
        ...

    async def close(self) -> None: ...


class PrefixDirectory(Protocol):
    """The replicas that hold the KV of one tenant's prefixes. Entries expire some time after the last note.

    `note` and `holders` raise Unavailable (STORE_UNAVAILABLE) if the directory cannot be reached.
    """

    def of_tenant(self, tenant: str) -> PrefixDirectory:
        """Return the directory of another tenant, on the same connections."""
        ...

    async def note(self, chain_hashes: Sequence[bytes], num_held: Mapping[str, int]) -> None:
        """Record which prefixes of one chain replicas hold. Idempotent.

        Args:
            chain_hashes: hashes of prefixes of one chain, shortest first, at least one. The first one chooses the
                cluster slot, so all callers must begin a chain at the same length.
            num_held: by the replica's incarnation, the number of those prefixes that it holds, counted from the first.
        """
        ...

    async def holders(self, chain_hashes: Sequence[bytes]) -> list[list[str]]:
        """Return the incarnations that hold each prefix of a chain, given as for `note`; the latest come first."""
        ...


class PromotionStatus(StrEnum):
    """State of a promotion."""

    RUNNING = "running"
    DONE = "done"
    """The requested share is reached and stays."""
    ROLLED_BACK = "rolled_back"
    """The pool produced fewer tokens a second, so no session uses it."""


@dataclass(frozen=True, slots=True)
class PromotionRecord:
    """A draft pool that replaces the usual pool for a share of the sessions."""

    pool: str
    share: float  # of the sessions, above 0, at most `most`
    most: float  # the requested share, at most 1
    status: PromotionStatus


@dataclass(frozen=True, slots=True)
class TargetShare:
    """A share of the new sessions for one target model; the other models divide the rest."""

    fingerprint: str  # of the model
    share: float  # 0 to 1


class TargetShares(Protocol):
    """The decision of an operator about target models, which all coordinators of a tenant share: one at a time.

    All methods raise Unavailable (STORE_UNAVAILABLE) if the store cannot be reached, and Internal for an invalid
    record.
    """

    async def read(self) -> TargetShare | None:
        """Return the decision; None if the models' replicas are counted."""
        ...

    async def put(self, share: TargetShare | None) -> None:
        """Store a decision, or remove it with None."""
        ...


class Promotions(Protocol):
    """The promotion of a tenant's coordinators: one at a time, kept until another one replaces it.

    All methods raise Unavailable (STORE_UNAVAILABLE) if the store cannot be reached, and Internal for an invalid
    record.
    """

    async def read(self) -> PromotionRecord | None:
        """Return the current promotion, or None."""
        ...

    async def put(self, promotion: PromotionRecord | None) -> PromotionRecord | None:
        """Store a promotion, or remove it with None; return the stored one."""
        ...

    async def swap(self, expected: PromotionRecord, wanted: PromotionRecord) -> PromotionRecord | None:
        """Replace `expected` by `wanted` if it is still stored; return the promotion that is stored afterwards."""
        ...
