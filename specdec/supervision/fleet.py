"""The services of one `specdec up`: starts them together, supervises them, and scales the number of replicas.

An added replica counts once it serves. One that ends before that is not started again, and the wanted number falls
back. Replicas that leave drain, and their sessions move to the others. Replicas that do not serve leave first, then the
oldest, and these only once every coordinator has had time to find the others.

`specdec.cli.launching` decides what a service is started with, `supervisor` restarts services that end, and
`specdec.cli.control` receives requests for other numbers.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from itertools import count
from typing import Protocol

from specdec.contract.errors import InvalidRequest, SpecdecError, StaleEpoch, Unavailable
from specdec.supervision.services import STOP_GRACE_S, Service
from specdec.supervision.supervisor import Supervisor

#: Name of the coordinator's service. Replicas are called ROLE-NUMBER.
COORDINATOR = "coordinator"

#: Name of the gateway's service.
GATEWAY = "gateway"

#: Most replicas of a role. Each is a process that holds a model.
MAX_REPLICAS = 256

#: Time after which every coordinator has found a serving replica in the registry.
KNOWN_AFTER_S = 2.0


def role_of(name: str) -> str:
    """Return the role of a service called ROLE-NUMBER; draft-POOL for one of several draft pools; "" for no replica."""
    return name.rpartition("-")[0]


class Launches(Protocol):
    """Starts services (`specdec.cli.launching.Launcher`)."""

    @property
    def roles(self) -> tuple[str, ...]: ...

    def coordinator(self) -> Service: ...

    def gateway(self) -> Service: ...

    def replica(self, name: str, num_alike: int) -> Service: ...

    def join(self, name: str, model: str) -> str:
        """Add a draft model; return its role. Raises SpecdecError if it cannot be added."""
        ...

    def forget(self, role: str) -> None:
        """Remove a draft model that joined and never served, so that its name is free again."""
        ...

    def require_room(self, added: Mapping[str, int]) -> None:
        """Raises ResourceExhausted if the added replicas of each role do not fit."""
        ...


class Scaling:
    """The progress of one request for other numbers of replicas. May be read from any thread."""

    def __init__(self) -> None:
        self.ended = threading.Event()
        self.stage = ""
        """Stage of the request, for people."""
        self.failure: SpecdecError | None = None
        """Why the numbers were not reached, once the request has ended; None if they were."""
        self.counts: dict[str, int] = {}
        """Replicas of each role, once the request has ended."""

    def end(self, counts: Mapping[str, int], failure: SpecdecError | None = None) -> None:
        """End the request. Only the first call has an effect."""
        if not self.ended.is_set():
            self.counts, self.failure = dict(counts), failure
            self.ended.set()


class Fleet:
    """One coordinator, the replicas of each role, and perhaps a gateway.

    One thread uses it; others may call `scale` and `join`.
    """

    def __init__(self, launcher: Launches, clock: Callable[[], float] = time.monotonic) -> None:
        self._launcher = launcher
        self._clock = clock
        self._kept: list[Service] = []
        """Services that have served, oldest first. The supervisor restarts those that end."""
        self._starting: list[Service] = []
        self._leaving: dict[Service, float] = {}
        """Draining services, with the time at which they are killed."""
        self._wanted: dict[str, int] = {}
        self._joining: set[str] = set()
        """Roles that joined and of which no replica has served yet."""
        self._serving_since: dict[Service, float] = {}
        self._supervisor = Supervisor(self._kept, clock)
        self._scaling: Scaling | None = None
        self._lock = threading.Lock()

    @property
    def services(self) -> list[Service]:
        """All services, the coordinator last."""
        everyone = [*self._kept, *self._starting, *self._leaving]
        return sorted(everyone, key=lambda service: service.name == COORDINATOR)

    def begin(
        self, counts: Mapping[str, int], *, with_gateway: bool = False, prepare: Callable[[], bool] = lambda: True
    ) -> None:
        """Start the coordinator, the gateway if there is to be one, and `counts` replicas of each role.

        Args:
            counts: numbers of replicas by role.
            with_gateway: whether to start a gateway.
            prepare: called before the replicas are started; returns whether to go on.
        """
        self._wanted = dict(counts)
        self._starting.append(self._launcher.coordinator())
        if with_gateway:
            self._starting.append(self._launcher.gateway())
        if not prepare():
            return
        for role, number in counts.items():
            for index in range(number):
                self._starting.append(self._launcher.replica(f"{role}-{index}", number))

    def settle(self) -> None:
        """Take over the services of `begin`, which all serve by now: from here on, those that end are restarted."""
        for service in self._starting:
            service.relay()
        self._kept += self._starting
        self._starting.clear()

    def scale(self, wanted: Mapping[str, int]) -> Scaling:
        """Request other numbers of replicas. An earlier request that has not ended fails with STALE_EPOCH.

        Args:
            wanted: numbers by role. A role that is left out keeps its number.

        Raises:
            InvalidRequest: a role does not exist, or its number is out of range.
            ResourceExhausted: the added replicas do not fit.
        """
        for role, number in wanted.items():
            self._check(role, number)
        with self._lock:
            return self._begin_scaling(wanted)

    def join(self, pool: str, model: str) -> Scaling:
        """Request one replica of another draft model, which serves requests that name it or are promoted to it.

        If the replica ends or is scaled away before it serves, the pool is removed and its name is free again.

        Raises:
            SpecdecError: the pool cannot be added.
        """
        with self._lock:
            role = self._launcher.join(pool, model)
            self._wanted[role] = 0
            self._joining.add(role)
            try:
                return self._begin_scaling({role: 1})
            except SpecdecError:
                self._forget_unserved()
                raise

    def look(self) -> None:
        """Start, drain and restart services as needed. Call this often."""
        with self._lock:
            self._supervisor.look()
            self._look_at_starting()
            self._look_at_leaving()
            now_s = self._clock()
            serving = [service for service in self._kept if service.is_serving]
            self._serving_since = {service: self._serving_since.get(service, now_s) for service in serving}
            for role in self._wanted:
                self._approach(role)
            self._tell()
            self._forget_unserved()

    def stop(self) -> None:
        """End the gateway, then the coordinator, then all replicas together."""
        with self._lock:
            if self._scaling is not None:
                self._scaling.end(self._wanted, Unavailable("specdec up is ending", reason="DRAINING"))
            services = self.services
            for name in (GATEWAY, COORDINATOR):
                for service in services:
                    if service.name == name:
                        service.stop()
            for service in services:
                service.ask_to_stop()
            for service in services:
                service.stop()

    def _begin_scaling(self, wanted: Mapping[str, int]) -> Scaling:
        """Raises ResourceExhausted if the added replicas do not fit."""
        self._launcher.require_room({role: max(0, number - self._wanted[role]) for role, number in wanted.items()})
        if self._scaling is not None:
            self._scaling.end(self._wanted, StaleEpoch("a later request asked for other numbers of replicas"))
        self._wanted |= wanted
        self._scaling = Scaling()
        return self._scaling

    def _forget_unserved(self) -> None:
        """Remove roles that joined and lost their last replica before one of them had served."""
        leaving = {role_of(service.name) for service in self._leaving}
        for role in [role for role in self._joining if not self._wanted[role] and role not in leaving]:
            if not self._of(role):
                self._joining.remove(role)
                del self._wanted[role]
                self._launcher.forget(role)

    def _check(self, role: str, number: int) -> None:
        if role not in self._launcher.roles:
            known = ", ".join(self._launcher.roles)
            raise InvalidRequest(f"{role}={number}: this system has no {role} model; it has {known}", field=role)
        least = 1 if role == "target" else 0
        if not least <= number <= MAX_REPLICAS:
            raise InvalidRequest(f"{role}={number}: the number must be {least} to {MAX_REPLICAS}", field=role)

    def _of(self, role: str) -> list[Service]:
        """Return the services of a role that are not leaving, oldest first."""
        return [service for service in (*self._kept, *self._starting) if role_of(service.name) == role]

    def _look_at_starting(self) -> None:
        for service in list(self._starting):
            if not service.is_alive:
                self._starting.remove(service)
                role = role_of(service.name)
                self._wanted[role] = len(self._of(role))
                failure = service.failure()
                service.stop()
                service.say(f"ended before it served and is not started again: {failure.message} ({failure.reason})")
                if self._scaling is not None:
                    self._scaling.end(self._wanted, failure)
            elif service.has_started:
                self._starting.remove(service)
                self._kept.append(service)
                self._joining.discard(role_of(service.name))
                service.relay()
                service.say("serving")

    def _look_at_leaving(self) -> None:
        for service, deadline_s in list(self._leaving.items()):
            if not service.is_alive or self._clock() >= deadline_s:
                service.stop(grace_s=0.0)
                del self._leaving[service]
                service.say("gone")

    def _approach(self, role: str) -> None:
        """Start or drain replicas of a role towards the wanted number."""
        staying = self._of(role)
        for _ in range(self._wanted[role] - len(staying)):
            self._starting.append(self._launcher.replica(self._free_name(role), self._wanted[role]))
        for service in self._dispensable(staying, len(staying) - self._wanted[role]):
            (self._kept if service in self._kept else self._starting).remove(service)
            service.ask_to_stop()
            self._leaving[service] = self._clock() + STOP_GRACE_S
            service.say("leaving")

    def _dispensable(self, staying: list[Service], number: int) -> list[Service]:
        """Return up to `number` services that may leave now."""
        if number <= 0:
            return []
        idle = [service for service in staying if not service.is_serving]
        serving = [service for service in staying if service.is_serving]
        last = serving[max(0, number - len(idle)) :]
        known_s = self._clock() - KNOWN_AFTER_S
        if all(self._serving_since.get(service, self._clock()) <= known_s for service in last):
            return [*idle, *serving][:number]
        return idle[:number]

    def _free_name(self, role: str) -> str:
        taken = {service.name for service in self.services}
        return next(name for index in count() if (name := f"{role}-{index}") not in taken)

    def _tell(self) -> None:
        """Update the progress of the current request, and end it once its numbers are reached."""
        if self._scaling is None:
            return
        pending = [
            *(f"{service.name}: {service.stage}" for service in self._starting),
            *(f"{service.name}: leaving" for service in self._leaving),
            *(f"{service.name}: starting again" for service in self._kept if not service.is_serving),
        ]
        self._scaling.stage = ", ".join(pending)
        if not pending and all(len(self._of(role)) == number for role, number in self._wanted.items()):
            self._scaling.end(self._wanted)
            self._scaling = None
