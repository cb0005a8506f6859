"""Keeps the children of `specdec up` running: one that ends is started again, at once at first, then ever later.

A child comes back with its own arguments, so at its own addresses: coordinators find a replica again, clients their
coordinator. Not here: the first start, at which an end is final (`up`), and what a child is (`processes`).
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from specdec.cli.processes import Child
from specdec.restarts import RestartPauses


@dataclass(slots=True)
class _Watched:
    """What is remembered of a child."""

    started_s: float
    """When it was last started."""
    pauses: RestartPauses = field(default_factory=RestartPauses)
    """Before each restart."""
    restart_at_s: float | None = None
    """Once it has ended."""
    is_back: bool = True
    """Whether it has said that it serves."""


class Supervisor:
    """Looks after children that have started. Not thread-safe."""

    def __init__(self, children: list[Child], clock: Callable[[], float] = time.monotonic) -> None:
        """Replaces elements of `children`, in place: whoever stops them all finds them there."""
        self._children = children
        self._clock = clock
        self._watched = [_Watched(clock()) for _ in children]

    def look(self) -> None:
        """To be called often: says who has ended, starts again whose pause is over."""
        for index, watched in enumerate(self._watched):
            child = self._children[index]
            if watched.restart_at_s is not None:
                if self._clock() >= watched.restart_at_s:
                    self._restart(index, watched)
            elif not child.is_alive:
                self._note_end(child, watched)
            elif not watched.is_back and child.has_started:
                watched.is_back = True
                child.relay()
                _say(child, "serving again")

    def _note_end(self, child: Child, watched: _Watched) -> None:
        now_s = self._clock()
        pause_s = watched.pauses.next_s(lived_s=now_s - watched.started_s)
        watched.restart_at_s = now_s + pause_s
        _say(child, f"ended ({child.ending()}), restarting in {pause_s:.0f} s")

    def _restart(self, index: int, watched: _Watched) -> None:
        child = self._children[index]
        child.stop()  # it has ended; this lets go of its pipes
        self._children[index] = child.again()
        watched.started_s, watched.restart_at_s, watched.is_back = self._clock(), None, False


def _say(child: Child, words: str) -> None:
    print(f"[{child.name}] {words}", file=sys.stderr, flush=True)
