"""Builds a `GenerateRequest` from the keyword arguments of `generate`.

The server checks the ranges of values, and its errors name the field and the limit. This module refuses what protobuf
would change silently or refuse with a traceback: two inputs at once, text that is not valid Unicode, numbers of the
wrong type, and names of options that other SDKs use.
"""

from __future__ import annotations

import difflib
import uuid
from collections.abc import Mapping, Sequence
from typing import Any, TypedDict, TypeVar

from google.protobuf.message import Message

from specdec.client.fields import assign, assign_biases, assign_seed, extend
from specdec.client.messages import ChatMessage, fill_messages
from specdec.client.tools import fill_tools
from specdec.contract.constraint import Constraint
from specdec.contract.errors import InvalidRequest
from specdec.contract.types import FILTER_RANGES, Mode
from specdec.v1 import coordinator_pb2 as pb

#: Fields of `SamplingParams` that are set as they are given.
_SAMPLING_SCALARS = ("max_new_tokens", "min_new_tokens", *FILTER_RANGES, "ignore_eos", "logprobs")

MessageT = TypeVar("MessageT", bound=Message)

Input = str | Sequence[ChatMessage] | None
"""First argument of `generate`: a prompt, or messages. None: the input is among the options."""


class GenerateOptions(TypedDict, total=False):
    """Options of `generate`. An entry that is absent or None means the server's default."""

    prompt_token_ids: Sequence[int] | None
    """Input as token ids, instead of text."""
    messages: Sequence[ChatMessage] | None
    """Input as the whole conversation, oldest message first, instead of text."""
    chat_template_kwargs: Mapping[str, Any] | None
    """Further variables of the chat template, such as `enable_thinking`; JSON values, only with messages."""
    session_id: str | None
    """Session to continue. None: a new session."""
    adapter: str | None
    """Name of an adapter that the targets serve (`info().adapters`); "": the base model. None: that of the session, of
    a new session the base model."""
    expected_session_tokens: int | None
    """Number of tokens that the session must hold before this turn, else SessionLost; 0: the session must be new. A
    client that received the session's last answer sets it by itself."""
    request_id: str | None
    """Idempotency key within the session. None: the client makes one."""
    max_new_tokens: int | None
    min_new_tokens: int | None
    temperature: float | None
    """0 selects greedy decoding."""
    top_p: float | None
    top_k: int | None
    min_p: float | None
    repetition_penalty: float | None
    presence_penalty: float | None
    frequency_penalty: float | None
    logit_bias: Mapping[int, float] | None
    """Value to add to the logit of each token id."""
    seed: int | None
    """Seed of the draws, at least -2^63 and below 2^64; it counts modulo 2^64."""
    stop: str | Sequence[str] | None
    stop_token_ids: Sequence[int] | None
    ignore_eos: bool | None
    logprobs: int | None
    """Number n of top tokens whose log-probability is returned beside that of the emitted token. They are `logprob`
    and `top_logprobs` in `Chunk.details` and `Completion.details`, whose other fields are then filled as well."""
    constraint: Constraint | None
    """Form that the output must have, such as `Constraint.json_schema({...})`. None: any."""
    tools: Sequence[Mapping[str, Any]] | None
    """Tools that the output may call, in OpenAI's form or as its function objects alone; only with messages."""
    tool_choice: str | Mapping[str, Any] | None
    """auto | none | required, or OpenAI's object that names a tool. None: auto."""
    parallel_tool_calls: bool | None
    """False allows one call. None: True."""
    mode: Mode | str | None
    """Verification mode: off | rejection | block | coupled. None: coupled with a seed, else the server's default."""
    gamma: int | None
    """Number of draft tokens per round. None: the server chooses."""
    draft_pool: str | None
    task: str | None
    """Label of the kind of request, for statistics and routing; at most 64 characters."""
    priority: int | None
    """Place in the server's queue among the requests of the same tenant: lower values go first. None: 0."""
    provenance: bool | None
    """True fills `Chunk.details`: source, p, q, draft pool and text of each token."""
    timeout: float | None
    """Seconds that the call may take until its last token, retries included; then DeadlineExceeded is raised, whose
    `partial` has the tokens received so far. None: the client's `timeout`."""
    traceparent: str | None
    """W3C trace context of the caller, which the server's trace of the request continues."""


def build_request(prompt: Input, options: GenerateOptions) -> pb.GenerateRequest:
    """Build the request of one `generate` call.

    The session and request ids are always set, so that a retry with the same message is idempotent.

    Raises:
        InvalidRequest: there is not exactly one input, or a value does not fit its field.
        TypeError: an option does not exist.
    """
    unknown = options.keys() - GenerateOptions.__annotations__.keys()
    if unknown:
        raise TypeError(
            f"generate() got unexpected keyword arguments: {', '.join(map(_with_suggestion, sorted(unknown)))}"
        )
    request = pb.GenerateRequest(return_provenance=bool(options.get("provenance")))
    assign(request, "session_id", options.get("session_id") or uuid.uuid4().hex)
    assign(request, "request_id", options.get("request_id") or uuid.uuid4().hex)
    _assign_given(request, ("expected_session_tokens", "priority", "adapter"), options)
    _set_input(request, prompt, options)
    _set_sampling(request.sampling, options)
    _set_speculation(request.speculation, options)
    if (constraint := options.get("constraint")) is not None:
        if not isinstance(constraint, Constraint):
            raise InvalidRequest(
                f"constraint must be a specdec.Constraint, got {type(constraint).__name__}", field="constraint"
            )
        constraint.check_size()
        assign(request.constraint, "kind", int(constraint.kind), "constraint.")
        assign(request.constraint, "text", constraint.text, "constraint.")
        request.constraint.is_lenient = constraint.is_lenient
    _set_tools(request, options)
    return request


