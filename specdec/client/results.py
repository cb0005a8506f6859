"""Results of the SDK: frozen dataclasses with the proto's field names, and functions that read them from messages.

Programs see these classes only, because protobuf types stop at this package.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, NamedTuple, Self

from specdec.client.tools import ToolCall, read_parts
from specdec.contract.tools import OutputPart
from specdec.contract.types import FinishReason, TokenSource
from specdec.rpc.plain_fields import read_fields
from specdec.v1 import coordinator_pb2 as pb

#: Finish reason of an output whose stream was closed before its end.
CANCELLED = "cancelled"

_FINISH_REASONS = {int(reason): reason.name.lower() for reason in FinishReason}
#: A source that this version does not know, from a newer server, is read as TARGET.
_SOURCES = {int(source): source for source in TokenSource}


class TopLogprob(NamedTuple):
    """One of the most probable tokens at a position."""

    token_id: int
    logprob: float
    """Log-probability before the sampling filters."""
    token_bytes: bytes = b""
    """Bytes of the token itself, for a special token those of its name."""


@dataclass(frozen=True, slots=True)
class TokenDetail:
    """Source and probabilities of one token, for requests with provenance or logprobs."""

    source: TokenSource | None
    """None for a token that a resumption replays, because its source and probabilities are not stored."""
    p: float
    """Target probability after the sampling filters."""
    q: float
    """Draft probability of the draft token at this position; 0 without a draft token."""
    draft_pool: str
    logprob: float | None
    """Log-probability before the filters; None unless the request asked for logprobs."""
    top_logprobs: tuple[TopLogprob, ...]
    """Most probable tokens at this position, highest first."""
    text: str
    """Text that this token completed. The texts of a chunk's tokens join to `Chunk.text`."""
    token_bytes: bytes = b""
    """Bytes of the token itself, for a special token those of its name. They may be a part of a character. Empty unless
    the request asked for logprobs."""

    def to_dict(self) -> dict[str, Any]:
        """Return a dictionary with the proto's field names; those of logprobs only if requested.

        Bytes are lists of numbers.
        """
        fields = asdict(self) | {"source": None if self.source is None else self.source.name.lower()}
        fields["top_logprobs"] = [top._asdict() | {"token_bytes": list(top.token_bytes)} for top in self.top_logprobs]
        fields["token_bytes"] = list(self.token_bytes)
        if self.logprob is None:
            del fields["logprob"], fields["top_logprobs"], fields["token_bytes"]
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
    num_draft_tokens: int | None = None
    """Number of draft tokens of the round; None without details, and for tokens that a resumption replays."""
    parts: tuple[OutputPart, ...] = ()
    """Parts that the tokens completed, of an output with tools or reasoning: `AnswerText`, which `text` holds too,
    `ReasoningText` and `ToolCallDelta`. Empty for any other output."""

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
    num_reasoning_tokens: int = 0
    """Number of output tokens up to the end of the reasoning, its marks included."""


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
    """Reason for the end: stop | length | stop_string | tool_calls, or cancelled if the stream was closed before its
    end. Then text, token ids and details are those received, usage counts them, and every field of `stats` is 0."""
    usage: Usage
    stats: GenerationStats
    details: tuple[TokenDetail, ...] = ()
    """One entry per token if the request asked for provenance or logprobs, else empty."""
    target_fingerprint: str = ""
    """Fingerprint of the target model that decided every token."""
    target_changed: bool = False
    """True if another target model decided the session's previous turn."""
    constraint_warnings: tuple[str, ...] = ()
    """Demands of a lenient constraint that the output may not follow, such as unknown keywords of a JSON schema."""
    tool_calls: tuple[ToolCall, ...] = ()
    reasoning: str = ""
    """Text that the model wrote before its answer, if the server knows how the model marks it."""
    is_named_call: bool = False
    """True if the request named the tool that the output calls."""
    adapter: str = ""
    """Name of the adapter of the target model; "" for none."""

    def to_dict(self, *, with_details: bool = False) -> dict[str, Any]:
        """Return the object that `specdec generate --json` prints: the proto's field names, without the target's.

        Warnings and an adapter are in it only if there are any.
        """
        fields = asdict(self)
        for name in ("details", "target_fingerprint", "target_changed", "constraint_warnings", "is_named_call"):
            del fields[name]
        if self.constraint_warnings:
            fields["constraint_warnings"] = list(self.constraint_warnings)
        fields["tool_calls"] = [asdict(call) for call in self.tool_calls]
        for name in ("tool_calls", "reasoning", "adapter"):
            if not fields[name]:
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


def read_chunk(message: pb.TokenChunk) -> Chunk:
    return Chunk(
        index=message.index,
        token_ids=tuple(message.token_ids),
        text=message.text,
        details=tuple(_read_detail(detail) for detail in message.details),
        num_draft_tokens=message.num_draft_tokens if message.HasField("num_draft_tokens") else None,
        parts=read_parts(message.parts),
    )


def read_usage(message: pb.Usage) -> Usage:
    return read_fields(Usage, message)


def read_stats(message: pb.GenerationStats) -> GenerationStats:
    return read_fields(GenerationStats, message, accepted_per_position=tuple(message.accepted_per_position))


def read_finish_reason(value: int) -> str:
    """Return the lower-case name of a finish reason; "unspecified" for one that this version does not know."""
    return _FINISH_REASONS.get(value, "unspecified")


def read_session(message: pb.GetSessionResponse) -> Session:
    return read_fields(Session, message, token_ids=tuple(message.token_ids), stats=read_stats(message.stats))


def _read_detail(message: pb.TokenDetail) -> TokenDetail:
    return TokenDetail(
        source=_SOURCES.get(message.source),
        p=message.p,
        q=message.q,
        draft_pool=message.draft_pool,
        logprob=message.logprob if message.HasField("logprob") else None,
        top_logprobs=tuple(TopLogprob(top.token_id, top.logprob, top.token_bytes) for top in message.top_logprobs),
        text=message.text,
        token_bytes=message.token_bytes,
    )
