"""What a client asked, validated, and what it gets back, as plain dataclasses.

A request comes here from `front/validation` and goes to `generation/generation_service`; its events come from the
generation's `stream`. Not here: protobuf and requests that are not checked yet (`front`), how a request is run
(`generation`). Shared by every front of the coordinator: gRPC now, HTTP later.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from specdec.types import FinishReason, Mode, SamplingParams, TokenIds, TokenSource

#: Output tokens of a request that names no limit, as far as the context has room.
DEFAULT_MAX_NEW_TOKENS = 256


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
    task: str = ""
    """The client's label of the kind of request."""


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One Generate call whose every field is within its limits.

    Exactly one of `text`, `token_ids` and `messages` is set, or none of them when `resume_from` is.
    """

    session_id: str
    """ "" until admission makes one."""
    request_id: str
    """ "" until admission makes one."""
    sampling: SamplingParams
    """`max_new_tokens` 0 means the default; `seed` counts only when `is_seeded`."""
    is_seeded: bool
    speculation: SpeculationChoice
    text: str | None = None
    token_ids: TokenIds | None = None
    messages: tuple[ChatTurn, ...] | None = None
    resume_from: int | None = None
    """Output tokens the caller already holds."""
    expected_session_tokens: int | None = None
    """What the session must hold where a new turn begins."""
    digest: str = ""
    """Of what was asked, ids aside: tells a retry from another request under the same id."""
    former_digests: tuple[str, ...] = ()
    """Of the same, in forms that older versions stored."""

    def is_same_as(self, stored_digest: str) -> bool:
        """Whether a request stored with this digest asked the same, whichever version stored it."""
        return stored_digest in (self.digest, *self.former_digests)


@dataclass(frozen=True, slots=True)
class RequestParameters:
    """What decides a request's output, beside its tokens."""

    sampling: SamplingParams
    """Resolved: `max_new_tokens` above 0 and within the context, the seed drawn."""
    speculation: SpeculationChoice
    """Resolved: `draft_pool` is the pool routed to; "" where there is none, or where it may change on the way."""
    target_fingerprint: str
    """Of the target model: no failover and no resumption may change it once a token was shown."""
    target_changed: bool = False
    """The session's turn before was another target model's."""


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


class Provenance(NamedTuple):
    """Where the tokens of one round came from: a column each, in their order."""

    sources: tuple[TokenSource, ...]
    p: tuple[float, ...]
    """Target probability after filters."""
    q: tuple[float, ...]
    """Draft probability each was drawn with; 0 where there was no draft token."""
    draft_pool: str
    """Pool that drafted them, or ""."""
    logprobs: tuple[TokenLogprobs, ...]
    """Empty where nobody asked for them."""

    def since(self, count: int) -> Provenance:
        """Without the first `count` tokens."""
        return Provenance(self.sources[count:], self.p[count:], self.q[count:], self.draft_pool, self.logprobs[count:])


@dataclass(frozen=True, slots=True)
class Started:
    session_id: str
    request_id: str
    num_prompt_tokens: int
    seed: int
    target_fingerprint: str
    target_changed: bool


class OutputChunk(NamedTuple):
    """The committed tokens of one round (or of a replay), as the proto's `TokenChunk`: a column each."""

    start: int
    """Index of the first one in the output."""
    token_ids: tuple[int, ...]
    texts: tuple[str, ...]
    """Text each completed: a function of the output up to and including it."""
    provenance: Provenance | None
    """Of these tokens and perhaps more, which the output left out; None for tokens replayed from the log."""

    @property
    def end(self) -> int:
        """Index behind the last one in the output."""
        return self.start + len(self.token_ids)

    def since(self, index: int) -> OutputChunk:
        """What of it is at `index` of the output or behind it."""
        count = index - self.start
        if count <= 0:
            return self
        provenance = self.provenance and self.provenance.since(count)
        return OutputChunk(index, self.token_ids[count:], self.texts[count:], provenance)


class DraftStats(NamedTuple):
    """What requests have shown of a draft pool here, for people; None where nothing has been seen."""

    alpha: float | None
    """Accepted share of the draft tokens tested lately."""
    gamma: float | None
    """Draft tokens asked for a round lately, by requests whose gamma is chosen."""


class RouteStats(NamedTuple):
    """How a draft pool does for a class of requests here, for people; the proto's `RouteInfo`, field by field."""

    request_class: str
    alpha: float | None
    """That it has or would have had, of tokens committed lately; None before the first."""
    goodput: float | None
    """Tokens a second of a stream, as predicted; None before it can be."""
    weight: float
    share: float
    """Of the class's rounds lately."""
    is_chosen: bool
    num_tested: float
    """Draft tokens that alpha is of, old ones fading."""


@dataclass(slots=True)
class RequestStats:
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
    stats: RequestStats


Event = Started | OutputChunk | Finished
