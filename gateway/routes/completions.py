"""/v1/completions."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from gateway.answers import ANSWERS, json_response, provenance_of, stream
from gateway.bodies import JsonRoute
from gateway.chunks import FINGERPRINT_CHARS, ChunkOptions, CompletionChunks
from gateway.context import Gateway, wants_event_ids
from gateway.logprobs import completion_logprobs
from gateway.outputs import Outputs, plan, session_options
from gateway.schemas.common import StreamOptions
from gateway.schemas.completions import CompletionRequest, Prompt
from gateway.sse import while_connected
from gateway.usage import finish_reason_of, metrics_object, usage_of, warnings_of
from specdec.client import AsyncClient, Completion


def router(gateway: Gateway) -> APIRouter:
    """Return the routes of completions."""
    routes = APIRouter(tags=["OpenAI"], route_class=JsonRoute)

    @routes.post("/v1/completions", response_model=None, responses=ANSWERS)
    async def create_completion(body: CompletionRequest, request: Request) -> Response:
        """Continue one or several prompts."""
        served = await gateway.upstream.served(body.model)
        model = served.require(body.model)
        body.require_supported()
        client = gateway.client(request)
        prompts = body.prompts()
        num_outputs = len(prompts) * body.num_outputs
        options = body.options(served.default_sampling)
        options["adapter"] = served.adapter_of(body.model)
        options.update(session_options(body.session_id, body.request_id, num_outputs))  # type: ignore[typeddict-item]
        options["max_new_tokens"] = body.max_new_tokens
        first_texts = [await _text_of(client, prompt) for prompt in prompts] if body.echo else []
        outputs = Outputs(client, plan(prompts, body.num_outputs, options, body.seed), gateway.metrics, model)
        answer = f"cmpl-{uuid.uuid4().hex}"
        if body.stream:
            encoder = CompletionChunks(
                ChunkOptions(
                    answer,
                    model,
                    int(time.time()),
                    num_outputs=num_outputs,
                    outputs_per_prompt=body.num_outputs,
                    stream_options=body.stream_options or StreamOptions(),
                    has_logprobs=body.logprobs is not None,
                    has_provenance=bool(body.return_provenance),
                    has_metrics=body.wants_metrics,
                    has_event_ids=wants_event_ids(request),
                    first_texts=first_texts,
                )
            )
            return stream(gateway, encoder, outputs)
        completions = await while_connected(request.receive, outputs.completions())
        return json_response(_answer(answer, model, body, completions, first_texts))

    return routes


async def _text_of(client: AsyncClient, prompt: Prompt) -> str:
    return prompt if isinstance(prompt, str) else await client.detokenize(prompt)


def _answer(
    answer_id: str, model: str, body: CompletionRequest, completions: Sequence[Completion], first_texts: Sequence[str]
) -> dict[str, Any]:
    choices = []
    for index, completion in enumerate(completions):
        first_text = first_texts[index // body.num_outputs] if first_texts else ""
        choices.append(_choice(index, body, completion, first_text))
    answer = {
        "id": answer_id,
        "object": "text_completion",
        "created": int(time.time()),
        "model": completions[0].adapter or model,
        "system_fingerprint": completions[0].target_fingerprint[:FINGERPRINT_CHARS],
        "session_id": completions[0].session_id,
        "choices": choices,
        "usage": usage_of(completions, body.num_outputs),
    }
    answer |= warnings_of(completions)
    return answer | ({"metrics": metrics_object(completions)} if body.wants_metrics else {})


def _choice(index: int, body: CompletionRequest, completion: Completion, first_text: str) -> dict[str, Any]:
    return {
        "index": index,
        "text": first_text + completion.text,
        "logprobs": None if body.logprobs is None else completion_logprobs(completion.details, 0),
        "finish_reason": finish_reason_of(completion),
        "session_id": completion.session_id,
    } | (provenance_of(completion) if body.return_provenance else {})
