"""Run one rank of a replica whose model is divided: `python -m specdec.service.rank ROLE --rank R ... -- FLAGS`.

The first rank is the replica: it runs the gRPC service, owns sessions, scheduling and sampling, and leads the others
through every step. They follow until it sends the end or is lost. Ranks that lose each other end, so the process that
started them only has to watch for exits and start all of them again. `specdec.service.rank_group` does that on one
machine, and a LeaderWorkerSet of Kubernetes on several (k8s/components/multi-node); `specdec.engine.parallel` is the
communication of ranks.
"""

from __future__ import annotations

if __name__ == "__main__":
    from specdec.settings.early_signals import end_on_sigterm
    from specdec.settings.standard_streams import never_wait_for_readers

    end_on_sigterm()
    never_wait_for_readers()

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

from specdec.contract.errors import Internal, SpecdecError, Unavailable, error_line
from specdec.engine.parallel.rank_heartbeat import listen
from specdec.observability.logging import configure_logging
from specdec.service import memory
from specdec.service.lifecycle import end_process, run_to_exit_code
from specdec.service.replica_main import load_request, on_its_own_thread, open_kv_tier, serve_replica
from specdec.settings.addresses import join_address
from specdec.settings.reading import parse_settings
from specdec.settings.shared import ReplicaSettings

if TYPE_CHECKING:  # torch takes seconds to import, and the first rank checks before whether it can serve
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    from specdec.engine.base import Worker
    from specdec.engine.parallel.group import RankGroup, Seat
    from specdec.engine.parallel.rank_heartbeat import RankHeartbeat

_log = logging.getLogger(__name__)

#: Environment variables of other launchers' process groups, which torch and transformers would use.
_FOREIGN_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


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
    """Run one rank until it ends; return the process's exit code. It takes over the process with its signals.

    Args:
        role: draft | target.
        argv: flags of the service, the same for all ranks.
        rank: 0 is the replica itself, which SIGTERM drains; the others end with it and ignore signals.
        world_size: number of ranks of the replica.
        store_host: address at which the others reach the first rank's machine.
        store_port: port of the first rank's store, the same for all ranks if they start apart from each other; 0 on
            the first rank takes a free port.
        publish_store: called with the bound port on the first rank.
        note_serving: called on the first rank once the replica takes calls.
        local_rank: index of the rank on this machine, and so of its GPU; None is `rank`.
    """
    kind = importlib.import_module(f"{role}_service.__main__").KIND
    settings = parse_settings(kind.settings_type, prog=f"python -m {role}_service", argv=argv)
    configure_logging(settings.log_format, settings.log_level, service=role)
    _clean_environment(settings, rank if local_rank is None else local_rank)
    listener = None
    if rank == 0:
        try:
            listener = listen(store_host, store_port)
        except OSError as error:
            where = join_address(store_host, store_port)
            print(error_line(Unavailable(f"cannot listen on {where}: {error.strerror or error}")), file=sys.stderr)
            return 1
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
    """Rank of this process."""

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

    def load_first(self, num_decode_rows: int, note_loaded: Callable[[float], None]) -> Worker:
        """Load the first rank's part while the others load theirs; fail as soon as one of them does."""
        outcome: Future[Worker] = Future()

        def fail(error: SpecdecError) -> None:
            with contextlib.suppress(InvalidStateError):  # the model is already loaded
                outcome.set_exception(error)

        return on_its_own_thread(partial(self._load, fail, num_decode_rows, note_loaded), outcome)

    def follow(self, num_decode_rows: int) -> int:
        """Run the steps that the first rank sends; return the exit code."""
        from specdec.engine.parallel.follower import follow

        rank_heartbeat = None
        try:
            seat, store, rank_heartbeat = self._connect(_leave)
            ranks, worker = self._load_rank(seat, store, rank_heartbeat, num_decode_rows)
            logging.getLogger("specdec.state").setLevel(logging.ERROR)  # the first rank logs warnings for all
            tier = open_kv_tier(self._settings, worker.shape)
            memory.settle()
            with contextlib.nullcontext() if tier is None else contextlib.closing(tier):
                follow(ranks, worker, tier)
        except Exception as error:  # after any error the other ranks cannot use this one
            _log.exception("rank %d failed", self._rank)
            if rank_heartbeat is not None:
                ours = error if isinstance(error, SpecdecError) else Internal(f"rank {self._rank} failed: {error}")
                rank_heartbeat.fail(ours)
            return 1
        rank_heartbeat.close()
        return 0

    def _load(
        self, note_lost: Callable[[SpecdecError], None], num_decode_rows: int, note_loaded: Callable[[float], None]
    ) -> Worker:
        return self._load_rank(*self._connect(note_lost), num_decode_rows, note_loaded)[1]

    def _load_rank(
        self,
        seat: Seat,
        store: TCPStore,
        rank_heartbeat: RankHeartbeat,
        num_decode_rows: int,
        note_loaded: Callable[[float], None] = lambda share: None,
    ) -> tuple[RankGroup, Worker]:
        with memory.collector_at_rest():
            from specdec.engine.parallel.group import RankGroup
            from specdec.engine.parallel.rank_loader import load_rank, rank_device

        ranks = RankGroup(seat, store, rank_device(self._settings.device, int(os.environ["LOCAL_RANK"])))
        return ranks, load_rank(load_request(self._settings, num_decode_rows, note_loaded), ranks, rank_heartbeat)

    def _connect(self, note_lost: Callable[[SpecdecError], None]) -> tuple[Seat, TCPStore, RankHeartbeat]:
        """Connect to the other ranks. Raises Unavailable: they do not connect in time."""
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
            raise Unavailable(f"the ranks cannot connect to each other: {error}") from error
        return seat, store, rank_heartbeat


def _leave(error: SpecdecError) -> None:
    """End the process after the first rank is lost; the thread that follows may be in the middle of a step."""
    _log.error("ending this rank: %s", error.message)
    end_process(1)


def _clean_environment(settings: ReplicaSettings, local_rank: int) -> None:
    for name in [*_FOREIGN_VARIABLES, *(name for name in os.environ if name.startswith("TORCHELASTIC_"))]:
        os.environ.pop(name, None)
    os.environ["LOCAL_RANK"] = str(local_rank)  # transformers reads its device from it
    if settings.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # otherwise transformers divides models among GPUs


def parse_arguments(given: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Return the arguments of a rank, and the service's flags, which follow `--`."""
    parser = argparse.ArgumentParser(prog="python -m specdec.service.rank", allow_abbrev=False)
    parser.add_argument("role", choices=["draft", "target"])
    for flag in ("--rank", "--world-size", "--store-port"):
        parser.add_argument(flag, type=int, default=0)
    parser.add_argument("--local-rank", type=int)
    parser.add_argument("--store-host", default="127.0.0.1")
    own_end = list(given).index("--")
    return parser.parse_args(given[:own_end]), list(given[own_end + 1 :])


def main(argv: Sequence[str] | None = None) -> int:
    """Run a rank. The first rank prints its store's port, and when it serves."""
    args, flags = parse_arguments(sys.argv[1:] if argv is None else argv)
    return serve_rank(
        args.role,
        flags,
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
