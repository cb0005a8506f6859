"""Checks a request: every bad input is refused here, before a lease or a replica is used.

A checked request goes to `generation/generation_service`, which checks what depends on the session. A checked request
carries a digest of its fields, which tells a retry from another request under the same id. Error messages name fields
in the proto's spelling, whichever front a request came through.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Collection, Iterable
from dataclasses import astuple, dataclass, fields, replace
from typing import Any

import numpy as np

from coordinator.front.chat_validation import check_template_arguments, validate_messages
from coordinator.front.raw_params import RawGenerationParams, RawSamplingParams, RawSpeculationParams
from coordinator.front.tool_validation import check_constraint, validate_tools
from coordinator.requests import DEFAULT_MAX_NEW_TOKENS, ChatTurn, GenerationRequest, SpeculationChoice
from specdec.contract.errors import InvalidRequest, Unsupported
from specdec.contract.number_range import NumberRange
from specdec.contract.types import FILTER_RANGES, Mode, SamplingFilters, SamplingParams, TokenIds

MAX_STOP_STRINGS = 16
MAX_STOP_STRING_CHARACTERS = 1024
MAX_LOGPROBS = 20
MAX_ID_CHARACTERS = 128
MAX_TASK_CHARACTERS = 64
MAX_SEED = 2**64 - 1

_DEFAULT_FILTERS = SamplingFilters()

#: Version of the digest's form. A stored digest outlives the program that wrote it, so a comparison also accepts the
#: older forms (`RawGenerationParams.former_digests`). Form 1 has no prefix and hashes protobuf bytes (`wire`).
_DIGEST_VERSION = "2:"

# Ids become parts of store keys, in which braces have a meaning; people also read them in logs and URLs.
_ID_PATTERN = re.compile(rf"[A-Za-z0-9._:@/+=-]{{1,{MAX_ID_CHARACTERS}}}")


@dataclass(frozen=True, slots=True)
class ServingLimits:
    """Limits of the connected target and of the server."""

    vocabulary_size: int
    max_context_tokens: int
    max_gamma: int
    eos_token_ids: tuple[int, ...]
    default_mode: Mode
    backend: str = ""
    """Backend of the connected target; "" for our own engine."""
    unsupported_fields: tuple[str, ...] = ()
    """Fields that the backend cannot serve exactly unless they have their defaults."""


def validate_request(raw: RawGenerationParams, limits: ServingLimits) -> GenerationRequest:
    """Check a request's fields.

    Raises:
        InvalidRequest: a field is outside its limits; `field` holds its name.
        Unsupported: the target's backend cannot serve a field exactly.
    """
    session_id = _checked_id("session_id", raw.session_id)
    request_id = _checked_id("request_id", raw.request_id)
    _check_input(raw)
    check_constraint(raw.constraint)
    _check_not_negative("resume_from", raw.resume_from)
    _check_not_negative("expected_session_tokens", raw.expected_session_tokens)
    sampling = replace(_sampling(raw.sampling, limits), constraint=raw.constraint)
    is_seeded = raw.sampling.seed is not None
    _check_supported(sampling, is_seeded, limits)
    speculation = _speculation(raw.speculation, limits, must_repeat=is_seeded and not sampling.filters.is_greedy)
    check_template_arguments(raw.template_arguments_json)
    token_ids = None if raw.prompt_token_ids is None else _prompt_token_ids(raw.prompt_token_ids, limits)
    return GenerationRequest(
        session_id=session_id,
        request_id=request_id,
        sampling=sampling,
        is_seeded=is_seeded,
        speculation=speculation,
        text=None if raw.prompt is None else _prompt(raw.prompt),
        token_ids=token_ids,
        messages=None if raw.messages is None else validate_messages(raw.messages),
        template_arguments_json=raw.template_arguments_json,
        tools=None if raw.tools is None else validate_tools(raw.tools, has_messages=raw.messages is not None),
        resume_from=raw.resume_from,
        expected_session_tokens=raw.expected_session_tokens,
        priority=raw.priority,
        digest=request_digest(raw, token_ids),
        former_digests=raw.former_digests,
        adapter=raw.adapter,
    )


def validate_session_id(session_id: str) -> str:
    """Check the id of a call that reads or deletes a session. Raises InvalidRequest."""
    if not session_id:
        raise _invalid("session_id", "must be set")
    return _checked_id("session_id", session_id)


def check_detokenized(token_ids: Collection[int], vocabulary_size: int, max_tokens: int) -> None:
    """Raise InvalidRequest for token ids to detokenize that are too many, or that the vocabulary does not have."""
    if len(token_ids) > max_tokens:
        raise InvalidRequest(
            f"token_ids must hold at most the {max_tokens} tokens of the context, got {len(token_ids)}",
            reason="CONTEXT_TOO_LONG",
            field="token_ids",
            numbers={"max_context_tokens": max_tokens, "num_prompt_tokens": len(token_ids)},
        )
    _check_token_ids("token_ids", token_ids, vocabulary_size)


def check_share(share: float) -> None:
    """Raise InvalidRequest unless `share` is a share of the sessions."""
    if not 0.0 <= share <= 1.0:
        raise _invalid("share", f"must be 0 to 1, got {share}")


def _invalid(field: str, problem: str) -> InvalidRequest:
    return InvalidRequest(f"{field} {problem}", field=field)


def _checked_id(field: str, value: str) -> str:
    if value and not _ID_PATTERN.fullmatch(value):
        raise _invalid(field, f"must be at most {MAX_ID_CHARACTERS} of A-Z a-z 0-9 . _ : @ / + = -, got {value[:64]!r}")
    return value


def _check_not_negative(field: str, value: int | None) -> None:
    if value is not None and value < 0:
        raise _invalid(field, f"must be at least 0, got {value}")


def _check_input(raw: RawGenerationParams) -> None:
    """Require one input, or none in a resumption."""
    inputs = {"prompt": raw.prompt, "prompt_token_ids": raw.prompt_token_ids, "messages": raw.messages}
    kinds = [kind for kind, value in inputs.items() if value is not None]
    if raw.resume_from is not None:
        if kinds:
            raise _invalid("resume_from", f"must come without an input, got {' and '.join(kinds)} too")
        if any(given is not None for given in (raw.constraint, raw.tools, raw.adapter)):
            kept = "constraint, tools and adapter"
            raise _invalid("resume_from", f"must come without {kept}; those of the request stay in force")
        if not raw.session_id:
            raise _invalid("session_id", "must be set with resume_from")
    elif len(kinds) != 1:
        got = " and ".join(kinds) or "none"
        raise _invalid("input", f"must be one of prompt, prompt_token_ids and messages, got {got}")


def _prompt(text: str) -> str:
    if not text:
        raise _invalid("prompt", "must not be empty")
    return text


def _prompt_token_ids(ids: Collection[int], limits: ServingLimits) -> TokenIds:
    # The number is checked before the values: a loop over millions of ids would hold up every other stream.
    if len(ids) >= limits.max_context_tokens:
        raise InvalidRequest(
            f"prompt_token_ids must leave room for an output token: it holds {len(ids)} tokens, the context is "
            f"{limits.max_context_tokens}",
            reason="CONTEXT_TOO_LONG",
            field="prompt_token_ids",
            numbers={"max_context_tokens": limits.max_context_tokens, "num_prompt_tokens": len(ids)},
        )
    if not len(ids):
        raise _invalid("prompt_token_ids", "must not be empty")
    _check_token_ids("prompt_token_ids", ids, limits.vocabulary_size)
    return np.fromiter(ids, dtype=np.uint32, count=len(ids))


def _check_token_ids(field: str, ids: Iterable[int], vocabulary_size: int) -> None:
    for token_id in ids:
        if not 0 <= token_id < vocabulary_size:
            raise _invalid(field, f"must be at least 0 and below the vocabulary size {vocabulary_size}, got {token_id}")


def _sampling(raw: RawSamplingParams, limits: ServingLimits) -> SamplingParams:
    for name in ("max_new_tokens", "min_new_tokens", "logprobs"):
        _check_not_negative(f"sampling.{name}", getattr(raw, name))
    max_new_tokens = raw.max_new_tokens or DEFAULT_MAX_NEW_TOKENS
    if raw.min_new_tokens > max_new_tokens:
        raise _invalid(
            "sampling.min_new_tokens", f"must be at most max_new_tokens {max_new_tokens}, got {raw.min_new_tokens}"
        )
    if raw.seed is not None and not 0 <= raw.seed <= MAX_SEED:
        raise _invalid("sampling.seed", f"must be at least 0 and at most {MAX_SEED}, got {raw.seed}")
    if raw.logprobs is not None and raw.logprobs > MAX_LOGPROBS:
        raise _invalid("sampling.logprobs", f"must be at most {MAX_LOGPROBS}, got {raw.logprobs}")
    _check_num_ids("sampling.stop_token_ids", raw.stop_token_ids, limits)
    _check_token_ids("sampling.stop_token_ids", raw.stop_token_ids, limits.vocabulary_size)
    return SamplingParams(
        max_new_tokens=raw.max_new_tokens,
        filters=_filters(raw, limits),
        seed=raw.seed or 0,
        stop=_stop(raw.stop),
        stop_token_ids=tuple(raw.stop_token_ids),
        ignore_eos=raw.ignore_eos,
        num_logprobs=raw.logprobs,
    )


def _check_supported(sampling: SamplingParams, is_seeded: bool, limits: ServingLimits) -> None:
    """Refuse a field that the target's backend cannot serve exactly."""
    for name in limits.unsupported_fields:
        field = name.removeprefix("sampling.")
        if field == "constraint":
            is_set = sampling.constraint is not None
        elif field == "logprobs":
            is_set = sampling.num_logprobs is not None
        elif field == "seed":
            is_set = is_seeded and not sampling.filters.is_greedy
        else:
            is_set = getattr(sampling.filters, field, None) != getattr(_DEFAULT_FILTERS, field, None)
        if is_set:
            raise Unsupported(
                f"{name} cannot be served exactly by a target with the backend {limits.backend[:64]}; leave it out, "
                "or use a target with --backend own",
                field=name,
            )


