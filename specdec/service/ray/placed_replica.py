"""Runs one replica on a Ray cluster, from start to end.

    python -m specdec.service.ray.placed_replica --name target-0 ... -- FLAGS

`specdec up` keeps this process for a replica whose ranks run on other nodes. The process is a job of the cluster: it
places the ranks' actors, passes on the lines of the first rank, drains on SIGTERM, and ends when a rank ends, with the
exit code and last line of a service. When the job ends for any reason, Ray ends its actors. `specdec up` starts the
replica again, perhaps on another node; a group of ranks restarts as a whole (docs/adr/0010-replicas-on-ray.md).
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any, TextIO

from specdec.contract.errors import Internal, SpecdecError, Unavailable, error_line
from specdec.service.ray.cluster_connection import connect, first_sentence, seclude
from specdec.service.ray.rank_host import CALLER_VARIABLES, only
from specdec.service.ray.ray_placement import PLACE_TIMEOUT_S, Needs, RayPlacement
from specdec.settings.addresses import join_address

#: Time that the first rank gets, after another rank has ended, to fail its calls and leave the registry.
_LEAVE_S = 5.0

#: Beginnings of lines that a first rank writes: its store's port, for those who start the other ranks, and that it
#: serves, which its log says too.
_STORE_LINE, _SERVING_LINE = "store ", "serving"
#: All ranks are on one node, so their messages need no other interface.
_LOOPBACK, _LOOPBACK_INTERFACE = "127.0.0.1", Path("/sys/class/net/lo")


@dataclass(frozen=True, slots=True)
class _Event:
    """A line of a rank, or how it ended; without a rank, a SIGTERM of this process."""

    rank: int | None = None
    words: str = ""
    has_ended: bool = False


class _Replica:
    """The ranks of the replica, from their start to their end."""

    def __init__(self, ray: Any, args: argparse.Namespace, flags: Sequence[str], placement: RayPlacement) -> None:
        self._ray, self._args, self._placement = ray, args, placement
        self._flags = [*flags, "--listen", join_address(placement.address, 0)]
        if args.metrics:
            self._flags += ["--metrics", join_address(placement.address, placement.free_port)]
        self._environ = only(os.environ, CALLER_VARIABLES)
        if _LOOPBACK_INTERFACE.exists():
            variables = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
            self._environ |= dict.fromkeys(variables, _LOOPBACK_INTERFACE.name)
        self._events: SimpleQueue[_Event] = SimpleQueue()

    def run(self, say: TextIO) -> int:
        """Return the first rank's exit code. Raises Unavailable if the rank is lost or did not report its end."""
        signal.signal(signal.SIGTERM, lambda *_: self._events.put(_Event()))
        self._start(0)
        ended = self._pass_on(say)
        if ended.rank != 0:
            ended = self._await_first(say, ended)
        if ended.rank == 0 and ended.words.startswith("exit code "):
            return int(ended.words.removeprefix("exit code "))
        raise Unavailable(f"{self._args.name} ended on node {self._placement.address} ({ended.words})")

    def _pass_on(self, say: TextIO) -> _Event:
        """Process events until a rank ends; return that event."""
        while not (event := self._events.get()).has_ended:
            if event.rank is None:
                self._placement.hosts[0].ask_to_stop.remote()
            elif event.rank == 0 and event.words.startswith(_STORE_LINE):
                for rank in range(1, self._args.ranks):
                    self._start(rank, store_port=event.words.removeprefix(_STORE_LINE))
            elif self._is_told(event):
                print(event.words, file=say, flush=True)
        return event

    def _is_told(self, event: _Event) -> bool:
        """Return whether to pass a line on: all lines of a lone rank; of several, their logs and the first's lines."""
        if self._args.ranks == 1 or event.words.startswith("{"):
            return True
        return event.rank == 0 and event.words != _SERVING_LINE

    def _await_first(self, say: TextIO, ended: _Event) -> _Event:
        """Return the first rank's end if it comes within `_LEAVE_S`, else `ended`."""
        timer = threading.Timer(_LEAVE_S, lambda: self._events.put(ended))
        timer.daemon = True
        timer.start()
        while (event := self._pass_on(say)) is not ended and event.rank != 0:
            pass
        return event

    def _start(self, rank: int, store_port: str = "0") -> None:
        role = self._args.role
        if self._args.ranks == 1:
            module, arguments = f"{role}_service", self._flags
        else:
            # The actor of each rank has one GPU and sees no other.
            own = ["--rank", str(rank), "--world-size", str(self._args.ranks), "--local-rank", "0"]
            own += ["--store-host", _LOOPBACK, "--store-port", store_port]
            module, arguments = "specdec.service.rank", [role, *own, "--", *self._flags]
        threading.Thread(target=self._follow, args=(rank, module, arguments), daemon=True).start()

    def _follow(self, rank: int, module: str, arguments: Sequence[str]) -> None:
        try:
            host = self._placement.hosts[rank]
            for answer in host.run.options(num_returns="streaming").remote(module, arguments, self._environ):
                self._events.put(_Event(rank, *self._ray.get(answer)))
        except Exception as error:  # actor or node are gone or cannot be reached; the consequence is the same
            self._events.put(_Event(rank, f"lost: {first_sentence(error)}", has_ended=True))


def main(argv: Sequence[str] | None = None) -> int:
    """Run until the replica has ended; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m specdec.service.ray.placed_replica", allow_abbrev=False)
    parser.add_argument("--ray-address", required=True)
    parser.add_argument("--name", required=True)
    parser.add_argument("--role", choices=["draft", "target"], required=True)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--cpus", type=float, default=1.0)
    parser.add_argument("--gpus", choices=["auto", "none"], default="auto")
    parser.add_argument("--metrics", action="store_true")
    parser.add_argument("--place-timeout-s", type=float, default=PLACE_TIMEOUT_S)
    given = list(sys.argv[1:] if argv is None else argv)
    end = given.index("--")
    args, flags = parser.parse_args(given[:end]), given[end + 1 :]
    say = seclude()
    try:
        return _run(args, flags, say)
    except SpecdecError as error:
        print(error_line(error), file=say)
    except Exception as error:  # an internal error; this process has no other output
        print(error_line(Internal(f"{args.name}: {error!r}")), file=say)
    return 1


def _run(args: argparse.Namespace, flags: Sequence[str], say: TextIO) -> int:
    _tell(say, f"connecting to Ray at {args.ray_address}")
    ray = connect(args.ray_address)
    try:
        has_gpus = args.gpus == "auto" and ray.cluster_resources().get("GPU", 0) > 0
        needs = Needs(args.ranks, args.cpus, 1.0 if has_gpus else 0.0)
        _tell(say, f"asking Ray for {needs}")
        with RayPlacement(ray, args.name, needs, args.place_timeout_s) as placement:
            replica = _Replica(ray, args, flags, placement)
            _tell(say, f"placed on node {placement.address}")
            if args.metrics:
                _tell(say, f"metrics at http://{join_address(placement.address, placement.free_port)}/metrics")
            return replica.run(say)
    finally:
        ray.shutdown()


def _tell(say: TextIO, words: str) -> None:
    print(json.dumps({"level": "info", "message": words}), file=say, flush=True)


if __name__ == "__main__":
    sys.exit(main())
