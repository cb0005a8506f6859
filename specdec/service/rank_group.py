"""The ranks of one replica as processes of this machine, kept together: `python -m target_service --tensor-parallel 2`.

The process that was asked for the replica watches; it loads nothing itself. Once a rank has ended, however it did, the
others are ended too and the group starts again as a whole, at once at first, then ever later. A start that fails is
final. Ranks end with their watcher (`specdec.supervision.child`), a killed one too.

Not here: what a rank does, and how ranks notice that one of them is gone (`specdec.service.rank`); ranks on several
machines.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sys
import time
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import Mapping, Sequence
from pathlib import Path

import specdec
from specdec.checkpoints.locate import locate_checkpoint
from specdec.checkpoints.preflight import require_servable
from specdec.checkpoints.rank_checks import FLAG, require_divisible, require_supported
from specdec.errors import InvalidRequest, Unavailable
from specdec.service.lifecycle import run_to_exit_code, stop_on_signals
from specdec.settings.base import ReplicaSettings
from specdec.settings.devices import likely_device, require_device, require_gpu_each
from specdec.supervision.backoff import RestartPauses
from specdec.types import SIMULATED_PREFIX

_HOST = "127.0.0.1"
#: After one rank has ended: how long the first may take to fail its calls and leave the registry.
_LEAVE_S = 5.0
#: How long the others may take to notice that the first has gone in order.
_FOLLOW_S = 2.0
#: Beyond what calls in flight may still take when the replica is asked to end.
_CLOSE_S = 10.0

_log = logging.getLogger(__name__)


def run_ranks(role: str, argv: Sequence[str], settings: ReplicaSettings) -> int:
    """Keeps a replica of several ranks running until SIGTERM or Ctrl-C; returns the exit code.

    Args:
        role: draft | target.
        argv: the service's flags, which every rank reads.
        settings: what they say.
    """
    watcher = _Watcher(role, argv, settings)
    return run_to_exit_code(watcher.run()) or watcher.exit_code


class _Watcher:
    """Starts the ranks, and starts them again."""

    def __init__(self, role: str, argv: Sequence[str], settings: ReplicaSettings) -> None:
        self.exit_code = 0
        """Of the first rank, where that has said on stderr why it ended."""
        self._role, self._argv, self._settings = role, argv, settings
        self._environ = _environment(os.environ, settings)

    async def run(self) -> None:
        """Returns once the replica has ended as it was asked to, or has failed to start.

        Raises:
            InvalidRequest, Unsupported: it could not be served.
            Unavailable: a rank ended before the replica served, and did not say why.
        """
        _require_divided(self._settings)
        stop, pauses = stop_on_signals(), RestartPauses()
        while not stop.is_set():
            began_s = time.monotonic()
            ranks = Ranks(self._role, self._argv, self._settings.tensor_parallel, self._environ)
            try:
                await ranks.run(stop, self._settings.drain_grace_s)
            finally:
                await ranks.end()
            if stop.is_set() or not ranks.has_served:
                self.exit_code = ranks.exit_code
                if not stop.is_set() and self.exit_code != 1:
                    raise Unavailable(f"the first rank ended before it served (exit code {self.exit_code})")
                return
            pause_s = pauses.next_s(lived_s=time.monotonic() - began_s)
            _log.warning("the ranks have ended, restarting all of them in %.0f s", pause_s)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(stop.wait(), pause_s)


class Ranks:
    """One life of a group."""

    def __init__(self, role: str, argv: Sequence[str], num_ranks: int, environ: Mapping[str, str]) -> None:
        self.has_served = False
        """Whether the replica has taken calls."""
        self._command = [sys.executable, "-P", "-m", "specdec.supervision.child", "specdec.service.rank", role]
        self._argv, self._num_ranks, self._environ = list(argv), num_ranks, environ
        self._processes: list[Process] = []

    @property
    def exit_code(self) -> int:
        """Of the first rank; 128 and a signal's number where that ended it."""
        code = (self._processes[0].returncode or 0) if self._processes else 1
        return code if code >= 0 else 128 - code

    async def run(self, stop: asyncio.Event, drain_grace_s: float) -> None:
        """Starts the ranks; returns once one of them has ended, or all of them on `stop`."""
        first = await self._start(0)
        stopping = asyncio.create_task(stop.wait())
        ended = [asyncio.create_task(first.wait())]
        store = asyncio.create_task(_line(first, b"store "))
        try:
            await asyncio.wait({store, stopping, *ended}, return_when=asyncio.FIRST_COMPLETED)
            if store.done() and (port := store.result()):
                others = [await self._start(rank, int(port)) for rank in range(1, self._num_ranks)]
                ended += [asyncio.create_task(process.wait()) for process in others]
                serving = asyncio.create_task(self._note_serving(first))
                await asyncio.wait({stopping, *ended}, return_when=asyncio.FIRST_COMPLETED)
                if first.returncode is not None:
                    await serving  # its pipe has been closed
                serving.cancel()
            if stop.is_set():
                _ask_to_end(first)
                await asyncio.wait(ended[:1], timeout=drain_grace_s + _CLOSE_S)
        finally:
            for task in (stopping, store, *ended):
                task.cancel()

    async def end(self) -> None:
        """Lets the first rank leave, then ends whoever is left, stopped ones too."""
        for process, patience_s in zip(self._processes, (_LEAVE_S, *[_FOLLOW_S] * self._num_ranks), strict=False):
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(process.wait(), patience_s)
        for process in self._processes:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()

    async def _start(self, rank: int, store_port: int = 0) -> Process:
        own = ["--rank", str(rank), "--world-size", str(self._num_ranks), "--store-host", _HOST]
        process = await asyncio.create_subprocess_exec(
            *self._command, *own, "--store-port", str(store_port), "--", *self._argv,
            stdin=PIPE, stdout=PIPE if rank == 0 else DEVNULL, env=self._environ, start_new_session=True,
        )  # fmt: skip
        self._processes.append(process)
        return process

    async def _note_serving(self, first: Process) -> None:
        self.has_served = await _line(first, b"serving") is not None


