"""The coordinator's gRPC face: protobuf in, generation events out.

Not here: checks (`validation`), admission (`generations`), error statuses (`specdec.rpc`). Built by `__main__`.
"""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from typing import Any

import grpc

import specdec
from coordinator.front.validation import ServingLimits, validate_messages, validate_request, validate_session_id
from coordinator.generation.admission import Generations
from coordinator.generation.request_log import decode_stats
from coordinator.replicas.pool import DRAFT, ReplicaPools
from coordinator.requests import Event, Finished, OutputChunk, RequestStats, Started
from coordinator.text.text_process import in_thread
from coordinator.text.tokenizer import ServedTokenizer
from specdec.errors import InvalidRequest
from specdec.types import Mode, TokenSource
from specdec.v1 import coordinator_pb2, coordinator_pb2_grpc

#: Sources whose token the draft pool had a part in.
_DRAFTED = (TokenSource.ACCEPTED, TokenSource.CORRECTED)


class CoordinatorServicer(coordinator_pb2_grpc.CoordinatorServiceServicer):
    """Serves clients. Use from one event loop."""

    def __init__(
        self, generations: Generations, pools: ReplicaPools, tokenizer: ServedTokenizer, default_mode: Mode
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
        subscription = await self._generations.open(validate_request(request, self._limits()))
        # Logprobs travel in the details; one who resumes the request does not ask for them again.
        num_logprobs = subscription.identity.parameters.sampling.num_logprobs
        with_details = request.return_provenance or num_logprobs is not None
        try:
            async with aclosing(subscription.events()) as events:
                async for event in events:
                    await context.write(_encode_event(event, with_details=with_details))
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
        last = record.request
        return coordinator_pb2.GetSessionResponse(
            session_id=record.session_id,
            status=record.status,
            num_tokens=record.num_tokens,
            token_ids=[int(token_id) for token_id in token_ids],
            turn=last.turn if last else 0,
            expires_in_s=record.expires_in_s,
            stats=_encode_stats(decode_stats(last.stats_json)) if last else None,
        )

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
        if kind == "messages":
            turns = validate_messages(request.messages)
            token_ids = await in_thread(self._tokenizer.encode_chat, [turn.as_dict() for turn in turns])
        else:
            token_ids = await in_thread(self._tokenizer.encode, request.text, add_special_tokens=True, field="text")
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
            pools=self._encode_pools(),
        )

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

    def _encode_pools(self) -> list[coordinator_pb2.PoolInfo]:
        """Live replicas, by role and pool."""
        pools: dict[tuple[str, str], coordinator_pb2.PoolInfo] = {}
        for replica in self._pools.all_replicas():
            engine = replica.info
            if engine is None or not replica.is_alive:
                continue
            pool = pools.setdefault(
                (replica.role, engine.pool),
                coordinator_pb2.PoolInfo(name=engine.pool, role=replica.role, model=engine.model),
            )
            pool.replicas.add(
                replica_id=engine.replica_id,
                address=replica.address,
                draining=engine.draining,
                num_sessions=engine.num_sessions,
                kv_usage=engine.kv_usage,
            )
        return sorted(pools.values(), key=lambda pool: (pool.role != DRAFT, pool.name))


def _encode_event(event: Event, *, with_details: bool) -> coordinator_pb2.GenerateResponse:
    if isinstance(event, OutputChunk):
        return _encode_chunk(event, with_details=with_details)
    if isinstance(event, Started):
        return coordinator_pb2.GenerateResponse(
            started=coordinator_pb2.Started(
                session_id=event.session_id,
                request_id=event.request_id,
                num_prompt_tokens=event.num_prompt_tokens,
                seed=event.seed,
                target_fingerprint=event.target_fingerprint,
                target_changed=event.target_changed,
            )
        )
    return coordinator_pb2.GenerateResponse(finished=_encode_finished(event))


def _encode_chunk(chunk: OutputChunk, *, with_details: bool) -> coordinator_pb2.GenerateResponse:
    response = coordinator_pb2.GenerateResponse()
    message = response.tokens
    message.index = chunk.start
    message.token_ids.extend(chunk.token_ids)
    message.text = "".join(chunk.texts)
    if with_details:
        message.details.extend(_encode_detail(chunk, index) for index in range(len(chunk.token_ids)))
    return response


def _encode_detail(chunk: OutputChunk, index: int) -> coordinator_pb2.TokenDetail:
    """A token replayed from the log has its text alone: where it came from is not stored."""
    origin = chunk.provenance
    if origin is None:
        return coordinator_pb2.TokenDetail(text=chunk.texts[index])
    source = origin.sources[index]
    detail = coordinator_pb2.TokenDetail(
        source=int(source),  # type: ignore[arg-type]  # protoc's stubs know no plain numbers
        p=origin.p[index],
        q=origin.q[index],
        draft_pool=origin.draft_pool if source in _DRAFTED else "",
        text=chunk.texts[index],
    )
    if origin.logprobs:
        detail.logprob = origin.logprobs[index].logprob
        for top in origin.logprobs[index].top:
            detail.top_logprobs.add(token_id=top.token_id, logprob=top.logprob)
    return detail


def _encode_finished(finished: Finished) -> coordinator_pb2.Finished:
    return coordinator_pb2.Finished(
        reason=int(finished.reason),  # type: ignore[arg-type]  # protoc's stubs know no plain numbers
        usage=coordinator_pb2.Usage(
            num_prompt_tokens=finished.num_prompt_tokens,
            num_output_tokens=finished.num_output_tokens,
            num_cached_prompt_tokens=finished.stats.num_cached_prompt_tokens,
        ),
        stats=_encode_stats(finished.stats),
    )


def _encode_stats(stats: RequestStats) -> coordinator_pb2.GenerationStats:
    return coordinator_pb2.GenerationStats(
        num_rounds=stats.num_rounds,
        num_draft_tokens=stats.num_draft_tokens,
        num_accepted_tokens=stats.num_accepted_tokens,
        accepted_per_position=stats.accepted_per_position,
        num_target_only_steps=stats.num_target_only_steps,
        ttft_s=stats.ttft_s,
        e2el_s=stats.e2el_s,
        draft_s=stats.draft_s,
        verify_s=stats.verify_s,
        wire_bytes=stats.wire_bytes,
    )
