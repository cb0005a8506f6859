"""Checked requests and the events that answer them, as plain dataclasses without protobuf.

`front/validation` makes a request, which goes to `generation/generation_service`; its events come from the generation's
`stream`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, NamedTuple

from specdec.contract.output_form import OutputForm
from specdec.contract.payer import NO_PAYER, Payer
from specdec.contract.tenant import DEFAULT_TENANT, SessionKey
from specdec.contract.tools import OutputPart, Tools
from specdec.contract.types import FinishReason, Mode, SamplingParams, TokenIds, TokenSource

#: Output limit of a request that names none; a full context lowers it.
DEFAULT_MAX_NEW_TOKENS = 256


@dataclass(frozen=True, slots=True)
class ChatTurn:
    """One message of a conversation."""

    role: str
    content: str
    extra_json: str = ""
    """JSON object with the message's further fields; "": none."""
    content_parts: tuple[str, ...] = ()
    """Texts that line breaks join to `content`; empty for content that is one text."""

    def as_dict(self) -> dict[str, Any]:
        """Return a checked message as `text/message_forms` takes it."""
        extra = json.loads(self.extra_json) if self.extra_json else {}
        parts = [{"type": "text", "text": text} for text in self.content_parts]
        return {"role": self.role, "content": parts or self.content, **extra}


@dataclass(frozen=True, slots=True)
class SpeculationChoice:
    """Speculation parameters of a request."""

    mode: Mode
    gamma: int | None
    """Number of draft tokens of a round; None: chosen each round."""
    draft_pool: str
    """Name of a pool; "": chosen by the server."""
    task: str = ""
    """Label that the client gives to this kind of request."""


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One Generate call whose fields are all within their limits.

    Exactly one of `text`, `token_ids` and `messages` is set; none of them is set together with `resume_from`.
    """

    session_id: str
    """Id of the session; "": admission makes one."""
    request_id: str
    """Id of the request; "": admission makes one."""
    sampling: SamplingParams
    """Parameters as sent: `max_new_tokens` 0 means the default, and `seed` is used only when `is_seeded`."""
    is_seeded: bool
    speculation: SpeculationChoice
    text: str | None = None
    token_ids: TokenIds | None = None
    messages: tuple[ChatTurn, ...] | None = None
    template_arguments_json: str = ""
    """JSON object with further variables of the chat template; "": none."""
    tools: Tools | None = None
    output_form: OutputForm | None = None
    """Form of the output, which `text/output_forms` decides; None: all of it is the answer."""
    resume_from: int | None = None
    """Number of output tokens that the caller already holds."""
    expected_session_tokens: int | None = None
    """Number of tokens that the session must hold before a new turn."""
    digest: str = ""
    """Digest of the request without its ids: tells a retry from another request under the same id."""
    former_digests: tuple[str, ...] = ()
    """Digests of the same request in the forms that older versions stored."""

    key_id: str = ""
    """Id of the caller's API key; "" without one."""
    tenant: str = DEFAULT_TENANT
    """Tenant that owns the session; not part of the digest, which is compared within one session."""
    priority: int = 0
    """Place in the queue: requests of lower values go first."""
    deadline_s: float | None = None
    """Time by which the caller wants the whole output, by `time.monotonic`; None: at any time."""
    constraint_warnings: tuple[str, ...] = ()
    """Demands of a lenient constraint that the output may not follow, in the library's words."""
    adapter: str | None = None
    """Name of the adapter, "" for the base model; None: that of the session, of a new session the base model."""

    @property
    def key(self) -> SessionKey:
        return SessionKey(self.tenant, self.session_id)

    def is_same_as(self, stored_digest: str) -> bool:
        """Return whether a request stored with this digest, by any version, equals this one."""
        return stored_digest in (self.digest, *self.former_digests)


@dataclass(frozen=True, slots=True)
class RequestParameters:
    """Everything but the tokens that decides the output of a request."""

    sampling: SamplingParams
    """Resolved parameters: `max_new_tokens` is above 0 and within the context, and the seed is drawn."""
    speculation: SpeculationChoice
    """Resolved choice: `draft_pool` is the chosen pool; "" if there is none, or if it may change each round."""
    target_fingerprint: str
    """Fingerprint of the target model. Once a token was shown it never changes, also not on failover or resumption."""
    target_changed: bool = False
    """True if the session's previous turn used another target model."""
    is_chat: bool = True
    """True if the input is a conversation, whose output begins a text. Any other output continues its prompt's text."""
    constraint_warnings: tuple[str, ...] = ()
    """Demands of a lenient constraint that the output may not follow, in the library's words."""
    output_form: OutputForm | None = None
    """Form of the output; None: all of it is the answer."""
    adapter: str = ""
    """Name of the adapter of the target model; "" for none. A session keeps it."""

    @property
    def adapter_fingerprint(self) -> str:
        """Fingerprint of the target model if that has an adapter, else ""."""
        return self.target_fingerprint if self.adapter else ""


@dataclass(frozen=True, slots=True)
class GenerationIdentity:
    """Identity of a request, and the position in its session at which the output begins."""

    session_id: str
    request_id: str
    digest: str
    turn: int
    output_start: int
    parameters: RequestParameters
    payer: Payer = NO_PAYER


