"""Unchecked requests as plain dataclasses, without protobuf.

`wire` decodes them from messages, and `validation` checks them. An optional field that was not sent is None. A
collection may be a view of the received message, so its length is checked before any loop over it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from coordinator.requests import ChatTurn
from specdec.contract.constraint import Constraint
from specdec.contract.tools import ToolDefinition


@dataclass(frozen=True, slots=True)
class RawSamplingParams:
    """Fields of the proto's `SamplingParams`."""

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
    """Fields of the proto's `SpeculationParams`."""

    mode: int = 0
    gamma: int | None = None
    draft_pool: str = ""
    task: str = ""


@dataclass(frozen=True, slots=True)
class RawTools:
    """Fields of the proto's `Tools`."""

    definitions: Sequence[ToolDefinition] = ()
    choice: int = 0
    name: str = ""
    parallel: bool | None = None


@dataclass(frozen=True, slots=True)
class RawGenerationParams:
    """Fields of the proto's `GenerateRequest`, without those that concern only the form of the answer."""

    session_id: str = ""
    request_id: str = ""
    prompt: str | None = None
    prompt_token_ids: Sequence[int] | None = None
    messages: Sequence[ChatTurn] | None = None
    template_arguments_json: str = ""
    sampling: RawSamplingParams = RawSamplingParams()
    speculation: RawSpeculationParams = RawSpeculationParams()
    resume_from: int | None = None
    expected_session_tokens: int | None = None
    priority: int = 0
    constraint: Constraint | None = None
    tools: RawTools | None = None
    adapter: str | None = None
    former_digests: tuple[str, ...] = ()
    """Digests of this request in the forms that older versions stored (see `validation.request_digest`)."""
