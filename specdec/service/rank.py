"""One rank of a replica whose model is divided: `python -m specdec.service.rank ROLE --rank R ... -- FLAGS`.

The first rank is the replica: it runs the whole gRPC service, owns sessions, scheduling and sampling, and leads the
others through every step. They follow until they are told to end, or until the first rank is gone. Ranks that lose each
other end, so that whoever started them starts all of them again: a watcher needs to look at nothing but exits.

Not here: starting and watching ranks (`rank_group` on one machine), what ranks say to each other
(`specdec.engine.parallel`).
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from functools import partial
from typing import TYPE_CHECKING

from specdec.errors import Internal, SpecdecError, Unavailable
from specdec.observability.logging import configure_logging
from specdec.service import memory
from specdec.service.lifecycle import end_process, run_to_exit_code
from specdec.service.replica_main import load_request, on_its_own_thread, open_kv_tier, serve_replica
from specdec.settings.base import ReplicaSettings, parse_settings

if TYPE_CHECKING:  # torch takes seconds to import, and a first rank finds out before whether it can serve at all
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    from specdec.engine.base import Worker
    from specdec.engine.parallel.group import RankGroup, Seat
    from specdec.engine.parallel.rank_heartbeat import RankHeartbeat

_log = logging.getLogger(__name__)

#: What launchers of other people's process groups leave in the environment; torch and transformers would believe it.
_FOREIGN_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")

_BACKLOG = 64


def serve_rank(
    role: str,
    argv: Sequence[str],
    *,
    rank: int,
    world_size: int,
    store_host: str,
    store_port: int = 0,
    publish_store: Callable[[int], None] | None = None,
    note_serving: Callable[[], None] | None = None,
    local_rank: int | None = None,
) -> int:
    """Runs one rank until it ends; returns the process's exit code. Takes the process over, signals included.

    Args:
        role: draft | target.
        argv: the service's flags, the same for all ranks.
        rank: 0 is the replica itself, which SIGTERM drains; the others end with it and ignore signals.
        world_size: ranks of the replica.
        store_host: address of the first rank's machine, at which the others reach it.
        store_port: where its store is; the first rank binds a free one instead, before anything else.
        publish_store: told that port, on the first rank.
        note_serving: called once the replica takes calls, on the first rank.
        local_rank: which of the ranks on this machine, and so which of its GPUs; None: `rank`.
    """
    kind = importlib.import_module(f"{role}_service.__main__").KIND
    settings = parse_settings(kind.settings_type, prog=f"python -m {role}_service", argv=argv)
    configure_logging(settings.log_format, settings.log_level, service=role)
    _clean_environment(settings, rank if local_rank is None else local_rank)
    listener = None
    if rank == 0:
        listener = socket.create_server((store_host, 0), backlog=_BACKLOG)
        store_port = int(listener.getsockname()[1])
        if publish_store is not None:
            publish_store(store_port)
    own = _Rank(settings, rank, world_size, store_host, store_port, listener)
    if rank == 0:
        return run_to_exit_code(serve_replica(kind, settings, own.load_first, note_serving))
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    return own.follow(kind.num_decode_rows(settings))


class _Rank:
    """This process's part in the group."""

    def __init__(
        self,
        settings: ReplicaSettings,
        rank: int,
        num_ranks: int,
        host: str,
        port: int,
        listener: socket.socket | None,
    ) -> None:
        self._settings = settings
        self._rank, self._num_ranks, self._host, self._port = rank, num_ranks, host, port
        self._listener = listener

    def load_first(self, num_decode_rows: int) -> Worker:
        """Loads the first rank's part, together with the others; fails as soon as one of them does."""
        outcome: Future[Worker] = Future()

        def fail(error: SpecdecError) -> None:
            with contextlib.suppress(InvalidStateError):  # it has been loaded
                outcome.set_exception(error)

        return on_its_own_thread(partial(self._load, fail, num_decode_rows), outcome)

    def follow(self, num_decode_rows: int) -> int:
        """Does what the first rank says; returns the exit code."""
        from specdec.engine.parallel.follower import follow

        rank_heartbeat = None
        try:
            seat, store, rank_heartbeat = self._connect(_leave)
            ranks, worker = self._load_rank(seat, store, rank_heartbeat, num_decode_rows)
            logging.getLogger("specdec.state").setLevel(logging.ERROR)  # the first rank warns for all
            tier = open_kv_tier(self._settings, worker.shape)
            memory.settle()
            with contextlib.nullcontext() if tier is None else contextlib.closing(tier):
                follow(ranks, worker, tier)
        except Exception as error:  # whatever it is, this rank is of no more use to the others
            _log.exception("rank %d fails", self._rank)
            if rank_heartbeat is not None:
                ours = error if isinstance(error, SpecdecError) else Internal(f"rank {self._rank} failed: {error}")
                rank_heartbeat.fail(ours)
            return 1
        rank_heartbeat.close()
        return 0

    def _load(self, note_lost: Callable[[SpecdecError], None], num_decode_rows: int) -> Worker:
        return self._load_rank(*self._connect(note_lost), num_decode_rows)[1]

    def _load_rank(
        self, seat: Seat, store: TCPStore, rank_heartbeat: RankHeartbeat, num_decode_rows: int
    ) -> tuple[RankGroup, Worker]:
        with memory.collector_at_rest():
            from specdec.engine.parallel.group import RankGroup
            from specdec.engine.parallel.rank_loader import load_rank, rank_device

        ranks = RankGroup(seat, store, rank_device(self._settings.device, int(os.environ["LOCAL_RANK"])))
        return ranks, load_rank(load_request(self._settings, num_decode_rows), ranks, rank_heartbeat)

    def _connect(self, note_lost: Callable[[SpecdecError], None]) -> tuple[Seat, TCPStore, RankHeartbeat]:
        """Finds the other ranks. Raises Unavailable: they do not come."""
        with memory.collector_at_rest():
            from specdec.engine.parallel.group import Seat, open_store
            from specdec.engine.parallel.rank_heartbeat import RankHeartbeat

        seat = Seat(self._rank, self._num_ranks, self._host, self._port, self._listener)
        try:
            store = open_store(seat)
            if self._rank == 0:
                rank_heartbeat = RankHeartbeat.of_first(store, self._host, self._num_ranks)
            else:
                rank_heartbeat = RankHeartbeat.of_other(store, self._host, self._rank)
            rank_heartbeat.watch(note_lost)
        except (RuntimeError, OSError) as error:
            raise Unavailable(f"the ranks do not find each other: {error}") from error
        return seat, store, rank_heartbeat


