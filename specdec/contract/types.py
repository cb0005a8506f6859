"""Dataclasses that several packages exchange: requests, positions, proposals and verifications.

Values are never changed after construction. Types that are made in every round are not frozen, because freezing makes
construction twice as slow. Token id sequences are numpy `uint32` arrays or tuples of int; positions count from the
session's first token. Protobuf messages stay in the servicers, `specdec.rpc` and `specdec.client`.

numpy is imported for type checkers only, because the client imports this module and runs without numpy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from specdec.contract.constraint import Constraint
from specdec.contract.number_range import ranged, ranges_of
from specdec.contract.tenant import DEFAULT_TENANT

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

TokenIds: TypeAlias = "NDArray[np.uint32]"

#: Sum of the uint32 weights in which a target distribution travels (docs/protocol.md section 3).
WEIGHT_TOTAL = 1 << 31

#: Seeds that callers may state: at least the first, and below the second, modulo which they count.
LEAST_SEED, NUM_SEEDS = -(1 << 63), 1 << 64

#: Limit on the entries of a support. Vocabularies up to this size may send their whole distribution: a cut would cost
#: acceptance and save few bytes. It also keeps W below 2^31, so that every product of the integer rule fits into 62
#: bits.
MAX_SUPPORT = 1 << 15

#: Prefix of model names that stand for a simulation with parameters and no weights
#: (`specdec.engine.simulated.simulated_pair`).
SIMULATED_PREFIX = "simulated:"

#: Tokens per KV block and per link of the chain hash. Both sides of every link must use the same value.
BLOCK_TOKENS = 16

#: Slots for the recurrent states of a hybrid's session with a running call, whatever gamma is.
SLOTS_PER_SESSION = 2

#: Largest number of committed tokens that a draft scores in one call. Other calls may wait for that one step.
MAX_SCORED_TOKENS = 64

#: Longest draft that is assumed when scored tokens are divided into rounds; acceptance beyond it matters little.
SCORED_GAMMA = 8


class Mode(IntEnum):
    """Speculation mode of a request; values equal the proto's `SpeculationMode`."""

    OFF = 1
    REJECTION = 2
    BLOCK = 3
    COUPLED = 4


class DrawRule(IntEnum):
    """The part of the mode that replicas need; values equal the proto's `DrawRule`."""

    DISTRIBUTION = 1
    COUPLED = 2


class TokenSource(IntEnum):
    """Origin of an emitted token; values equal the proto's `TokenSource`."""

    ACCEPTED = 1
    CORRECTED = 2
    BONUS = 3
    TARGET = 4


class FinishReason(IntEnum):
    """Reason why an output ended; values equal the proto's `FinishReason`."""

    STOP = 1
    LENGTH = 2
    STOP_STRING = 3
    TOOL_CALLS = 4


