"""Processes that are the other ranks of a group whose first rank is this process.

Called by the measurements in the suites `elastic` and `gpu`.
"""

import json
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist

from specdec.engine.base import SequenceSlice, StepPlan
from specdec.engine.options import CompileOptions, LoadRequest
from specdec.engine.parallel.follower import follow
from specdec.engine.parallel.group import RankGroup, Seat, open_store
from specdec.engine.parallel.rank_heartbeat import RankHeartbeat
from specdec.engine.parallel.rank_loader import load_rank, rank_device
from specdec.engine.parallel.rank_messages import pack_plan, unpack_plan

_HOST = "127.0.0.1"
_VOCABULARY = 32_000
#: Bytes of a message on the wire, with its length.
_MESSAGE_WORDS = 1025
#: Eight verifications of four draft tokens, in contexts of five hundred tokens.
_PLAN = StepPlan(tuple(SequenceSlice((7, 8, 9, 10, 11), 500, tuple(range(32)), 5) for _ in range(8)))


def exchange_plan(ranks: RankGroup) -> None:
    """Send a step's plan, which is unpacked there, and receive each rank's part of a row of logits."""
    if ranks.is_first:
        ranks.send(pack_plan(_PLAN))
    else:
        unpack_plan(ranks.receive())
    ranks.gather_first(torch.zeros(1, _VOCABULARY // ranks.num_ranks))


def broadcast_bare(ranks: RankGroup) -> None:
    """Broadcast as many bytes by gloo alone and receive one word back, so that the sender waits for the other ranks."""
    message = torch.zeros(_MESSAGE_WORDS, dtype=torch.int32)
    dist.broadcast(message, src=0)
    dist.broadcast(message[:1], src=ranks.num_ranks - 1)


def in_turns(num_rounds: int, per_round: int) -> Iterator[Callable[[RankGroup], None]]:
    """Exchange messages on all ranks, in the same order, before they load a model."""
    for _ in range(num_rounds):
        for act in (broadcast_bare, exchange_plan):
            for _ in range(per_round):
                yield act


@contextmanager
def rank_group(model: LoadRequest, num_ranks: int, *, num_rounds: int = 0, per_round: int = 0) -> Iterator[RankGroup]:
    """This process's end of the group. The others exchange messages `in_turns`, then load and follow the model.

    Close the worker of `load_rank` within it, or they do not end.
    """
    listener = socket.create_server((_HOST, 0))
    port = listener.getsockname()[1]
    told: dict[str, Any] = {"num_ranks": num_ranks, "port": port, "num_rounds": num_rounds, "per_round": per_round}
    told["model"] = {name: value for name, value in asdict(model).items() if name != "note_loaded"}
    others = [
        subprocess.Popen([sys.executable, "-m", "bench.systems.ranks", json.dumps(told | {"rank": rank})])
        for rank in range(1, num_ranks)
    ]
    try:
        seat = Seat(0, num_ranks, _HOST, port, listener)
        yield RankGroup(seat, open_store(seat), rank_device(model.device, 0))
        for other in others:
            other.wait()
    finally:
        for other in others:
            other.kill()
            other.wait()
        if dist.is_initialized():
            dist.destroy_process_group()


def _be_another(rank: int, num_ranks: int, port: int, num_rounds: int, per_round: int, model: dict[str, Any]) -> None:
    compiling = CompileOptions(**model.pop("compiling"))
    wanted = LoadRequest(**model, compiling=compiling)
    seat = Seat(rank, num_ranks, _HOST, port)
    ranks = RankGroup(seat, open_store(seat), rank_device(wanted.device, rank))
    for act in in_turns(num_rounds, per_round):
        act(ranks)
    follow(ranks, load_rank(wanted, ranks, RankHeartbeat({})))


if __name__ == "__main__":
    torch.set_num_threads(1)
    _be_another(**json.loads(sys.argv[1]))
