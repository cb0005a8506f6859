"""Target engines on table workers that share a cold tier in a real Redis. Called by tests of the tier."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from specdec.engine.loop.cold_tier import run_blocks
from specdec.engine.loop.replica import ReplicaOptions
from specdec.state.kv_tier import KvTier
from specdec.state.kv_values import KvSpace
from specdec.tenant import DEFAULT_TENANT
from specdec.types import Verification, VerifyRequest
from target_service.verifier import Verifier
from tests.support.round_driver import make_round

NO_DRAFT = np.empty(0, dtype=np.uint32)
_PATIENCE_S = 30.0


def space_of(worker: Any) -> KvSpace:
    """As the services make it."""
    shape, layout = worker.shape, worker.shape.kv_layout
    blocks = run_blocks(layout.block_bytes)
    return KvSpace(shape.model_fingerprint, layout.dtype, layout.rank, layout.layer_bytes, blocks)


def wait_until(condition: Callable[[], bool]) -> None:
    end_s = time.monotonic() + _PATIENCE_S
    while not condition():
        assert time.monotonic() < end_s, "it did not come about"
        time.sleep(0.002)


class Replica:
    """A target, or a draft, with a tier, whose rule believes that prefill is slow unless told otherwise."""

    def __init__(
        self, worker: Any, url: str, *, replay_s_per_token: float | None = 1.0, kind: type[Any] = Verifier
    ) -> None:
        """`replay_s_per_token`: what prefill is believed to cost; None: as measured."""
        self.worker = worker
        self.tier = KvTier(url, space_of(worker))
        self.engine = kind(worker, ReplicaOptions(kv_tier=self.tier))
        self.num_turns = 0
        """Of the device thread."""
        inbox = self.engine._engine_loop._inbox
        inbox.take = partial(self._take, inbox.take)
        if replay_s_per_token is not None:
            self.engine._engine_loop._scheduler.predict_replay_s = lambda num_tokens, kv_len: (
                num_tokens * replay_s_per_token
            )

    async def ask(self, tokens: Sequence[int], *, tenant: str = DEFAULT_TENANT, **position: Any) -> Verification:
        asked = replace(make_round(tokens, **position), tenant=tenant)
        return await self.engine.verify(VerifyRequest(asked, NO_DRAFT, ()))

    def wait_up(self) -> None:
        wait_until(lambda: self.tier.is_up)

    def wait_written(self, num_bytes: int) -> None:
        """Until that many bytes were written in all."""
        wait_until(lambda: self.tier.tally.num_bytes["written"] >= num_bytes)

    def _take(self, take: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        self.num_turns += 1
        return take(*arguments, **options)

    async def close(self) -> None:
        """Ends it, and checks that nothing was left pinned."""
        self.engine.check_integrity()
        assert not self.engine._engine_loop._calls.restoring
        await self.engine.close()
        self.engine.check_integrity()
        assert self.engine.info().kv_usage == 0.0
        await asyncio.to_thread(self.tier.close)
