"""The nouns that cross module walls, as dataclasses. Nobody changes one; those made for every round are not frozen,
because freezing costs as much as making them.

Not here: protobuf (they stop at servicers, `specdec.rpc` and `specdec.client`), torch, behaviour. Token id sequences
are numpy `uint32` arrays or tuples of int; positions count from the session's first token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from specdec.tenant import DEFAULT_TENANT

TokenIds = NDArray[np.uint32]

#: Target distributions travel as uint32 weights that sum to exactly this (docs/protocol.md section 3).
WEIGHT_TOTAL = 1 << 31

#: Most entries of a support. Vocabularies up to this size may send their whole distribution: cutting it would cost them
#: acceptance, and bytes are few. It also bounds W below 2^31, so that every product of the integer rule fits 62 bits.
MAX_SUPPORT = 1 << 15

#: Prefix of the name of a simulated model, which has dials and no weights (`specdec.engine.simulated.pair`).
SIMULATED_PREFIX = "simulated:"

#: Tokens per KV block and per link of the chain hash. One constant: both sides of every link must agree on it.
BLOCK_TOKENS = 16


#: Committed tokens that a draft scores in one call: one step beside which others may have to wait.
MAX_SCORED_TOKENS = 64

#: Draft tokens of the rounds that scored tokens are walked by: acceptance further in matters little.
SCORED_GAMMA = 8


class Mode(IntEnum):
    """How a request speculates; values equal the proto's `SpeculationMode`."""

    OFF = 1
    REJECTION = 2
    BLOCK = 3
    COUPLED = 4


class DrawRule(IntEnum):
    """What replicas need to know of the mode; values equal the proto's `DrawRule`."""

    DISTRIBUTION = 1
    COUPLED = 2


class TokenSource(IntEnum):
    """Where an emitted token came from; values equal the proto's `TokenSource`."""

    ACCEPTED = 1
    CORRECTED = 2
    BONUS = 3
    TARGET = 4


class FinishReason(IntEnum):
    """Why an output ended; values equal the proto's `FinishReason`."""

    STOP = 1
    LENGTH = 2
    STOP_STRING = 3


@dataclass(frozen=True, slots=True)
class SamplingFilters:
    """The filters that turn logits into p (or q), in the order of docs/protocol.md section 2."""

    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    """(0, 1]; 1 is off."""
    top_k: int = 0
    """0 is off."""
    min_p: float = 0.0
    """[0, 1); 0 is off."""
    repetition_penalty: float = 1.0
    """Above 0; 1 is off; over prompt and output."""
    presence_penalty: float = 0.0
    """Over output."""
    frequency_penalty: float = 0.0
    """Over output."""
    logit_bias: Mapping[int, float] = field(default_factory=lambda: MappingProxyType({}))
    """Token id to added logit."""
    min_new_tokens: int = 0
    """`end_token_ids` are masked while fewer output tokens than this precede the position."""
    end_token_ids: tuple[int, ...] = ()
    """EOS and stop ids, for `min_new_tokens`."""

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def uses_history(self) -> bool:
        """Whether the distribution at a position depends on which tokens came before it, other than through the
        model."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """What a client asked of one request, validated."""

    max_new_tokens: int = 256
    filters: SamplingFilters = field(default_factory=SamplingFilters)
    seed: int = 0
    """[0, 2^64)."""
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    num_logprobs: int | None = None
    """None: no logprobs; 0: the emitted token's; n: and the n likeliest."""


@dataclass(slots=True)
class SessionPosition:
    """Where a session stands and what the round may assume (docs/protocol.md section 5)."""

    session_id: str
    epoch: int
    round_id: int
    start: int
    """Position of `token_ids[0]`."""
    prefix_hash: bytes
    """`specdec.core.reference.chain_hash(tokens[0:start])`, 16 bytes."""
    token_ids: TokenIds
    """uint32 [n]: committed tokens from `start` on; n >= 1."""
    filters: SamplingFilters
    seed: int
    turn: int
    output_start: int
    """Position of this turn's first output token."""
    draw_rule: DrawRule
    tenant: str = DEFAULT_TENANT
    """Whose session it is. On a replica `session_id` is unique among all tenants (`specdec.tenant`)."""
    is_timed: bool = False
    """Whether the answer is to say when what was done."""

    @property
    def committed_len(self) -> int:
        return self.start + len(self.token_ids)

    @property
    def carries_distributions(self) -> bool:
        """Whether distributions travel in this round; see the function of this name."""
        return carries_distributions(self.filters, self.draw_rule)


def carries_distributions(filters: SamplingFilters, draw_rule: DrawRule) -> bool:
    """Whether distributions travel: the draft's supports, the target's rows. Greedy and coupled rounds carry token ids
    alone."""
    return draw_rule is DrawRule.DISTRIBUTION and not filters.is_greedy


@dataclass(slots=True)
class ProposeRequest:
    position: SessionPosition
    gamma: int


@dataclass(frozen=True, slots=True)
class Support:
    """A draft position's distribution as integers: q(id) = weight / sum(weights). Point mass: one id, any weight."""

    token_ids: TokenIds
    """uint32 [S], ascending."""
    weights: NDArray[np.uint16]
    """uint16 [S], all above 0."""


class Stages(NamedTuple):
    """When a replica did what for a call: seconds of a clock that only it has, each at least the one before."""

    admitted_s: float
    """The device thread took it."""
    step_began_s: float
    """The first step that ran for it; where none did, as `admitted_s`."""
    step_ended_s: float
    """The last one, and the answer was made."""
    received_s: float = 0.0
    """The frame that brought it was read. This and the following are set where an answer has come over a link."""
    decoded_s: float = 0.0
    """It was read and checked."""
    answered_s: float = 0.0
    """The event loop had the answer."""
    encoded_s: float = 0.0
    """The answer was a message."""
    sent_s: float = 0.0
    """Its frame was given to the stream."""


