"""Keeps the services of `specdec up` running: one that ends is started again, at once at first, then ever later.

A child process comes back with its own arguments, so at its own addresses: coordinators find a replica again, clients
their coordinator. One on a Ray cluster may come back on another node, and is found through the registry. Not here: a
service's first start, at which an end is final (`up`, `fleet`), and what a service is (`services`).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from specdec.supervision.backoff import RestartPauses
from specdec.supervision.services import Service


@dataclass(slots=True)
class _Watched:
    """What is remembered of a service."""

    started_s: float
    """When it was last started."""
    pauses: RestartPauses = field(default_factory=RestartPauses)
    """Before each restart."""
    restart_at_s: float | None = None
    """Once it has ended."""
    is_back: bool = True
    """Whether it has said that it serves."""


class Supervisor:
    """Looks after services that have started. Not thread-safe."""

    def __init__(self, services: list[Service], clock: Callable[[], float] = time.monotonic) -> None:
        """Replaces elements of `services`, in place: whoever stops them all finds them there. Others may be added and
        removed between two looks; their names are all different."""
        self._services = services
        self._clock = clock
        self._watched: dict[str, _Watched] = {}
        self._take_in()

    def look(self) -> None:
        """To be called often: says who has ended, starts again whose pause is over."""
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
        service.stop()  # it has ended; this lets go of its pipes
        self._services[index] = service.again()
        watched.started_s, watched.restart_at_s, watched.is_back = self._clock(), None, False
