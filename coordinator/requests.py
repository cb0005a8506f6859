"""What a client asked, validated, and what it gets back, as plain dataclasses.

Not here: protobuf (the servicer translates), how a request is checked (validation) or run (session). Shared by every
front of the coordinator: gRPC now, HTTP later.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from specdec.types import FinishReason, Mode, SamplingParams, TokenIds, TokenSource


@dataclass(frozen=True, slots=True)
class ChatTurn:
    """One message of a conversation."""

    role: str
    content: str

    def as_dict(self) -> dict[str, str]:
        """As chat templates take it."""
        return {"role": self.role, "content": self.content}


@dataclass(frozen=True, slots=True)
class SpeculationChoice:
    """How a request wants to be speculated."""

    mode: Mode
    gamma: int | None
    """None: chosen each round."""
    draft_pool: str
    """ "" is routed by the server."""


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One Generate call whose every field is within its limits.

    Exactly one of `text`, `token_ids` and `messages` is set, or none of them when `resume_from` is.
    """

    session_id: str
    """ "" until admission makes one."""
    request_id: str
    """ "" until admission makes one."""
    digest: str
    """Hash of what was asked, ids aside: tells a retry from another request under the same id."""
    sampling: SamplingParams
    """`max_new_tokens` 0 means the default; `seed` counts only when `is_seeded`."""
    is_seeded: bool
    speculation: SpeculationChoice
    text: str | None = None
    token_ids: TokenIds | None = None
    messages: tuple[ChatTurn, ...] | None = None
    resume_from: int | None = None
    """Output tokens the caller already holds."""


@dataclass(frozen=True, slots=True)
class RequestParameters:
    """What decides a request's output, beside its tokens."""

    sampling: SamplingParams
    """Resolved: `max_new_tokens` above 0 and within the context, the seed drawn."""
    speculation: SpeculationChoice
    """Resolved: `draft_pool` is the pool routed to, or "" where there is none."""
    target_fingerprint: str
    """Of the target model: no failover and no resumption may change it."""


@dataclass(frozen=True, slots=True)
class GenerationIdentity:
    """Which request a generation is, and where in its session the output begins."""

    session_id: str
    request_id: str
    digest: str
    turn: int
    output_start: int
    parameters: RequestParameters


@dataclass(frozen=True, slots=True)
class TopLogprob:
    token_id: int
    logprob: float


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """The model's logprobs at one position, before filters."""

    logprob: float
    top: tuple[TopLogprob, ...]


class TokenProvenance(NamedTuple):
    """Where an output token came from."""

    source: TokenSource
    p: float
    """Target probability after filters."""
    q: float
    """Draft probability it was drawn with; 0 where there was no draft token."""
    draft_pool: str
    """Pool that drafted it, or ""."""
    logprobs: TokenLogprobs | None


class OutputToken(NamedTuple):
    """A committed output token."""

    token_id: int
    text: str
    """Text it completed: a function of the output up to and including it."""
    provenance: TokenProvenance | None
    """None for a token replayed from the log."""


@dataclass(frozen=True, slots=True)
class Started:
    session_id: str
    request_id: str
    num_prompt_tokens: int
    seed: int


class Chunk(NamedTuple):
    """The tokens of one round (or of a replay), as the proto's `TokenChunk`."""

    start: int
    """Index of the first one in the output."""
    tokens: tuple[OutputToken, ...]

    @property
    def text(self) -> str:
        return "".join(token.text for token in self.tokens)


@dataclass(slots=True)
class GenerationStats:
    """Counters of one request, resumptions included; the proto's `GenerationStats`, field by field."""

    num_rounds: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    accepted_per_position: list[int] = field(default_factory=list)
    num_target_only_steps: int = 0
    ttft_s: float = 0.0
    e2el_s: float = 0.0
    draft_s: float = 0.0
    verify_s: float = 0.0
    wire_bytes: int = 0
    num_cached_prompt_tokens: int = 0
    """Not in the proto message: the usage's, kept here so that a resumed request still knows it."""


@dataclass(frozen=True, slots=True)
class Finished:
    reason: FinishReason
    num_prompt_tokens: int
    num_output_tokens: int
    stats: GenerationStats


Event = Started | Chunk | Finished