@dataclass(slots=True)
class Proposal:
    """L <= gamma draft tokens. `supports` is empty for greedy and coupled rounds."""

    draft_token_ids: TokenIds
    supports: Sequence[Support]
    lost_mass: tuple[float, ...]
    """Law mass outside each support, 0..1."""
    kv_len: int
    """Tokens whose KV the replica really holds now (the last draft token never is)."""
    num_cached_tokens: int
    forward_s: float
    stages: Stages | None = None
    """None where nobody asked, or nobody knows."""


@dataclass(frozen=True, slots=True)
class LocalDraft:
    """What a target is to draft with by itself (docs/protocol.md section 9)."""

    pool: str
    """Name of one of its local drafts."""
    gamma: int


@dataclass(slots=True)
class ScoreRequest:
    """Committed tokens, of which another draft than theirs is to say what it would have drawn them with."""

    position: SessionPosition
    """The session as it was before them; `start` is 0, and session, epoch and round are compared with nothing."""
    token_ids: TokenIds
    """uint32 [n]: what was committed then; 1..MAX_SCORED_TOKENS."""
    local_pool: str = ""
    """Which of a target's local drafts is to say it; "" of draft replicas."""


@dataclass(slots=True)
class Score:
    q: tuple[float, ...]
    """Of each scored token; of greedy and coupled rounds 1 where it is the draft's choice, else 0."""
    forward_s: float
    step_s: float = 0.0
    """A draft step of one session, as measured; 0: not known yet."""
    round_lengths: tuple[int, ...] = ()
    """Where q depends on where its round began: how many of `q` are of the round that begins at each scored token, one
    round after the other, each up to its first 0; (): one of each token, in any round."""


@dataclass(slots=True)
class VerifyRequest:
    position: SessionPosition
    draft_token_ids: TokenIds
    support_ids: Sequence[TokenIds]
    """Ids of S_i per draft token, ascending; empty for greedy and coupled rounds."""
    num_logprobs: int | None = None
    local_draft: LocalDraft | None = None
    """In place of draft tokens: the target drafts, and answers what it drafted."""


@dataclass(slots=True)
class DistributionRow:
    """p at one position, seen through a support, in integers."""

    weights: NDArray[np.uint32]
    """uint32 [S + 1]: p on S_i in the support's order, then the rest; they sum to `WEIGHT_TOTAL`."""
    tail_token_id: int
    """z: drawn from p outside S_i; -1 where the rest is 0."""
    tail_probability: float
    """p(z); 0 where absent."""


@dataclass(frozen=True, slots=True)
class LogitRow:
    """Raw logits at one position, before filters."""

    support_logits: NDArray[np.float32]
    """float32 [S]; empty in greedy and coupled rounds."""
    tail_logit: float
    """Of `tail_token_id`, or of the choice in greedy and coupled rounds; 0 where absent."""
    logsumexp: float
    top_token_ids: TokenIds
    top_logits: NDArray[np.float32]


@dataclass(slots=True)
class Verification:
    """The target's answer for L + 1 positions: `choice_token_ids` (greedy, coupled) or `rows` (distribution rounds)."""

    choice_token_ids: TokenIds
    """uint32 [L + 1], or [0] in distribution rounds."""
    choice_probabilities: NDArray[np.float64]
    """float64 [L + 1]: p of each choice after filters (1 when greedy), or [0] in distribution rounds."""
    rows: Sequence[DistributionRow]
    """L + 1 rows, the last with an empty support; empty in greedy and coupled rounds."""
    logit_rows: tuple[LogitRow, ...]
    """L + 1 rows when logprobs were asked for, else empty."""
    kv_len: int
    num_cached_tokens: int
    forward_s: float
    """Of the step that verified it."""
    step_tokens: int
    """Tokens of that step, of all sessions."""
    num_concurrent: int = 0
    """Rounds that the replica answered for others since its last answer to this session; 0 at the first."""
    num_other_rows: int = 0
    """Positions in those."""
    drafted: Proposal | None = None
    """What it drafted by itself, `forward_s` being the time that took; None: nothing, also where it was asked to."""
    stages: Stages | None = None
    """None where nobody asked, or nobody knows."""


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What a replica is; the proto's `EngineInfo`, field by field."""

    version: str
    role: str
    """draft | target."""
    pool: str
    replica_id: str
    model: str
    model_fingerprint: str
    vocabulary_fingerprint: str
    vocabulary_size: int
    max_context_tokens: int
    eos_token_ids: tuple[int, ...]
    max_gamma: int
    num_kv_blocks: int
    kv_block_tokens: int
    kv_usage: float
    num_sessions: int
    draining: bool
    dtype: str
    device: str
    incarnation: str = ""
    """Of the process: another one after every start, whatever its replica id; "" where nobody serves it yet."""
    num_running: int = 0
    """Sessions that call it: one is in work, or was within the last second."""
    local_drafts: tuple[str, ...] = ()
    """Of a target: names of what it can draft with by itself."""
    shadow: bool = False
    """Of a draft: scored, and used by those alone that name its pool or that it is promoted to."""
    local_gammas: tuple[int, ...] = ()
    """Of each: most tokens that a draft can have, 0 for as many as are asked for. () where that is so of all, and of
    releases that do not tell."""
    num_steps: int = 0
    """That have ended since the process began."""
    step_limit_s: float = 0.0
    """How long calls may wait now, in seconds and by its own prediction, before a step ends; 0: not known."""
    lane: str = ""
    """Name of an abstract Unix socket on its machine that takes the same frames; "": none."""
    device_lane: str = ""
    """Name of another, which the device's own thread reads between two steps; "": none."""