@dataclass(frozen=True, slots=True)
class RankedLogprob:
    token_id: int
    logprob: float


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """The model's logprobs at one position, before filters."""

    logprob: float
    top: tuple[RankedLogprob, ...]


#: Name under which tokens that a constraint forces are counted and shown, like the name of a pool.
GRAMMAR_POOL = "grammar"


class Provenance(NamedTuple):
    """Origin of the tokens of one round, as columns with one entry a token."""

    sources: tuple[TokenSource, ...]
    p: tuple[float, ...]
    """Target probability of each token after filters."""
    q: tuple[float, ...]
    """Probability with which the draft drew each token; 0 without a draft token."""
    draft_pool: str
    """Pool that drafted the round, or ""."""
    logprobs: tuple[TokenLogprobs, ...]
    """Empty if the request asks for no logprobs."""
    num_draft_tokens: int = 0
    """Number of draft tokens of the round."""
    num_forced: int = 0
    """Number of leading tokens that the request's constraint forced; `draft_pool` did not draft them."""

    def pool_of(self, index: int) -> str:
        """Return the pool that drafted a token."""
        return GRAMMAR_POOL if index < self.num_forced else self.draft_pool

    def since(self, count: int) -> Provenance:
        """Return the columns without the first `count` tokens."""
        return self._replace(
            sources=self.sources[count:],
            p=self.p[count:],
            q=self.q[count:],
            logprobs=self.logprobs[count:],
            num_forced=max(0, self.num_forced - count),
        )


@dataclass(frozen=True, slots=True)
class Started:
    session_id: str
    request_id: str
    num_prompt_tokens: int
    seed: int
    target_fingerprint: str
    target_changed: bool
    constraint_warnings: tuple[str, ...] = ()
    adapter: str = ""
    """Name of the adapter that the turn runs with; "" for none."""


class OutputChunk(NamedTuple):
    """The committed tokens of one round or of a replay, as columns (the proto's `TokenChunk`)."""

    start: int
    """Index of the first token in the output."""
    token_ids: tuple[int, ...]
    texts: tuple[str, ...]
    """Text that each token completed. It depends only on the output up to and including the token."""
    provenance: Provenance | None
    """Origin of the tokens; may have entries for further tokens that the output left out. None in a replay."""
    parts: tuple[tuple[OutputPart, ...], ...] = ()
    """Parts that each token completed, of an output with a form; empty for any other."""

    @property
    def end(self) -> int:
        """Index in the output after the last token."""
        return self.start + len(self.token_ids)

    def since(self, index: int) -> OutputChunk:
        """Return the part of the chunk from output token `index` on."""
        count = index - self.start
        if count <= 0:
            return self
        provenance = self.provenance and self.provenance.since(count)
        return OutputChunk(index, self.token_ids[count:], self.texts[count:], provenance, self.parts[count:])

    @classmethod
    def joined(cls, chunks: Sequence[OutputChunk]) -> OutputChunk:
        """Return consecutive chunks as one, without provenance."""
        token_ids = tuple(chain.from_iterable(chunk.token_ids for chunk in chunks))
        texts = tuple(chain.from_iterable(chunk.texts for chunk in chunks))
        parts = tuple(chain.from_iterable(chunk.parts for chunk in chunks))
        return cls(chunks[0].start, token_ids, texts, None, parts)

    def pieces(self, num_tokens: int) -> Iterator[OutputChunk]:
        """Yield the chunk in parts of at most `num_tokens` tokens."""
        rest = self
        while len(rest.token_ids) > num_tokens:
            token_ids, texts, parts = rest.token_ids[:num_tokens], rest.texts[:num_tokens], rest.parts[:num_tokens]
            yield OutputChunk(rest.start, token_ids, texts, rest.provenance, parts)
            rest = rest.since(rest.start + num_tokens)
        yield rest


class DraftStats(NamedTuple):
    """Statistics of a draft pool in this coordinator, for reports; None if nothing was measured."""

    alpha: float | None
    """Accepted share of the draft tokens that were tested recently."""
    gamma: float | None
    """Recent mean number of draft tokens of a round, over requests whose gamma is chosen each round."""


class RouteStats(NamedTuple):
    """Statistics of a draft pool for one class of requests, for reports (the proto's `RouteInfo`)."""

    request_class: str
    alpha: float | None
    """Accepted share, measured or scored, over recently committed tokens; None before the first token."""
    goodput: float | None
    """Predicted rate of a stream in tokens per second; None while it cannot be predicted."""
    weight: float
    share: float
    """Recent share of the class's rounds."""
    is_chosen: bool
    num_tested: float
    """Number of draft tokens behind `alpha`; old tokens count less."""


@dataclass(slots=True)
class RequestStats:
    """Counters of one request with its resumptions (the proto's `GenerationStats`)."""

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
    """Part of the proto's `Usage`; stored here so that a resumed request keeps it."""


@dataclass(frozen=True, slots=True)
class Finished:
    reason: FinishReason
    num_prompt_tokens: int
    num_output_tokens: int
    stats: RequestStats
    num_reasoning_tokens: int = 0
    """Number of output tokens up to the end of the reasoning, its marks included."""
    is_named_call: bool = False
    """True if the request named the tool that the output calls."""


Event = Started | OutputChunk | Finished
