"""What the SDK returns: frozen dataclasses with the proto's field names, and how they are read from its messages.

Not here: any call. Protobuf stops at this package, so programs see only these.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Self

from specdec.types import FinishReason, TokenSource
from specdec.v1 import coordinator_pb2 as pb

#: Of an output that its caller left before its end.
CANCELLED = "cancelled"

_FINISH_REASONS = {int(reason): reason.name.lower() for reason in FinishReason}
#: A source that a newer server knows and this version does not is shown as the target's own.
_SOURCES = {int(source): source for source in TokenSource}


@dataclass(frozen=True, slots=True)
class TokenDetail:
    """Where one token came from, and its logprobs; present when provenance or logprobs were asked for."""

    source: TokenSource
    p: float
    """Target probability after filters."""
    q: float
    """Draft probability it was drawn with; 0 where there was no draft token."""
    draft_pool: str
    logprob: float | None
    """The model's, before filters; None unless logprobs were asked for."""
    top_logprobs: tuple[tuple[int, float], ...]
    """(token id, logprob), likeliest first."""
    text: str
    """The text this token completed; joined over a chunk they are `Chunk.text`."""

    def to_dict(self) -> dict[str, Any]:
        """The proto's field names; `logprob` and `top_logprobs` where they were asked for."""
        fields = asdict(self) | {"source": self.source.name.lower()}
        fields["top_logprobs"] = [{"token_id": token_id, "logprob": value} for token_id, value in self.top_logprobs]
        if self.logprob is None:
            del fields["logprob"], fields["top_logprobs"]
        return fields


@dataclass(frozen=True, slots=True)
class Chunk:
    """The tokens of one committed round."""

    index: int
    """Index of its first token in the output."""
    token_ids: tuple[int, ...]
    text: str
    details: tuple[TokenDetail, ...]
    """One per token when provenance or logprobs were asked for, else empty."""

    def to_dict(self, *, with_details: bool = False) -> dict[str, Any]:
        """A line of `specdec generate --json-lines`: the proto's field names."""
        fields = {"index": self.index, "token_ids": list(self.token_ids), "text": self.text}
        return fields | ({"details": [detail.to_dict() for detail in self.details]} if with_details else {})


@dataclass(frozen=True, slots=True)
class Usage:
    num_prompt_tokens: int
    num_output_tokens: int
    """The EOS or stop token included."""
    num_cached_prompt_tokens: int


@dataclass(frozen=True, slots=True)
class GenerationStats:
    """Counters and times of one request, as the server measured them."""

    num_rounds: int
    num_draft_tokens: int
    num_accepted_tokens: int
    accepted_per_position: tuple[int, ...]
    num_target_only_steps: int
    ttft_s: float
    e2el_s: float
    draft_s: float
    verify_s: float
    wire_bytes: int

    @classmethod
    def nothing(cls) -> Self:
        """Of a request whose end, with its figures, was not waited for."""
        return cls(0, 0, 0, (), 0, 0.0, 0.0, 0.0, 0.0, 0)


@dataclass(frozen=True, slots=True)
class Completion:
    """One whole output."""

    session_id: str
    request_id: str
    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    """stop | length | stop_string; cancelled where the caller closed the stream before its end: text, token ids and
    details are those that came, usage counts them, and every figure of `stats` is 0."""
    usage: Usage
    stats: GenerationStats
    details: tuple[TokenDetail, ...] = ()
    """One per token when provenance or logprobs were asked for, else empty."""
    target_fingerprint: str = ""
    """Of the model that decided every token."""
    target_changed: bool = False
    """The session's turn before was another target model's."""

    def to_dict(self, *, with_details: bool = False) -> dict[str, Any]:
        """The object that `specdec generate --json` prints: the proto's field names, without the target's."""
        fields = asdict(self)
        for name in ("details", "target_fingerprint", "target_changed"):
            del fields[name]
        fields["token_ids"] = list(self.token_ids)
        fields["stats"]["accepted_per_position"] = list(self.stats.accepted_per_position)
        return fields | ({"details": [detail.to_dict() for detail in self.details]} if with_details else {})


@dataclass(frozen=True, slots=True)
class Session:
    session_id: str
    status: str
    """running | idle."""
    num_tokens: int
    """Committed, prompt included."""
    token_ids: tuple[int, ...]
    """When asked for, else empty."""
    turn: int
    expires_in_s: float
    stats: GenerationStats


@dataclass(frozen=True, slots=True)
class Replica:
    replica_id: str
    address: str
    draining: bool
    num_sessions: int
    kv_usage: float
    """0..1."""


@dataclass(frozen=True, slots=True)
class Route:
    """How a draft pool does for a class of requests."""

    request_class: str
    """Task label or kind of prompt, mode, temperature: `code/rejection/greedy`."""
    alpha: float | None
    """That it has or would have had, of tokens committed lately; None before the first."""
    goodput: float | None
    """Tokens a second of a stream, as predicted; None before it can be."""
    weight: float
    """Of the class's pools, 0..1."""
    share: float
    """Of the class's rounds lately, 0..1."""
    is_chosen: bool
    """Whether new requests of the class are drafted for here."""
    num_tested: float = 0.0
    """Draft tokens that alpha is of, old ones fading."""


