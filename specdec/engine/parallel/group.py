"""Communication of one rank with the other ranks that hold the same model.

Plans are sent over gloo; tensors over NCCL between GPUs and over gloo otherwise. The first rank binds the store's port
before the others learn of it, so a port is never guessed and never taken by another process.
`engine.parallel.rank_messages` has the messages, and `engine.parallel.rank_heartbeat` detects lost ranks. One thread of
a rank uses its group at a time.
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

from specdec.engine.parallel.rank_messages import Words

#: Time after which a rank that another one waits for in a step is lost.
STEP_TIMEOUT_S = 60.0
#: Long, because the process that started the ranks notices if one of them ends instead of connecting.
_CONNECT_TIMEOUT_S = 600.0
#: Ranks start and load at different speeds, and the fastest waits for the slowest.
_LOAD_TIMEOUT_S = 3600.0
#: NCCL opens all connections at once, instead of each when it is first used, which could be while a CUDA graph is
#: recorded; and it registers no buffers of CUDA graphs.
_NCCL_SETTINGS = {"NCCL_RUNTIME_CONNECT": "0", "NCCL_GRAPH_REGISTER": "0"}
# Words of a message that are sent in one broadcast; a plan of a few sequences has fewer.
_FIRST_WORDS = 1024


@dataclass(frozen=True, slots=True)
class Seat:
    """This process's rank and the address of the store."""

    rank: int
    num_ranks: int
    host: str
    """Address of the first rank."""
    port: int
    listener: socket.socket | None = None
    """Socket of the first rank, bound to `port` and listening, which the store takes over; None on other ranks."""


def open_store(seat: Seat) -> TCPStore:
    """Open the store on the first rank, or connect to it from another one.

    Raises:
        RuntimeError: the store does not answer (`torch.distributed.DistError`).
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
    """One rank's end of the group; a process has one. Any error that it raises means that the group is lost."""

    def __init__(self, seat: Seat, store: TCPStore, device: torch.device) -> None:
        """Wait until all ranks have connected.

        Args:
            seat: seat of this process.
            store: store as `open_store` returned it.
            device: device of this rank's tensors.
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
        if device.type == "cuda":  # connections take device memory: open them before free memory is measured
            self.gather_first(self.add_up(torch.zeros(1, 1, device=device)))

    @property
    def is_first(self) -> bool:
        """True for the rank that plans steps and gathers the logits."""
        return self.rank == 0

    def send(self, message: Words) -> None:
        """Send a message to every other rank; only the first rank may call this."""
        self._first_words[0] = len(message)
        head = message[:_FIRST_WORDS]
        self._first_words[1 : 1 + len(head)] = head
        dist.broadcast(self._first, src=0)
        if len(message) > _FIRST_WORDS:
            dist.broadcast(torch.from_numpy(message[_FIRST_WORDS:]), src=0)

    def receive(self) -> Words:
        """Return the next message of the first rank, which arrives within `STEP_TIMEOUT_S`."""
        dist.broadcast(self._first, src=0)
        count = int(self._first_words[0])
        head = self._first_words[1 : 1 + min(count, _FIRST_WORDS)].copy()
        if count <= _FIRST_WORDS:
            return head
        rest = np.empty(count - _FIRST_WORDS, dtype=np.int32)
        dist.broadcast(torch.from_numpy(rest), src=0)
        return np.concatenate((head, rest))

    def add_up(self, part: torch.Tensor) -> torch.Tensor:
        """Replace each rank's part by the sum over all ranks, with the same bits on all of them; return it."""
        dist.all_reduce(part)
        return part

    def add_in_order(self, part: torch.Tensor) -> torch.Tensor:
        """Return the sum [T, n] over all ranks, added in rank order in float32 and rounded once.

        A row has the same bits in any batch. Libraries choose the order of a sum by its size.
        """
        first, *others = self._all_parts(part)
        total = first.to(torch.float32)
        for other in others:
            total += other
        return total.to(part.dtype)

    def largest(self, own: torch.Tensor) -> torch.Tensor:
        """Replace each rank's numbers by the elementwise maximum over all ranks; return them."""
        dist.all_reduce(own, op=dist.ReduceOp.MAX)
        return own

    def gather_first(self, part: torch.Tensor) -> torch.Tensor:
        """Return, on the first rank, the parts [R, n] of all ranks as [R, ranks * n]; on the others their own part."""
        if not self.is_first:
            dist.gather(part, dst=0)
            return part
        parts = [torch.empty_like(part) for _ in range(self.num_ranks)]
        dist.gather(part, parts, dst=0)
        return torch.cat(parts, dim=-1)

    def gather_all(self, part: torch.Tensor) -> torch.Tensor:
        """Return the parts [..., n] of all ranks as [..., ranks * n], on every rank."""
        return torch.cat(self._all_parts(part), dim=-1)

    def _all_parts(self, part: torch.Tensor) -> list[torch.Tensor]:
        parts = [torch.empty_like(part) for _ in range(self.num_ranks)]
        dist.all_gather(parts, part)
        return parts

    def smallest(self, number: int) -> int:
        """Return the smallest of all ranks' numbers."""
        least = torch.tensor(number, dtype=torch.int64)
        dist.all_reduce(least, op=dist.ReduceOp.MIN)
        return int(least)

    def all_agree(self, yes: bool) -> bool:
        """Return whether every rank passed True."""
        return bool(self.smallest(int(yes)))

    def barrier(self, place: str) -> None:
        """Wait until every rank has reached the same place; unlike a step, a load may take up to an hour."""
        self._store.set(f"{place}/{self.rank}", "here")
        self._store.wait([f"{place}/{rank}" for rank in range(self.num_ranks)], timedelta(seconds=_LOAD_TIMEOUT_S))
