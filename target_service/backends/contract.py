"""The contract of a backend, by which a target replica verifies draft tokens in another engine.

A backend returns the distribution of the next token at L + 1 positions of a session: at each draft token, and one
beyond. A backend that can only sample is exact too: its token is a distribution with one entry. Rejection sampling
then accepts a draft token if it equals the sample, and otherwise emits the sample.
`engine` makes a target replica of a backend, and `wire_rows` turns its answer into the rows and choices of the wire.

A backend names the fields of a request that it cannot serve exactly. Coordinators refuse such requests before they
begin. Our own engine (`target_service.verifier`) serves every field, from whole rows of logits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from specdec.contract.errors import Internal
from specdec.contract.types import SamplingFilters, SessionPosition, TokenIds
from specdec.core.random import DrawKey, DrawStream
from specdec.structured.mask_threads import MasksInWork

#: Fields of a request that no sampler of a single next token can serve.
PENALTIES = (
    "sampling.repetition_penalty",
    "sampling.presence_penalty",
    "sampling.frequency_penalty",
    "sampling.logit_bias",
)

#: Seeds of engines are signed 32-bit integers at least.
_NUM_SEEDS = 1 << 31


@dataclass(frozen=True, slots=True)
class BackendShape:
    """Description of the engine behind a backend and of its model."""

    backend: str
    """Name of the backend, as --backend takes it."""
    engine: str
    """Name and version of the engine, as `EngineInfo.device` reports it."""
    vocabulary_size: int
    vocabulary_fingerprint: str
    model_fingerprint: str
    max_context_tokens: int
    eos_token_ids: tuple[int, ...]
    unsupported_fields: tuple[str, ...]
    """Names of the request fields that the backend cannot serve exactly unless they have their defaults."""
    has_whole_rows: bool = False
    """True if the backend knows all logits, so that it can follow constraints."""


@dataclass(frozen=True, slots=True)
class TopTokens:
    """The top tokens of a position with their raw logits, before filters."""

    token_ids: TokenIds
    """uint32 [K], most probable first."""
    logits: NDArray[np.float64]
    """float64 [K], beside `token_ids`."""
    logsumexp: float
    """Logarithm of the sum of exp over all logits; 0 if the logits are logarithms of probabilities."""


@dataclass(frozen=True, slots=True)
class Distribution:
    """The distribution of the next token at one position, after the request's filters."""

    token_ids: TokenIds
    """uint32 [n], ascending: every token with a probability above 0."""
    probabilities: NDArray[np.float64]
    """float64 [n], beside `token_ids`; they sum to 1."""
    top: TopTokens | None = None
    """Raw logits for logprobs; None if the backend does not know them."""


def sampled(token_id: int) -> Distribution:
    """Return the distribution of a token that the engine sampled. Raises Internal if it cannot be a token id."""
    if not 0 <= token_id < 1 << 32:
        raise Internal(f"the engine sampled {token_id}, which cannot be a token id")
    return Distribution(np.array([token_id], dtype=np.uint32), np.ones(1))


@dataclass(frozen=True, slots=True)
class RowsRequest:
    """The positions of one round whose distributions are wanted."""

    position: SessionPosition
    """The session at the start of the round; its `token_ids` may be a part of the committed tokens only."""
    token_ids: TokenIds
    """uint32 [n + L]: all committed tokens of the session, then the draft tokens."""
    num_rows: int
    """L + 1: distributions are wanted after the last L + 1 prefixes of `token_ids`, the shortest first."""
    num_logprobs: int | None = None
    """Number of top tokens wanted in `Distribution.top`; None: `top` is not needed."""
    model: str = ""
    """Fingerprint of the model with an adapter; "": the model itself."""
    masks: MasksInWork | None = None
    """Masks of a constrained request, one a row; None, too, for backends that follow no constraints."""

    @property
    def filters(self) -> SamplingFilters:
        """Return the filters of the request."""
        return self.position.filters

    @property
    def prefixes(self) -> list[TokenIds]:
        """Return the token ids before each wanted position."""
        first = len(self.token_ids) - self.num_rows + 1
        return [self.token_ids[: first + row] for row in range(self.num_rows)]

    def masks_end(self, row: int) -> bool:
        """Return whether the request's end tokens are masked at a row, because the output is too short yet."""
        num_before = len(self.token_ids) - self.num_rows + 1 + row - self.position.output_start
        return bool(self.filters.end_token_ids) and num_before < self.filters.min_new_tokens

    def seed_at(self, row: int) -> int:
        """Return the seed of a row: a function of the request's seed, the turn and the absolute position."""
        at = len(self.token_ids) - self.num_rows + 1 + row
        return DrawKey(self.position.seed, self.position.turn, at).below(_NUM_SEEDS, 0, DrawStream.TAIL)


@dataclass(frozen=True, slots=True)
class Answer:
    """The statement of a backend about a round."""

    distributions: Sequence[Distribution]
    """`RowsRequest.num_rows` distributions."""
    num_cached_tokens: int = 0
    """Number of committed tokens that needed no forward pass."""
    num_reasked_rows: int = 0
    """Number of distributions for which the engine had to be asked again."""
    num_lost_rows: int = 0
    """Number of distributions that the engine's first answer lacked although it should have had them."""


class Backend(Protocol):
    """An engine that answers questions. Use from one event loop; any number of questions may be asked at once."""

    shape: BackendShape

    @property
    def adapters(self) -> dict[str, str]:
        """Names of the adapters that requests may select now, by the fingerprints of the models that they make."""
        ...

    async def ask(self, rows_request: RowsRequest) -> Answer:
        """Return the distributions of a request for rows.

        Raises:
            Unavailable: the engine cannot be reached or does not answer.
            NotFound: it does not have the request's adapter any more (MODEL_NOT_FOUND).
            Internal: the engine answered something else than its contract says.
        """
        ...

    def forget(self, session_ids: Sequence[str]) -> None:
        """Free what the backend keeps for sessions. Unknown ids are allowed."""
        ...

    async def wait_changed(self) -> None:
        """Return never while the model stays the same.

        Raises:
            Internal: the engine now serves another model, so the replica must not answer any more.
        """
        ...

    async def close(self) -> None:
        """Free all resources. Idempotent."""
        ...