def _check_num_ids(field: str, ids: Collection[int], limits: ServingLimits) -> None:
    """Check the number of ids, before a loop over them."""
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


def _filters(raw: RawSamplingParams, limits: ServingLimits) -> SamplingFilters:
    numbers: dict[str, Any] = {
        name: _number(f"sampling.{name}", getattr(raw, name), range_) for name, range_ in FILTER_RANGES.items()
    }
    if numbers["top_k"] >= limits.vocabulary_size:  # such a top-k filters nothing, so the engines are not told of it
        numbers["top_k"] = 0
    _check_num_ids("sampling.logit_bias", raw.logit_bias, limits)
    _check_token_ids("sampling.logit_bias", raw.logit_bias, limits.vocabulary_size)
    for token_id, bias in raw.logit_bias.items():
        if not math.isfinite(bias):
            raise _invalid("sampling.logit_bias", f"must hold finite values, got {bias} for token {token_id}")
    end_token_ids = sorted({*limits.eos_token_ids, *raw.stop_token_ids}) if raw.min_new_tokens else ()
    return SamplingFilters(
        **numbers,
        logit_bias=dict(sorted(raw.logit_bias.items())),
        min_new_tokens=raw.min_new_tokens,
        end_token_ids=tuple(end_token_ids),
    )