@dataclass(frozen=True, slots=True)
class Pool:
    name: str
    role: str
    """draft | target."""
    model: str
    replicas: tuple[Replica, ...]
    alpha: float | None = None
    """Of a draft pool: accepted share of the draft tokens tested lately; None before the first."""
    gamma: float | None = None
    """Of a draft pool: draft tokens asked for a round lately, near 0 while drafting does not pay; None before the first
    round whose gamma the server chose."""
    routes: tuple[Route, ...] = ()
    """Of a draft pool, where requests are routed: by class of requests."""


@dataclass(frozen=True, slots=True)
class Promotion:
    """A draft pool that sessions get instead of the one they would have had."""

    draft_pool: str
    share: float
    """Of the sessions, now."""
    most: float
    """That was asked for."""
    status: str
    """running | done | rolled_back: it made fewer tokens a second."""


@dataclass(frozen=True, slots=True)
class ServerInfo:
    version: str
    target_model: str
    vocabulary_fingerprint: str
    vocabulary_size: int
    max_context_tokens: int
    max_gamma: int
    pools: tuple[Pool, ...]
    promotion: Promotion | None = None


def read_chunk(message: pb.TokenChunk) -> Chunk:
    return Chunk(
        index=message.index,
        token_ids=tuple(message.token_ids),
        text=message.text,
        details=tuple(_read_detail(detail) for detail in message.details),
    )


def read_usage(message: pb.Usage) -> Usage:
    return Usage(message.num_prompt_tokens, message.num_output_tokens, message.num_cached_prompt_tokens)


def read_stats(message: pb.GenerationStats) -> GenerationStats:
    return GenerationStats(
        num_rounds=message.num_rounds,
        num_draft_tokens=message.num_draft_tokens,
        num_accepted_tokens=message.num_accepted_tokens,
        accepted_per_position=tuple(message.accepted_per_position),
        num_target_only_steps=message.num_target_only_steps,
        ttft_s=message.ttft_s,
        e2el_s=message.e2el_s,
        draft_s=message.draft_s,
        verify_s=message.verify_s,
        wire_bytes=message.wire_bytes,
    )


def read_finish_reason(value: int) -> str:
    """The lower-case name of a finish reason; "unspecified" for one this version does not know."""
    return _FINISH_REASONS.get(value, "unspecified")


def read_session(message: pb.GetSessionResponse) -> Session:
    return Session(
        session_id=message.session_id,
        status=message.status,
        num_tokens=message.num_tokens,
        token_ids=tuple(message.token_ids),
        turn=message.turn,
        expires_in_s=message.expires_in_s,
        stats=read_stats(message.stats),
    )


def read_server_info(message: pb.GetInfoResponse) -> ServerInfo:
    return ServerInfo(
        version=message.version,
        target_model=message.target_model,
        vocabulary_fingerprint=message.vocabulary_fingerprint,
        vocabulary_size=message.vocabulary_size,
        max_context_tokens=message.max_context_tokens,
        max_gamma=message.max_gamma,
        pools=tuple(map(_read_pool, message.pools)),
        promotion=read_promotion(message.promotion) if message.HasField("promotion") else None,
    )


def read_promotion(message: pb.PromotionInfo) -> Promotion:
    return Promotion(message.draft_pool, message.share, message.most, message.status)


def _read_pool(message: pb.PoolInfo) -> Pool:
    return Pool(
        name=message.name,
        role=message.role,
        model=message.model,
        replicas=_read_replicas(message.replicas),
        alpha=message.alpha if message.HasField("alpha") else None,
        gamma=message.gamma if message.HasField("gamma") else None,
        routes=tuple(map(_read_route, message.routes)),
    )


def _read_route(message: pb.RouteInfo) -> Route:
    return Route(
        request_class=message.request_class,
        alpha=message.alpha if message.HasField("alpha") else None,
        goodput=message.goodput if message.HasField("goodput") else None,
        weight=message.weight,
        share=message.share,
        is_chosen=message.is_chosen,
        num_tested=message.num_tested,
    )


def _read_replicas(messages: Sequence[pb.ReplicaInfo]) -> tuple[Replica, ...]:
    return tuple(
        Replica(replica.replica_id, replica.address, replica.draining, replica.num_sessions, replica.kv_usage)
        for replica in messages
    )


def _read_detail(message: pb.TokenDetail) -> TokenDetail:
    return TokenDetail(
        source=_SOURCES.get(message.source, TokenSource.TARGET),
        p=message.p,
        q=message.q,
        draft_pool=message.draft_pool,
        logprob=message.logprob if message.HasField("logprob") else None,
        top_logprobs=tuple((top.token_id, top.logprob) for top in message.top_logprobs),
        text=message.text,
    )
