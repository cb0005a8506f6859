"""Checks of a running system: its coordinator, and the replicas that it, the registry or the command line names."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from specdec.cli.checks.comparisons import (
    compare_models,
    compare_versions,
    compare_vocabularies,
    coordinator_build,
    listed,
    state_room,
)
from specdec.cli.checks.finding import Finding, fail, ok, warn
from specdec.client import Client, ServerInfo, Tls
from specdec.contract.engine_api import EngineInfo
from specdec.contract.errors import DeadlineExceeded, Forbidden, SpecdecError, Unauthenticated, Unavailable
from specdec.rpc.handshake import Metadata
from specdec.settings.addresses import is_loopback

#: Words of gRPC before the reason why a connection failed.
_GRPC_REFUSAL = "Failed to connect to remote host: "


class Connect(Protocol):
    """Returns a client of the coordinator at an address, which sends the caller's key, if it has one, or none."""

    def __call__(self, endpoint: str, *, has_key: bool = True) -> Client: ...


@dataclass(frozen=True, slots=True)
class SystemAddresses:
    """Addresses of the parts of a system, as the command line states them."""

    endpoint: str
    is_endpoint_given: bool
    """Set if a user named the endpoint; nothing has to serve at the default one."""
    connect: Connect
    redis_url: str = ""
    cluster: str = "default"
    """Name of the cluster in whose part of Redis the registry is."""
    static: Sequence[tuple[str, str]] = ()
    """Role and address of replicas that no registry lists."""
    tls: Tls | None = None
    """Credentials of connections; None: plaintext."""
    has_credential: bool = False
    """Set if `connect` sends a key."""
    metadata: Metadata = ()
    """Credential of calls to replicas: the service key; (): none."""


