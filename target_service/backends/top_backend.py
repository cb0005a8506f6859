"""The part that backends share whose engine states the top tokens of each position.

A question becomes top tokens, and these decide distributions (`top_distributions`). Where the filters keep more tokens
than the engine states, or the bounds do not decide, the engine samples the token (`contract.sampled`). A subclass knows
the wire: `vllm` and `sglang`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from specdec.core.random import DrawKey, Stream
from specdec.engine.remote.connection import Connection
from target_service.backends.contract import Answer, BackendShape, Distribution, RowsRequest, TopTokens
from target_service.backends.top_distributions import distribution_of, may_decide, num_wanted

#: Largest number of logprobs that a request may ask for.
MAX_LOGPROBS = 20

#: Fields of a request that no sampler of a single next token can serve.
PENALTIES = (
    "sampling.repetition_penalty",
    "sampling.presence_penalty",
    "sampling.frequency_penalty",
    "sampling.logit_bias",
)

#: Seeds of engines are signed 32-bit integers at least.
_NUM_SEEDS = 1 << 31


class TopBackend:
    """Implements `contract.Backend` with the top tokens of a server."""

    def __init__(self, connection: Connection, shape: BackendShape, max_logprobs: int) -> None:
        """`max_logprobs` is the largest number of top tokens that the engine states."""
        self.shape = shape
        self._connection = connection
        self._max_logprobs = max_logprobs

    async def _ask_tops(self, rows_request: RowsRequest, num_top: int) -> tuple[list[TopTokens | None], int]:
        """Return the top tokens of each row, None for rows that are lost, and the number of cached tokens."""
        raise NotImplementedError

    async def _ask_row(self, rows_request: RowsRequest, row: int, num_top: int) -> TopTokens:
        """Return the top tokens of one row, asked for after its prefix."""
        raise NotImplementedError

    async def _sample(self, rows_request: RowsRequest, row: int) -> tuple[Distribution, int]:
        """Let the engine sample the token of a row; return its distribution and the number of cached tokens."""
        raise NotImplementedError

    async def ask(self, rows_request: RowsRequest) -> Answer:
        """Return the distributions of a question; see `Backend.ask`."""
        num_masked = len(rows_request.filters.end_token_ids) if rows_request.masks_end(0) else 0
        num_top = max(num_wanted(rows_request.filters, num_masked, self._max_logprobs), rows_request.num_logprobs or 0)
        filters = rows_request.filters
        # Engines apply min-p before top-p, and the protocol after it: with both, the engine's own order decides.
        has_both = not filters.is_greedy and filters.top_p < 1.0 and filters.min_p > 0.0
        if has_both or not may_decide(filters, num_top, self.shape.vocabulary_size):
            samples = await asyncio.gather(*(self._sample(rows_request, row) for row in range(rows_request.num_rows)))
            return Answer([distribution for distribution, _ in samples], num_cached_tokens=samples[0][1])
        tops, num_cached_tokens = await self._ask_tops(rows_request, num_top)
        lost = [row for row, top in enumerate(tops) if top is None]
        asked_again = await asyncio.gather(*(self._ask_row(rows_request, row, num_top) for row in lost))
        for row, top in zip(lost, asked_again, strict=True):
            tops[row] = top
        distributions = [self._distribution(rows_request, row, top) for row, top in enumerate(tops) if top is not None]
        undecided = [row for row, distribution in enumerate(distributions) if distribution is None]
        sampled_distributions = await asyncio.gather(*(self._sample(rows_request, row) for row in undecided))
        for row, (distribution, _) in zip(undecided, sampled_distributions, strict=True):
            distributions[row] = distribution
        return Answer(
            [distribution for distribution in distributions if distribution is not None],
            num_cached_tokens=num_cached_tokens,
            num_reasked_rows=len(lost) + len(undecided),
            num_lost_rows=len(lost),
        )

    def forget(self, session_ids: Sequence[str]) -> None:
        """Do nothing: the server finds cached prefixes by itself."""

    async def wait_changed(self) -> None:
        """Raise Internal once the server serves another model."""
        await self._connection.wait_changed()

    async def close(self) -> None:
        """Close the connections. Idempotent."""
        await self._connection.close()

    def _distribution(self, rows_request: RowsRequest, row: int, top: TopTokens) -> Distribution | None:
        masked = rows_request.filters.end_token_ids if rows_request.masks_end(row) else ()
        return distribution_of(top, self.shape.vocabulary_size, rows_request.filters, masked)


def seed_at(rows_request: RowsRequest, row: int) -> int:
    """Return the seed of a position: a function of the request's seed, the turn and the absolute position."""
    position = rows_request.position
    at = len(rows_request.token_ids) - rows_request.num_rows + 1 + row
    return DrawKey(position.seed, position.turn, at).below(_NUM_SEEDS, 0, Stream.TAIL)
