"""The services of one `specdec up`: started together, kept running, and more or fewer of them when told.

A replica that is added belongs to the fleet once it serves; one that ends before is not tried again, and the number
falls back. Those that leave drain: their sessions move on to the others. The first to leave are those that do not
serve, then the oldest, and these not before the others have been known to coordinators for a while.

Not here: what a service is started with (`launching`), how one that ends comes back (`supervision`), who asks for other
numbers (`control`).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from itertools import count
from typing import Protocol

from specdec.errors import InvalidRequest, SpecdecError
from specdec.supervision.services import STOP_GRACE_S, Service
from specdec.supervision.supervisor import Supervisor

#: Name of the coordinator's service; the other names are ROLE-NUMBER.
COORDINATOR = "coordinator"

#: Of a role. Every one is a process with a model.
MAX_REPLICAS = 256

#: Once a replica has served for so long, every coordinator has found it in the registry.
KNOWN_AFTER_S = 2.0


def role_of(name: str) -> str:
    """Of a service that is called ROLE-NUMBER; of a replica of one of several draft pools, draft-POOL."""
    return name.rpartition("-")[0]


class Launches(Protocol):
    """Starts services (`specdec.cli.launching.Launcher`)."""

    @property
    def roles(self) -> tuple[str, ...]: ...

    def coordinator(self) -> Service: ...

    def replica(self, name: str, num_alike: int) -> Service: ...

    def join(self, name: str, model: str) -> str:
        """A further draft model; returns its role. Raises SpecdecError where there can be none."""
        ...

    def forget(self, role: str) -> None:
        """A draft model that joined and never served: another one may have its name."""
        ...

    def require_room(self, added: Mapping[str, int]) -> None:
        """Raises ResourceExhausted where so many more replicas of each role cannot be placed."""
        ...


class Scaling:
    """One request for other numbers, while it is being followed. Read from any thread."""

    def __init__(self) -> None:
        self.ended = threading.Event()
        self.stage = ""
        """What is waited for."""
        self.failure = ""
        """Once it has ended: the "CODE REASON: message" of an error line; "" where the numbers were reached."""
        self.counts: dict[str, int] = {}
        """Once it has ended: replicas of each role."""

    def end(self, counts: Mapping[str, int], failure: str = "") -> None:
        """Only the first end counts."""
        if not self.ended.is_set():
            self.counts, self.failure = dict(counts), failure
            self.ended.set()


class Fleet:
    """One coordinator and replicas of each role. Used by one thread, but for `scale`."""

    def __init__(self, launcher: Launches, clock: Callable[[], float] = time.monotonic) -> None:
        self._launcher = launcher
        self._clock = clock
        self._kept: list[Service] = []
        """Have served, oldest first; those that ended come back."""
        self._starting: list[Service] = []
        self._leaving: dict[Service, float] = {}
        """With when they are made to end."""
        self._wanted: dict[str, int] = {}
        self._joining: set[str] = set()
        """Roles that joined and have not served yet."""
        self._serving_since: dict[Service, float] = {}
        self._supervisor = Supervisor(self._kept, clock)
        self._scaling: Scaling | None = None
        self._lock = threading.Lock()

    @property
    def services(self) -> list[Service]:
        """All there are, the coordinator last."""
        everyone = [*self._kept, *self._starting, *self._leaving]
        return sorted(everyone, key=lambda service: service.name == COORDINATOR)

    def begin(self, counts: Mapping[str, int]) -> None:
        """Starts so many replicas of each role, and the coordinator."""
        self._wanted = dict(counts)
        for role, number in counts.items():
            for index in range(number):
                self._starting.append(self._launcher.replica(f"{role}-{index}", number))
        self._starting.append(self._launcher.coordinator())

    def settle(self) -> None:
        """All that were started serve; from now on those that end come back."""
        for service in self._starting:
            service.relay()
        self._kept += self._starting
        self._starting.clear()

    def scale(self, wanted: Mapping[str, int]) -> Scaling:
        """Asks for other numbers of replicas; what was asked before and is not reached ends as overruled.

        Args:
            wanted: by role; a role that is left out keeps its number.

        Raises:
            InvalidRequest: there are no such roles, or cannot be so many.
            ResourceExhausted: there is no room for them.
        """
        for role, number in wanted.items():
            self._check(role, number)
        with self._lock:
            return self._begin_scaling(wanted)

    def join(self, pool: str, model: str) -> Scaling:
        """Asks for one replica of a further draft model, which only those get that name it or are promoted to it.

        One that ends before it serves, or is scaled away before, was never there: its name is free again.

        Raises:
            SpecdecError: there can be no such pool.
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
        """To be called often: starts, drains and restarts what has to be."""
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
        """Ends the coordinator, then draft and target replicas together."""
        with self._lock:
            if self._scaling is not None:
                self._scaling.end(self._wanted, "UNAVAILABLE DRAINING: specdec up is ending")
            services = self.services[::-1]
            for service in services[:1]:
                service.stop()
            for service in services:
                service.ask_to_stop()
            for service in services:
                service.stop()

    def _begin_scaling(self, wanted: Mapping[str, int]) -> Scaling:
        """Raises ResourceExhausted: there is no room."""
        self._launcher.require_room({role: max(0, number - self._wanted[role]) for role, number in wanted.items()})
        if self._scaling is not None:
            self._scaling.end(self._wanted, "ABORTED STALE_EPOCH: other numbers were asked for meanwhile")
        self._wanted |= wanted
        self._scaling = Scaling()
        return self._scaling

    def _forget_unserved(self) -> None:
        """Roles that joined and have no replica any more before one of them has served."""
        leaving = {role_of(service.name) for service in self._leaving}
        for role in [role for role in self._joining if not self._wanted[role] and role not in leaving]:
            if not self._of(role):
                self._joining.remove(role)
                del self._wanted[role]
                self._launcher.forget(role)

    def _check(self, role: str, number: int) -> None:
        if role not in self._launcher.roles:
            there_are = ", ".join(self._launcher.roles)
            raise InvalidRequest(f"{role}={number}: this system has no {role} model; there are {there_are}", field=role)
        least = 1 if role == "target" else 0
        if not least <= number <= MAX_REPLICAS:
            raise InvalidRequest(f"{role}={number}: must be {least} to {MAX_REPLICAS}", field=role)

    def _of(self, role: str) -> list[Service]:
        """Those that stay, oldest first."""
        return [service for service in (*self._kept, *self._starting) if role_of(service.name) == role]

    def _look_at_starting(self) -> None:
        for service in list(self._starting):
            if not service.is_alive:
                self._starting.remove(service)
                role = role_of(service.name)
                self._wanted[role] = len(self._of(role))
                failure = service.failure()
                service.stop()
                service.say(f"is not started again: {failure}")
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
        """Takes the next step towards the wanted number."""
        staying = self._of(role)
        for _ in range(self._wanted[role] - len(staying)):
            self._starting.append(self._launcher.replica(self._free_name(role), self._wanted[role]))
        for service in self._dispensable(staying, len(staying) - self._wanted[role]):
            (self._kept if service in self._kept else self._starting).remove(service)
            service.ask_to_stop()
            self._leaving[service] = self._clock() + STOP_GRACE_S
            service.say("leaving")

    def _dispensable(self, staying: list[Service], number: int) -> list[Service]:
        """Up to `number` that may leave now."""
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
        """Follows the request there is."""
        if self._scaling is None:
            return
        waited_for = [
            *(f"{service.name}: {service.stage}" for service in self._starting),
            *(f"{service.name}: leaving" for service in self._leaving),
            *(f"{service.name}: starting again" for service in self._kept if not service.is_serving),
        ]
        self._scaling.stage = ", ".join(waited_for)
        if not waited_for and all(len(self._of(role)) == number for role, number in self._wanted.items()):
            self._scaling.end(self._wanted)
            self._scaling = None
