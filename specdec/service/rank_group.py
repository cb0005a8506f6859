"""Run the ranks of one replica as processes of this machine: `python -m target_service --tensor-parallel 2`.

This process starts the ranks and watches them; it loads no model. Once a rank has ended for any reason, the other ranks
are ended too and the whole group starts again, at first at once and then after longer and longer pauses. If the first
start fails, this process ends. Ranks end with their watcher (`specdec.supervision.child`), even if it is killed.
`specdec.service.rank` is what a rank runs.
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
from specdec.contract.errors import InvalidRequest, Unavailable
from specdec.contract.types import SIMULATED_PREFIX
from specdec.service.lifecycle import run_to_exit_code, stop_on_signals
from specdec.settings.devices import likely_device, require_device, require_gpu_each
from specdec.settings.processors import num_processors
from specdec.settings.shared import ReplicaSettings
from specdec.supervision.supervisor import RestartPauses

_HOST = "127.0.0.1"
#: Time for the first rank, after another one has ended, to fail its calls and leave the registry.
_LEAVE_S = 5.0
#: Time for the other ranks to notice that the first one has ended.
_FOLLOW_S = 2.0
_READ_BYTES = 1 << 16
#: Time to end after the drain time of calls in flight.
_CLOSE_S = 10.0

_log = logging.getLogger(__name__)


def run_ranks(role: str, argv: Sequence[str], settings: ReplicaSettings) -> int:
    """Keep a replica of several ranks running until SIGTERM or Ctrl-C; return the exit code.

    Args:
        role: draft | target.
        argv: flags of the service, which every rank reads.
        settings: settings of these flags.
    """
    watcher = _Watcher(role, argv, settings)
    return run_to_exit_code(watcher.run()) or watcher.exit_code


class _Watcher:
    """Starts the ranks and restarts them."""

    def __init__(self, role: str, argv: Sequence[str], settings: ReplicaSettings) -> None:
        self.exit_code = 0
        """Exit code of the first rank if it has written on stderr why it ended."""
        self._role, self._argv, self._settings = role, argv, settings
        self._environ = _environment(os.environ, settings)

    async def run(self) -> None:
        """Run the replica until it is stopped or fails to start.

        Raises:
            InvalidRequest, Unsupported: the replica cannot be served.
            Unavailable: a rank ended before the replica served, without an error message.
        """
        _require_divided(self._settings)
        stop, pauses = stop_on_signals(), RestartPauses()
        while not stop.is_set():
            began_s = time.monotonic()
            ranks = Ranks(self._role, self._argv, self._settings.tensor_parallel, self._environ)
            try:
                await ranks.run(stop, self._settings.end_grace_s)
            finally:
                await ranks.end(at_once=stop.is_set() and not ranks.has_served)
            if stop.is_set() or not ranks.has_served:
                self.exit_code = ranks.exit_code
                if not stop.is_set() and self.exit_code != 1:
                    raise Unavailable(f"the first rank ended before it served (exit code {self.exit_code})")
                return
            pause_s = pauses.next_s(lived_s=time.monotonic() - began_s)
            _log.warning("a rank ended; restarting all ranks in %.0f s", pause_s)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await stop.wait()


class Ranks:
    """Processes of a group, from one start to its end."""

    def __init__(self, role: str, argv: Sequence[str], num_ranks: int, environ: Mapping[str, str]) -> None:
        self.has_served = False
        """True once the replica takes calls."""
        self._command = [sys.executable, "-P", "-m", "specdec.supervision.child", "specdec.service.rank", role]
        self._argv, self._num_ranks, self._environ = list(argv), num_ranks, environ
        self._processes: list[Process] = []

    @property
    def exit_code(self) -> int:
        """Exit code of the first rank; 128 plus the signal's number if a signal ended it."""
        code = (self._processes[0].returncode or 0) if self._processes else 1
        return code if code >= 0 else 128 - code

    async def run(self, stop: asyncio.Event, grace_s: float) -> None:
        """Start the ranks; return once one of them has ended, or after `stop` once the first has ended."""
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
                    await asyncio.wait({serving}, timeout=_FOLLOW_S)  # the pipe closes with the rank's processes
                serving.cancel()
            if stop.is_set():
                _ask_to_end(first)
                await asyncio.wait(ended[:1], timeout=grace_s + _CLOSE_S)
        finally:
            for task in (stopping, store, *ended):
                task.cancel()

    async def end(self, *, at_once: bool = False) -> None:
        """Wait for the ranks to end, the first one longest, and kill those that do not; `at_once` without waiting."""
        patience = () if at_once else (_LEAVE_S, *[_FOLLOW_S] * self._num_ranks)
        for process, patience_s in zip(self._processes, patience, strict=False):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(patience_s):
                    await process.wait()
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
        assert first.stdout is not None
        while await first.stdout.read(_READ_BYTES):  # what libraries print later must not fill the pipe
            pass


async def _line(process: Process, prefix: bytes) -> bytes | None:
    """Return the next line with a prefix from the process's stdout, without the prefix; None at the end."""
    assert process.stdout is not None  # the first rank's stdout is a pipe
    async for line in process.stdout:
        if line.startswith(prefix):
            return line.removeprefix(prefix)
    return None


def _ask_to_end(process: Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.terminate()


def _require_divided(settings: ReplicaSettings) -> None:
    """Check everything that settings and small files tell, before a process is started."""
    if settings.model.startswith(SIMULATED_PREFIX):
        raise InvalidRequest("--tensor-parallel cannot divide a simulated replica", field="tensor_parallel")
    require_supported(device=likely_device(settings.device), dtype=settings.dtype,
                      compile_backend=settings.compile_backend, deterministic=settings.deterministic)  # fmt: skip
    require_device(settings.device)
    require_gpu_each(settings.device, settings.tensor_parallel, flag=FLAG)
    require_servable(settings.model, flag="--model")
    require_divisible(settings.model, settings.tensor_parallel)
    locate_checkpoint(settings.model)  # downloads the checkpoint once instead of on every rank


def _environment(environ: Mapping[str, str], settings: ReplicaSettings) -> dict[str, str]:
    # Ranks import the same packages as this process, whatever the working directory is.
    root = str(Path(specdec.__file__).resolve().parents[1])
    own = {"PYTHONPATH": os.pathsep.join(filter(None, (root, environ.get("PYTHONPATH"))))}
    # Ranks wait for each other in every layer, so none may take a core that another one needs.
    shared = {"OMP_NUM_THREADS": str(max(1, num_processors() // settings.tensor_parallel))}
    if os.path.exists("/sys/class/net/lo"):  # all ranks are on this machine
        shared |= {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
    return {**shared, **environ, **own}
