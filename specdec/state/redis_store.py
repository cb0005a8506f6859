"""The session store and the replica registry on Redis 7 or the embedded `fakeredis`, one Lua script per atomic step.

`store` defines the contracts, `key_names` the key names, and `connection` retries and maps failures. Called by the
coordinator and, for the registry, by every service.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from specdec.contract.errors import NotFound, SessionBusy, SpecdecError
from specdec.contract.tenant import DEFAULT_TENANT, SessionKey, check_tenant
from specdec.contract.types import TokenIds
from specdec.settings.cluster_names import DEFAULT_CLUSTER, check_cluster
from specdec.state.connection import DamagedValue, RedisConnection
from specdec.state.key_names import TOKEN_BYTES, pack_tokens, replica_keys, session_keys, unpack_tokens
from specdec.state.live_coordinators import COORDINATOR
from specdec.state.prefix_directory import RedisPrefixDirectory
from specdec.state.replica_records import (
    MAX_RECORD_BYTES,
    MAX_REPLICA_ID_BYTES,
    Signer,
    decode_record,
    encode_record,
)
from specdec.state.session_fields import (
    MAX_EPOCH,
    check_log,
    check_owned,
    check_schema,
    damage_of,
    loss_of,
    read_locations,
    read_number,
    read_request,
    read_seal,
    refusal_of,
    request_fields,
    write_finish_reason,
    write_locations,
)
from specdec.state.shared_decisions import RedisPromotions, RedisTargetShares
from specdec.state.shared_quotas import SharedQuotas
from specdec.state.store import Commit, KvLocation, Lease, ReplicaRecord, ReplicaRegistry, RequestRecord, SessionRecord
from specdec.state.usage_records import UsageRecords, usage_keys

DEFAULT_SESSION_TTL_S = 3600.0

ROLES = ("draft", "target", COORDINATOR)

#: Longest TTL of a heartbeat.
_MOST_TTL_S = 90.0

#: Lifetime of a deletion mark, from which a coordinator that still writes the session learns of the deletion.
_DELETION_TTL_S = 600.0

_log = logging.getLogger(__name__)


class RedisSessionStore:
    """`SessionStore` on Redis. Safe for any number of tasks of one event loop.

    A cancelled call may or may not have taken effect; every step may be repeated. A session expires `session_ttl_s`
    after its last acquire, renewal, begin, commit or release; reading does not prolong it.
    """

    def __init__(
        self,
        url: str,
        *,
        tenant: str = DEFAULT_TENANT,
        cluster: str = DEFAULT_CLUSTER,
        session_ttl_s: float = DEFAULT_SESSION_TTL_S,
        usage_kept_s: float = 0.0,
    ) -> None:
        """Open no connection yet.

        Args:
            url: a URL of `specdec.settings.redis_url`.
            tenant: owner of the sessions; tenants share no session.
            cluster: name of the system; clusters on one Redis share no key.
            session_ttl_s: above 0.
            usage_kept_s: time for which the usage record of a turn is kept; 0: none is written.

        Raises:
            InvalidRequest: the URL, the tenant or the cluster is malformed.
        """
        self._url = url
        self._cluster = check_cluster(cluster)
        self._tenant = check_tenant(tenant)
        self._session_ttl_s = session_ttl_s
        self._session_ttl_ms = _milliseconds(session_ttl_s)
        self._usage_kept_s = usage_kept_s
        self._connection = RedisConnection(url)

    async def acquire(self, session_id: str, *, owner: str, ttl_s: float, create: bool) -> Lease:
        """See `SessionStore.acquire`. The same owner may acquire again, which raises the epoch again."""
        args: list[str | bytes | int] = [owner, _milliseconds(ttl_s), self._session_ttl_ms, int(create)]
        answer = await self._run("acquire", self._key(session_id), args)
        if answer[0] == b"BUSY":
            raise SessionBusy(f"session {session_id!r} is running another request", field="session_id")
        if answer[0] == b"NOT_FOUND":
            raise NotFound(f"session {session_id!r} does not exist", field="session_id")
        return Lease(session_id, owner, int(answer[1]), ttl_s, was_left=answer[2] == b"1", tenant=self._tenant)

    async def renew(self, lease: Lease) -> None:
        (error,) = await self.renew_all([lease])
        if error is not None:
            raise error

    async def raise_epoch(self, lease: Lease, *, above: int) -> Lease:
        args = [*self._fence(lease, _milliseconds(lease.ttl_s)), above]
        answer = await self._run("renew", lease.key, args)
        check_owned(answer, lease)
        return lease if len(answer) == 1 else replace(lease, epoch=int(answer[1]))

    async def renew_all(self, leases: Sequence[Lease]) -> list[SpecdecError | None]:
        calls = [
            (self._keys(lease.key), self._fence(lease, _milliseconds(lease.ttl_s)))
            for lease in leases
        ]  # fmt: skip
        answers = await self._connection.run_scripts("renew", calls)
        return [loss_of(answer, lease) for answer, lease in zip(answers, leases, strict=True)]

    async def release(
        self, lease: Lease, *, left: bool = True, num_tokens: int = 0, locations: Sequence[KvLocation] = ()
    ) -> None:
        args = [*self._fence(lease), int(left), write_locations(locations), num_tokens]
        await self._run("release", lease.key, args)

    async def begin_request(
        self, lease: Lease, request: RequestRecord, *, keep: int, token_ids: TokenIds, round_id: int | None = None
    ) -> None:
        rounds: list[str | bytes | int] = [] if round_id is None else ["round", round_id]
        usage_ms = round(self._usage_kept_s * 1000)
        args = [*self._fence(lease), keep, pack_tokens(token_ids), usage_ms, *request_fields(request), *rounds]
        answer = await self._run("begin_request", lease.key, args)
        check_owned(answer, lease)
        check_log(answer, lease, keep)

    async def commit(self, lease: Lease, commit: Commit) -> None:
        (error,) = await self.commit_all([(lease, commit)])
        if error is not None:
            raise error

    async def commit_all(self, commits: Sequence[tuple[Lease, Commit]]) -> list[SpecdecError | None]:
        calls = [(self._keys(lease.key), self._commit_args(lease, commit)) for lease, commit in commits]
        answers = await self._connection.run_scripts("commit", calls)
        return [
            None if answer == b"OK" else refusal_of(answer, lease, commit)
            for answer, (lease, commit) in zip(answers, commits, strict=True)
        ]

    def _commit_args(self, lease: Lease, commit: Commit) -> list[str | bytes | int]:
        return [
            *self._fence(lease),
            commit.round_id,
            commit.base_len,
            pack_tokens(commit.token_ids),
            commit.stats_json,
            write_finish_reason(commit.finish_reason),
            commit.chain_hash.hex(),
            commit.num_rounds,
        ]

    async def load(self, session_id: str) -> SessionRecord | None:
        answer = await self._run("load", self._key(session_id), [])
        if not answer:
            return None
        try:
            return self._record(session_id, *answer)
        except (KeyError, ValueError) as error:
            raise damage_of(session_id, error) from error

    def _record(
        self, session_id: str, flat: Sequence[bytes], num_bytes: int, owner: bytes, expires_in_ms: int
    ) -> SessionRecord:
        """Return the record in an answer of `load`.

        Raises:
            KeyError, ValueError: a field was damaged.
            Unavailable: a newer version stored it.
        """
        fields = dict(zip(flat[::2], flat[1::2], strict=True))
        check_schema(session_id, fields.get(b"schema", b"1"))
        meta = {name.decode(): value.decode() for name, value in fields.items()}
        seal = read_seal(meta)
        return SessionRecord(
            session_id=session_id,
            epoch=read_number(meta, "epoch", MAX_EPOCH),
            round_id=read_number(meta, "round"),
            num_tokens=num_bytes // TOKEN_BYTES if seal is None else min(num_bytes // TOKEN_BYTES, seal.num_tokens),
            request=read_request(meta),
            owner=owner.decode(),
            expires_in_s=max(0, expires_in_ms) / 1000,
            was_left=meta.get("left") == meta["epoch"],
            locations=read_locations(meta.get("homes", "")),
            seal=seal,
        )

    async def read_tokens(self, session_id: str, start: int = 0) -> TokenIds:
        """See `SessionStore.read_tokens`. Empty beyond the log's end, and if the session does not exist."""
        tokens_key = session_keys(*self._key(session_id), self._cluster)[1]
        try:
            return unpack_tokens(await self._connection.run_command("GETRANGE", tokens_key, start * TOKEN_BYTES, -1))
        except DamagedValue as error:
            raise damage_of(session_id, error) from error

    async def delete(self, session_id: str) -> None:
        await self._run("delete", self._key(session_id), [_milliseconds(_DELETION_TTL_S)])

    async def discard(self, lease: Lease) -> None:
        check_owned(await self._run("discard", lease.key, [lease.owner, lease.epoch]), lease)

    async def ping(self) -> None:
        await self._connection.ping()

    def prefixes(self) -> RedisPrefixDirectory:
        """Return the tenant's directory of prefixes; its scripts travel in the store's pipelines."""
        return RedisPrefixDirectory(self._connection, self._tenant, cluster=self._cluster)

    def promotions(self) -> RedisPromotions:
        """Return the tenant's promotion of a draft pool."""
        return RedisPromotions(self._connection, self._tenant, cluster=self._cluster)

    def target_shares(self) -> RedisTargetShares:
        """Return the tenant's decision about target models."""
        return RedisTargetShares(self._connection, self._tenant, cluster=self._cluster)

    def usage(self) -> UsageRecords:
        """Return the usage records of all tenants, on the connections of this store."""
        return UsageRecords(self._connection, cluster=self._cluster)

    def quotas(self, process: str, *, lease_ttl_s: float) -> SharedQuotas:
        """Return the part of a process in the limits of all tenants, on the connections of this store."""
        return SharedQuotas(self._connection, process, lease_ttl_s=lease_ttl_s, cluster=self._cluster)

    @property
    def num_failures(self) -> int:
        """Number of calls that found the store not available."""
        return self._connection.num_failures

    def of_tenant(self, tenant: str) -> RedisSessionStore:
        """See `SessionStore.of_tenant`. Raises InvalidRequest for an invalid name."""
        if tenant == self._tenant:
            return self
        other = copy.copy(self)
        other._tenant = check_tenant(tenant)
        return other

    def reopen(self) -> RedisSessionStore:
        return RedisSessionStore(
            self._url,
            tenant=self._tenant,
            cluster=self._cluster,
            session_ttl_s=self._session_ttl_s,
            usage_kept_s=self._usage_kept_s,
        )

    async def close(self) -> None:
        await self._connection.close()

    async def _run(self, script: str, key: SessionKey, args: list[str | bytes | int]) -> Any:
        try:
            return await self._connection.run_script(script, self._keys(key), args)
        except DamagedValue as error:
            raise damage_of(key.session_id, error) from error

    def _key(self, session_id: str) -> SessionKey:
        return SessionKey(self._tenant, session_id)

    def _keys(self, key: SessionKey) -> Sequence[str]:
        """Return the keys of every session script."""
        usage = usage_keys(key.session_id, self._cluster, is_sharded=self._connection.is_cluster)
        return *session_keys(*key, self._cluster), *usage

    def _fence(self, lease: Lease, *between: int) -> list[str | bytes | int]:
        """Return the first arguments of every fenced script."""
        return [lease.owner, lease.epoch, *between, self._session_ttl_ms]