def _number(field: str, value: float | None, range_: NumberRange) -> float:
    """Return an optional number, or its default. Raises InvalidRequest unless it is finite and in its range."""
    if value is None:
        return range_.default
    if not math.isfinite(value):
        raise _invalid(field, f"must be a finite number, got {value}")
    if not range_.holds(value):
        raise _invalid(field, f"must be {range_.words}, got {value:g}")
    return type(range_.default)(value)


def _speculation(raw: RawSpeculationParams, limits: ServingLimits, *, must_repeat: bool) -> SpeculationChoice:
    """Check speculation parameters.

    Args:
        raw: as sent.
        limits: of the server.
        must_repeat: True if a seed decides the output. A request that names no mode then gets one in which draft tokens
            do not change the text: coupled, or off if that is the server's default, which gives the same text.
    """
    if raw.mode and raw.mode not in tuple(Mode):
        raise _invalid("speculation.mode", f"must be a SpeculationMode, got {raw.mode}")
    _check_not_negative("speculation.gamma", raw.gamma)
    if raw.gamma is not None and raw.gamma > limits.max_gamma:
        raise _invalid("speculation.gamma", f"must be at most {limits.max_gamma}, got {raw.gamma}")
    if len(raw.task) > MAX_TASK_CHARACTERS:
        raise _invalid("speculation.task", f"must be at most {MAX_TASK_CHARACTERS} characters, got {len(raw.task)}")
    mode = Mode(raw.mode) if raw.mode else limits.default_mode
    if must_repeat and not raw.mode and mode is not Mode.OFF:
        mode = Mode.COUPLED
    return SpeculationChoice(mode=mode, gamma=raw.gamma, draft_pool=raw.draft_pool, task=raw.task)


