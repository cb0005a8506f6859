"""Results of the SDK: frozen dataclasses with the proto's field names, and functions that read them from messages.

Programs see these classes only, because protobuf types stop at this package.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Self

from specdec.types import FinishReason, TokenSource
from specdec.v1 import coordinator_pb2 as pb

#: Finish reason of an output whose stream was closed before its end.
CANCELLED = "cancelled"

_FINISH_REASONS = {int(reason): reason.name.lower() for reason in FinishReason}
#: A source that this version does not know, from a newer server, is read as TARGET.
_SOURCES = {int(source): source for source in TokenSource}


@dataclass(frozen=True, slots=True)
class TokenDetail:
    """Source and probabilities of one token, for requests with provenance or logprobs."""

    source: TokenSource
    p: float
    """Target probability after the sampling filters."""
    q: float
    """Draft probability of the draft token at this position; 0 without a draft token."""
    draft_pool: str
    logprob: float | None
    """Log-probability before the filters; None unless the request asked for logprobs."""
    top_logprobs: tuple[tuple[int, float], ...]
    """Pairs of (token id, logprob), highest first."""
    text: str
    """Text that this token completed. The texts of a chunk's tokens join to `Chunk.text`."""

    def to_dict(self) -> dict[str, Any]:
        """Return a dictionary with the proto's field names; `logprob` and `top_logprobs` only if requested."""
        fields = asdict(self) | {"source": self.source.name.lower()}
        fields["top_logprobs"] = [{"token_id": token_id, "logprob": value} for token_id, value in self.top_logprobs]
        if self.logprob is None:
            del fields["logprob"], fields["top_logprobs"]
        return fields


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens of one committed round."""

    index: int
    """Index in the output of the chunk's first token."""
    token_ids: tuple[int, ...]
    text: str
    details: tuple[TokenDetail, ...]
    """One entry per token if the request asked for provenance or logprobs, else empty."""

    def to_dict(self, *, with_details: bool = False) -> dict[str, Any]:
        """Return the object that `specdec generate --json-lines` prints, with the proto's field names."""
        fields = {"index": self.index, "token_ids": list(self.token_ids), "text": self.text}
        return fields | ({"details": [detail.to_dict() for detail in self.details]} if with_details else {})


@dataclass(frozen=True, slots=True)
class Usage:
    num_prompt_tokens: int
    num_output_tokens: int
    """Number of output tokens, the EOS or stop token included."""
    num_cached_prompt_tokens: int


@dataclass(frozen=True, slots=True)
class GenerationStats:
    """Counters and times of one request, measured by the server."""

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
        """Return the statistics of a request whose stream was closed before the server sent them."""
        return cls(0, 0, 0, (), 0, 0.0, 0.0, 0.0, 0.0, 0)


@dataclass(frozen=True, slots=True)
class Completion:
    """One whole output."""

    session_id: str
    request_id: str
    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    """Reason for the end: stop | length | stop_string, or cancelled if the stream was closed before its end. Then text,
    token ids and details are those received, usage counts them, and every field of `stats` is 0."""
    usage: Usage
    stats: GenerationStats
    details: tuple[TokenDetail, ...] = ()
    """One entry per token if the request asked for provenance or logprobs, else empty."""
    target_fingerprint: str = ""
    """Fingerprint of the target model that decided every token."""
    target_changed: bool = False
    """True if another target model decided the session's previous turn."""

    def to_dict(self, *, with_details: bool = False) -> dict[str, Any]:
        """Return the object that `specdec generate --json` prints: the proto's field names, without the target's."""
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
    """State of the session: running | idle."""
    num_tokens: int
    """Number of committed tokens, prompt included."""
    token_ids: tuple[int, ...]
    """Committed tokens if requested, else empty."""
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
    """Used share of the KV cache, 0 to 1."""


@dataclass(frozen=True, slots=True)
class Route:
    """Statistics of a draft pool for one class of requests."""

    request_class: str
    """Task label or kind of prompt, mode and temperature: `code/rejection/greedy`."""
    alpha: float | None
    """Acceptance that the pool has, or would have had, on recently committed tokens; None before the first."""
    goodput: float | None
    """Predicted tokens per second of a stream; None until there is enough data."""
    weight: float
    """Routing weight among the pools of the class, 0 to 1."""
    share: float
    """Share of the class's recent rounds, 0 to 1."""
    is_chosen: bool
    """True if new requests of the class get their drafts from this pool."""
    num_tested: float = 0.0
    """Number of draft tokens that alpha was measured on, older ones weighted less."""


@dataclass(frozen=True, slots=True)
class Pool:
    name: str
    role: str
    """Role of the replicas: draft | target."""
    model: str
    replicas: tuple[Replica, ...]
    alpha: float | None = None
    """Draft pools: accepted share of the draft tokens tested recently; None before the first."""
    gamma: float | None = None
    """Draft pools: draft tokens requested per round recently, near 0 while drafting gives no speedup; None before the
    first round whose gamma the server chose."""
    routes: tuple[Route, ...] = ()
    """Draft pools of a system with request routing: statistics by class of requests."""
    dtype: str = ""
    """Type of the weights: float32 | bfloat16 | float16 | int8; "" for drafts found in the text."""
    shadow: bool = False
    """Draft pools: True if the pool is scored, and used only by requests that name it or by promotion."""


@dataclass(frozen=True, slots=True)
class Promotion:
    """Draft pool that a share of the sessions gets instead of its own."""

    draft_pool: str
    share: float
    """Share of the sessions now, 0 to 1."""
    most: float
    """Largest share, as requested."""
    status: str
    """State: running | done | rolled_back, because the pool gave fewer tokens per second."""


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
    """Return the lower-case name of a finish reason; "unspecified" for one that this version does not know."""
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
        dtype=message.dtype,
        shadow=message.shadow,
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
