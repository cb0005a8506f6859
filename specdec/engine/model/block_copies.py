"""Copies whole KV blocks, all layers, between the pool and host memory.

A block's bytes are its layers' one after the other, each as it lies in the pool. On a CPU this is numpy's work: in a
thread of its own torch would start helpers that stay, and slow down every step. On an accelerator blocks are read on a
stream of their own, beside the steps, and written in order with them.

Not here: which blocks, and whether one is written meanwhile (`engine.loop`). Called by `engine.model.kv_cache`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray


class BlockCopies:
    """Of pools [num_blocks, numbers of a block], one a layer, on one device."""

    def __init__(self, pools: Sequence[torch.Tensor]) -> None:
        self._device = pools[0].device
        self._pools = [pool.view(torch.uint8) for pool in pools]
        self.layer_bytes = tuple(pool.shape[1] for pool in self._pools)
        """Of one block in each layer."""
        self._stream = torch.cuda.Stream(self._device) if self._device.type == "cuda" else None

    def read(self, block_ids: Sequence[int]) -> NDArray[np.uint8]:
        """See `engine.base.Worker.read_blocks`."""
        if self._stream is not None:
            return self._read_beside(self._stream, block_ids)
        rows = np.empty((len(block_ids), sum(self.layer_bytes)), dtype=np.uint8)
        for pool, columns in self._columns():
            rows[:, columns] = pool.numpy()[block_ids]
        return rows

    def write(self, block_ids: Sequence[int], rows: NDArray[np.uint8]) -> None:
        """See `engine.base.Worker.write_blocks`."""
        if self._stream is None:
            for pool, columns in self._columns():
                pool.numpy()[block_ids] = rows[:, columns]
            return
        index = torch.tensor(block_ids, device=self._device)
        copied = torch.tensor(rows).to(self._device)  # torch takes over no memory that it may not write to
        for pool, columns in self._columns():
            pool.index_copy_(0, index, copied[:, columns])
        # Reading goes on beside the steps, in a stream that knows nothing of this one.
        torch.cuda.current_stream(self._device).synchronize()

    def _read_beside(self, stream: torch.cuda.Stream, block_ids: Sequence[int]) -> NDArray[np.uint8]:
        with torch.inference_mode(), torch.cuda.stream(stream):
            index = torch.tensor(block_ids, device=self._device)
            rows: NDArray[np.uint8] = torch.cat([pool.index_select(0, index) for pool in self._pools], 1).cpu().numpy()
        return rows

    def _columns(self) -> Iterator[tuple[torch.Tensor, slice]]:
        """Each pool, and where its bytes are in a row of all layers."""
        end = 0
        for pool, num_bytes in zip(self._pools, self.layer_bytes, strict=True):
            end += num_bytes
            yield pool, slice(end - num_bytes, end)
