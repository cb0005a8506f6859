"""/v1/responses: OpenAI's Responses, whose conversations the server keeps.

A response is stored with its conversation. The first response that continues it goes on in its session; a further one,
also one at the same time, or one after the session has expired, begins a new session with the same conversation.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

from fastapi import APIRouter, Request
from starlette.responses import Response

from gateway.answers import ANSWERS, ERRORS, json_response, stream
from gateway.bodies import JsonRoute
from gateway.context import Gateway
from gateway.outputs import Continued, Outputs, plan, room_of, session_options
from gateway.response_objects import ResponseEvents, ResponseShape
from gateway.schemas.common import unicode_text
from gateway.schemas.responses import ResponseRequest
from gateway.sse import while_connected
from specdec.client import AsyncClient, ChatMessage, Completion
from specdec.contract.errors import NotFound, SpecdecError
from specdec.state.stored_responses import ResponseRecord, encode_record

#: Length of `resp_` and a number of 128 bits.
_ID_CHARS = 37

_log = logging.getLogger(__name__)


def router(gateway: Gateway) -> APIRouter:
    """Return the routes of responses."""
    routes = APIRouter(tags=["OpenAI"], route_class=JsonRoute)

    @routes.post("/v1/responses", response_model=None, responses=ANSWERS)
    async def create_response(body: ResponseRequest, request: Request) -> Response:
        """Continue a conversation, and keep it for the next turn."""
        served = await gateway.upstream.served(body.model)
        model = served.require(body.model)
        body.require_supported()
        stored, client = _Stored(gateway, request), gateway.client(request)
        previous = None if body.previous_response_id is None else await stored.read(body.previous_response_id)
        messages = [*(cast(Sequence[ChatMessage], previous.messages) if previous else ()), *body.new_messages()]
        if body.store is not False:
            encode_record(ResponseRecord({}, messages, "", 0))  # refuses a conversation that is too large to store
        last_adapter = None if previous is None else served.adapter_of(previous.answer.get("model"))
        adapter = last_adapter if body.model is None else served.adapter_of(model)
        shape = ResponseShape(f"resp_{uuid.uuid4().hex}", adapter or model, int(time.time()), body)
        options = body.options(served.default_sampling)
        options["adapter"] = adapter
        options["messages"] = [*_instructions(body), *messages]
        options.update(session_options(body.session_id, body.request_id, 1))  # type: ignore[typeddict-item]
        limit = body.max_output_tokens
        options["max_new_tokens"] = await room_of(client, served, options) if limit is None else limit
        continued = None
        if previous is not None and adapter == last_adapter and (session_id := await _session_of(client, previous)):
            once = gateway.client(request, tries_again=False)
            continued = Continued(once, session_id, previous.num_tokens)
        outputs = Outputs(client, plan([None], 1, options, body.seed), gateway.metrics, model, continued)

        async def finish(completion: Completion) -> dict[str, Any]:
            answer = shape.finished(completion)
            return await stored.put(answer, messages, completion) if answer["store"] else answer

        if body.stream:
            return stream(gateway, ResponseEvents(shape, finish), outputs)
        (completion,) = await while_connected(request.receive, outputs.completions())
        return json_response(await finish(completion))

    @routes.get("/v1/responses/{response_id}", response_model=None, responses=ERRORS)
    async def retrieve_response(response_id: str, request: Request) -> Response:
        """Return a stored response."""
        return json_response((await _Stored(gateway, request).read(response_id, field="response_id")).answer)

    @routes.delete("/v1/responses/{response_id}", response_model=None, responses=ERRORS)
    async def delete_response(response_id: str, request: Request) -> Response:
        """Delete a stored response, and its session if nothing continues it."""
        stored, client = _Stored(gateway, request), gateway.client(request)
        record = await stored.read(response_id, field="response_id")
        if session_id := await _session_of(client, record):
            await client.delete_session(session_id)
        await stored.delete(response_id)
        return json_response({"id": response_id, "object": "response", "deleted": True})

    return routes


def _instructions(body: ResponseRequest) -> list[ChatMessage]:
    text = unicode_text(body.instructions or "", "instructions")
    return [{"role": "system", "content": text}] if text else []


def _turn_of(completion: Completion) -> ChatMessage:
    """Return an output as a message, for the turns that continue it."""
    turn: ChatMessage = {"role": "assistant", "content": completion.text}
    if completion.tool_calls:
        turn |= {
            "content": completion.text or None,
            "tool_calls": [call.for_message() for call in completion.tool_calls],
        }
    if completion.reasoning:
        turn["reasoning_content"] = completion.reasoning
    return turn


async def _session_of(client: AsyncClient, record: ResponseRecord) -> str | None:
    """Return the session of a response if it still ends where the response did, and so nothing continues it."""
    try:
        session = await client.get_session(record.session_id)
    except NotFound:
        return None
    is_last = session.status == "idle" and session.num_tokens == record.num_tokens
    return record.session_id if is_last else None


@dataclass(frozen=True, slots=True)
class _Stored:
    """The stored responses of a request's tenant."""

    gateway: Gateway
    request: Request

    @property
    def _tenant(self) -> str:
        return self.gateway.store_tenant(self.request)

    async def read(self, response_id: str, *, field: str = "previous_response_id") -> ResponseRecord:
        """Return a stored response. Raises NotFound."""
        is_id = len(response_id) == _ID_CHARS and response_id.isascii()
        record = await self.gateway.responses.read(self._tenant, response_id) if is_id else None
        if record is None:
            raise NotFound(
                f"{field}: the response {response_id[:128]!r} does not exist: it has expired, was deleted, or was not "
                "stored",
                reason="RESPONSE_NOT_FOUND",
                field=field,
            )
        return record

    async def put(
        self, answer: dict[str, Any], messages: Sequence[ChatMessage], completion: Completion
    ) -> dict[str, Any]:
        """Store a response for as long as its session has left; return it, with `store` false if that failed."""
        usage = completion.usage
        record = ResponseRecord(
            answer,
            [*messages, _turn_of(completion)],
            completion.session_id,
            usage.num_prompt_tokens + usage.num_output_tokens,
        )
        try:
            session = await self.gateway.client(self.request).get_session(completion.session_id)
            await self.gateway.responses.put(self._tenant, answer["id"], record, ttl_s=session.expires_in_s)
        except SpecdecError as error:
            _log.warning("cannot store a response: %s", error, extra={"response_id": answer["id"]})
            return answer | {"store": False}
        return answer

    async def delete(self, response_id: str) -> None:
        await self.gateway.responses.delete(self._tenant, response_id)