@dataclass(frozen=True, slots=True)
class SamplingFilters:
    """The filters that turn logits into p (or q), in the order of docs/protocol.md section 2.

    Clients, links, checkpoints and checks read names, defaults, ranges and meanings of the numbers from here.
    """

    temperature: float = ranged(1.0, "sampling temperature (0: greedy)", least=0.0)
    top_p: float = ranged(1.0, "probability mass of the top tokens that are kept (1: all)", above=0.0, most=1.0)
    top_k: int = ranged(0, "number of top tokens that are kept (0: all)", least=0)
    min_p: float = ranged(0.0, "least share of the top token's probability (0: off)", least=0.0, below=1.0)
    repetition_penalty: float = ranged(1.0, "factor against repeating tokens of prompt and output (1: off)", above=0.0)
    presence_penalty: float = ranged(0.0, "amount that makes tokens of the output less likely (0: off)")
    frequency_penalty: float = ranged(0.0, "amount that makes tokens less likely with each occurrence in the output")
    logit_bias: Mapping[int, float] = field(default_factory=lambda: MappingProxyType({}))  # token id to added logit
    min_new_tokens: int = 0
    """`end_token_ids` are masked while fewer output tokens than this precede the position."""
    end_token_ids: tuple[int, ...] = ()
    """EOS and stop ids that `min_new_tokens` masks; with a constraint, all that end the output."""
    constraint_id: bytes = b""
    """Identity of the constraint that masks p, 16 bytes; b"": none."""

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def uses_history(self) -> bool:
        """Return whether a penalty makes the distribution depend on the earlier tokens, beside the model itself."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0


#: Ranges of the numbers among the filters, by name.
FILTER_RANGES = ranges_of(SamplingFilters)
#: Filters that a model may recommend in its generation_config.json.
RECOMMENDED_FILTERS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """A request's validated sampling parameters."""

    max_new_tokens: int = 256
    filters: SamplingFilters = field(default_factory=SamplingFilters)
    seed: int = 0  # [0, 2^64)
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    num_logprobs: int | None = None
    """None: no logprobs; 0: those of the emitted tokens; n: also those of the top n tokens."""
    constraint: Constraint | None = None
    """Form of the output; its identity is `filters.constraint_id`."""


@dataclass(slots=True)
class SessionPosition:
    """The state of a session at the start of a round (docs/protocol.md section 5)."""

    session_id: str
    epoch: int
    round_id: int
    start: int  # position of `token_ids[0]`
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
    """Tenant that owns the session. On a replica `session_id` is unique among all tenants (`tenant`)."""
    is_timed: bool = False
    """Set if the answer shall carry `Stages`."""
    max_session_tokens: int = 0
    """Largest number of tokens that the session can hold when its turn ends; 0: not known."""
    constraint: Constraint | None = None
    """Text of `filters.constraint_id`, for a replica that does not know it."""

    @property
    def committed_len(self) -> int:
        return self.start + len(self.token_ids)

    @property
    def carries_distributions(self) -> bool:
        """Return whether distributions travel in this round; see the function of the same name."""
        return carries_distributions(self.filters, self.draw_rule)


def carries_distributions(filters: SamplingFilters, draw_rule: DrawRule) -> bool:
    """Return whether the draft's supports and the target's rows travel. Greedy and coupled rounds carry ids alone."""
    return draw_rule is DrawRule.DISTRIBUTION and not filters.is_greedy


@dataclass(slots=True)
class ProposeRequest:
    position: SessionPosition
    gamma: int


@dataclass(frozen=True, slots=True)
class Support:
    """A draft position's distribution as integers: q(id) = weight / sum(weights). Point mass: one id, any weight."""

    token_ids: TokenIds  # uint32 [S], ascending
    weights: NDArray[np.uint16]  # uint16 [S], all above 0


class Stages(NamedTuple):
    """Times at which a replica finished the stages of a call, in seconds of the replica's own clock, ascending."""

    admitted_s: float  # the device thread admitted the call
    step_began_s: float  # the first step for the call began; equals `admitted_s` if no step ran
    step_ended_s: float  # the last step had ended and the answer was made
    # These are set only on answers that came over a link.
    received_s: float = 0.0  # the frame with the call had been read
    decoded_s: float = 0.0  # the request had been decoded and checked
    answered_s: float = 0.0  # the event loop had the answer
    encoded_s: float = 0.0  # the answer had been encoded as a message
    sent_s: float = 0.0  # the frame with the answer was handed to the stream


@dataclass(slots=True)
class Proposal:
    """L <= gamma draft tokens. `supports` is empty for greedy and coupled rounds."""

    draft_token_ids: TokenIds
    supports: Sequence[Support]
    lost_mass: tuple[float, ...]
    """Probability mass outside each support, 0..1."""
    kv_len: int
    """Number of tokens whose KV the replica holds now; it never includes the last draft token."""
    num_cached_tokens: int
    forward_s: float
    stages: Stages | None = None
    """None if the request did not ask for them, or the engine does not know them."""


