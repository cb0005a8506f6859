"""/v1/messages and /v1/messages/count_tokens, in the form of Anthropic's Messages API."""

from __future__ import annotations

import uuid
from collections.abc import Sequence

from fastapi import APIRouter, Request
from starlette.responses import Response

from gateway.answers import ANTHROPIC_ANSWERS, ANTHROPIC_ERRORS, json_response, stream
from gateway.bodies import JsonRoute
from gateway.context import Gateway
from gateway.message_objects import MessageEvents, message_object
from gateway.outputs import Outputs, plan, session_options
from gateway.schemas.messages import CountTokensRequest, MessagesRequest
from gateway.sse import while_connected
from specdec.client import AsyncClient, Completion


def router(gateway: Gateway) -> APIRouter:
    """Return the routes of messages."""
    routes = APIRouter(tags=["Anthropic"], route_class=JsonRoute)

    @routes.post("/v1/messages", response_model=None, responses=ANTHROPIC_ANSWERS)
    async def create_message(body: MessagesRequest, request: Request) -> Response:
        """Continue a conversation."""
        served = await gateway.upstream.served(body.model)
        model = served.require(body.model)
        body.require_supported()
        client = gateway.client(request)
        options = body.options(served.default_sampling)
        options["adapter"] = served.adapter_of(body.model)
        options.update(session_options(body.session_id, body.request_id, 1))  # type: ignore[typeddict-item]
        outputs = Outputs(client, plan([None], 1, options, body.seed), gateway.metrics, model)
        message_id = f"msg_{uuid.uuid4().hex}"

        async def find_stop(completion: Completion) -> str | None:
            return await _stop_sequence(client, body.stops, completion)

        if body.stream:
            return stream(gateway, MessageEvents(message_id, model, body, find_stop), outputs)
        (completion,) = await while_connected(request.receive, outputs.completions())
        return json_response(message_object(message_id, model, body, completion, await find_stop(completion)))

    @routes.post("/v1/messages/count_tokens", response_model=None, responses=ANTHROPIC_ERRORS)
    async def count_message_tokens(body: CountTokensRequest, request: Request) -> Response:
        """Return the number of tokens of a conversation."""
        (await gateway.upstream.served(body.model)).require(body.model)
        body.require_supported()
        token_ids = await gateway.client(request).tokenize(
            messages=body.conversation(),
            chat_template_kwargs=body.template_arguments(),
            tools=body.definitions(),
        )
        return json_response({"input_tokens": len(token_ids)})

    return routes


async def _stop_sequence(client: AsyncClient, stops: Sequence[str], completion: Completion) -> str | None:
    """Return the text before which an output ended, or None for another end.

    The output's tokens reach to the one that completed the text, and its own text ends before.
    """
    if completion.finish_reason != "stop_string":
        return None
    if len(stops) == 1:
        return stops[0]
    whole = await client.detokenize(completion.token_ids)
    return next((stop for stop in stops if whole.startswith(stop, len(completion.text))), None)
