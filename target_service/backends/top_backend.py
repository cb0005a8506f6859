"""The part that backends share whose engine states the likeliest tokens of each position.

A question becomes top tokens, and these decide laws (`top_laws`). Where the filters keep more tokens than the engine
states, or the bounds do not decide, the engine samples the token (`contract.sampled`). A subclass knows the wire:
`vllm` and `sglang`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from specdec.core.random import DrawKey, Stream
from specdec.engine.remote.connection import Connection
from target_service.backends.contract import Answer, BackendShape, Law, Question, TopTokens
from target_service.backends.top_laws import law_of, may_decide, num_wanted

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

    async def _ask_tops(self, question: Question, num_top: int) -> tuple[list[TopTokens | None], int]:
        """Return the top tokens of each row, None for rows that are lost, and the number of cached tokens."""
        raise NotImplementedError

    async def _ask_row(self, question: Question, row: int, num_top: int) -> TopTokens:
        """Return the top tokens of one row, asked for after its prefix."""
        raise NotImplementedError

    async def _sample(self, question: Question, row: int) -> tuple[Law, int]:
        """Let the engine sample the token of a row; return its law and the number of cached tokens."""
        raise NotImplementedError

    async def ask(self, question: Question) -> Answer:
        """Return the laws of a question; see `Backend.ask`."""
        num_masked = len(question.filters.end_token_ids) if question.masks_end(0) else 0
        num_top = max(num_wanted(question.filters, num_masked, self._max_logprobs), question.num_logprobs or 0)
        filters = question.filters
        # Engines apply min-p before top-p, and the protocol after it: with both, the engine's own order decides.
        has_both = not filters.is_greedy and filters.top_p < 1.0 and filters.min_p > 0.0
        if has_both or not may_decide(filters, num_top, self.shape.vocabulary_size):
            samples = await asyncio.gather(*(self._sample(question, row) for row in range(question.num_rows)))
            return Answer([law for law, _ in samples], num_cached_tokens=samples[0][1])
        tops, num_cached_tokens = await self._ask_tops(question, num_top)
        lost = [row for row, top in enumerate(tops) if top is None]
        asked_again = await asyncio.gather(*(self._ask_row(question, row, num_top) for row in lost))
        for row, top in zip(lost, asked_again, strict=True):
            tops[row] = top
        laws = [self._law(question, row, top) for row, top in enumerate(tops) if top is not None]
        undecided = [row for row, law in enumerate(laws) if law is None]
        sampled_laws = await asyncio.gather(*(self._sample(question, row) for row in undecided))
        for row, (law, _) in zip(undecided, sampled_laws, strict=True):
            laws[row] = law
        return Answer(
            [law for law in laws if law is not None],
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

    def _law(self, question: Question, row: int, top: TopTokens) -> Law | None:
        masked = question.filters.end_token_ids if question.masks_end(row) else ()
        return law_of(top, self.shape.vocabulary_size, question.filters, masked)


def seed_at(question: Question, row: int) -> int:
    """Return the seed of a position: a function of the request's seed, the turn and the absolute position."""
    position = question.position
    at = len(question.token_ids) - question.num_rows + 1 + row
    return DrawKey(position.seed, position.turn, at).below(_NUM_SEEDS, 0, Stream.TAIL)
