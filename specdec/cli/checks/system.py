"""Checks of a running system: its coordinator, and the replicas that it, the registry or the command line names."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from specdec.cli.checks.finding import Finding, fail, ok, warn
from specdec.client import Client, ServerInfo, Tls
from specdec.contract.engine_api import EngineInfo
from specdec.contract.errors import DeadlineExceeded, Forbidden, SpecdecError, Unauthenticated, Unavailable
from specdec.contract.version import __version__
from specdec.settings.addresses import is_loopback

#: Replicas that are named in one line.
_MAX_NAMED = 3
_SHOWN_CHARACTERS = 8
#: Words of gRPC before the reason why a connection failed.
_GRPC_REFUSAL = "Failed to connect to remote host: "


@dataclass(frozen=True, slots=True)
class SystemAddresses:
    """Addresses of the parts of a system, as the command line states them."""

    endpoint: str
    is_endpoint_given: bool
    """Set if a user named the endpoint; nothing has to serve at the default one."""
    connect: Callable[[], Client]
    redis_url: str = ""
    cluster: str = "default"
    """Name of the cluster in whose part of Redis the registry is."""
    static: Sequence[tuple[str, str]] = ()
    """Role and address of replicas that no registry lists."""
    tls: Tls | None = None
    """Credentials of connections; None: plaintext."""
    has_credential: bool = False
    """Set if `connect` sends a key."""


@dataclass(slots=True)
class System:
    """A running system as far as it is known. The checks fill it in, and later ones use it."""

    addresses: SystemAddresses
    info: ServerInfo | None = None
    engines: dict[str, EngineInfo] = field(default_factory=dict)
    """Descriptions of replicas by address."""
    coordinators: dict[str, EngineInfo] = field(default_factory=dict)
    """Records of coordinators by address."""
    closed: dict[str, str] = field(default_factory=dict)
    """Roles of replicas that answer services alone and that no record describes, by address."""
    open_callers: list[str] = field(default_factory=list)
    """Services beyond this machine that answer callers without a credential."""

    def target_model(self) -> str:
        """Return path or hub id of the target; "" if it is not known."""
        models = [engine.model for engine in self.engines.values() if engine.role == "target"]
        return self.info.target_model if self.info is not None else next(iter(models), "")

    def check_coordinator(self) -> Iterator[Finding]:
        """Ask the coordinator what it serves."""
        endpoint = self.addresses.endpoint
        try:
            with self.addresses.connect() as client:
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
        version = self.info.version
        if version != __version__:
            yield warn("coordinator", f"{endpoint} runs specdec {version}, and this is {__version__}",
                       "run the doctor of the same version")  # fmt: skip
        else:
            yield ok("coordinator", f"{endpoint} answers, specdec {version}")

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
        yield from self._compare()
        if self.open_callers:
            yield warn("callers", f"callers without a key are answered by {_listed(self.open_callers)}",
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
        """Fill in `engines`; return a failure for the registry and for each replica that gives no description."""
        failures = []
        known = {address: role for role, address in self.addresses.static}
        if self.info is not None:
            known |= {
                replica.address: pool.role
                for pool in self.info.pools
                for replica in pool.replicas
                if replica.address and pool.role in ("draft", "target")
            }
        if self.addresses.redis_url:
            try:
                await self._read_registry()
            except SpecdecError as error:
                failures.append(fail("registry", error.message, "see the check of Redis"))
        known |= {address: record.role for address, record in self.engines.items()}
        answers = await asyncio.gather(
            *(_describe(role, address, self.addresses.tls) for address, role in known.items())
        )
        for (address, role), answer in zip(known.items(), answers, strict=True):
            if isinstance(answer, EngineInfo):
                self.engines[address] = answer
                if not is_local(address) and not (self.addresses.tls and self.addresses.tls.cert):
                    self.open_callers.append(f"{role} at {address}")
            elif isinstance(answer, Unauthenticated | Forbidden):  # it lives; the registry may describe it
                if address not in self.engines:
                    self.closed[address] = role
            else:
                self.engines.pop(address, None)
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
                self.engines |= {record.address: record.engine for record in await registry.replicas(role)}
            records = await registry.replicas(COORDINATOR)
            self.coordinators = {record.address: record.engine for record in records}
        finally:
            await registry.close()

    def _compare(self) -> Iterator[Finding]:
        everything = {**self.coordinators, **self.engines}
        if self.info is not None:
            reference, whose = self.info.vocabulary_fingerprint, f"the coordinator at {self.addresses.endpoint}"
        else:
            fingerprints = Counter(engine.vocabulary_fingerprint for engine in everything.values())
            reference, whose = fingerprints.most_common(1)[0][0] if fingerprints else "", "most others"
        others = [
            f"{_named(address, engine)} has {_short(engine.vocabulary_fingerprint)}"
            for address, engine in everything.items()
            if engine.vocabulary_fingerprint != reference
        ]
        if others:
            yield fail("vocabularies", f"{whose} has {_short(reference)}, {_listed(others)}; it is not used",
                       "serve models with one tokenizer, and give the coordinator the target's")  # fmt: skip
        elif everything:
            yield ok("vocabularies", f"equal: {_short(reference)}")
        yield from _compare_models(self.engines)
        yield from _compare_versions(everything)


def is_local(address: str) -> bool:
    """Return whether only programs of this machine reach an address."""
    try:
        return is_loopback(address)
    except ValueError:  # a Unix socket, or a name in another scheme of gRPC
        return True


def _compare_models(engines: dict[str, EngineInfo]) -> Iterator[Finding]:
    pools: dict[tuple[str, str], dict[str, str]] = {}
    for address, engine in engines.items():
        pool = pools.setdefault((engine.role, engine.pool), {})
        pool[f"{engine.model_fingerprint[:_SHOWN_CHARACTERS]} {engine.dtype}"] = address
    mixed = [
        f"{role} pool {name} has {' and '.join(f'{model} at {address}' for model, address in models.items())}"
        for (role, name), models in pools.items()
        if len(models) > 1
    ]
    if mixed:
        yield warn("models", _listed(mixed), "give each pool one model and one dtype; finish the upgrade")
    elif engines:
        yield ok("models", f"one model in each of {len(pools)} pools")


def _compare_versions(engines: dict[str, EngineInfo]) -> Iterator[Finding]:
    versions = {engine.version: _named(address, engine) for address, engine in engines.items()}
    if len(versions) > 1:
        named = [f"{version} at {where}" for version, where in versions.items()]
        yield warn("service versions", _listed(named), "finish the upgrade: replace the older processes")
    elif versions:
        yield ok("service versions", f"all {next(iter(versions))}")


async def _describe(role: str, address: str, tls: Tls | None) -> EngineInfo | SpecdecError:
    """Return a replica's answer. With `tls`, a replica that does not answer is asked in plaintext, too."""
    answer = await _ask(role, address, tls)
    return await _ask(role, address, None) if tls is not None and isinstance(answer, Unavailable) else answer


async def _ask(role: str, address: str, tls: Tls | None) -> EngineInfo | SpecdecError:
    from specdec.rpc.client import open_link

    link = open_link(role, address, tls=tls)
    try:
        return await link.info()
    except SpecdecError as error:
        return error
    finally:
        await link.close()


def _named(address: str, engine: EngineInfo) -> str:
    pool = f" (pool {engine.pool})" if engine.pool else ""
    return f"{engine.role} {engine.replica_id} at {address}{pool}"


def _short(fingerprint: str) -> str:
    return fingerprint[:_SHOWN_CHARACTERS] or "none"


def _listed(texts: Iterable[str]) -> str:
    """Return texts as a list that names the first few."""
    every = list(texts)
    more = f"; and {len(every) - _MAX_NAMED} more" if len(every) > _MAX_NAMED else ""
    return "; ".join(every[:_MAX_NAMED]) + more
