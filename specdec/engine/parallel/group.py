"""Ranks that hold one model together, as one of them sees the others.

Plans travel over gloo; tensors over NCCL where they lie on GPUs, over gloo elsewhere. The first rank has bound the port
of the store before anybody else is told of it, so there is no port to guess and none to lose. Not here: what is sent
(`engine.parallel.messages`), what is computed (`engine.parallel.sharded_llama`), and whether the others are still there
(`engine.parallel.rank_heartbeat`). One thread of a rank uses its group at a time.
"""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # it is not in __all__

from specdec.engine.parallel.messages import Words

#: A rank that another one waits for longer than this, in a step, is lost.
STEP_TIMEOUT_S = 60.0
#: Who started the ranks sees when one of them ends instead of coming.
_CONNECT_TIMEOUT_S = 600.0
#: Ranks start and load at different speeds, and the first to be done waits for the last.
_LOAD_TIMEOUT_S = 3600.0
#: All connections at once instead of each when it is first needed, while steps are recorded, say; and no buffers of
#: recordings that are registered beyond the step.
_NCCL_SETTINGS = {"NCCL_RUNTIME_CONNECT": "0", "NCCL_GRAPH_REGISTER": "0"}
# Words of a message that travel at once; a plan of a few sequences has fewer.
_FIRST_WORDS = 1024


@dataclass(frozen=True, slots=True)
class Seat:
    """Which rank this process is, and where the ranks meet."""

    rank: int
    num_ranks: int
    host: str
    """Of the first rank."""
    port: int
    listener: socket.socket | None = None
    """The first rank's own, bound to `port` and listening; handed over to the store."""


def open_store(seat: Seat) -> TCPStore:
    """Opens the first rank's store, or dials it.

    Raises:
        RuntimeError: it does not answer (`torch.distributed.DistError`).
    """
    return TCPStore(
        seat.host,
        seat.port,
        seat.num_ranks,
        is_master=seat.listener is not None,
        timeout=timedelta(seconds=_CONNECT_TIMEOUT_S),
        wait_for_workers=False,
        master_listen_fd=None if seat.listener is None else seat.listener.detach(),
    )


class RankGroup:
    """One rank's end of the group; there is one in a process. Whatever it raises, the group is lost."""

    def __init__(self, seat: Seat, store: TCPStore, device: torch.device) -> None:
        """Returns once all ranks have come.

        Args:
            seat: of this process.
            store: as `open_store` gave it.
            device: where this rank's tensors lie.
        """
        self.rank = seat.rank
        self.num_ranks = seat.num_ranks
        self.device = device
        self._store = store
        self._first = torch.zeros(1 + _FIRST_WORDS, dtype=torch.int32)
        self._first_words = self._first.numpy()
        if device.type == "cuda":
            torch.cuda.set_device(device)
            for name, value in _NCCL_SETTINGS.items():
                os.environ.setdefault(name, value)
        self.barrier("here")
        dist.init_process_group(
            "gloo" if device.type == "cpu" else f"cpu:gloo,{device.type}:nccl",
            store=store,
            rank=seat.rank,
            world_size=seat.num_ranks,
            timeout=timedelta(seconds=STEP_TIMEOUT_S),
        )
        if device.type == "cuda":  # connections take memory of the device: before anybody counts what is left
            self.gather_first(self.add_up(torch.zeros(1, 1, device=device)))

    @property
    def is_first(self) -> bool:
        """Whether this is the rank that leads: it plans, and has the logits."""
        return self.rank == 0

    def send(self, message: Words) -> None:
        """Gives every other rank a message; the first rank's alone."""
        self._first_words[0] = len(message)
        head = message[:_FIRST_WORDS]
        self._first_words[1 : 1 + len(head)] = head
        dist.broadcast(self._first, src=0)
        if len(message) > _FIRST_WORDS:
            dist.broadcast(torch.from_numpy(message[_FIRST_WORDS:]), src=0)

    def receive(self) -> Words:
        """The next message of the first rank; it comes within `STEP_TIMEOUT_S`."""
        dist.broadcast(self._first, src=0)
        count = int(self._first_words[0])
        head = self._first_words[1 : 1 + min(count, _FIRST_WORDS)].copy()
        if count <= _FIRST_WORDS:
            return head
        rest = np.empty(count - _FIRST_WORDS, dtype=np.int32)
        dist.broadcast(torch.from_numpy(rest), src=0)
        return np.concatenate((head, rest))

    def add_up(self, part: torch.Tensor) -> torch.Tensor:
        """The sum over all ranks, in the place of each rank's part; the same bits on all of them."""
        dist.all_reduce(part)
        return part

    def add_in_order(self, part: torch.Tensor) -> torch.Tensor:
        """The sum over all ranks [T, n], by rank, in float32 and rounded once: a row has the same bits in any company.

        Libraries choose the order of a sum by its size.
        """
        first, *others = self._all_parts(part)
        total = first.to(torch.float32)
        for other in others:
            total += other
        return total.to(part.dtype)

    def largest(self, own: torch.Tensor) -> torch.Tensor:
        """The largest of what each rank has, number by number, in the place of its own."""
        dist.all_reduce(own, op=dist.ReduceOp.MAX)
        return own

    def gather_first(self, part: torch.Tensor) -> torch.Tensor:
        """[R, n] of each rank -> [R, ranks * n] on the first, side by side by rank; the others keep their part."""
        if not self.is_first:
            dist.gather(part, dst=0)
            return part
        parts = [torch.empty_like(part) for _ in range(self.num_ranks)]
        dist.gather(part, parts, dst=0)
        return torch.cat(parts, dim=-1)

    def gather_all(self, part: torch.Tensor) -> torch.Tensor:
        """[..., n] of each rank -> [..., ranks * n] on all of them."""
        return torch.cat(self._all_parts(part), dim=-1)

    def _all_parts(self, part: torch.Tensor) -> list[torch.Tensor]:
        parts = [torch.empty_like(part) for _ in range(self.num_ranks)]
        dist.all_gather(parts, part)
        return parts

    def smallest(self, number: int) -> int:
        """The least of what each rank has."""
        least = torch.tensor(number, dtype=torch.int64)
        dist.all_reduce(least, op=dist.ReduceOp.MIN)
        return int(least)

    def all_agree(self, yes: bool) -> bool:
        """Whether every rank says so."""
        return bool(self.smallest(int(yes)))

    def barrier(self, place: str) -> None:
        """Waits until every rank has come to the same place, longer than a step may take."""
        self._store.set(f"{place}/{self.rank}", "here")
        self._store.wait([f"{place}/{rank}" for rank in range(self.num_ranks)], timedelta(seconds=_LOAD_TIMEOUT_S))
