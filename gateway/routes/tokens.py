"""/tokenize and /detokenize, in vLLM's form."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Request
from pydantic import Field
from starlette.responses import Response

from gateway.answers import ERRORS, json_response
from gateway.bodies import JsonRoute
from gateway.context import Gateway
from gateway.schemas.chat import MAX_MESSAGES, Message
from gateway.schemas.common import Body, Flag, FreeObject, Items, Text, TokenIds, refuse
from gateway.schemas.tools import ChatTools, chat_definitions
from specdec.contract.errors import InvalidRequest


class TokenizeRequest(Body):
    """A text or a conversation."""

    model: Text | None = None
    """Name of the model; absent: the one that is served."""
    prompt: Text | None = None
    """A text."""
    messages: Annotated[Items[Message], Field(max_length=MAX_MESSAGES)] | None = None
    """A conversation, in place of a text."""
    add_special_tokens: Flag | None = None
    """Only true is supported for a text: the tokens are those that a new session would hold."""
    chat_template_kwargs: FreeObject | None = None
    """Further variables of the chat template."""
    tools: ChatTools | None = None
    """Functions that the chat template tells the model of."""


class DetokenizeRequest(Body):
    """Token ids."""

    model: Text | None = None
    """Name of the model; absent: the one that is served."""
    tokens: TokenIds
    """Token ids."""
    skip_special_tokens: Flag = False
    """Leave special tokens out of the text."""


def router(gateway: Gateway) -> APIRouter:
    """Return the routes of tokens."""
    routes = APIRouter(tags=["tokens"], route_class=JsonRoute)

    @routes.post("/tokenize", response_model=None, responses=ERRORS)
    async def tokenize(body: TokenizeRequest, request: Request) -> Response:
        """Return the token ids of a text or a conversation, as a new session would hold them."""
        served = await gateway.upstream.served(body.model)
        served.require(body.model)
        if (body.prompt is None) == (body.messages is None):
            raise InvalidRequest("give exactly one of prompt and messages", field="prompt")
        if body.prompt is not None and body.add_special_tokens is False:
            raise refuse("add_special_tokens", "the tokens are those that a new session would hold")
        token_ids = await gateway.client(request).tokenize(
            body.prompt,
            messages=None if body.messages is None else [message.for_template() for message in body.messages],
            chat_template_kwargs=body.chat_template_kwargs,
            tools=chat_definitions(body.tools),
        )
        return json_response(
            {"count": len(token_ids), "max_model_len": served.max_context_tokens, "tokens": list(token_ids)}
        )

    @routes.post("/detokenize", response_model=None, responses=ERRORS)
    async def detokenize(body: DetokenizeRequest, request: Request) -> Response:
        """Return the text of token ids."""
        (await gateway.upstream.served(body.model)).require(body.model)
        text = await gateway.client(request).detokenize(body.tokens, skip_special_tokens=body.skip_special_tokens)
        return json_response({"prompt": text})

    return routes
