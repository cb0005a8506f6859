"""/v1/chat/completions: a request becomes outputs of `gateway.outputs`, and these become chunks or one answer."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from gateway.answers import ANSWERS, json_response, provenance_of, stream
from gateway.bodies import JsonRoute
from gateway.chunks import FINGERPRINT_CHARS, ChatChunks, ChunkOptions, reasoning_fields
from gateway.context import Gateway, wants_event_ids
from gateway.logprobs import chat_logprobs
from gateway.outputs import Outputs, plan, room_of, session_options
from gateway.schemas.chat import ChatRequest
from gateway.schemas.common import StreamOptions
from gateway.sse import while_connected
from gateway.usage import finish_reason_of, metrics_object, usage_of, warnings_of
from specdec.client import Completion


def router(gateway: Gateway) -> APIRouter:
    """Return the routes of chat completions."""
    routes = APIRouter(tags=["OpenAI"], route_class=JsonRoute)

    @routes.post("/v1/chat/completions", response_model=None, responses=ANSWERS)
    async def create_chat_completion(body: ChatRequest, request: Request) -> Response:
        """Continue a conversation."""
        served = await gateway.upstream.served(body.model)
        model = served.require(body.model)
        body.require_supported()
        client = gateway.client(request)
        options = body.options(served.default_sampling)
        options["adapter"] = served.adapter_of(body.model)
        options.update(session_options(body.session_id, body.request_id, body.num_outputs))  # type: ignore[typeddict-item]
        limit = body.max_new_tokens
        options["max_new_tokens"] = await room_of(client, served, options) if limit is None else limit
        outputs = Outputs(client, plan([None], body.num_outputs, options, body.seed), gateway.metrics, model)
        answer = f"chatcmpl-{uuid.uuid4().hex}"
        if body.stream:
            encoder = ChatChunks(
                ChunkOptions(
                    answer,
                    model,
                    int(time.time()),
                    num_outputs=body.num_outputs,
                    outputs_per_prompt=body.num_outputs,
                    stream_options=body.stream_options or StreamOptions(),
                    has_logprobs=bool(body.logprobs),
                    has_provenance=bool(body.return_provenance),
                    has_metrics=body.wants_metrics,
                    has_event_ids=wants_event_ids(request),
                )
            )
            return stream(gateway, encoder, outputs)
        completions = await while_connected(request.receive, outputs.completions())
        return json_response(_answer(answer, model, body, completions))

    return routes


def _answer(answer_id: str, model: str, body: ChatRequest, completions: Sequence[Completion]) -> dict[str, Any]:
    answer = {
        "id": answer_id,
        "object": "chat.completion",
        "created": int(time.time()),
        "model": completions[0].adapter or model,
        "system_fingerprint": completions[0].target_fingerprint[:FINGERPRINT_CHARS],
        "session_id": completions[0].session_id,
        "choices": [_choice(index, body, completion) for index, completion in enumerate(completions)],
        "usage": usage_of(completions, body.num_outputs),
    }
    answer |= warnings_of(completions)
    return answer | ({"metrics": metrics_object(completions)} if body.wants_metrics else {})


def _choice(index: int, body: ChatRequest, completion: Completion) -> dict[str, Any]:
    return {
        "index": index,
        "message": _message(completion),
        "logprobs": chat_logprobs(completion.details) if body.logprobs else None,
        "finish_reason": finish_reason_of(completion),
        "session_id": completion.session_id,
    } | (provenance_of(completion) if body.return_provenance else {})


def _message(completion: Completion) -> dict[str, Any]:
    """Return the message; its text is null if it holds calls alone."""
    calls = [call.for_message() for call in completion.tool_calls]
    return {
        "role": "assistant",
        "content": (completion.text or None) if calls else completion.text,
        "refusal": None,
        **({"tool_calls": calls} if calls else {}),
        **(reasoning_fields(completion.reasoning) if completion.reasoning else {}),
    }
