"""Decodes clients' protobuf requests to plain dataclasses, and encodes events and records as messages.

A decoded request goes to `validation`. Events come from a generation's `stream`, and `servicer` writes their messages
to the client. Only the number of messages of a conversation is checked here, before the loop over them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from dataclasses import asdict
from typing import Any, cast

from coordinator.front.chat_validation import check_num_messages
from coordinator.front.raw_params import RawGenerationParams, RawSamplingParams, RawSpeculationParams, RawTools
from coordinator.front.tool_validation import check_num_tools
from coordinator.generation.request_log import decode_stats
from coordinator.replicas.replica import DRAFT, Replica
from coordinator.replicas.target_models import ServedModel
from coordinator.requests import (
    ChatTurn,
    DraftStats,
    Event,
    Finished,
    OutputChunk,
    RequestStats,
    RouteStats,
    Started,
)
from specdec.contract.tools import AnswerText, OutputPart, ReasoningText, ToolDefinition, joined_parts
from specdec.contract.types import TokenSource
from specdec.observability.series import served_name
from specdec.rpc.plain_fields import read_fields
from specdec.rpc.rounds import decode_constraint
from specdec.state.store import PromotionRecord, SessionRecord
from specdec.v1 import coordinator_pb2

#: Sources of tokens that depend on a draft token.
_DRAFTED = (TokenSource.ACCEPTED, TokenSource.CORRECTED)

#: States of replicas that are not called.
_LOST_STATES = ("down", "refused")

#: Fields of a request that do not change its output.
_NOT_DIGESTED = ("session_id", "request_id", "return_provenance", "resume_from", "expected_session_tokens", "priority")


def decode_request(message: coordinator_pb2.GenerateRequest) -> RawGenerationParams:
    """Decode a request. Raises InvalidRequest only for a conversation that is empty or too long."""
    kind = message.WhichOneof("input")
    return read_fields(
        RawGenerationParams,
        message,
        prompt_token_ids=message.prompt_token_ids.ids if kind == "prompt_token_ids" else None,
        messages=decode_messages(message.messages) if kind == "messages" else None,
        template_arguments_json=message.messages.template_arguments_json,
        sampling=read_fields(RawSamplingParams, message.sampling),
        speculation=read_fields(RawSpeculationParams, message.speculation),
        constraint=decode_constraint(message.constraint, "constraint") if message.HasField("constraint") else None,
        tools=decode_tools(message.tools) if message.HasField("tools") else None,
        former_digests=(_digest_of_form_1(message),),
    )


def decode_messages(messages: coordinator_pb2.ChatMessages) -> tuple[ChatTurn, ...]:
    """Decode a conversation. Raises InvalidRequest when it is empty or too long."""
    check_num_messages(len(messages.messages))
    return tuple(
        ChatTurn(message.role, message.content, message.extra_json, tuple(message.content_parts))
        for message in messages.messages
    )


def decode_tools(tools: coordinator_pb2.Tools) -> RawTools:
    """Decode tools. Raises InvalidRequest if they are none or too many."""
    check_num_tools(len(tools.definitions))
    definitions = [read_fields(ToolDefinition, definition) for definition in tools.definitions]
    return read_fields(RawTools, tools, definitions=definitions)


def _digest_of_form_1(message: coordinator_pb2.GenerateRequest) -> str:
    """Return the digest in form 1, for retries of requests that an older version started."""
    digested = coordinator_pb2.GenerateRequest()
    digested.CopyFrom(message)
    for field in _NOT_DIGESTED:
        digested.ClearField(field)
    return hashlib.blake2b(digested.SerializeToString(deterministic=True), digest_size=16).hexdigest()


def encode_event(
    event: Event, *, with_details: bool, token_bytes: Callable[[int], bytes]
) -> coordinator_pb2.GenerateResponse:
    """Return the message of an event.

    Args:
        event: an event of a generation.
        with_details: adds the origin of each token.
        token_bytes: returns the bytes of a token; called if logprobs are sent.
    """
    if isinstance(event, OutputChunk):
        return _encode_chunk(event, token_bytes if with_details else None)
    if isinstance(event, Started):
        return coordinator_pb2.GenerateResponse(
            started=coordinator_pb2.Started(
                session_id=event.session_id,
                request_id=event.request_id,
                num_prompt_tokens=event.num_prompt_tokens,
                seed=event.seed,
                target_fingerprint=event.target_fingerprint,
                target_changed=event.target_changed,
                constraint_warnings=event.constraint_warnings,
                adapter=event.adapter,
            )
        )
    return coordinator_pb2.GenerateResponse(finished=_encode_finished(event))


def _encode_chunk(chunk: OutputChunk, token_bytes: Callable[[int], bytes] | None) -> coordinator_pb2.GenerateResponse:
    """Return the message of a chunk, with details if there is a `token_bytes`."""
    response = coordinator_pb2.GenerateResponse()
    message = response.tokens
    message.index = chunk.start
    message.token_ids.extend(chunk.token_ids)
    message.text = "".join(chunk.texts)
    if chunk.parts:
        _encode_parts(message, joined_parts([part for parts in chunk.parts for part in parts]))
    if token_bytes is not None:
        message.details.extend(_encode_detail(chunk, index, token_bytes) for index in range(len(chunk.token_ids)))
        if chunk.provenance is not None:
            message.num_draft_tokens = chunk.provenance.num_draft_tokens
    return response


def _encode_parts(message: coordinator_pb2.TokenChunk, parts: Iterable[OutputPart]) -> None:
    for part in parts:
        if isinstance(part, AnswerText):
            message.parts.add(text=part.text)
        elif isinstance(part, ReasoningText):
            message.parts.add(reasoning=part.text)
        else:
            message.parts.add(tool_call=coordinator_pb2.ToolCallDelta(**asdict(part)))


def _encode_detail(chunk: OutputChunk, index: int, token_bytes: Callable[[int], bytes]) -> coordinator_pb2.TokenDetail:
    """Return the details of one token. A token replayed from the log has only its text, as no origin is stored."""
    origin = chunk.provenance
    if origin is None:
        return coordinator_pb2.TokenDetail(text=chunk.texts[index])
    source = origin.sources[index]
    detail = coordinator_pb2.TokenDetail(
        source=cast("coordinator_pb2.TokenSource", int(source)),
        p=origin.p[index],
        q=origin.q[index],
        draft_pool=origin.pool_of(index) if source in _DRAFTED else "",
        text=chunk.texts[index],
    )
    if origin.logprobs:
        detail.logprob = origin.logprobs[index].logprob
        detail.token_bytes = token_bytes(chunk.token_ids[index])
        for top in origin.logprobs[index].top:
            detail.top_logprobs.add(token_id=top.token_id, logprob=top.logprob, token_bytes=token_bytes(top.token_id))
    return detail


def _encode_finished(finished: Finished) -> coordinator_pb2.Finished:
    return coordinator_pb2.Finished(
        reason=cast("coordinator_pb2.FinishReason", int(finished.reason)),
        usage=coordinator_pb2.Usage(
            num_prompt_tokens=finished.num_prompt_tokens,
            num_output_tokens=finished.num_output_tokens,
            num_cached_prompt_tokens=finished.stats.num_cached_prompt_tokens,
            num_reasoning_tokens=finished.num_reasoning_tokens,
        ),
        stats=_encode_stats(finished.stats),
        is_named_call=finished.is_named_call,
    )


def _encode_stats(stats: RequestStats) -> coordinator_pb2.GenerationStats:
    names = coordinator_pb2.GenerationStats.DESCRIPTOR.fields_by_name
    return coordinator_pb2.GenerationStats(**{name: getattr(stats, name) for name in names})


def encode_session(record: SessionRecord, token_ids: Iterable[int]) -> coordinator_pb2.GetSessionResponse:
    """Return the message of a session's record, with `token_ids`."""
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