def request_digest(raw: RawGenerationParams, prompt_token_ids: TokenIds | None) -> str:
    """Return the digest of the fields that decide the output. Ids and what the caller already holds are left out.

    A field that was not sent adds nothing, so a new field does not change the digests of requests without it.

    Args:
        raw: a checked request: its collections are short, and its numbers are finite.
        prompt_token_ids: the request's prompt tokens, if it has any.
    """
    sent: dict[str, Any] = {"sampling": _sent_fields(raw.sampling), "speculation": _sent_fields(raw.speculation)}
    prompt = b""
    if raw.adapter is not None:
        sent["adapter"] = raw.adapter
    if raw.constraint is not None:
        sent["constraint"] = astuple(raw.constraint)
    if raw.tools is not None:
        sent["tools"] = [[astuple(tool) for tool in raw.tools.definitions], *astuple(raw.tools)[1:]]
    if raw.prompt is not None:
        sent["input"] = "prompt"
        prompt = raw.prompt.encode("utf-8", "surrogatepass")
    elif prompt_token_ids is not None:
        sent["input"] = "prompt_token_ids"
        prompt = prompt_token_ids.astype("<u4").tobytes()
    elif raw.messages is not None:
        sent["input"] = [_sent_message(turn) for turn in raw.messages]
        if raw.template_arguments_json:
            sent["template_arguments"] = raw.template_arguments_json
    # JSON contains no zero byte, so the prompt cannot be mistaken for a part of it.
    text = json.dumps(sent, sort_keys=True, separators=(",", ":")).encode() + b"\0"
    return _DIGEST_VERSION + hashlib.blake2b(text + prompt, digest_size=16).hexdigest()


def _sent_message(turn: ChatTurn) -> list[Any]:
    parts = [list(turn.content_parts)] if turn.content_parts else []
    return [turn.role, turn.content, *([turn.extra_json] if turn.extra_json else []), *parts]


def _sent_fields(raw: RawSamplingParams | RawSpeculationParams) -> dict[str, Any]:
    sent: dict[str, Any] = {}
    for field in fields(raw):
        value = getattr(raw, field.name)
        if field.name == "logit_bias":
            value = sorted([int(token_id), float(bias)] for token_id, bias in value.items()) or None
        elif field.name in ("stop", "stop_token_ids"):
            value = list(value) or None
        elif value == field.default:
            value = None
        if value is not None:
            sent[field.name] = value
    return sent
