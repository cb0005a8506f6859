"""The coordinator's gRPC calls: requests come in here, and their events go out.

`wire` decodes a request, `validation` checks it, and `generation/generation_service` opens it. The generation's events
come back through a subscription to its `stream`, and `wire` encodes them for the client.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from contextlib import aclosing
from dataclasses import asdict, replace
from types import MappingProxyType
from typing import Any

import grpc

from coordinator.front.chat_validation import check_template_arguments, validate_messages
from coordinator.front.drains import Drains
from coordinator.front.tenants import CallTenants
from coordinator.front.tool_validation import check_follows_constraints, validate_tools
from coordinator.front.validation import (
    ServingLimits,
    check_detokenized,
    check_share,
    validate_request,
    validate_session_id,
)
from coordinator.front.wire import (
    decode_messages,
    decode_request,
    decode_tools,
    encode_adapters,
    encode_event,
    encode_lost_replicas,
    encode_pools,
    encode_promotion,
    encode_session,
    encode_target_models,
)
from coordinator.generation.generation_service import GenerationService
from coordinator.generation.request_log import no_session
from coordinator.generation.stream import Subscription
from coordinator.replicas.pool import ReplicaPools
from coordinator.replicas.target_models import TargetModels
from coordinator.round.draft_source_factory import DraftSourceFactory
from coordinator.routing.promotion import Canary
from coordinator.text.constraints import ConstraintAdmission
from coordinator.text.output_forms import DEFAULT_PARSERS, OutputForms, ParserNames
from coordinator.text.text_process import in_thread
from coordinator.text.tokenizer import ServedTokenizer
from specdec.contract.errors import Forbidden, InvalidRequest, SpecdecError, Unavailable, Unsupported
from specdec.contract.tenant import SessionKey
from specdec.contract.types import Mode
from specdec.contract.version import __version__, build_of
from specdec.observability.series import served_name
from specdec.observability.tracing import Tracing, span_of_call
from specdec.state.store import PromotionRecord, SessionStore
from specdec.v1 import coordinator_pb2, coordinator_pb2_grpc

#: Limit on the tokens to encode or decode in one call while no target replica has told its context length.
_MAX_TOKENS_UNTIL_CONNECTED = 1 << 15

#: Name of the span of a Generate call.
GENERATE_SPAN = "specdec.v1.CoordinatorService/Generate"


class CoordinatorServicer(coordinator_pb2_grpc.CoordinatorServiceServicer):
    """Serves clients. Used from one event loop."""

    def __init__(
        self,
        *,
        generations: GenerationService,
        store: SessionStore,
        pools: ReplicaPools,
        target_models: TargetModels,
        draft_sources: DraftSourceFactory,
        tokenizer: ServedTokenizer,
        default_mode: Mode,
        tenants: CallTenants,
        allows_grammars: bool = False,
        default_sampling: Mapping[str, float | int] = MappingProxyType({}),
        canary: Canary | None = None,
        tracing: Tracing | None = None,
        parser_names: ParserNames = DEFAULT_PARSERS,
        drains: Drains | None = None,
    ) -> None:
        """
        Args:
            generations: runs the requests.
            store: session store of all tenants, for calls that read a session.
            pools: replicas, for the limits that requests are checked against.
            target_models: divides new sessions among target models.
            draft_sources: keeps the statistics of the draft pools.
            tokenizer: tokenizer of the target model.
            default_mode: speculation mode of requests that name none.
            tenants: decides which tenant a call is served for.
            allows_grammars: whether requests may hold grammars.
            default_sampling: sampling parameters that the model recommends, by field name; reported by `GetInfo`.
            canary: promotes draft pools; None if requests are not routed.
            tracing: records a span of each Generate call; None: none is recorded.
            parser_names: formats in which the model writes tool calls and reasoning.
            drains: drains replicas and this coordinator; None: those of `pools`, without a registry.
        """
        self._generations = generations
        self._store = store
        self._pools = pools
        self._target_models = target_models
        self._draft_sources = draft_sources
        self._tokenizer = tokenizer
        self._constraints = ConstraintAdmission(
            tokenizer,
            OutputForms(tokenizer, parser_names),
            generations.count_constrained,
            allows_grammars=allows_grammars,
        )
        self._default_mode = default_mode
        self._tenants = tenants
        recommended: dict[str, Any] = dict(default_sampling)
        self._default_sampling = coordinator_pb2.SamplingParams(**recommended)
        self._canary = canary
        self._tracing = tracing
        self.drains = drains or Drains(pools, generations)
        self.is_registered = False
        """Set if the registry lists this coordinator."""
        self.admin_address = ""
        """HOST:PORT for operator calls; "" if there is none."""

    def add_to(self, server: grpc.aio.Server) -> None:
        """Register the service on a server that has not started."""
        coordinator_pb2_grpc.add_CoordinatorServiceServicer_to_server(self, server)

    async def Generate(self, request: coordinator_pb2.GenerateRequest, context: Any) -> None:  # noqa: N802
        """Write the events to `context`, which costs one generator less per chunk than yielding them."""
        with span_of_call(self._tracing, GENERATE_SPAN, context):
            await self._generate(request, context)

    async def _generate(self, request: coordinator_pb2.GenerateRequest, context: Any) -> None:
        subscription = await self._open(request, context)
        # Logprobs travel in the details, and a call that resumes the request does not ask for them again.
        num_logprobs = subscription.identity.parameters.sampling.num_logprobs
        with_details = request.return_provenance or num_logprobs is not None
        token_bytes = self._tokenizer.token_bytes
        with subscription.reading():
            async with aclosing(subscription.events(joins_chunks=not with_details)) as events:
                async for event in events:
                    message = encode_event(event, with_details=with_details, token_bytes=token_bytes)
                    began_s = subscription.sending_since_s = time.monotonic()
                    await context.write(message)
                    subscription.sending_since_s = None
                    self._generations.count_client_wait(time.monotonic() - began_s)

    async def _open(self, request: coordinator_pb2.GenerateRequest, context: Any) -> Subscription:
        """Return a reader of the generation that a call requests. Raises what `GenerationService.open` raises."""
        try:
            tenant = self._tenants.of(context)
            limits = self._limits()
            checked = validate_request(decode_request(request), limits)
            answer = checked.sampling.constraint
            checked = await self._constraints.with_form(checked)
            check_follows_constraints(checked, is_possible=self._pools.follows_constraints)
            checked = await self._constraints.admit(checked, answer, limits.eos_token_ids, tenant)
            key_id, deadline_s = self._tenants.key_id_of(context), _deadline_s(context)
            reader = await self._generations.open(replace(checked, tenant=tenant, key_id=key_id, deadline_s=deadline_s))
        except SpecdecError as error:
            self._generations.count_refusal(error)
            raise
        # gRPC holds the last events until the client reads them, so the call may last longer than the reading.
        reader.hold()
        context.add_done_callback(lambda _: reader.let_go())
        return reader

    def _limits(self) -> ServingLimits:
        """Return the limits for requests. Raises Unavailable before the first target replica is connected."""
        target = self._pools.target_info
        return ServingLimits(
            vocabulary_size=target.vocabulary_size,
            max_context_tokens=self._pools.max_context_tokens,
            max_gamma=self._pools.max_gamma,
            eos_token_ids=target.eos_token_ids,
            default_mode=self._default_mode,
            backend=target.backend,
            unsupported_fields=target.unsupported_fields,
        )

    async def GetSession(  # noqa: N802
        self, request: coordinator_pb2.GetSessionRequest, context: Any
    ) -> coordinator_pb2.GetSessionResponse:
        store = self._store.of_tenant(self._tenants.of(context))
        session_id = validate_session_id(request.session_id)
        record = await store.load(session_id)
        if record is None:
            raise no_session(session_id)
        token_ids = await store.read_tokens(session_id) if request.include_token_ids else ()
        return encode_session(record, token_ids[: record.num_tokens])

    async def DeleteSession(  # noqa: N802
        self, request: coordinator_pb2.DeleteSessionRequest, context: Any
    ) -> coordinator_pb2.DeleteSessionResponse:
        tenant = self._tenants.of(context)
        await self._generations.delete(SessionKey(tenant, validate_session_id(request.session_id)))
        return coordinator_pb2.DeleteSessionResponse()

    async def Tokenize(  # noqa: N802
        self, request: coordinator_pb2.TokenizeRequest, context: Any
    ) -> coordinator_pb2.TokenizeResponse:
        self._tenants.of(context)
        kind = request.WhichOneof("input")
        if kind is None:
            raise InvalidRequest("input must be one of text and messages, got none", field="input")
        max_tokens = self._max_tokenized()
        if kind == "messages":
            turns = [turn.as_dict() for turn in validate_messages(decode_messages(request.messages))]
            arguments_json = request.messages.template_arguments_json
            check_template_arguments(arguments_json)
            has_tools = request.HasField("tools")
            token_ids = await in_thread(
                self._tokenizer.encode_chat,
                turns,
                template_arguments_json=arguments_json,
                tools=validate_tools(decode_tools(request.tools), has_messages=True) if has_tools else None,
                max_tokens=max_tokens,
            )
        else:
            token_ids = await in_thread(
                self._tokenizer.encode, request.text, add_special_tokens=True, field="text", max_tokens=max_tokens
            )
        return coordinator_pb2.TokenizeResponse(token_ids=token_ids)

    async def Detokenize(  # noqa: N802
        self, request: coordinator_pb2.DetokenizeRequest, context: Any
    ) -> coordinator_pb2.DetokenizeResponse:
        self._tenants.of(context)
        check_detokenized(request.token_ids, self._tokenizer.vocabulary_size, self._max_tokenized())
        text = await asyncio.to_thread(
            self._tokenizer.decode, list(request.token_ids), keep_special_tokens=request.keep_special_tokens
        )
        return coordinator_pb2.DetokenizeResponse(text=text)

    async def GetInfo(  # noqa: N802
        self, request: coordinator_pb2.GetInfoRequest, context: Any
    ) -> coordinator_pb2.GetInfoResponse:
        sees_all = self._tenants.sees_all(self._tenants.of(context))
        target = self._pools.target_info
        return coordinator_pb2.GetInfoResponse(
            version=__version__,
            target_model=target.model if sees_all else served_name(target.model),
            vocabulary_fingerprint=self._pools.vocabulary_fingerprint,
            vocabulary_size=target.vocabulary_size,
            max_context_tokens=self._pools.max_context_tokens,
            max_gamma=self._pools.max_gamma,
            pools=encode_pools(
                self._pools.all_replicas(),
                self._pools.lookup_pools,
                self._draft_sources.draft_stats,
                self._draft_sources.route_stats if sees_all else lambda pool: [],
                has_inner_names=sees_all,
            ),
            promotion=encode_promotion(self._canary.promotion if self._canary is not None and sees_all else None),
            default_sampling=self._default_sampling,
            admin_address=self.admin_address if sees_all else "",
            target_models=encode_target_models(self._target_models.models(), has_inner_names=sees_all),
            adapters=encode_adapters(
                self._target_models.adapters(), self._draft_sources.adapter_stats, has_inner_names=sees_all
            ),
            coordinator_id=self._generations.coordinator_id if sees_all else "",
            build=build_of("coordinator"),
            is_registered=self.is_registered,
            lost_replicas=encode_lost_replicas(self._pools.addressed_replicas()) if sees_all else (),
            lost_draft_pools=self._pools.lost_model_pools() if sees_all else (),
            max_running=self._generations.admission.queue_state.num_slots,
        )

    async def Promote(  # noqa: N802
        self, request: coordinator_pb2.PromoteRequest, context: Any
    ) -> coordinator_pb2.PromoteResponse:
        if not self._tenants.sees_all(self._tenants.of(context)):
            raise Forbidden("a promotion affects all tenants, so only operators may change it")
        check_share(request.share)
        if request.HasField("target_fingerprint"):
            await self._target_models.give(request.target_fingerprint, request.share)
            return self._promoted(None if self._canary is None else self._canary.promotion)
        self._pools.require_model_pool(request.draft_pool)
        if self._canary is None:
            raise Unsupported("this coordinator does not route requests: it runs without --route auto")
        return self._promoted(await self._canary.promote(request.draft_pool, request.share))

    async def Drain(self, request: coordinator_pb2.DrainRequest, context: Any) -> coordinator_pb2.DrainResponse:  # noqa: N802
        if not self._tenants.sees_all(self._tenants.of(context)):
            raise Forbidden("a drain affects all tenants, so only operators may ask for one")
        if not request.replica_id:
            raise InvalidRequest("replica_id must name a replica, got none", field="replica_id")
        drained = await self.drains.drain(request.replica_id, undo=request.undo)
        return coordinator_pb2.DrainResponse(**asdict(drained))

    def _promoted(self, promotion: PromotionRecord | None) -> coordinator_pb2.PromoteResponse:
        return coordinator_pb2.PromoteResponse(
            promotion=encode_promotion(promotion), target_models=encode_target_models(self._target_models.models())
        )

    def _max_tokenized(self) -> int:
        try:
            return self._pools.max_context_tokens
        except Unavailable:
            return _MAX_TOKENS_UNTIL_CONNECTED


def _deadline_s(context: Any) -> float | None:
    """Return the time at which the call ends, by `time.monotonic`; None if its caller set none."""
    left_s = context.time_remaining()
    return None if left_s is None else time.monotonic() + left_s