def encode_pools(
    replicas: Iterable[Replica[Any]],
    lookup_pools: Iterable[str],
    draft_stats: Callable[[str], DraftStats],
    route_stats: Callable[[str], Iterable[RouteStats]],
    *,
    has_inner_names: bool = True,
) -> list[coordinator_pb2.PoolInfo]:
    """Return the pools with their live replicas, draft pools first.

    Args:
        replicas: replicas of both roles.
        lookup_pools: names of the pools whose drafts are found in text, without a replica.
        draft_stats: returns the statistics of a draft pool.
        route_stats: returns the statistics of a draft pool for each class of requests.
        has_inner_names: whether addresses of replicas and paths of models are stated; else a model's last name alone.
    """
    pools = {(DRAFT, name): coordinator_pb2.PoolInfo(name=name, role=DRAFT, model=name) for name in lookup_pools}
    for replica in replicas:
        engine = replica.info
        if engine is None or not replica.is_alive:
            continue
        model = engine.model if has_inner_names else served_name(engine.model)
        for name in engine.local_drafts:
            pools.setdefault(
                (DRAFT, name), coordinator_pb2.PoolInfo(name=name, role=DRAFT, model=model, dtype=engine.dtype)
            )
        pool = pools.setdefault(
            (replica.role, engine.pool),
            coordinator_pb2.PoolInfo(
                name=engine.pool, role=replica.role, model=model, dtype=engine.dtype, shadow=engine.shadow
            ),
        )
        pool.replicas.add(
            replica_id=engine.replica_id,
            address=replica.address if has_inner_names else "",
            draining=engine.draining,
            num_sessions=engine.num_sessions,
            kv_usage=engine.kv_usage,
        )
    for pool in pools.values():
        if pool.role == DRAFT:
            alpha, gamma = draft_stats(pool.name)
            pool.MergeFrom(coordinator_pb2.PoolInfo(alpha=alpha, gamma=gamma))  # None leaves the field unset
            for stats in route_stats(pool.name):
                pool.routes.add(**stats._asdict())
    return sorted(pools.values(), key=lambda pool: (pool.role != DRAFT, pool.name))