def open_store(
    url: str,
    *,
    tenant: str = DEFAULT_TENANT,
    cluster: str = DEFAULT_CLUSTER,
    session_ttl_s: float = DEFAULT_SESSION_TTL_S,
    usage_kept_s: float = 0.0,
) -> RedisSessionStore:
    """Return the session store at a URL. It connects at the first command; `ping` checks that it is available.

    Raises:
        InvalidRequest: the URL, the tenant or the cluster is malformed.
    """
    return RedisSessionStore(
        url, tenant=tenant, cluster=cluster, session_ttl_s=session_ttl_s, usage_kept_s=usage_kept_s
    )


class RedisReplicaRegistry:
    """`ReplicaRegistry` on Redis. Entries expire by the server's clock; reading removes expired ones."""

    def __init__(self, url: str, *, cluster: str = DEFAULT_CLUSTER, signer: Signer | None = None) -> None:
        """Open no connection yet.

        Args:
            url: a URL of `specdec.settings.redis_url`.
            cluster: name of the system; clusters on one Redis share no key.
            signer: signs the records that are published, and without its signature none is read; None: no signatures.

        Raises:
            InvalidRequest: the URL or the cluster is malformed.
        """
        self._cluster = check_cluster(cluster)
        self._connection = RedisConnection(url)
        self._signer = signer
        self._skipped: dict[str, dict[bytes, str]] = {}
        """Records that were skipped at the last read, with the reasons, by role."""

    async def publish(self, record: ReplicaRecord, *, ttl_s: float) -> None:
        engine = record.engine
        text = encode_record(record, ttl_s=ttl_s, signer=self._signer, cluster=self._cluster)
        args: list[str | bytes | int] = [engine.replica_id, text, _milliseconds(ttl_s), _milliseconds(_MOST_TTL_S)]
        await self._connection.run_script("publish", replica_keys(engine.role, self._cluster), args)

    async def remove(self, replica_id: str) -> None:
        for role in ROLES:
            await self._connection.run_script("remove", replica_keys(role, self._cluster), [replica_id])

    async def replicas(self, role: str) -> list[ReplicaRecord]:
        """See `ReplicaRegistry.replicas`. A record that this version cannot read is skipped and logged once."""
        limits = [MAX_RECORD_BYTES, MAX_REPLICA_ID_BYTES]
        answer = await self._connection.run_script("replicas", replica_keys(role, self._cluster), limits)
        records = []
        skipped: dict[bytes, str] = {}
        for replica_id, text in zip(answer[::2], answer[1::2], strict=True):
            try:
                records.append(self._decode(role, text))
            except ValueError as error:
                skipped[replica_id] = str(error)
                if skipped[replica_id] != self._skipped.get(role, {}).get(replica_id):
                    _log.warning("skipped unreadable record of %s replica %s: %s", role, ascii(replica_id)[1:], error)
        self._skipped[role] = skipped
        return records

    def _decode(self, role: str, text: bytes) -> ReplicaRecord:
        record = decode_record(text, signer=self._signer, cluster=self._cluster)
        if self._signer is not None and record.engine.role != role:
            raise ValueError("it was signed for another role")
        return record

    async def close(self) -> None:
        await self._connection.close()


def open_registry(url: str, *, cluster: str = DEFAULT_CLUSTER, signer: Signer | None = None) -> ReplicaRegistry:
    """Return the registry at a URL, not connected yet. Arguments and errors as of `RedisReplicaRegistry`."""
    return RedisReplicaRegistry(url, cluster=cluster, signer=signer)


def _milliseconds(seconds: float) -> int:
    # Redis refuses an expiry of 0.
    return max(1, round(seconds * 1000))
