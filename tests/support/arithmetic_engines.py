"""Draft and target engines without a model, for tests of links, servicers and processes' gRPC side.

Their answers are simple functions of the request, so that every reply can be told from every other. A session id says
what happens: `raise:KvMiss` fails with that error of the tree, `crash` with one outside it, `hold` waits until
`release_held` is set.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from typing import Any

import numpy as np

from specdec.contract import errors
from specdec.contract.engine_api import EndedTurn, EngineInfo, EngineStats
from specdec.contract.types import (
    WEIGHT_TOTAL,
    DistributionRow,
    DrawRule,
    LogitRow,
    Proposal,
    ProposeRequest,
    SamplingFilters,
    SessionPosition,
    Support,
    Verification,
    VerifyRequest,
)
from specdec.core.reference import chain_hash

VOCABULARY = 1000
CONTEXT = 4096
MAX_GAMMA = 8


def make_round(
    session_id: str = "s",
    *,
    num_tokens: int = 3,
    filters: SamplingFilters | None = None,
    draw_rule: DrawRule = DrawRule.DISTRIBUTION,
    round_id: int = 1,
    start: int = 0,
) -> SessionPosition:
    """Return a round whose committed tokens are start, start + 1, ... (modulo the vocabulary)."""
    return SessionPosition(
        session_id=session_id,
        epoch=7,
        round_id=round_id,
        start=start,
        prefix_hash=chain_hash(list(range(start))),
        token_ids=np.arange(start, start + num_tokens, dtype=np.uint32) % VOCABULARY,
        filters=filters or SamplingFilters(),
        seed=(1 << 64) - 1,
        turn=2,
        output_start=start + 1,
        draw_rule=draw_rule,
    )


GREEDY = SamplingFilters(temperature=0.0)


class _Engine:
    """The common part of both engines."""

    is_stalled = False

    def __init__(self, role: str) -> None:
        self.role = role
        self.seen: list[str] = []
        self.asked = defaultdict[str, asyncio.Event](asyncio.Event)
        self.given_up = defaultdict[str, asyncio.Event](asyncio.Event)
        self.released: list[str] = []
        self.ended_turns: list[EndedTurn] = []
        self.release_held = asyncio.Event()
        self.broken = asyncio.Event()
        """Set by a test to make the engine fail."""

    async def _behave(self, session_id: str) -> None:
        self.seen.append(session_id)
        self.asked[session_id].set()
        if session_id.startswith("hold"):
            try:
                await self.release_held.wait()
            except asyncio.CancelledError:
                self.given_up[session_id].set()
                raise
        if session_id.startswith("crash"):
            raise ZeroDivisionError("a fault of the engine")
        if session_id.startswith("raise:"):
            raise make_error(session_id.removeprefix("raise:"))

    async def warm_up(self) -> None:
        self.asked["warm-up"].set()

    async def release(self, session_ids: list[str]) -> None:
        self.released.extend(session_ids)

    async def end_turns(self, turns: list[EndedTurn]) -> None:
        self.ended_turns.extend(turns)

    def info(self) -> EngineInfo:
        return EngineInfo(
            version="0.1.0",
            role=self.role,
            pool="default",
            replica_id=f"{self.role}-1",
            model="arithmetic",
            model_fingerprint="model",
            vocabulary_fingerprint="vocabulary",
            vocabulary_size=VOCABULARY,
            max_context_tokens=CONTEXT,
            eos_token_ids=(2, 3),
            max_gamma=MAX_GAMMA,
            num_kv_blocks=100,
            kv_block_tokens=16,
            kv_usage=0.25,
            num_sessions=len(set(self.seen)),
            draining=False,
            dtype="float32",
            device="cpu",
        )

    def stats(self) -> EngineStats:
        return EngineStats(num_kv_blocks=100)

    async def wait_ended(self) -> None:
        await self.broken.wait()
        raise errors.Internal("the engine broke down")

    async def close(self) -> None:
        self.release_held.set()
        self.given_up["closed"].set()


def make_error(name: str) -> errors.SpecdecError:
    """Return the error of the tree with this class name."""
    if name == "KvMiss":
        return errors.KvMiss("send from 16 on", have=16)
    error_type: type[errors.SpecdecError] = getattr(errors, name)
    return error_type(f"a {name}")


class ArithmeticDraft(_Engine):
    """Drafts the successors of the last token; draft position i has a support of 3 + i ids."""

    def __init__(self) -> None:
        super().__init__("draft")

    async def propose(self, request: ProposeRequest) -> Proposal:
        await self._behave(request.position.session_id)
        last = int(request.position.token_ids[-1])
        drafts = (last + 1 + np.arange(request.gamma, dtype=np.uint32)) % VOCABULARY
        supports = tuple(support_of(int(token), 3 + index) for index, token in enumerate(drafts))
        with_supports = request.position.carries_distributions
        return Proposal(
            draft_token_ids=drafts.astype(np.uint32),
            supports=supports if with_supports else (),
            lost_mass=tuple(0.125 * index for index in range(request.gamma)) if with_supports else (),
            kv_len=request.position.committed_len + request.gamma - 1,
            num_cached_tokens=request.position.start,
            forward_s=0.5,
        )


def support_of(token_id: int, size: int) -> Support:
    """Return a support of `size` ids that include `token_id`, with different weights."""
    ids = np.sort((token_id + 31 * np.arange(size)) % VOCABULARY).astype(np.uint32)
    return Support(ids, np.arange(1, size + 1, dtype=np.uint16))


class ArithmeticTarget(_Engine):
    """Puts weight 100 * (entry + 1) on a support's entries; every second position has no tail mass."""

    def __init__(self) -> None:
        super().__init__("target")

    async def verify(self, request: VerifyRequest, on_step: Any = None) -> Verification:
        await self._behave(request.position.session_id)
        num_positions = len(request.draft_token_ids) + 1
        rows: tuple[DistributionRow, ...] = ()
        choices = np.arange(num_positions, dtype=np.uint32)
        if request.position.carries_distributions:
            choices = choices[:0]
            rows = tuple(map(distribution_row, range(num_positions), [*map(len, request.support_ids), 0]))
        greedy = request.position.filters.is_greedy
        return Verification(
            choice_token_ids=choices,
            choice_probabilities=np.ones(len(choices)) if greedy else 0.5 ** (1.0 + choices % 8),
            rows=rows,
            logit_rows=self._logit_rows(request, rows, num_positions),
            kv_len=request.position.committed_len + num_positions - 1,
            num_cached_tokens=request.position.start,
            forward_s=0.25,
            step_tokens=len(request.draft_token_ids) + 1,
        )

    def _logit_rows(
        self, request: VerifyRequest, rows: tuple[DistributionRow, ...], num_positions: int
    ) -> tuple[LogitRow, ...]:
        if request.num_logprobs is None:
            return ()
        sizes = [*map(len, request.support_ids), 0] if rows else [0] * num_positions
        top = np.arange(request.num_logprobs)
        return tuple(
            LogitRow(
                support_logits=np.arange(size, dtype=np.float32) + index,
                tail_logit=float(index) if not rows or rows[index].tail_token_id >= 0 else 0.0,
                logsumexp=10.0 + index,
                top_token_ids=(top + index).astype(np.uint32),
                top_logits=-top.astype(np.float32) - index,
            )
            for index, size in enumerate(sizes)
        )


def distribution_row(index: int, support_size: int) -> DistributionRow:
    """Return a row over `support_size` entries, with tail mass at even positions and at the bonus position."""
    weights = 100 * np.arange(1, support_size + 2, dtype=np.uint32)
    weights[-1] = 0
    rest = WEIGHT_TOTAL - int(weights.sum())
    if index % 2 == 0 or support_size == 0:
        weights[-1] = rest
        return DistributionRow(weights, 40 + index, 0.5 ** (3 + index))  # exact in float32, as it travels
    weights[0] += rest
    return DistributionRow(weights, -1, 0.0)
