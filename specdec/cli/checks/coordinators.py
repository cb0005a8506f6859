"""Checks of what coordinators know: whether the registry is theirs, and which replicas they cannot use."""

from __future__ import annotations

import time
from collections.abc import Iterator

from specdec.cli.checks.comparisons import listed, named
from specdec.cli.checks.finding import Finding, fail, ok, warn
from specdec.cli.checks.system import System
from specdec.client import ServerInfo
from specdec.contract.errors import Forbidden, InvalidRequest, SpecdecError, Unauthenticated

#: Time in which a coordinator that was idle finds a replica that has just registered, and the pause between two looks.
_KNOWN_WITHIN_S, _LOOK_S = 12.0, 1.0
_REGISTRY_ADVICE = "give all services one --redis-url, one --cluster and one --service-key"


def check_coordinators(system: System) -> Iterator[Finding]:
    """Compare the coordinator with the registry, and ask the other coordinators. Call it after `check_replicas`."""
    if system.info is None:
        return
    yield from _lost(system, system.info)
    if system.has_registry and system.info.build:  # an older release does not say what it uses
        yield from _own_registry(system, system.info)
    yield from _others(system, system.info)


def _lost(system: System, info: ServerInfo) -> Iterator[Finding]:
    for lost in info.lost_replicas:
        if lost.address not in system.failed:
            found = f"the coordinator does not use {lost.role} at {lost.address}: {lost.state}: {lost.reason}"
            yield fail("replica", found, "look at its log, its --service-key, and the network between both")
    if pools := info.lost_draft_pools:
        yield warn("draft pools", f"no draft serves {', '.join(pools)}: requests of this pool run without drafts",
                   "start a draft of the pool, unless it was scaled to zero")  # fmt: skip
    if draining := [named(address, engine) for address, engine in system.engines.items() if engine.draining]:
        yield warn("draining", f"{listed(draining)}: no new sessions",
                   "end them, or run specdec drain REPLICA --undo")  # fmt: skip


def _own_registry(system: System, info: ServerInfo) -> Iterator[Finding]:
    """Tell whether the coordinator and the replicas use the Redis that was named."""
    ids = {engine.replica_id for engine in system.coordinators.values()}
    is_there = info.coordinator_id in ids if info.coordinator_id else bool(ids)
    if info.is_registered and not is_there:
        yield fail("registry", f"the registry at --redis-url does not list the coordinator at "
                   f"{system.addresses.endpoint}: it uses another Redis, database or --cluster",
                   _REGISTRY_ADVICE)  # fmt: skip
        return
    if not info.is_registered:
        yield ok("registry", "the coordinator has static endpoints and does not use it")
        return
    unknown = _unknown_to(system, info)
    if unknown:
        yield fail("registry", f"the coordinator at {system.addresses.endpoint} does not use {listed(unknown)}, "
                   "although the registry lists it", _REGISTRY_ADVICE)  # fmt: skip
    else:
        yield ok("registry", f"lists {len(ids)} coordinators, {len(system.registered)} replicas")


def _unknown_to(system: System, info: ServerInfo) -> list[str]:
    """Return the registered replicas that the coordinator neither uses nor reports as lost, after a while."""
    began_s, latest = time.monotonic(), info
    while True:
        known = {replica.address for pool in latest.pools for replica in pool.replicas}
        known |= {lost.address for lost in latest.lost_replicas}
        if "" in known:  # addresses are hidden from callers without the right operate
            return []
        unknown = [
            named(address, engine)
            for address, engine in system.registered.items()
            if address not in known and address not in system.failed
            and engine.vocabulary_fingerprint == info.vocabulary_fingerprint
        ]  # fmt: skip
        if not unknown or time.monotonic() - began_s > _KNOWN_WITHIN_S:
            return unknown
        time.sleep(_LOOK_S)
        with system.addresses.connect(system.addresses.endpoint) as client:
            latest = client.info()


def _others(system: System, info: ServerInfo) -> Iterator[Finding]:
    """Ask every other coordinator of the registry."""
    others = {
        address: engine
        for address, engine in system.coordinators.items()
        if engine.replica_id != info.coordinator_id and address != system.addresses.endpoint
    }
    num_answering = 0
    for address, engine in others.items():
        try:
            with system.addresses.connect(address) as client:
                client.info()
        except (Unauthenticated, Forbidden):
            num_answering += 1
        except InvalidRequest:  # the way there is not encrypted, and the key would be shown
            continue
        except SpecdecError as error:
            yield fail("coordinator", f"{named(address, engine)} does not answer: {error.message}",
                       "look at its log, and whether this machine may reach its port")  # fmt: skip
        else:
            num_answering += 1
    if num_answering:
        yield ok("coordinators", f"{num_answering} of {len(others)} others answer")
