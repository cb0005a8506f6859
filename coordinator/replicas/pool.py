"""The draft and target replicas that a coordinator can reach: connections, checks of the vocabulary, liveness.

Replicas come from static endpoints or from the registry, which is polled. A replica is used once it has described
itself with the tokenizer's vocabulary. A failed call takes it out of use until it answers again. Another service, or a
replica of another vocabulary, is left out until it fits. `placement` chooses the replicas of a session.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Sequence
from contextlib import suppress
from typing import Any

from coordinator.replicas.draft_pool_names import DraftPoolNames, local_drafts, unknown_pool
from coordinator.replicas.replica import DRAFT, TARGET, DraftReplica, Replica, TargetReplica
from coordinator.replicas.replica_addresses import Endpoint, ReplicaEndpoints
from coordinator.replicas.store_watch import IDLE_FACTOR, Activity
from specdec.contract.engine_api import EngineInfo
from specdec.contract.errors import SpecdecError, Unavailable, Unsupported, VocabularyMismatch
from specdec.contract.tenant import DEFAULT_TENANT
from specdec.rpc.client import DraftLink, TargetLink
from specdec.rpc.ticks import until_tick_s
from specdec.state.store import ReplicaRegistry

#: Shortest time between two polls, however often a replica is in doubt.
MIN_POLL_INTERVAL_S = 0.05

#: Time between two polls: a replica that has just started is used this soon.
POLL_INTERVAL_S = 0.2
#: Time between two polls while all replicas serve and none has come or gone within `SETTLED_AFTER_S`: a poll costs this
#: process and every replica about a millisecond.
QUIET_POLL_INTERVAL_S = 1.0
SETTLED_AFTER_S = 10.0

#: Longest time that one poll waits, so that a hung replica does not delay the others.
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
        static_endpoints: Collection[Endpoint] = (),
        registry: ReplicaRegistry | None = None,
        lookup_pools: Sequence[str] = (),
        first_model_pool: str = "",
        poll_interval_s: float = POLL_INTERVAL_S,
        target_wait_s: float = 0.0,
        on_readiness: Callable[[bool], Awaitable[None]] | None = None,
        prepare_for: Callable[[EngineInfo], Awaitable[None]] | None = None,
    ) -> None:
        """
        Args:
            vocabulary_fingerprint: fingerprint of the tokenizer's vocabulary.
            open_link: opens the link to a replica.
            static_endpoints: (role, HOST:PORT); with any of them the registry is not read.
            registry: where replicas are registered.
            lookup_pools: names of the pools of drafts that are found in text.
            first_model_pool: pool of draft replicas that comes first; the others are in order of name.
            poll_interval_s: seconds between two polls; while nothing changes, at least `QUIET_POLL_INTERVAL_S`.
            target_wait_s: seconds that a request waits for a lost target replica (`target_wait`).
            on_readiness: awaited whenever it changes whether a target replica is connected.
            prepare_for: awaited with the first description of each replica's process, before it is used.
        """
        self.vocabulary_fingerprint = vocabulary_fingerprint
        self.lookup_pools = tuple(lookup_pools)
        self.target_wait_s = target_wait_s
        self._names = DraftPoolNames(lookup_pools, first_model_pool)
        self._open_link = open_link
        self._endpoints = ReplicaEndpoints(static_endpoints, registry)
        self._poll_interval_s = poll_interval_s
        self._changed_at_s = time.monotonic()
        """Time at which a replica last came, left, did not serve or was in doubt, by `time.monotonic`."""
        self._on_readiness, self._prepare_for = on_readiness, prepare_for
        self._replicas: dict[Endpoint, Replica[Any]] = {}
        """Replicas by role and address, sorted."""
        self._checks: dict[Endpoint, asyncio.Task[None]] = {}
        """Checks under way."""
        self._was_ready = self._has_been_ready = False
        self._targets_lost_at_s = 0.0
        self._last_target_info: EngineInfo | None = None
        self.num_faults: Counter[tuple[str, str]] = Counter()
        self._doubt, self._target_described = asyncio.Event(), asyncio.Event()
        self.activity = Activity(on_wake=self._doubt.set)

    def targets(self) -> list[TargetReplica]:
        """Return every target replica that has ever described itself, by address. Any thread may call this."""
        return self._known(TARGET)

    def drafts(self, pool: str) -> list[DraftReplica]:
        return [replica for replica in self._known(DRAFT) if replica.pool == pool]

    def all_replicas(self) -> list[Replica[Any]]:
        return self._known(TARGET) + self._known(DRAFT)

    def addressed_replicas(self) -> list[Replica[Any]]:
        """Return every replica with an address, also one that never answered. Any thread may call this."""
        return list(self._replicas.values())

    def draft_pools(self) -> list[str]:
        """Return the names of all draft pools that have been seen. Any thread may call this."""
        return list(self._names.all)

    def _known(self, role: str) -> list[Replica[Any]]:
        return [replica for (kind, _), replica in list(self._replicas.items()) if kind == role and replica.info]

    @property
    def is_ready(self) -> bool:
        """True while a target replica lives."""
        return any(replica.is_alive for replica in self.targets())

    @property
    def follows_constraints(self) -> bool:
        """Return whether a target can follow the constraint of a request."""
        return any(replica.follows_constraints for replica in self.targets())

    @property
    def target_info(self) -> EngineInfo:
        """Description of the served model, from a target replica; while none lives, the last one that was received.

        Raises:
            Unavailable: no target replica has been connected yet.
        """
        pairs = ((not replica.is_alive, replica.info) for replica in self.targets() if replica.info)
        infos = sorted(pairs, key=lambda pair: pair[0])
        if infos:
            self._last_target_info = infos[0][1]
        if self._last_target_info is None:
            raise Unavailable("no target replica has been connected yet")
        return self._last_target_info

    def model_info(self, fingerprint: str) -> EngineInfo:
        """Return the description of a target model; of the served one if no replica of that model is known.

        Raises:
            Unavailable: no target replica has been connected yet.
        """
        known = [replica for replica in self.targets() if replica.serves(fingerprint)]
        infos = [replica.info for replica in sorted(known, key=lambda replica: not replica.is_alive) if replica.info]
        return infos[0] if infos else self.target_info

    def serves(self, target_fingerprint: str) -> bool:
        """Return whether a live target replica serves this model."""
        return any(replica.is_alive and replica.serves(target_fingerprint) for replica in self.targets())

    def is_registered(self, replica: Replica[Any]) -> bool:
        """Return whether the registry last held the process that described itself as this replica."""
        return replica.info is not None and self._endpoints.holds(
            (replica.role, replica.address), replica.info.incarnation
        )

    @property
    def targets_lost_at_s(self) -> float:
        """Time at which the last live target replica was lost, by `time.monotonic`; now while one lives."""
        return time.monotonic() if self._was_ready else self._targets_lost_at_s

    async def next_target(self, timeout_s: float) -> None:
        """Return when a target replica next describes itself, or after `timeout_s`."""
        self._target_described.clear()
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._target_described.wait()

    @property
    def max_context_tokens(self) -> int:
        """Longest session that every live target replica can hold, so that failover never meets a smaller one."""
        live = [replica.info.max_context_tokens for replica in self.targets() if replica.is_alive and replica.info]
        return min(live or [self.target_info.max_context_tokens])

    @property
    def max_gamma(self) -> int:
        """Largest number of draft tokens per round that every replica allows."""
        return min([self.target_info.max_gamma, *(r.info.max_gamma for r in self.all_replicas() if r.info)])

    def route_draft(self, pool: str, *, is_settled: bool = True) -> str:
        """Return the draft pool of a request that names `pool` ("": any); "" if no draft pool is known.

        Args:
            pool: pool that the request names.
            is_settled: whether a request that names none gets one now, and keeps it; else "".

        Raises:
            NotFound: no draft pool of that name has ever been seen.
        """
        if pool in self.lookup_pools:
            return pool
        if not pool and not is_settled:
            return ""
        if not pool and (named := (*self.lookup_pools, *self.local_pools)):
            return named[0]
        if pool in self._names.local:
            return pool
        if pool and pool not in self._names.models:
            raise unknown_pool(pool, "speculation.draft_pool", self._names.all)
        return self.model_pool(pool)

    def require_model_pool(self, pool: str) -> None:
        """Raise NotFound if no draft replica of that pool has ever been seen."""
        if pool not in self._names.models:
            raise unknown_pool(pool, "draft_pool", self._names.models)

    def live_model_pools(self) -> list[str]:
        """Return the pools with a usable draft replica, shadows included, in the order in which requests get them."""
        return self._names.in_order({replica.pool for replica in self._known(DRAFT) if replica.is_in_use})

    def lost_model_pools(self) -> list[str]:
        """Return the pools of draft replicas that have been seen and have no usable replica now, in order."""
        return sorted(self._names.models.difference(self.live_model_pools()))

    def open_model_pools(self) -> list[str]:
        """Return those pools without shadows, which requests get by name only; with them if all are shadows."""
        live = [replica for replica in self._known(DRAFT) if replica.is_in_use]
        pools = {replica.pool for replica in live if not replica.is_shadow}
        return self._names.in_order(pools) or self.live_model_pools()

    @property
    def local_pools(self) -> tuple[str, ...]:
        """Pools in which live targets draft by themselves, without a draft replica."""
        live = {name for replica in self.targets() if replica.is_alive for name in local_drafts(replica)}
        return tuple(name for name in self._names.local if name in live)

    def local_targets(self, pool: str) -> list[TargetReplica]:
        """Return the target replicas that draft in `pool` by themselves, alive or not."""
        return [replica for replica in self.targets() if pool in local_drafts(replica)]

    def local_gamma(self, pool: str) -> int:
        """Return the largest number of draft tokens that every live target drafts in `pool`."""
        limits = [
            dict(zip(replica.info.local_drafts, replica.info.local_gammas, strict=False)).get(pool, 0)
            for replica in self.targets()
            if replica.is_alive and replica.info
        ]
        return min([self.target_info.max_gamma, *(gamma for gamma in limits if gamma)])

    def local_pool(self, pool: str) -> str:
        """Return the local drafts of a request routed to `pool`, the first ones for found drafts, or ""."""
        if pool in self._names.local:
            return pool
        return next(iter(self.local_pools), "") if pool in self.lookup_pools else ""

    def model_pool(self, pool: str) -> str:
        """Return the pool of draft replicas of a request routed to `pool`: itself, or the first one if the request
        is routed to drafts found in text, or names no pool."""
        if pool and pool not in self.lookup_pools:
            return pool
        live = {replica.pool: replica.is_shadow for replica in self._known(DRAFT) if replica.is_alive}
        names = {name for name, shadow in live.items() if not shadow} or live or self._names.models
        return next(iter(self._names.in_order(names)), "")

    async def poll(self) -> None:
        """Check every replica once: connect new ones, bring answering ones back, remove those that left.

        Raises:
            VocabularyMismatch: a static endpoint serves another vocabulary before any target replica was connected.
                Later, and for registered replicas, the replica is left out and logged, and running streams go on.
        """
        known = set(self._replicas)
        endpoints = await self._endpoints.read(self._replicas)
        for key in self._replicas.keys() - endpoints:
            if self._stays(self._replicas[key]):
                continue
            if check := self._checks.pop(key, None):
                check.cancel()
            self._endpoints.forget(key)
            await self._replicas.pop(key).close()
        for key in sorted(endpoints - self._replicas.keys()):
            replica = self._replicas[key] = Replica(*key, self._open_link(*key))
            replica.on_doubt, replica.num_faults = self._doubt.set, self.num_faults
            replica.prepare_for = self._prepare_for
            self._replicas = dict(sorted(self._replicas.items()))
        await self._check_all()
        if known != self._replicas.keys() or not all(replica.is_alive for replica in self.all_replicas()):
            self._changed_at_s = time.monotonic()
        if self.is_ready != self._was_ready:
            self._was_ready, self._has_been_ready = self.is_ready, True
            if not self._was_ready:
                self._targets_lost_at_s = time.monotonic()
                _log.warning("lost the last target replica: requests wait up to %g s for one", self.target_wait_s)
            if self._on_readiness is not None:
                await self._on_readiness(self._was_ready)

    async def watch(self) -> None:
        """Poll forever, at once if a replica is in doubt. Raises as `poll` does."""
        while True:
            if self._doubt.is_set():
                self._changed_at_s = time.monotonic()
            self._doubt.clear()
            await self.poll()
            interval_s = self._poll_interval_s
            if time.monotonic() - self._changed_at_s > SETTLED_AFTER_S:
                interval_s = max(interval_s, QUIET_POLL_INTERVAL_S)
                if self.activity.is_idle:
                    interval_s = max(interval_s, IDLE_FACTOR * QUIET_POLL_INTERVAL_S)
            await asyncio.sleep(min(MIN_POLL_INTERVAL_S, interval_s))
            with suppress(TimeoutError):
                async with asyncio.timeout(until_tick_s(interval_s)):
                    await self._doubt.wait()

    async def close(self) -> None:
        """Close every connection. Idempotent."""
        for check in self._checks.values():
            check.cancel()
        replicas, self._replicas = list(self._replicas.values()), {}
        await asyncio.gather(*(replica.close() for replica in replicas))

    async def release(self, session_id: str, *, tenant: str = DEFAULT_TENANT) -> None:
        """Request that every live replica frees the KV of a session. One that cannot be reached evicts it later."""
        live = [replica for replica in self.all_replicas() if replica.is_alive]
        calls = (replica.link.release([session_id], tenant=tenant) for replica in live)
        results = await asyncio.gather(*calls, return_exceptions=True)
        for replica, result in zip(live, results, strict=True):
            if isinstance(result, BaseException):
                _log.warning("replica %s failed to release a session: %s", replica.address, result)

    def _stays(self, replica: Replica[Any]) -> bool:
        """Return whether a replica that is no longer registered stays in use: its record expired or was lost with a
        Redis, and the registered process still answers. One that leaves drains first, and then stops answering."""
        is_serving = replica.is_alive and replica.info is not None and not replica.info.draining
        return is_serving and self.is_registered(replica)

    async def _check_all(self) -> None:
        """Check every replica. A check that takes longer than `POLL_PATIENCE_S` goes on during the next polls."""
        for key, replica in self._replicas.items():
            if key not in self._checks:
                self._checks[key] = asyncio.create_task(self._check(key, replica), name=f"check {replica.address}")
        if self._checks:
            await asyncio.wait(self._checks.values(), timeout=POLL_PATIENCE_S)
        for key, check in list(self._checks.items()):
            if check.done():
                del self._checks[key]
                check.result()

    async def _check(self, key: Endpoint, replica: Replica[Any]) -> None:
        try:
            await replica.describe(self.vocabulary_fingerprint)
            self._names.note(replica)
            if replica.role == TARGET:
                self._target_described.set()
        except VocabularyMismatch as error:
            if key in self._endpoints.static and not self._has_been_ready:
                raise
            replica.refuse(error)
        except Unsupported as error:
            replica.refuse(error)
        except (SpecdecError, TimeoutError) as error:
            replica.fail(error)