def build_tokenize_request(
    text: str | None,
    messages: Sequence[ChatMessage] | None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    tools: Sequence[Mapping[str, Any]] | None = None,
) -> pb.TokenizeRequest:
    """Build a `TokenizeRequest` from exactly one of text and messages.

    Raises:
        InvalidRequest: both are given or none is, or a text comes with `chat_template_kwargs` or `tools`.
    """
    _require_messages(messages, chat_template_kwargs)
    if tools and messages is None:
        raise InvalidRequest("tools needs messages", field="tools")
    if (text is None) == (messages is None):
        raise InvalidRequest("give exactly one of text and messages", field="input")
    request = pb.TokenizeRequest()
    if text is not None:
        assign(request, "text", text)
    else:
        fill_messages(request.messages, messages or (), chat_template_kwargs)
        if tools:
            fill_tools(request.tools, tools, None, None)
    return request


def build_detokenize_request(token_ids: Sequence[int], *, skip_special_tokens: bool) -> pb.DetokenizeRequest:
    """Build a `DetokenizeRequest`. Raises InvalidRequest for an id that is not a whole number of 32 bits."""
    request = pb.DetokenizeRequest(keep_special_tokens=not skip_special_tokens)
    extend(request, "token_ids", token_ids)
    return request


def _require_messages(messages: object, chat_template_kwargs: object) -> None:
    if chat_template_kwargs is not None and messages is None:
        raise InvalidRequest("chat_template_kwargs needs messages", field="chat_template_kwargs")


def _with_suggestion(name: str) -> str:
    """Return the name of an unknown option, with the nearest known one in brackets."""
    alike = difflib.get_close_matches(name, GenerateOptions.__annotations__, n=1)
    return f"{name} (did you mean {alike[0]}?)" if alike else name


def _set_input(request: pb.GenerateRequest, prompt: Input, options: GenerateOptions) -> None:
    prompt_token_ids, messages = options.get("prompt_token_ids"), options.get("messages")
    if prompt is not None and not isinstance(prompt, str):
        if messages is None:
            prompt, messages = None, _as_messages(prompt)
        else:
            raise InvalidRequest("give messages once: as the first argument or by name", field="messages")
    given = [
        name
        for name, value in (("prompt", prompt), ("prompt_token_ids", prompt_token_ids), ("messages", messages))
        if value is not None
    ]
    if len(given) != 1:
        what = " and ".join(given) if given else "none"
        raise InvalidRequest(f"give exactly one of prompt, prompt_token_ids and messages (got {what})", field="input")
    _require_messages(messages, options.get("chat_template_kwargs"))
    if prompt is not None:
        assign(request, "prompt", prompt)
    elif prompt_token_ids is not None:
        request.prompt_token_ids.SetInParent()  # an empty list is still this input
        extend(request.prompt_token_ids, "ids", prompt_token_ids, "prompt_token_ids.")
    elif messages is not None:
        fill_messages(request.messages, messages, options.get("chat_template_kwargs"))


def _as_messages(prompt: Any) -> Sequence[ChatMessage]:
    """Return a first argument that is not a text as messages. Raises InvalidRequest if it is something else."""
    if isinstance(prompt, Sequence) and all(isinstance(item, Mapping) for item in prompt):
        return prompt
    raise InvalidRequest(
        f"prompt must be a text or a list of messages, got {type(prompt).__name__}; token ids go to prompt_token_ids",
        field="prompt",
    )


def _set_sampling(sampling: pb.SamplingParams, options: GenerateOptions) -> None:
    _assign_given(sampling, _SAMPLING_SCALARS, options, "sampling.")
    if options.get("seed") is not None:
        assign_seed(sampling, "seed", options.get("seed"), "sampling.")
    stop = options.get("stop") or ()
    extend(sampling, "stop", (stop,) if isinstance(stop, str) else stop, "sampling.")
    extend(sampling, "stop_token_ids", options.get("stop_token_ids") or (), "sampling.")
    assign_biases(sampling, "logit_bias", options.get("logit_bias") or {}, "sampling.")


def _set_speculation(speculation: pb.SpeculationParams, options: GenerateOptions) -> None:
    mode = options.get("mode")
    if isinstance(mode, str):
        if mode.upper() not in Mode.__members__:
            names = ", ".join(name.lower() for name in Mode.__members__)
            raise InvalidRequest(f"speculation.mode must be one of {names} (got {mode!r})", field="speculation.mode")
        mode = Mode[mode.upper()]
    if mode is not None:
        assign(speculation, "mode", int(mode), "speculation.")
    _assign_given(speculation, ("gamma", "draft_pool", "task"), options, "speculation.")


def _set_tools(request: pb.GenerateRequest, options: GenerateOptions) -> None:
    tools = options.get("tools")
    if tools:
        fill_tools(request.tools, tools, options.get("tool_choice"), options.get("parallel_tool_calls"))
        return
    for name in ("tool_choice", "parallel_tool_calls"):
        if options.get(name) not in (None, "none", "auto"):
            raise InvalidRequest(f"{name} needs tools", field=name)


def _assign_given(message: Message, names: Sequence[str], options: Mapping[str, Any], prefix: str = "") -> None:
    """Set the fields whose options are given."""
    for name in names:
        if options.get(name) is not None:
            assign(message, name, options[name], prefix)


def build_message(kind: type[MessageT], **fields: Any) -> MessageT:
    """Build a message from plain fields. Raises InvalidRequest, which names a field whose value does not fit."""
    message = kind()
    for name, value in fields.items():
        assign(message, name, value)
    return message
