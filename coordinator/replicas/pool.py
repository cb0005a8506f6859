"""The draft and target replicas a coordinator can reach: connections, vocabulary check, liveness.

Replicas come from static endpoints or from the registry, polled. A replica is used once `GetEngineInfo` answered and
its vocabulary is the tokenizer's; it is dead from a failed call until it answers again. One that turns out to be
another service or to have another vocabulary is left out until it fits. Not here: which session goes where
(`placement`), what one replica is (`replica`), what is sent (`round/session_calls`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from contextlib import suppress
from typing import Any

from coordinator.replicas.replica import DRAFT, TARGET, DraftReplica, Replica, TargetReplica
from specdec.errors import NotFound, SpecdecError, Unavailable, Unsupported, VocabularyMismatch
from specdec.rpc.client import DraftLink, TargetLink
from specdec.state.store import ReplicaRegistry
from specdec.tenant import DEFAULT_TENANT
from specdec.types import EngineInfo

#: Least time between two looks at the replicas, however often they are in doubt.
MIN_POLL_INTERVAL_S = 0.05

#: Names of draft pools that are kept, the targets' own drafts among them: for each there are figures.
MAX_POOLS = 256

#: Of them, so many are told where one is not found.
_MAX_TOLD = 16

#: A poll waits for so long at most: one hung replica must not keep it from the others.
POLL_PATIENCE_S = 1.0

_log = logging.getLogger(__name__)


LinkFactory = Callable[[str, str], DraftLink | TargetLink]
"""Makes the link to the replica of a role at HOST:PORT (`specdec.rpc.client.open_link`)."""


class ReplicaPools:
    """All replicas of both roles. Used from one event loop."""

    def __init__(
        self,
        vocabulary_fingerprint: str,
        open_link: LinkFactory,
        *,
        static_endpoints: Collection[tuple[str, str]] = (),
        registry: ReplicaRegistry | None = None,
        lookup_pools: Sequence[str] = (),
        first_model_pool: str = "",
        poll_interval_s: float = 1.0,
        on_readiness: Callable[[bool], Awaitable[None]] | None = None,
    ) -> None:
        """
        Args:
            vocabulary_fingerprint: the tokenizer's.
            open_link: how replicas are called.
            static_endpoints: (role, HOST:PORT); with any of them the registry is not asked.
            lookup_pools: names of the pools of drafts that are found in text, by this coordinator itself.
            first_model_pool: the pool of draft replicas that comes before the others; those are in order of name.
            on_readiness: awaited whenever the answer to "is a target replica connected" changes.
        """
        self.vocabulary_fingerprint = vocabulary_fingerprint
        self.lookup_pools = tuple(lookup_pools)
        self._first_model_pool = first_model_pool
        self._open_link = open_link
        self._static = frozenset(static_endpoints)
        self._registry = None if static_endpoints else registry
        self._poll_interval_s = poll_interval_s
        self._on_readiness = on_readiness
        self._replicas: dict[tuple[str, str], Replica[Any]] = {}
        """By role and address, in that order."""
        self._named: dict[tuple[str, str], str] = {}
        """Incarnation of each replica when it was last named."""
        self._draft_pool_names: set[str] = set()
        self._local_pool_names: dict[str, None] = {}
        """What targets have said they draft with by themselves, in that order."""
        self._checks: dict[tuple[str, str], asyncio.Task[None]] = {}
        """Those under way."""
        self._was_ready = False
        self._has_been_ready = False
        self._last_target_info: EngineInfo | None = None
        self._doubt = asyncio.Event()

    def targets(self) -> list[TargetReplica]:
        """Every target replica that ever described itself, alive or not, by address."""
        return self._known(TARGET)

    def drafts(self, pool: str) -> list[DraftReplica]:
        return [replica for replica in self._known(DRAFT) if replica.pool == pool]

    def all_replicas(self) -> list[Replica[Any]]:
        return self._known(TARGET) + self._known(DRAFT)

    def _known(self, role: str) -> list[Replica[Any]]:
        return [replica for (kind, _), replica in self._replicas.items() if kind == role and replica.info]

    @property
    def is_ready(self) -> bool:
        """Whether a target replica can serve now."""
        return any(replica.is_alive for replica in self.targets())

    @property
    def target_info(self) -> EngineInfo:
        """What is served, as the target replicas describe it; the last known while none is reachable.

        Raises:
            Unavailable: no target replica has been connected yet.
        """
        infos = sorted(
            ((not replica.is_alive, replica.info) for replica in self.targets() if replica.info),
            key=lambda pair: pair[0],
        )
        if infos:
            self._last_target_info = infos[0][1]
        if self._last_target_info is None:
            raise Unavailable("no target replica has been connected yet")
        return self._last_target_info

    def serves(self, target_fingerprint: str) -> bool:
        """Whether a live target replica has this model."""
        return any(replica.is_alive and replica.model == target_fingerprint for replica in self.targets())

    @property
    def max_context_tokens(self) -> int:
        """Longest session that every live target replica can hold, so that failover never meets a smaller one."""
        live = [replica.info.max_context_tokens for replica in self.targets() if replica.is_alive and replica.info]
        return min(live or [self.target_info.max_context_tokens])

    @property
    def max_gamma(self) -> int:
        """Most draft tokens a round that every live replica allows."""
        return min([self.target_info.max_gamma, *(r.info.max_gamma for r in self.all_replicas() if r.info)])

    def route_draft(self, pool: str, *, is_settled: bool = True) -> str:
        """The draft pool of a request that asked for `pool` ("": any); "" when there is no draft pool at all.

        Args:
            pool: as asked for.
            is_settled: whether a request that asked for any gets one now, and keeps it; else "".

        Raises:
            NotFound: no draft pool of that name has ever been seen.
        """
        if pool in self.lookup_pools:
            return pool
        if not pool and not is_settled:
            return ""
        if not pool and (named := (*self.lookup_pools, *self.local_pools)):
            return named[0]
        if pool in self._local_pool_names:
            return pool
        if pool and pool not in self._draft_pool_names:
            raise self._unknown(pool, "speculation.draft_pool", self._all_draft_pools())
        return self.model_pool(pool)

    def require_model_pool(self, pool: str) -> None:
        """Raises NotFound where no draft replica of that pool has ever been seen."""
        if pool not in self._draft_pool_names:
            raise self._unknown(pool, "draft_pool", self._draft_pool_names)

    def _all_draft_pools(self) -> set[str]:
        return {*self._draft_pool_names, *self.lookup_pools, *self._local_pool_names}

    def _unknown(self, pool: str, field: str, known: Collection[str]) -> NotFound:
        told = ", ".join(sorted(known)[:_MAX_TOLD]) or "none"
        more = f" and {len(known) - _MAX_TOLD} more" if len(known) > _MAX_TOLD else ""
        words = f"{field} {pool[:64]!r} is not a draft pool; there are {told}{more}"
        return NotFound(words, reason="POOL_NOT_FOUND", field=field)

    def live_model_pools(self) -> list[str]:
        """Names of the pools with a draft replica that can be used, the first one first, shadows
        included."""
        return self._in_order({replica.pool for replica in self._known(DRAFT) if replica.is_in_use})

    def _in_order(self, model_pools: Iterable[str]) -> list[str]:
        return sorted(model_pools, key=lambda name: (name != self._first_model_pool, name))

    def open_model_pools(self) -> list[str]:
        """Of those, the ones that a request gets that names none: no shadow, unless there is nothing else."""
        live = [replica for replica in self._known(DRAFT) if replica.is_in_use]
        return self._in_order({replica.pool for replica in live if not is_shadow(replica)}) or self.live_model_pools()

    @property
    def local_pools(self) -> tuple[str, ...]:
        """What live targets draft with by themselves: pools that need no draft replica."""
        live = {name for replica in self.targets() if replica.is_alive for name in _local_drafts(replica)}
        return tuple(name for name in self._local_pool_names if name in live)

    def local_targets(self, pool: str) -> list[TargetReplica]:
        """Target replicas that draft in `pool` by themselves, alive or not."""
        return [replica for replica in self.targets() if pool in _local_drafts(replica)]

    def local_gamma(self, pool: str) -> int:
        """Most draft tokens that every live target drafts in `pool`."""
        told = [
            dict(zip(replica.info.local_drafts, replica.info.local_gammas, strict=False)).get(pool, 0)
            for replica in self.targets()
            if replica.is_alive and replica.info
        ]
        return min([self.target_info.max_gamma, *(gamma for gamma in told if gamma)])

    def local_pool(self, pool: str) -> str:
        """The local drafts of a request routed to `pool`: those, or where it was routed to text the first there are;
        "" for none."""
        if pool in self._local_pool_names:
            return pool
        return next(iter(self.local_pools), "") if pool in self.lookup_pools else ""

    def model_pool(self, pool: str) -> str:
        """The pool of draft replicas of a request routed to `pool`: that, which has none where the target drafts, or
        any where text is looked into first."""
        if pool and pool not in self.lookup_pools:
            return pool
        live = {replica.pool: is_shadow(replica) for replica in self._known(DRAFT) if replica.is_alive}
        names = {name for name, shadow in live.items() if not shadow} or live or self._draft_pool_names
        return next(iter(self._in_order(names)), "")

    async def poll(self) -> None:
        """Looks at every replica once: connects new ones, revives and buries old ones.

        Raises:
            VocabularyMismatch: a static endpoint serves another vocabulary before a target replica was ever connected.
                Later, and for discovered replicas, the replica is left out and logged: what streams goes on.
        """
        endpoints = await self._endpoints()
        for key in self._replicas.keys() - endpoints.keys():
            if self._stays(key):
                continue
            if check := self._checks.pop(key, None):
                check.cancel()
            self._named.pop(key, None)
            await self._replicas.pop(key).link.close()
        self._named |= endpoints
        for key in sorted(endpoints.keys() - self._replicas.keys()):
            self._replicas[key] = Replica(*key, self._open_link(*key))
            self._replicas[key].on_doubt = self._doubt.set
            self._replicas = dict(sorted(self._replicas.items()))
        await self._check_all()
        if self.is_ready != self._was_ready:
            self._was_ready, self._has_been_ready = self.is_ready, True
            if self._on_readiness is not None:
                await self._on_readiness(self._was_ready)

    async def watch(self) -> None:
        """Polls for ever, at once where a replica is in doubt. Raises as `poll` does."""
        while True:
            self._doubt.clear()
            await self.poll()
            await asyncio.sleep(min(MIN_POLL_INTERVAL_S, self._poll_interval_s))
            with suppress(TimeoutError):
                async with asyncio.timeout(self._poll_interval_s - MIN_POLL_INTERVAL_S):
                    await self._doubt.wait()

    async def close(self) -> None:
        """Closes every connection. Idempotent."""
        for check in self._checks.values():
            check.cancel()
        replicas, self._replicas = list(self._replicas.values()), {}
        await asyncio.gather(*(replica.link.close() for replica in replicas))

    async def release(self, session_id: str, *, tenant: str = DEFAULT_TENANT) -> None:
        """Asks every live replica to free the KV of a tenant's session. A replica that cannot be reached will evict it
        itself."""
        live = [replica for replica in self.all_replicas() if replica.is_alive]
        results = await asyncio.gather(
            *(replica.link.release([session_id], tenant=tenant) for replica in live), return_exceptions=True
        )
        for replica, result in zip(live, results, strict=True):
            if isinstance(result, BaseException):
                _log.warning("releasing a session on %s failed: %s", replica.address, result)

    async def _endpoints(self) -> dict[tuple[str, str], str]:
        """Of each replica that is named, its process as it described itself there; "" where nobody asked."""
        if self._registry is None:
            return dict.fromkeys(self._static, "")
        try:
            return {
                (role, record.address): record.engine.incarnation
                for role in (DRAFT, TARGET)
                for record in await self._registry.replicas(role)
            }  # fmt: skip
        except SpecdecError as error:
            # Without the registry the replicas we have go on serving.
            _log.warning("the replica registry cannot be read: %s", error)
            return {key: self._named.get(key, "") for key in self._replicas}

    def _stays(self, key: tuple[str, str]) -> bool:
        """Whether a replica that the registry names no more is used on: its record ran out or was lost with a Redis,
        and the process that was named still answers here. One that leaves says that it drains, and then nothing."""
        replica = self._replicas[key]
        return (
            replica.is_alive
            and replica.info is not None
            and not replica.info.draining
            and replica.info.incarnation == self._named.get(key)
        )

    async def _check_all(self) -> None:
        """Checks every replica. What a hung one takes beyond `POLL_PATIENCE_S` goes on beside the next polls."""
        for key, replica in self._replicas.items():
            if key not in self._checks:
                self._checks[key] = asyncio.create_task(self._check(key, replica), name=f"check {replica.address}")
        if self._checks:
            await asyncio.wait(self._checks.values(), timeout=POLL_PATIENCE_S)
        for key, check in list(self._checks.items()):
            if check.done():
                del self._checks[key]
                check.result()

    async def _check(self, key: tuple[str, str], replica: Replica[Any]) -> None:
        try:
            await replica.describe(self.vocabulary_fingerprint)
            self._note_pools(replica)
        except VocabularyMismatch as error:
            if key in self._static and not self._has_been_ready:
                raise
            replica.refuse(error)
        except Unsupported as error:
            replica.refuse(error)
        except (SpecdecError, TimeoutError) as error:
            replica.fail(error)

    def _note_pools(self, replica: Replica[Any]) -> None:
        """Raises Unsupported: a name of its pools is taken, or there are too many."""
        names = (replica.pool,) if replica.role == DRAFT else _local_drafts(replica)
        if name := next((name for name in names if name in self.lookup_pools), ""):
            raise Unsupported(f"{replica.address} calls its pool {name}, which is the coordinator's own")
        if len(self._all_draft_pools().union(names)) > MAX_POOLS:
            raise Unsupported(f"{replica.address} adds to {MAX_POOLS} names of draft pools, the most there may be")
        if replica.role == DRAFT:
            self._draft_pool_names.add(replica.pool)
        else:
            self._local_pool_names |= dict.fromkeys(names)


def is_shadow(replica: DraftReplica) -> bool:
    """Whether requests get a replica's pool by name or promotion alone."""
    return replica.info is not None and replica.info.shadow


def _local_drafts(replica: Replica[Any]) -> tuple[str, ...]:
    return replica.info.local_drafts if replica.role == TARGET and replica.info else ()
