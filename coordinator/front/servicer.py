"""The coordinator's gRPC calls: where a request comes in, and where each of its events goes out.

A request is read by `wire`, checked by `validation` and opened by `generation/generation_service`; the events of the
generation come back as a subscription to its `stream`, and go to the client through `wire`. Not here: error statuses
(`specdec.rpc`). Built by `__main__`.
"""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from typing import Any

import grpc

import specdec
from coordinator.front.validation import (
    ServingLimits,
    check_share,
    validate_messages,
    validate_request,
    validate_session_id,
)
from coordinator.front.wire import (
    decode_messages,
    decode_request,
    encode_event,
    encode_pools,
    encode_promotion,
    encode_session,
)
from coordinator.generation.generation_service import GenerationService
from coordinator.replicas.pool import ReplicaPools
from coordinator.text.text_process import in_thread
from coordinator.text.tokenizer import ServedTokenizer
from specdec.errors import InvalidRequest, Unavailable
from specdec.types import Mode
from specdec.v1 import coordinator_pb2, coordinator_pb2_grpc

#: Of how many tokens a text to tokenize may be, before any target replica has said how many it holds.
_MAX_TOKENS_UNTIL_CONNECTED = 1 << 15


class CoordinatorServicer(coordinator_pb2_grpc.CoordinatorServiceServicer):
    """Serves clients. Use from one event loop."""

    def __init__(
        self, generations: GenerationService, pools: ReplicaPools, tokenizer: ServedTokenizer, default_mode: Mode
    ) -> None:
        self._generations = generations
        self._pools = pools
        self._tokenizer = tokenizer
        self._default_mode = default_mode

    def add_to(self, server: grpc.aio.Server) -> None:
        """Registers the service on a server that has not started."""
        coordinator_pb2_grpc.add_CoordinatorServiceServicer_to_server(self, server)

    async def Generate(self, request: coordinator_pb2.GenerateRequest, context: Any) -> None:  # noqa: N802
        """Writes by itself instead of yielding: a generator less for every chunk to pass."""
        subscription = await self._generations.open(validate_request(decode_request(request), self._limits()))
        # Logprobs travel in the details; one who resumes the request does not ask for them again.
        num_logprobs = subscription.identity.parameters.sampling.num_logprobs
        with_details = request.return_provenance or num_logprobs is not None
        try:
            async with aclosing(subscription.events()) as events:
                async for event in events:
                    await context.write(encode_event(event, with_details=with_details))
        except asyncio.CancelledError:
            if subscription.behind is None or (task := asyncio.current_task()) is None:
                raise
            task.uncancel()
            raise subscription.behind from None
        finally:
            subscription.close()

    async def GetSession(  # noqa: N802
        self, request: coordinator_pb2.GetSessionRequest, context: Any
    ) -> coordinator_pb2.GetSessionResponse:
        record = await self._generations.record(validate_session_id(request.session_id))
        token_ids = await self._generations.token_ids(record.session_id) if request.include_token_ids else ()
        return encode_session(record, token_ids)

    async def DeleteSession(  # noqa: N802
        self, request: coordinator_pb2.DeleteSessionRequest, context: Any
    ) -> coordinator_pb2.DeleteSessionResponse:
        await self._generations.delete(validate_session_id(request.session_id))
        return coordinator_pb2.DeleteSessionResponse()

    async def Tokenize(  # noqa: N802
        self, request: coordinator_pb2.TokenizeRequest, context: Any
    ) -> coordinator_pb2.TokenizeResponse:
        kind = request.WhichOneof("input")
        if kind is None:
            raise InvalidRequest("input must be one of text and messages, got none", field="input")
        most = self._max_tokenized()
        if kind == "messages":
            turns = [turn.as_dict() for turn in validate_messages(decode_messages(request.messages))]
            token_ids = await in_thread(self._tokenizer.encode_chat, turns, max_tokens=most)
        else:
            token_ids = await in_thread(
                self._tokenizer.encode, request.text, add_special_tokens=True, field="text", max_tokens=most
            )
        return coordinator_pb2.TokenizeResponse(token_ids=token_ids)

    async def GetInfo(  # noqa: N802
        self, request: coordinator_pb2.GetInfoRequest, context: Any
    ) -> coordinator_pb2.GetInfoResponse:
        target = self._pools.target_info
        return coordinator_pb2.GetInfoResponse(
            version=specdec.__version__,
            target_model=target.model,
            vocabulary_fingerprint=self._pools.vocabulary_fingerprint,
            vocabulary_size=target.vocabulary_size,
            max_context_tokens=self._pools.max_context_tokens,
            max_gamma=self._pools.max_gamma,
            pools=encode_pools(
                self._pools.all_replicas(),
                self._pools.lookup_pools,
                self._generations.draft_stats,
                self._generations.route_stats,
            ),
            promotion=encode_promotion(self._generations.promotion),
        )

    async def Promote(  # noqa: N802
        self, request: coordinator_pb2.PromoteRequest, context: Any
    ) -> coordinator_pb2.PromoteResponse:
        check_share(request.share)
        self._pools.require_model_pool(request.draft_pool)
        promotion = await self._generations.promote(request.draft_pool, request.share)
        return coordinator_pb2.PromoteResponse(promotion=encode_promotion(promotion))

    def _max_tokenized(self) -> int:
        try:
            return self._pools.max_context_tokens
        except Unavailable:
            return _MAX_TOKENS_UNTIL_CONNECTED

    def _limits(self) -> ServingLimits:
        """Raises Unavailable before the first target replica is connected."""
        target = self._pools.target_info
        return ServingLimits(
            vocabulary_size=target.vocabulary_size,
            max_context_tokens=self._pools.max_context_tokens,
            max_gamma=self._pools.max_gamma,
            eos_token_ids=target.eos_token_ids,
            default_mode=self._default_mode,
        )
