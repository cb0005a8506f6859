"""From a GenerateRequest to checked types: every bad input is refused here, before anything is acquired.

Not here: what depends on the session (its length, whether it exists) or on live replicas; `generations` checks those.
Messages name the field in proto spelling and its limit. Called by the servicer.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass

import numpy as np

from coordinator.requests import DEFAULT_MAX_NEW_TOKENS, ChatTurn, GenerationRequest, SpeculationChoice
from specdec.errors import InvalidRequest
from specdec.types import Mode, SamplingFilters, SamplingParams
from specdec.v1 import coordinator_pb2

MAX_STOP_STRINGS = 16
MAX_STOP_STRING_CHARACTERS = 1024
MAX_LOGPROBS = 20
MAX_ID_CHARACTERS = 128
MAX_TASK_CHARACTERS = 64
MAX_MESSAGES = 4096

# Ids become parts of store keys, whose braces mean something; they are also read in logs and URLs.
_ID_PATTERN = re.compile(rf"[A-Za-z0-9._:@/+=-]{{1,{MAX_ID_CHARACTERS}}}")


@dataclass(frozen=True, slots=True)
class ServingLimits:
    """What requests are checked against: the connected target's, and the server's own."""

    vocabulary_size: int
    max_context_tokens: int
    max_gamma: int
    eos_token_ids: tuple[int, ...]
    default_mode: Mode


def validate_request(message: coordinator_pb2.GenerateRequest, limits: ServingLimits) -> GenerationRequest:
    """Checks a request's own fields.

    Raises:
        InvalidRequest: a field is outside its limits; `field` holds its name.
    """
    session_id = _checked_id("session_id", message.session_id)
    request_id = _checked_id("request_id", message.request_id)
    kind = message.WhichOneof("input")
    resume_from = message.resume_from if message.HasField("resume_from") else None
    if resume_from is not None:
        if kind is not None:
            raise _invalid("resume_from", f"must come without an input, got {kind} too")
        if not session_id:
            raise _invalid("session_id", "must be set with resume_from")
    elif kind is None:
        raise _invalid("input", "must be one of prompt, prompt_token_ids and messages, got none")
    return GenerationRequest(
        session_id=session_id,
        request_id=request_id,
        digest=_digest(message),
        sampling=_sampling(message.sampling, limits),
        is_seeded=message.sampling.HasField("seed"),
        speculation=_speculation(message.speculation, limits),
        text=_prompt(message.prompt) if kind == "prompt" else None,
        token_ids=_prompt_token_ids(message.prompt_token_ids.ids, limits) if kind == "prompt_token_ids" else None,
        messages=validate_messages(message.messages) if kind == "messages" else None,
        resume_from=resume_from,
        expected_session_tokens=message.expected_session_tokens
        if message.HasField("expected_session_tokens")
        else None,
    )


def validate_session_id(session_id: str) -> str:
    """Checks the id of a call that reads or deletes a session. Raises InvalidRequest."""
    if not session_id:
        raise _invalid("session_id", "must be set")
    return _checked_id("session_id", session_id)


def validate_messages(messages: coordinator_pb2.ChatMessages) -> tuple[ChatTurn, ...]:
    """Checks a conversation. Raises InvalidRequest when it is empty or too long, or a role is missing."""
    if not messages.messages:
        raise _invalid("messages", "must not be empty")
    if len(messages.messages) > MAX_MESSAGES:
        raise _invalid("messages", f"must hold at most {MAX_MESSAGES} messages, got {len(messages.messages)}")
    for index, message in enumerate(messages.messages):
        if not message.role:
            raise _invalid(f"messages[{index}].role", "must not be empty")
    return tuple(ChatTurn(message.role, message.content) for message in messages.messages)


def _invalid(field: str, problem: str) -> InvalidRequest:
    return InvalidRequest(f"{field} {problem}", field=field)


def _checked_id(field: str, value: str) -> str:
    if value and not _ID_PATTERN.fullmatch(value):
        raise _invalid(field, f"must be at most {MAX_ID_CHARACTERS} of A-Z a-z 0-9 . _ : @ / + = -, got {value[:64]!r}")
    return value


def _prompt(text: str) -> str:
    if not text:
        raise _invalid("prompt", "must not be empty")
    return text


def _prompt_token_ids(ids: Collection[int], limits: ServingLimits) -> np.ndarray:
    # Counted before it is looked at: going through millions of ids would hold up every other stream.
    if len(ids) >= limits.max_context_tokens:
        raise InvalidRequest(
            f"prompt_token_ids must leave room for an output token: it holds {len(ids)} tokens, the context is "
            f"{limits.max_context_tokens}",
            reason="CONTEXT_TOO_LONG",
            field="prompt_token_ids",
        )
    token_ids = np.fromiter(ids, dtype=np.uint32)
    if not len(token_ids):
        raise _invalid("prompt_token_ids", "must not be empty")
    _check_token_ids("prompt_token_ids", token_ids.tolist(), limits)
    return token_ids


def _check_token_ids(field: str, ids: Iterable[int], limits: ServingLimits) -> None:
    for token_id in ids:
        if token_id >= limits.vocabulary_size:
            raise _invalid(field, f"must be below the vocabulary size {limits.vocabulary_size}, got {token_id}")


def _sampling(params: coordinator_pb2.SamplingParams, limits: ServingLimits) -> SamplingParams:
    asked_new_tokens = params.max_new_tokens or DEFAULT_MAX_NEW_TOKENS
    if params.min_new_tokens > asked_new_tokens:
        raise _invalid(
            "sampling.min_new_tokens", f"must be at most max_new_tokens {asked_new_tokens}, got {params.min_new_tokens}"
        )
    if len(params.stop_token_ids) > limits.vocabulary_size:
        raise _invalid(
            "sampling.stop_token_ids",
            f"must hold at most as many ids as the vocabulary, {limits.vocabulary_size}, "
            f"got {len(params.stop_token_ids)}",
        )
    _check_token_ids("sampling.stop_token_ids", params.stop_token_ids, limits)
    return SamplingParams(
        max_new_tokens=params.max_new_tokens,
        filters=_law(params, limits),
        seed=params.seed,
        stop=_stop(params.stop),
        stop_token_ids=tuple(params.stop_token_ids),
        ignore_eos=params.ignore_eos,
        num_logprobs=_num_logprobs(params),
    )


def _num_logprobs(params: coordinator_pb2.SamplingParams) -> int | None:
    if not params.HasField("logprobs"):
        return None
    if params.logprobs > MAX_LOGPROBS:
        raise _invalid("sampling.logprobs", f"must be at most {MAX_LOGPROBS}, got {params.logprobs}")
    return params.logprobs


def _stop(stop: Collection[str]) -> tuple[str, ...]:
    if len(stop) > MAX_STOP_STRINGS:
        raise _invalid("sampling.stop", f"must hold at most {MAX_STOP_STRINGS} strings, got {len(stop)}")
    strings = tuple(stop)
    for string in strings:
        if not string:
            raise _invalid("sampling.stop", "must not hold an empty string")
        if len(string) > MAX_STOP_STRING_CHARACTERS:
            raise _invalid(
                "sampling.stop",
                f"must hold strings of at most {MAX_STOP_STRING_CHARACTERS} characters, got {len(string)}",
            )
    return strings


def _law(params: coordinator_pb2.SamplingParams, limits: ServingLimits) -> SamplingFilters:
    temperature = _number(params, "temperature", 1.0)
    if temperature < 0:
        raise _invalid("sampling.temperature", f"must be at least 0, got {temperature:g}")
    top_p = _number(params, "top_p", 1.0)
    if not 0 < top_p <= 1:
        raise _invalid("sampling.top_p", f"must be in (0, 1], got {top_p:g}")
    min_p = _number(params, "min_p", 0.0)
    if not 0 <= min_p < 1:
        raise _invalid("sampling.min_p", f"must be in [0, 1), got {min_p:g}")
    repetition_penalty = _number(params, "repetition_penalty", 1.0)
    if repetition_penalty <= 0:
        raise _invalid("sampling.repetition_penalty", f"must be above 0, got {repetition_penalty:g}")
    if len(params.logit_bias) > limits.vocabulary_size:  # counted before it is gone through
        raise _invalid(
            "sampling.logit_bias",
            f"must hold at most as many ids as the vocabulary, {limits.vocabulary_size}, got {len(params.logit_bias)}",
        )
    _check_token_ids("sampling.logit_bias", params.logit_bias, limits)
    for token_id, bias in params.logit_bias.items():
        if not math.isfinite(bias):
            raise _invalid("sampling.logit_bias", f"must hold finite values, got {bias} for token {token_id}")
    end_token_ids = sorted({*limits.eos_token_ids, *params.stop_token_ids}) if params.min_new_tokens else ()
    return SamplingFilters(
        temperature=temperature,
        top_p=top_p,
        # Past the vocabulary top-k filters nothing, and the engines need not know.
        top_k=params.top_k if params.top_k < limits.vocabulary_size else 0,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        presence_penalty=_number(params, "presence_penalty", 0.0),
        frequency_penalty=_number(params, "frequency_penalty", 0.0),
        logit_bias=dict(sorted(params.logit_bias.items())),
        min_new_tokens=params.min_new_tokens,
        end_token_ids=tuple(end_token_ids),
    )


def _number(params: coordinator_pb2.SamplingParams, name: str, default: float) -> float:
    """An optional float field, or its default. Raises InvalidRequest unless it is finite."""
    if not params.HasField(name):
        return default
    value = float(getattr(params, name))
    if not math.isfinite(value):
        raise _invalid(f"sampling.{name}", f"must be a finite number, got {value}")
    return value


def _speculation(params: coordinator_pb2.SpeculationParams, limits: ServingLimits) -> SpeculationChoice:
    if params.mode and int(params.mode) not in tuple(Mode):
        raise _invalid("speculation.mode", f"must be a SpeculationMode, got {params.mode}")
    gamma = params.gamma if params.HasField("gamma") else None
    if gamma is not None and gamma > limits.max_gamma:
        raise _invalid("speculation.gamma", f"must be at most {limits.max_gamma}, got {gamma}")
    if len(params.task) > MAX_TASK_CHARACTERS:
        raise _invalid("speculation.task", f"must be at most {MAX_TASK_CHARACTERS} characters, got {len(params.task)}")
    mode = Mode(params.mode) if params.mode else limits.default_mode
    return SpeculationChoice(mode=mode, gamma=gamma, draft_pool=params.draft_pool)


def _digest(message: coordinator_pb2.GenerateRequest) -> str:
    """Hash of what decides the output, so that a retry may differ in what it wants to see of it."""
    asked = coordinator_pb2.GenerateRequest()
    asked.CopyFrom(message)
    for field in ("session_id", "request_id", "return_provenance", "resume_from", "expected_session_tokens"):
        asked.ClearField(field)
    return hashlib.blake2b(asked.SerializeToString(deterministic=True), digest_size=16).hexdigest()
