"""What a client asked, as plain dataclasses: parsed by a front (`wire`, HTTP later), not checked yet.

An optional field that was not sent is None. Collections may be views of the message they came in: whoever goes through
one counts it first. From here a request goes to `validation`. Not here: protobuf, limits, defaults.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from coordinator.requests import ChatTurn


@dataclass(frozen=True, slots=True)
class RawSamplingParams:
    """The proto's `SamplingParams`, field by field."""

    max_new_tokens: int = 0
    min_new_tokens: int = 0
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: Mapping[int, float] = field(default_factory=lambda: MappingProxyType({}))
    seed: int | None = None
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    logprobs: int | None = None


@dataclass(frozen=True, slots=True)
class RawSpeculationParams:
    """The proto's `SpeculationParams`, field by field."""

    mode: int = 0
    gamma: int | None = None
    draft_pool: str = ""
    task: str = ""


@dataclass(frozen=True, slots=True)
class RawGenerationParams:
    """The proto's `GenerateRequest`, except for what concerns its answer's form alone."""

    session_id: str = ""
    request_id: str = ""
    prompt: str | None = None
    prompt_token_ids: Sequence[int] | None = None
    messages: Sequence[ChatTurn] | None = None
    sampling: RawSamplingParams = RawSamplingParams()
    speculation: RawSpeculationParams = RawSpeculationParams()
    resume_from: int | None = None
    expected_session_tokens: int | None = None
    former_digests: tuple[str, ...] = ()
    """Of this request, in the forms that older versions stored; `digest` has the present one."""
