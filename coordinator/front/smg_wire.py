"""Decodes requests of the router `smg`, and encodes the events of a generation as its messages.

The router calls a worker as it calls vLLM's engine: the messages are those of `vllm.grpc.engine`, from the package
`smg-grpc-proto`. It encodes prompts and decodes outputs itself, so both are token ids here. A decoded request goes to
`opening`; events come from a generation's `stream`, and `smg_servicer` writes their messages.
"""

from __future__ import annotations

from smg_grpc_proto.generated import vllm_engine_pb2

from coordinator.front.raw_params import RawGenerationParams, RawSamplingParams
from coordinator.requests import Event, Finished, OutputChunk, Started, TokenLogprobs
from specdec.contract.errors import InvalidRequest
from specdec.contract.types import FinishReason

_FINISH_REASONS = {
    FinishReason.STOP: "stop",
    FinishReason.STOP_STRING: "stop",
    FinishReason.LENGTH: "length",
}

#: Seeds are signed here, and unsigned in the coordinator.
_SEEDS = 1 << 64


def decode_request(message: vllm_engine_pb2.GenerateRequest, max_context_tokens: int) -> RawGenerationParams:
    """Decode a request.

    Raises:
        InvalidRequest: the input is not tokenized, the output limit is 0, or a field is not supported.
    """
    _require_supported(message)
    params, token_ids = message.sampling_params, message.tokenized.input_ids
    if params.HasField("max_tokens") and not params.max_tokens:
        raise _refused("max_tokens", "must be at least 1, got 0")
    room = max(1, max_context_tokens - len(token_ids))
    return RawGenerationParams(
        request_id=message.request_id,
        prompt_token_ids=token_ids,
        sampling=_decode_sampling(params, params.max_tokens or room),
    )


def _decode_sampling(params: vllm_engine_pb2.SamplingParams, max_new_tokens: int) -> RawSamplingParams:
    """Decode sampling parameters. As in vLLM, a `top_p` or a `repetition_penalty` of 0 was not sent."""
    return RawSamplingParams(
        max_new_tokens=max_new_tokens,
        min_new_tokens=params.min_tokens,
        temperature=params.temperature if params.HasField("temperature") else None,
        top_p=params.top_p or None,
        top_k=params.top_k,
        min_p=params.min_p,
        repetition_penalty=params.repetition_penalty or None,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        logit_bias=params.logit_bias,
        seed=params.seed % _SEEDS if params.HasField("seed") else None,
        stop=params.stop,
        stop_token_ids=params.stop_token_ids,
        ignore_eos=params.ignore_eos,
        logprobs=params.logprobs if params.HasField("logprobs") else None,
    )


def _require_supported(message: vllm_engine_pb2.GenerateRequest) -> None:
    """Refuse what would change the output and cannot be honoured."""
    params = message.sampling_params
    if message.WhichOneof("input") != "tokenized":
        raise InvalidRequest("tokenized: the prompt must be sent as token ids", field="tokenized")
    for name in ("mm_inputs", "media_refs"):
        if message.HasField(name):
            raise InvalidRequest(f"{name} is not supported: prompts are text", field=name)
    if constraint := params.WhichOneof("constraint"):
        raise _refused(constraint, "is not supported: there are no grammars yet")
    if params.n > 1:
        raise _refused("n", f"must be 1, got {params.n}: a request has one output")
    if params.HasField("prompt_logprobs"):
        raise _refused("prompt_logprobs", "is not supported: logprobs are those of output tokens")
    if params.HasField("truncate_prompt_tokens"):
        raise _refused("truncate_prompt_tokens", "is not supported: shorten the prompt")


def _refused(name: str, problem: str) -> InvalidRequest:
    return InvalidRequest(f"sampling_params.{name} {problem}", field=f"sampling_params.{name}")


class Answer:
    """The messages of one output: a chunk for each round and an end, or all in one message where it is not streamed."""

    def __init__(self, *, is_streamed: bool) -> None:
        self._is_streamed = is_streamed
        self._num_prompt_tokens = 0
        self._num_tokens = 0
        self._complete = vllm_engine_pb2.GenerateComplete()

    def message_of(self, event: Event) -> vllm_engine_pb2.GenerateResponse | None:
        """Return the message to send after an event; None if there is none."""
        if isinstance(event, OutputChunk):
            return self._add(event)
        if isinstance(event, Started):
            self._num_prompt_tokens = event.num_prompt_tokens
            return None
        return self._finished(event)

    def aborted(self) -> vllm_engine_pb2.GenerateResponse:
        """Return the last message of an output that was aborted."""
        return self._end("abort")

    def _add(self, chunk: OutputChunk) -> vllm_engine_pb2.GenerateResponse | None:
        logprobs = chunk.provenance.logprobs[: len(chunk.token_ids)] if chunk.provenance is not None else ()
        self._num_tokens = chunk.end
        if not self._is_streamed:
            self._complete.output_ids.extend(chunk.token_ids)
            _add_logprobs(self._complete, chunk.token_ids, logprobs)
            return None
        message = vllm_engine_pb2.GenerateStreamChunk(
            token_ids=chunk.token_ids,
            prompt_tokens=self._num_prompt_tokens,
            completion_tokens=len(chunk.token_ids),
        )
        _add_logprobs(message, chunk.token_ids, logprobs)
        return vllm_engine_pb2.GenerateResponse(chunk=message)

    def _finished(self, finished: Finished) -> vllm_engine_pb2.GenerateResponse:
        stats = finished.stats
        self._complete.cached_tokens = stats.num_cached_prompt_tokens
        self._complete.spec_draft_tokens = stats.num_draft_tokens
        self._complete.spec_accepted_tokens = stats.num_accepted_tokens
        return self._end(_FINISH_REASONS[finished.reason])

    def _end(self, reason: str) -> vllm_engine_pb2.GenerateResponse:
        self._complete.finish_reason = reason
        self._complete.prompt_tokens = self._num_prompt_tokens
        self._complete.completion_tokens = self._num_tokens
        return vllm_engine_pb2.GenerateResponse(complete=self._complete)


def _add_logprobs(
    message: vllm_engine_pb2.GenerateStreamChunk | vllm_engine_pb2.GenerateComplete,
    token_ids: tuple[int, ...],
    logprobs: tuple[TokenLogprobs, ...],
) -> None:
    """Add the logprobs of tokens to a message. Without any, the field stays unset."""
    for token_id, of_token in zip(token_ids, logprobs, strict=False):
        message.output_logprobs.token_ids.append(token_id)
        message.output_logprobs.token_logprobs.append(of_token.logprob)
        top = message.output_logprobs.top_logprobs.add()
        top.token_ids.extend(each.token_id for each in of_token.top)
        top.values.extend(each.logprob for each in of_token.top)