@dataclass(frozen=True, slots=True)
class LocalDraft:
    """The draft source inside a target that shall draft for a round (docs/protocol.md section 9)."""

    pool: str  # name of one of the target's local drafts
    gamma: int


@dataclass(slots=True)
class ScoreRequest:
    """Committed tokens for which a draft shall state the probabilities that it would have drawn them with."""

    position: SessionPosition
    """The session before the scored tokens; `start` is 0. Session, epoch and round are not checked."""
    token_ids: TokenIds
    """uint32 [n]: the committed tokens; 1..MAX_SCORED_TOKENS."""
    local_pool: str = ""
    """Local draft of a target that scores the tokens; "" for draft replicas."""


@dataclass(slots=True)
class Score:
    """The answer to a `ScoreRequest`."""

    q: tuple[float, ...]
    """Probability of each scored token. In greedy and coupled rounds: 1 if the token is the draft's choice, else 0."""
    forward_s: float
    step_s: float = 0.0
    """Measured time of a draft step of one session; 0: not known yet."""
    round_lengths: tuple[int, ...] = ()
    """Set if q depends on where a round begins: number of entries of `q` that belong to the round that begins at each
    scored token. The rounds follow one another, each up to its first 0. (): one entry a token, valid in any round."""


@dataclass(frozen=True, slots=True)
class RunLimit:
    """The end of a run, in which the target goes on by itself (docs/protocol.md section 10)."""

    until: int
    """Largest number of tokens that the session may hold; above its committed length. A renewal raises it."""
    end_token_ids: frozenset[int]
    """Tokens that end the run."""


@dataclass(slots=True)
class VerifyRequest:
    position: SessionPosition
    draft_token_ids: TokenIds
    support_ids: Sequence[TokenIds]
    """Ids of S_i per draft token, ascending; empty for greedy and coupled rounds."""
    num_logprobs: int | None = None
    local_draft: LocalDraft | None = None
    """Draft source of the target, in place of draft tokens; the answer then contains the draft."""
    run: RunLimit | None = None
    """Set in place of draft tokens: the target goes on by itself after the first step."""
    model: str = ""
    """Fingerprint of the base model with an adapter, if that shall answer; "": the base model."""


@dataclass(slots=True)
class DistributionRow:
    """The target distribution p at one position as integers over a support."""

    weights: NDArray[np.uint32]
    """uint32 [S + 1]: p on S_i in the support's order, then the tail mass; they sum to `WEIGHT_TOTAL`."""
    tail_token_id: int
    """Token drawn from p outside S_i; -1 if the tail mass is 0."""
    tail_probability: float
    """p of the tail token; 0 if there is none."""


@dataclass(frozen=True, slots=True)
class LogitRow:
    """Raw logits at one position, before filters."""

    support_logits: NDArray[np.float32]  # float32 [S]; empty in greedy and coupled rounds
    tail_logit: float
    """Logit of the tail token, or of the choice in greedy and coupled rounds; 0 if there is none."""
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
    """L + 1 rows if logprobs were requested, else empty."""
    kv_len: int
    num_cached_tokens: int
    forward_s: (
        float  # duration of the step that verified the draft; 0 for a token of a run that ran with the one before
    )
    step_tokens: int  # tokens of all sessions in that step
    num_concurrent: int = 0
    """Rounds of other sessions that the replica answered since its last answer to this session; 0 at the first."""
    num_other_rows: int = 0  # positions in those rounds
    drafted: Proposal | None = None
    """Draft made by the target itself, with the time it took in `forward_s`; None if it drafted nothing."""
    stages: Stages | None = None
    """None if the request did not ask for them, or the engine does not know them."""

    @property
    def decided_token_id(self) -> int:
        """Token that a target-only step decides: the target's choice, or the tail token of its distribution."""
        return int(self.choice_token_ids[0]) if len(self.choice_token_ids) else self.rows[0].tail_token_id
