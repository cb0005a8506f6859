"""From what was asked to a checked request: every bad input is refused here, before anything is acquired.

From here a request goes to `generation/generation_service`. Not here: protobuf (`wire`), what depends on the session
(its length, whether it exists) or on live replicas; admission checks those. Messages name the field in the proto's
spelling, and its limit, whichever front it came through.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from coordinator.front.digest import digest_of
from coordinator.front.raw_params import RawGenerationParams, RawSamplingParams, RawSpeculationParams
from coordinator.requests import DEFAULT_MAX_NEW_TOKENS, ChatTurn, GenerationRequest, SpeculationChoice
from specdec.errors import InvalidRequest
from specdec.types import Mode, SamplingFilters, SamplingParams, TokenIds

MAX_STOP_STRINGS = 16
MAX_STOP_STRING_CHARACTERS = 1024
MAX_LOGPROBS = 20
MAX_ID_CHARACTERS = 128
MAX_TASK_CHARACTERS = 64
MAX_MESSAGES = 4096
MAX_SEED = 2**64 - 1

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


def validate_request(asked: RawGenerationParams, limits: ServingLimits) -> GenerationRequest:
    """Checks a request's own fields.

    Raises:
        InvalidRequest: a field is outside its limits; `field` holds its name.
    """
    session_id = _checked_id("session_id", asked.session_id)
    request_id = _checked_id("request_id", asked.request_id)
    _check_input(asked)
    _check_not_negative("resume_from", asked.resume_from)
    _check_not_negative("expected_session_tokens", asked.expected_session_tokens)
    sampling = _sampling(asked.sampling, limits)
    speculation = _speculation(asked.speculation, limits)
    token_ids = None if asked.prompt_token_ids is None else _prompt_token_ids(asked.prompt_token_ids, limits)
    return GenerationRequest(
        session_id=session_id,
        request_id=request_id,
        sampling=sampling,
        is_seeded=asked.sampling.seed is not None,
        speculation=speculation,
        text=None if asked.prompt is None else _prompt(asked.prompt),
        token_ids=token_ids,
        messages=None if asked.messages is None else validate_messages(asked.messages),
        resume_from=asked.resume_from,
        expected_session_tokens=asked.expected_session_tokens,
        digest=digest_of(asked, token_ids),
        former_digests=asked.former_digests,
    )


def validate_session_id(session_id: str) -> str:
    """Checks the id of a call that reads or deletes a session. Raises InvalidRequest."""
    if not session_id:
        raise _invalid("session_id", "must be set")
    return _checked_id("session_id", session_id)


def validate_messages(messages: Sequence[ChatTurn]) -> tuple[ChatTurn, ...]:
    """Checks a conversation. Raises InvalidRequest when it is empty or too long, or a role is missing."""
    check_num_messages(len(messages))
    for index, message in enumerate(messages):
        if not message.role:
            raise _invalid(f"messages[{index}].role", "must not be empty")
    return tuple(messages)


def check_num_messages(num_messages: int) -> None:
    """Also for a front, before it goes through what it received. Raises InvalidRequest."""
    if not num_messages:
        raise _invalid("messages", "must not be empty")
    if num_messages > MAX_MESSAGES:
        raise _invalid("messages", f"must hold at most {MAX_MESSAGES} messages, got {num_messages}")


def _invalid(field: str, problem: str) -> InvalidRequest:
    return InvalidRequest(f"{field} {problem}", field=field)


def _checked_id(field: str, value: str) -> str:
    if value and not _ID_PATTERN.fullmatch(value):
        raise _invalid(field, f"must be at most {MAX_ID_CHARACTERS} of A-Z a-z 0-9 . _ : @ / + = -, got {value[:64]!r}")
    return value


def _check_not_negative(field: str, value: int | None) -> None:
    if value is not None and value < 0:
        raise _invalid(field, f"must be at least 0, got {value}")


def _check_input(asked: RawGenerationParams) -> None:
    """One input, or none in a resumption."""
    inputs = {"prompt": asked.prompt, "prompt_token_ids": asked.prompt_token_ids, "messages": asked.messages}
    kinds = [kind for kind, value in inputs.items() if value is not None]
    if asked.resume_from is not None:
        if kinds:
            raise _invalid("resume_from", f"must come without an input, got {' and '.join(kinds)} too")
        if not asked.session_id:
            raise _invalid("session_id", "must be set with resume_from")
    elif len(kinds) != 1:
        got = " and ".join(kinds) or "none"
        raise _invalid("input", f"must be one of prompt, prompt_token_ids and messages, got {got}")


def _prompt(text: str) -> str:
    if not text:
        raise _invalid("prompt", "must not be empty")
    return text


def _prompt_token_ids(ids: Collection[int], limits: ServingLimits) -> TokenIds:
    # Counted before it is looked at: going through millions of ids would hold up every other stream.
    if len(ids) >= limits.max_context_tokens:
        raise InvalidRequest(
            f"prompt_token_ids must leave room for an output token: it holds {len(ids)} tokens, the context is "
            f"{limits.max_context_tokens}",
            reason="CONTEXT_TOO_LONG",
            field="prompt_token_ids",
        )
    if not len(ids):
        raise _invalid("prompt_token_ids", "must not be empty")
    _check_token_ids("prompt_token_ids", ids, limits)
    return np.fromiter(ids, dtype=np.uint32, count=len(ids))


def _check_token_ids(field: str, ids: Iterable[int], limits: ServingLimits) -> None:
    for token_id in ids:
        if not 0 <= token_id < limits.vocabulary_size:
            raise _invalid(
                field, f"must be at least 0 and below the vocabulary size {limits.vocabulary_size}, got {token_id}"
            )


def _sampling(asked: RawSamplingParams, limits: ServingLimits) -> SamplingParams:
    for name in ("max_new_tokens", "min_new_tokens", "top_k", "logprobs"):
        _check_not_negative(f"sampling.{name}", getattr(asked, name))
    asked_new_tokens = asked.max_new_tokens or DEFAULT_MAX_NEW_TOKENS
    if asked.min_new_tokens > asked_new_tokens:
        raise _invalid(
            "sampling.min_new_tokens", f"must be at most max_new_tokens {asked_new_tokens}, got {asked.min_new_tokens}"
        )
    if asked.seed is not None and not 0 <= asked.seed <= MAX_SEED:
        raise _invalid("sampling.seed", f"must be at least 0 and at most {MAX_SEED}, got {asked.seed}")
    if asked.logprobs is not None and asked.logprobs > MAX_LOGPROBS:
        raise _invalid("sampling.logprobs", f"must be at most {MAX_LOGPROBS}, got {asked.logprobs}")
    _check_num_ids("sampling.stop_token_ids", asked.stop_token_ids, limits)
    _check_token_ids("sampling.stop_token_ids", asked.stop_token_ids, limits)
    return SamplingParams(
        max_new_tokens=asked.max_new_tokens,
        filters=_filters(asked, limits),
        seed=asked.seed or 0,
        stop=_stop(asked.stop),
        stop_token_ids=tuple(asked.stop_token_ids),
        ignore_eos=asked.ignore_eos,
        num_logprobs=asked.logprobs,
    )


def _check_num_ids(field: str, ids: Collection[int], limits: ServingLimits) -> None:
    """Counts ids before they are gone through."""
    if len(ids) > limits.vocabulary_size:
        raise _invalid(
            field, f"must hold at most as many ids as the vocabulary, {limits.vocabulary_size}, got {len(ids)}"
        )


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


def _filters(asked: RawSamplingParams, limits: ServingLimits) -> SamplingFilters:
    temperature = _number("sampling.temperature", asked.temperature, 1.0)
    if temperature < 0:
        raise _invalid("sampling.temperature", f"must be at least 0, got {temperature:g}")
    top_p = _number("sampling.top_p", asked.top_p, 1.0)
    if not 0 < top_p <= 1:
        raise _invalid("sampling.top_p", f"must be in (0, 1], got {top_p:g}")
    min_p = _number("sampling.min_p", asked.min_p, 0.0)
    if not 0 <= min_p < 1:
        raise _invalid("sampling.min_p", f"must be in [0, 1), got {min_p:g}")
    repetition_penalty = _number("sampling.repetition_penalty", asked.repetition_penalty, 1.0)
    if repetition_penalty <= 0:
        raise _invalid("sampling.repetition_penalty", f"must be above 0, got {repetition_penalty:g}")
    _check_num_ids("sampling.logit_bias", asked.logit_bias, limits)
    _check_token_ids("sampling.logit_bias", asked.logit_bias, limits)
    for token_id, bias in asked.logit_bias.items():
        if not math.isfinite(bias):
            raise _invalid("sampling.logit_bias", f"must hold finite values, got {bias} for token {token_id}")
    end_token_ids = sorted({*limits.eos_token_ids, *asked.stop_token_ids}) if asked.min_new_tokens else ()
    top_k = asked.top_k or 0
    return SamplingFilters(
        temperature=temperature,
        top_p=top_p,
        # Past the vocabulary top-k filters nothing, and the engines need not know.
        top_k=top_k if top_k < limits.vocabulary_size else 0,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        presence_penalty=_number("sampling.presence_penalty", asked.presence_penalty, 0.0),
        frequency_penalty=_number("sampling.frequency_penalty", asked.frequency_penalty, 0.0),
        logit_bias=dict(sorted(asked.logit_bias.items())),
        min_new_tokens=asked.min_new_tokens,
        end_token_ids=tuple(end_token_ids),
    )


def _number(field: str, value: float | None, default: float) -> float:
    """An optional number, or its default. Raises InvalidRequest unless it is finite."""
    if value is None:
        return default
    if not math.isfinite(value):
        raise _invalid(field, f"must be a finite number, got {value}")
    return float(value)


def _speculation(asked: RawSpeculationParams, limits: ServingLimits) -> SpeculationChoice:
    if asked.mode and asked.mode not in tuple(Mode):
        raise _invalid("speculation.mode", f"must be a SpeculationMode, got {asked.mode}")
    _check_not_negative("speculation.gamma", asked.gamma)
    if asked.gamma is not None and asked.gamma > limits.max_gamma:
        raise _invalid("speculation.gamma", f"must be at most {limits.max_gamma}, got {asked.gamma}")
    if len(asked.task) > MAX_TASK_CHARACTERS:
        raise _invalid("speculation.task", f"must be at most {MAX_TASK_CHARACTERS} characters, got {len(asked.task)}")
    mode = Mode(asked.mode) if asked.mode else limits.default_mode
    return SpeculationChoice(mode=mode, gamma=asked.gamma, draft_pool=asked.draft_pool, task=asked.task)


def check_share(share: float) -> None:
    """Raises InvalidRequest for what is no share of the sessions."""
    if not 0.0 <= share <= 1.0:
        raise _invalid("share", f"must be 0 to 1, got {share}")