@dataclass(slots=True)
class System:
    """A running system as far as it is known. The checks fill it in, and later ones use it."""

    addresses: SystemAddresses
    info: ServerInfo | None = None
    engines: dict[str, EngineInfo] = field(default_factory=dict)
    """Descriptions of replicas by address."""
    coordinators: dict[str, EngineInfo] = field(default_factory=dict)
    """Records of coordinators by address."""
    registered: dict[str, EngineInfo] = field(default_factory=dict)
    """Records of replicas by address, also of those that do not answer."""
    has_registry: bool = False
    """Set if the registry was read."""
    failed: set[str] = field(default_factory=set)
    """Addresses of replicas that gave no description."""
    plaintext: set[str] = field(default_factory=set)
    """Addresses of replicas that answered without TLS."""
    closed: dict[str, str] = field(default_factory=dict)
    """Roles of replicas that answer services alone and that no record describes, by address."""
    open_callers: list[str] = field(default_factory=list)
    """Services beyond this machine that answer callers without a credential."""

    def target_model(self) -> str:
        """Return path or hub id of the target; "" if it is not known."""
        models = [engine.model for engine in self.engines.values() if engine.role == "target"]
        return self.info.target_model if self.info is not None else next(iter(models), "")

    def check_registry(self) -> Iterator[Finding]:
        """Read the registry. Run this before checks that take long: the record of a process that hangs expires soon."""
        if not self.addresses.redis_url:
            return
        try:
            asyncio.run(self._read_registry())
        except SpecdecError as error:
            yield fail("registry", error.message, "see the check of Redis")

    def check_coordinator(self) -> Iterator[Finding]:
        """Ask the coordinator what it serves."""
        endpoint = self.addresses.endpoint
        try:
            with self.addresses.connect(endpoint) as client:
                self.info = client.info()
        except (Unavailable, DeadlineExceeded) as error:
            if self.addresses.is_endpoint_given:
                yield fail("coordinator", error.message, "start it, or name another one with --endpoint HOST:PORT")
            else:
                yield warn("coordinator", f"nothing answers at {endpoint}; no running system was checked",
                           "start specdec up --detach, or name one with --endpoint HOST:PORT")  # fmt: skip
            return
        except (Unauthenticated, Forbidden) as error:
            yield fail("coordinator", f"{endpoint} refuses this caller: {error.message}", "give a key with --api-key")
            return
        if not self.addresses.has_credential and not is_local(endpoint):
            self.open_callers.append(f"coordinator at {endpoint}")
        yield coordinator_build(self.info, endpoint)

    def check_replicas(self) -> Iterator[Finding]:
        """Ask every known replica for its description, and compare the descriptions."""
        failures = asyncio.run(self._describe_all())
        yield from failures
        roles = Counter([*(engine.role for engine in self.engines.values()), *self.closed.values()])
        hidden = Counter(
            pool.role for pool in (self.info.pools if self.info else ()) for each in pool.replicas if not each.address
        )
        num_failed = sum(finding.check == "replica" for finding in failures)
        if hidden and not roles:
            yield ok("replicas", f"{hidden['target']} target, {hidden['draft']} draft; operators see their addresses")
        elif roles or num_failed or self.info is not None:
            yield self._replica_finding(roles, num_failed)
        services = {**self.coordinators, **self.engines}
        yield from compare_vocabularies(self.info, self.addresses.endpoint, services)
        yield from compare_models(self.engines)
        yield from compare_versions(services)
        yield from state_room(self.info, self.engines)
        if self.open_callers:
            yield warn("callers", f"callers without a key are answered by {listed(self.open_callers)}",
                       "give coordinators --api-keys, and all services one --service-key")  # fmt: skip

    def _replica_finding(self, roles: Counter[str], num_failed: int) -> Finding:
        num_alive = roles["target"] + roles["draft"]
        found = f"{num_alive} of {num_alive + num_failed} answer: {roles['target']} target, {roles['draft']} draft"
        if self.closed:
            found += f", {len(self.closed)} of them services alone"
        if not roles["target"]:
            return fail("replicas", f"{found}; without a target, requests wait and fail",
                        "start a target, or look at its log")  # fmt: skip
        targets = [engine for engine in self.engines.values() if engine.role == "target"]
        if targets and all(engine.draining for engine in targets):
            return fail("replicas", f"{found}; every target drains and takes no new session", "start another target")
        return ok("replicas", found)

    async def _describe_all(self) -> list[Finding]:
        """Fill in `engines`; return a failure for each replica that gives no description."""
        failures = []
        known = {address: role for role, address in self.addresses.static}
        if self.info is not None:
            known |= {
                replica.address: pool.role
                for pool in self.info.pools
                for replica in pool.replicas
                if replica.address and pool.role in ("draft", "target")
            }
        known |= {address: record.role for address, record in self.engines.items()}
        answers = await asyncio.gather(*(self._describe(role, address) for address, role in known.items()))
        for (address, role), answer in zip(known.items(), answers, strict=True):
            if isinstance(answer, EngineInfo):
                self.engines[address] = answer
                if not is_local(address) and not (self.addresses.tls and self.addresses.tls.cert):
                    self.open_callers.append(f"{role} at {address}")
            elif isinstance(answer, Unauthenticated | Forbidden) and self.addresses.metadata:
                self.failed.add(address)
                failures.append(fail("replica", f"{role} at {address} refuses the service key: {answer.message}",
                                     "give all services one --service-key"))  # fmt: skip
            elif isinstance(answer, Unauthenticated | Forbidden):  # it lives; the registry may describe it
                if address not in self.engines:
                    self.closed[address] = role
            else:
                self.engines.pop(address, None)
                self.failed.add(address)
                reason = answer.message.rpartition(_GRPC_REFUSAL)[2].removeprefix(f"{address}: ")
                failures.append(fail("replica", f"{role} at {address} does not answer: {reason}",
                                     "look at its log, and whether this machine may reach its port"))  # fmt: skip
        return failures

    async def _read_registry(self) -> None:
        from specdec.state.live_coordinators import COORDINATOR
        from specdec.state.redis_store import open_registry

        registry = open_registry(self.addresses.redis_url, cluster=self.addresses.cluster)
        try:
            for role in ("target", "draft"):
                self.registered |= {record.address: record.engine for record in await registry.replicas(role)}
            self.engines |= self.registered
            records = await registry.replicas(COORDINATOR)
            self.coordinators = {record.address: record.engine for record in records}
            self.has_registry = True
        finally:
            await registry.close()

    async def _describe(self, role: str, address: str) -> EngineInfo | SpecdecError:
        """Return a replica's answer. With TLS, a replica that does not answer is asked in plaintext, too."""
        answer = await _ask(role, address, self.addresses, self.addresses.tls)
        if self.addresses.tls is not None and isinstance(answer, Unavailable):
            plain = await _ask(role, address, self.addresses, None)
            if not isinstance(plain, Unavailable):
                self.plaintext.add(address)
                return plain
        return answer


def is_local(address: str) -> bool:
    """Return whether only programs of this machine reach an address."""
    try:
        return is_loopback(address)
    except ValueError:  # a Unix socket, or a name in another scheme of gRPC
        return True


async def _ask(role: str, address: str, addresses: SystemAddresses, tls: Tls | None) -> EngineInfo | SpecdecError:
    from specdec.rpc.client import open_link

    link = open_link(role, address, metadata=addresses.metadata, tls=tls)
    try:
        return await link.info()
    except SpecdecError as error:
        return error
    finally:
        await link.close()
