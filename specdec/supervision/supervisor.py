"""Restarts the services of `specdec up` that end: after one second at first, then after ever longer pauses.

A child process is restarted with its own arguments and so at its own address, where coordinators find a replica and
clients find their coordinator. A replica on a Ray cluster may come back on another node and is found through the
registry. The first start of a service is not supervised here: if that fails, it is final (`cli.up`, `fleet`).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from specdec.supervision.services import Service

_FIRST_PAUSE_S = 1.0
_LONGEST_PAUSE_S = 30.0
#: A process that ran for this long starts again with the first pause.
_HEALTHY_S = 60.0


class RestartPauses:
    """The pauses of one supervised process."""

    def __init__(self) -> None:
        self._pause_s = _FIRST_PAUSE_S

    def next_s(self, *, lived_s: float) -> float:
        """Return the pause before the next start, in seconds.

        Args:
            lived_s: time from the last start to its end.
        """
        if lived_s >= _HEALTHY_S:
            self._pause_s = _FIRST_PAUSE_S
        pause_s = self._pause_s
        self._pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        return pause_s


@dataclass(slots=True)
class _Watched:
    """State of one supervised service."""

    started_s: float
    """Time of its last start."""
    pauses: RestartPauses = field(default_factory=RestartPauses)
    restart_at_s: float | None = None
    """Time of its next start, once it has ended."""
    is_back: bool = True
    """True once it has reported, since its last start, that it serves."""


class Supervisor:
    """Supervises services that have started. Not thread-safe."""

    def __init__(self, services: list[Service], clock: Callable[[], float] = time.monotonic) -> None:
        """Supervise the elements of `services`, which have different names.

        A restart replaces the element in place, so the owner of the list can stop every service. The owner may add and
        remove elements between two calls of `look`.
        """
        self._services = services
        self._clock = clock
        self._watched: dict[str, _Watched] = {}
        self._take_in()

    def look(self) -> None:
        """Report services that have ended, and restart those whose pause is over. Call this often."""
        self._take_in()
        for index, service in enumerate(self._services):
            watched = self._watched[service.name]
            if watched.restart_at_s is not None:
                if self._clock() >= watched.restart_at_s:
                    self._restart(index, watched)
            elif not service.is_alive:
                self._note_end(service, watched)
            elif not watched.is_back and service.has_started:
                watched.is_back = True
                service.relay()
                service.say("serving again")

    def _take_in(self) -> None:
        now_s = self._clock()
        self._watched = {service.name: self._watched.get(service.name, _Watched(now_s)) for service in self._services}

    def _note_end(self, service: Service, watched: _Watched) -> None:
        now_s = self._clock()
        pause_s = watched.pauses.next_s(lived_s=now_s - watched.started_s)
        watched.restart_at_s = now_s + pause_s
        service.say(f"ended ({service.ending()}), restarting in {pause_s:.0f} s")

    def _restart(self, index: int, watched: _Watched) -> None:
        service = self._services[index]
        service.stop()  # it has ended; this closes its pipes
        self._services[index] = service.again()
        watched.started_s, watched.restart_at_s, watched.is_back = self._clock(), None, False