async def _line(process: Process, beginning: bytes) -> bytes | None:
    """What follows `beginning` in the next line of its stdout that begins so; None: there is none."""
    assert process.stdout is not None  # it is the first rank's
    async for line in process.stdout:
        if line.startswith(beginning):
            return line.removeprefix(beginning)
    return None


def _ask_to_end(process: Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.terminate()


def _require_divided(settings: ReplicaSettings) -> None:
    """What small files tell, before anything is started."""
    if settings.model.startswith(SIMULATED_PREFIX):
        raise InvalidRequest("--tensor-parallel: simulated replicas have nothing to divide", field="tensor_parallel")
    require_supported(device=likely_device(settings.device), dtype=settings.dtype,
                      compile_backend=settings.compile_backend, deterministic=settings.deterministic)  # fmt: skip
    require_device(settings.device)
    require_gpu_each(settings.device, settings.tensor_parallel, flag=FLAG)
    require_servable(settings.model, flag="--model")
    require_divisible(settings.model, settings.tensor_parallel)
    locate_checkpoint(settings.model)  # downloads it once, not once a rank


def _environment(environ: Mapping[str, str], settings: ReplicaSettings) -> dict[str, str]:
    # Whatever folder this is started from, ranks import the packages that we are.
    root = str(Path(specdec.__file__).resolve().parents[1])
    own = {"PYTHONPATH": os.pathsep.join(filter(None, (root, environ.get("PYTHONPATH"))))}
    # Ranks wait for each other within every layer: none may take a core that another one needs.
    num_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    shared = {"OMP_NUM_THREADS": str(max(1, num_cores // settings.tensor_parallel))}
    if os.path.exists("/sys/class/net/lo"):  # all of them are on this machine
        shared |= {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
    return {**shared, **environ, **own}
