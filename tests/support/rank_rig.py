"""A group of ranks of which this process is the first; the others are child processes. One model after another.

    with RankRig(2) as rig:
        worker = rig.load(directory)
        worker.execute(plan)

For tests of what a group computes; tests of lost ranks use real replicas. Called by tests and, in the children, by
itself.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
import torch.distributed as dist

from specdec.contract.errors import SpecdecError
from specdec.engine.base import Worker
from specdec.engine.options import Capture, CompileOptions, LoadRequest
from specdec.engine.parallel.follower import follow
from specdec.engine.parallel.group import RankGroup, Seat, open_store
from specdec.engine.parallel.rank_heartbeat import RankHeartbeat
from specdec.engine.parallel.rank_loader import load_rank, rank_device
from specdec.state.kv_tier import KvTier
from tests.support.cuda_graphs_rig import CountedCapture, record_on_tape
from tests.support.interpreted_kernels import cheap_recordings
from tests.support.process_template import ENVIRON, Streams, start_like
from tests.support.tier_rig import space_of

_HOST = "127.0.0.1"
_TOLD = ("parameter_share", "kv_share", "share_read")


class RankRig:
    """Ranks on this machine, on its CPU with one thread each or on one GPU each."""

    def __init__(self, num_ranks: int, *, device: str = "cpu", interprets_kernels: bool = False) -> None:
        """
        Args:
            num_ranks: of the group.
            device: cpu | cuda.
            interprets_kernels: whether Triton's kernels run in few programs, on tapes too, in all ranks.
        """
        listener = socket.create_server((_HOST, 0))
        port = listener.getsockname()[1]
        self.shares: list[dict[str, float]] = []
        """Logged shares of each rank's part of the newest model, the first rank first."""
        self.capture = CountedCapture(record_on_tape)
        """Capture function of this rank's recorded steps."""
        self._device = device
        self._worker: Worker | None = None
        told = {"num_ranks": num_ranks, "port": port, "device": device, "interprets_kernels": interprets_kernels}
        self._children = [_Child(told | {"rank": rank}) for rank in range(1, num_ranks)]
        self._kernels = cheap_recordings() if interprets_kernels else nullcontext()
        seat = Seat(0, num_ranks, _HOST, port, listener)
        self.ranks = RankGroup(seat, open_store(seat), rank_device(device, 0))

    def __enter__(self) -> Self:
        self._kernels.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._kernels.__exit__(kind, error, trace)
        self._close_worker()
        for child in self._children:
            child.close()
        dist.destroy_process_group()

    def load(self, directory: Path | str, *, kv_tier_url: str = "", **fields: Any) -> Worker:
        """Return this rank's worker, which the others follow until the next load. Raises as `load_rank`.

        `kv_tier_url`: store of the other ranks' cold tiers; the caller makes this rank's. `compiling`: the
        fields of `CompileOptions`; with `records`, steps are recorded on a tape, as a GPU would.
        """
        self._close_worker()
        wanted = {"model": str(directory), "device": self._device, "dtype": "float32", **fields}
        for child in self._children:
            print(json.dumps(wanted | {"kv_tier_url": kv_tier_url}), file=child.stdin, flush=True)
        outcome: Worker | SpecdecError
        try:
            outcome, own = _load(self.ranks, wanted, self.capture)
        except SpecdecError as error:
            outcome, own = error, {}
        answers = [json.loads(child.stdout.readline()) for child in self._children]
        if isinstance(outcome, SpecdecError):
            # An error on the first rank alone, such as a failed self-check, does not stop the others from loading.
            assert {answer["error"] for answer in answers if "error" in answer} <= {outcome.message}
            raise outcome
        self.shares = [own, *answers]
        self._worker = outcome
        return outcome

    def kill(self) -> None:
        """Kill the other ranks."""
        for child in self._children:
            child.process.kill()

    def _close_worker(self) -> None:
        if self._worker is not None:
            self._worker.close()
            self._worker = None


class _Child:
    """The process of another rank, with a pipe each way."""

    def __init__(self, told: dict[str, Any]) -> None:
        their_stdin, stdin = os.pipe()
        stdout, their_stdout = os.pipe()
        self.stdin, self.stdout = os.fdopen(stdin, "w"), os.fdopen(stdout)
        environ = {**os.environ, **ENVIRON}
        with open(their_stdin, "rb") as first, open(their_stdout, "wb") as second:
            streams = Streams(first, second, sys.__stderr__.buffer)
            self.process = start_like("tests.support.rank_rig", [json.dumps(told)], environ, streams)

    def close(self) -> None:
        """End the process at the end of its stdin."""
        with contextlib.suppress(BrokenPipeError):
            self.stdin.close()
        self.stdout.read()
        self.stdout.close()
        self.process.wait()


def _load(ranks: RankGroup, wanted: dict[str, Any], capture: Capture) -> tuple[Worker, dict[str, float]]:
    """Return a rank's worker and the logged shares of its part. `capture`: function that records steps."""
    wanted, told = dict(wanted), dict[str, float]()
    logger = logging.getLogger("specdec.engine.parallel")
    with _Listening(logger, lambda record: told.update({k: v for k, v in vars(record).items() if k in _TOLD})):
        options = dict(wanted.pop("compiling", {}))
        records = options.pop("records", False)
        compiling = CompileOptions(**options, capture=capture if records else None)
        return load_rank(LoadRequest(**wanted, compiling=compiling), ranks, RankHeartbeat({})), told


class _Listening(logging.Handler):
    """Passes a logger's records to a function within a `with` block."""

    def __init__(self, logger: logging.Logger, hear: Callable[[logging.LogRecord], None]) -> None:
        super().__init__(logging.INFO)
        self._logger, self._level_before, self.emit = logger, logger.level, hear  # type: ignore[method-assign]

    def __enter__(self) -> None:
        self._logger.addHandler(self)
        self._logger.setLevel(logging.INFO)

    def __exit__(self, *_: object) -> None:
        self._logger.removeHandler(self)
        self._logger.setLevel(self._level_before)


def _follow_all(rank: int, num_ranks: int, port: int, device: str) -> None:
    seat = Seat(rank, num_ranks, _HOST, port)
    ranks = RankGroup(seat, open_store(seat), rank_device(device, rank))
    for line in sys.stdin:
        wanted = json.loads(line)
        tier_url = wanted.pop("kv_tier_url")
        try:
            worker, told = _load(ranks, wanted, record_on_tape)
        except SpecdecError as error:
            print(json.dumps({"error": error.message}), flush=True)
            continue
        # Printed before this rank follows: the first rank runs its self-check on all ranks before it reads this.
        print(json.dumps(told), flush=True)
        tier = KvTier(tier_url, space_of(worker)) if tier_url else None
        follow(ranks, worker, tier)
        if tier is not None:
            tier.close()


if __name__ == "__main__":
    torch.set_num_threads(1)
    told = json.loads(sys.argv[1])
    with cheap_recordings() if told.pop("interprets_kernels") else nullcontext():
        _follow_all(**told)