def _leave(error: SpecdecError) -> None:
    """The first rank is gone, and with it all that this one is for; its thread may be in the middle of a step."""
    _log.error("leaving: %s", error.message)
    end_process(1)


def _clean_environment(settings: ReplicaSettings, local_rank: int) -> None:
    for name in [*_FOREIGN_VARIABLES, *(name for name in os.environ if name.startswith("TORCHELASTIC_"))]:
        os.environ.pop(name, None)
    os.environ["LOCAL_RANK"] = str(local_rank)  # transformers looks there for its device
    if settings.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # or else transformers divides models among GPUs


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a rank, with the service's flags after `--`; the first one says on stdout where its store is, and when it
    serves.
    """
    parser = argparse.ArgumentParser(prog="python -m specdec.service.rank", allow_abbrev=False)
    parser.add_argument("role", choices=["draft", "target"])
    for flag in ("--rank", "--world-size", "--store-port"):
        parser.add_argument(flag, type=int, default=0)
    parser.add_argument("--local-rank", type=int)
    parser.add_argument("--store-host", default="127.0.0.1")
    given = list(sys.argv[1:] if argv is None else argv)
    own_end = given.index("--")
    args = parser.parse_args(given[:own_end])
    return serve_rank(
        args.role,
        given[own_end + 1 :],
        rank=args.rank,
        world_size=args.world_size,
        store_host=args.store_host,
        store_port=args.store_port,
        local_rank=args.local_rank,
        publish_store=lambda port: print(f"store {port}", flush=True),
        note_serving=lambda: print("serving", flush=True),
    )


if __name__ == "__main__":
    end_process(main())
