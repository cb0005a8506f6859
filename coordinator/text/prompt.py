"""Encodes the input of a turn after the tokens that the session holds, and limits the length of the output.

`generation/turn_preparer` writes the tokens into the session's log. `front/validation` has already checked everything
that needs no tokens.
"""

from __future__ import annotations

import secrets
import threading
from dataclasses import dataclass, replace

import numpy as np

from coordinator.requests import DEFAULT_MAX_NEW_TOKENS, GenerationRequest
from coordinator.text.kept_tokens import common_text
from coordinator.text.tokenizer import ServedTokenizer
from specdec.contract.errors import InvalidRequest
from specdec.contract.types import SamplingParams, TokenIds


@dataclass(frozen=True, slots=True)
class Prompt:
    """Tokens of a session before the output of a turn begins."""

    keep: int
    """Number of leading tokens of the session that stay."""
    new_token_ids: TokenIds
    field: str
    """Request field that holds the input."""

    @property
    def num_tokens(self) -> int:
        return self.keep + len(self.new_token_ids)


def encode_prompt(
    request: GenerationRequest,
    held: TokenIds,
    tokenizer: ServedTokenizer,
    max_context_tokens: int | None = None,
    *,
    given_up: threading.Event | None = None,
) -> Prompt:
    """Encode the input of a turn.

    A text or token ids are appended to the session. A conversation keeps the tokens of the session with whose
    text it begins.

    Args:
        request: a request with an input.
        held: uint32 [n]: tokens of the session; empty for a new session, and only then special tokens are added.
        max_context_tokens: length of the context. A text that cannot fit is refused before it is encoded;
            `resolve_sampling` checks the exact number of tokens.
        given_up: set when the caller no longer waits for the result.

    Raises:
        InvalidRequest: the input is empty or far too long (CONTEXT_TOO_LONG), the tokenizer or the template cannot take
            it, or a conversation meets a model without a template (NO_CHAT_TEMPLATE).
        GivenUp: `given_up` was set.
    """
    max_tokens = None if max_context_tokens is None else max_context_tokens - 1
    if request.messages is not None:
        turns = [turn.as_dict() for turn in request.messages]
        encoded = tokenizer.encode_chat(
            turns,
            template_arguments_json=request.template_arguments_json,
            tools=request.tools,
            max_tokens=max_tokens,
            given_up=given_up,
        )
        whole = np.asarray(encoded, np.uint32)
        keep, num_used = common_text(held, whole, tokenizer)
        prompt = Prompt(keep, whole[num_used:], "messages")
    elif request.token_ids is not None:
        prompt = Prompt(len(held), request.token_ids, "prompt_token_ids")
    else:
        token_ids = tokenizer.encode(
            request.text or "",
            add_special_tokens=len(held) == 0,
            continues=len(held) > 0,
            max_tokens=None if max_tokens is None else max_tokens - len(held),
            given_up=given_up,
        )
        prompt = Prompt(len(held), np.asarray(token_ids, np.uint32), "prompt")
    if prompt.num_tokens == 0:
        raise InvalidRequest(f"{prompt.field} must not be empty", field=prompt.field)
    return prompt


def resolve_sampling(request: GenerationRequest, prompt: Prompt, max_context_tokens: int) -> SamplingParams:
    """Resolve what depends on the session: the output limit and, for an unseeded request, the seed.

    Raises:
        InvalidRequest: CONTEXT_TOO_LONG; the message names the field at fault and the limit.
    """
    room, max_new_tokens = max_context_tokens - prompt.num_tokens, request.sampling.max_new_tokens
    numbers = {"max_context_tokens": max_context_tokens, "num_prompt_tokens": prompt.num_tokens}
    if room < 1:
        raise InvalidRequest(
            f"{prompt.field} must leave room for an output token: the session would hold {prompt.num_tokens} tokens, "
            f"the context is {max_context_tokens}",
            reason="CONTEXT_TOO_LONG",
            field=prompt.field,
            numbers=numbers | {"max_new_tokens": max_new_tokens},
        )
    if max_new_tokens > room:
        raise InvalidRequest(
            f"sampling.max_new_tokens must be at most {room} after {prompt.num_tokens} tokens in a context of "
            f"{max_context_tokens}, got {max_new_tokens}",
            reason="CONTEXT_TOO_LONG",
            field="sampling.max_new_tokens",
            numbers=numbers | {"max_new_tokens": max_new_tokens},
        )
    return replace(
        request.sampling,
        max_new_tokens=max_new_tokens or min(DEFAULT_MAX_NEW_TOKENS, room),
        seed=request.sampling.seed if request.is_seeded else secrets.randbits(64),
    )