def encode_lost_replicas(replicas: Iterable[Replica[Any]]) -> list[coordinator_pb2.LostReplica]:
    """Return the messages of those replicas that this coordinator does not call now."""
    return [
        coordinator_pb2.LostReplica(
            role=replica.role,
            pool=replica.pool,
            address=replica.address,
            state=replica.state,
            reason=replica.last_fault,
        )
        for replica in replicas
        if replica.state in _LOST_STATES and replica.last_fault
    ]


def encode_target_models(
    models: Iterable[ServedModel], *, has_inner_names: bool = True
) -> list[coordinator_pb2.TargetModelInfo]:
    """Return the messages of the served target models; `has_inner_names` as for `encode_pools`."""
    return [
        coordinator_pb2.TargetModelInfo(
            fingerprint=model.fingerprint,
            model=model.info.model if has_inner_names else served_name(model.info.model),
            num_replicas=model.num_replicas,
            share=model.share,
        )
        for model in models
    ]


def encode_adapters(
    models: Iterable[ServedModel], draft_stats: Callable[[str], DraftStats], *, has_inner_names: bool = True
) -> list[coordinator_pb2.AdapterInfo]:
    """Return the messages of the served adapters.

    Args:
        models: the adapters.
        draft_stats: returns what requests have shown about drafts for an adapter, by its fingerprint.
        has_inner_names: as for `encode_pools`.
    """
    return [
        coordinator_pb2.AdapterInfo(
            name=model.adapter,
            fingerprint=model.fingerprint,
            model=model.info.model if has_inner_names else served_name(model.info.model),
            num_replicas=model.num_replicas,
            share=model.share,
            **draft_stats(model.fingerprint)._asdict(),
        )
        for model in models
    ]


def encode_promotion(promotion: PromotionRecord | None) -> coordinator_pb2.PromotionInfo | None:
    """Return the message of a promotion; None, which leaves the field unset, if there is none."""
    if promotion is None:
        return None
    return coordinator_pb2.PromotionInfo(
        draft_pool=promotion.pool, share=promotion.share, most=promotion.most, status=promotion.status.value
    )
