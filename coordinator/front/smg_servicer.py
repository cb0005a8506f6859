"""The gRPC contract of vLLM's engine, by which the router `smg` calls its workers. Beside `servicer`, on the same port.

Requests take the same way as our own: `smg_wire` decodes them, `opening` checks and opens them. The router keeps no
sessions, so each request gets one of its own. This module needs the package `smg-grpc-proto` (the extra `smg`).
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import time
from collections import defaultdict
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from contextlib import aclosing, contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import grpc
from smg_grpc_proto.generated import common_pb2, vllm_engine_pb2, vllm_engine_pb2_grpc

from coordinator.front.opening import RequestOpener
from coordinator.front.smg_wire import Answer, decode_request
from coordinator.front.tokenizer_bundle import tokenizer_bundle
from coordinator.generation.generation_service import GenerationService
from coordinator.generation.stream import Subscription
from coordinator.replicas.pool import ReplicaPools
from specdec.contract.errors import SpecdecError, Unsupported
from specdec.contract.version import __version__
from specdec.observability.series import served_name
from specdec.observability.tracing import Tracing, span_of_call

GENERATE_SPAN = "vllm.grpc.engine.VllmEngine/Generate"

#: Recommended sampling parameters that the router applies to requests without them.
_RECOMMENDED = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")

#: Size of the messages in which the tokenizer's files are sent; the router accepts 4 MB.
_BUNDLE_CHUNK_BYTES = 1 << 16


class SmgServicer(vllm_engine_pb2_grpc.VllmEngineServicer):  # type: ignore[misc]
    """Serves routers. Used from one event loop."""

    def __init__(
        self,
        *,
        opener: RequestOpener,
        generations: GenerationService,
        pools: ReplicaPools,
        tokenizer_directory: Path,
        default_sampling: Mapping[str, float | int],
        is_serving: Callable[[], bool],
        tracing: Tracing | None = None,
    ) -> None:
        """
        Args:
            opener: opens the requests.
            generations: runs them.
            pools: replicas, for the description of the model and its load.
            tokenizer_directory: directory of the target's tokenizer.
            default_sampling: sampling parameters that the model recommends, by field name.
            is_serving: returns whether health is SERVING; a worker that is not gets no requests.
            tracing: records a span of each Generate call; None: none is recorded.
        """
        self._opener = opener
        self._generations = generations
        self._pools = pools
        self._tokenizer_directory = tokenizer_directory
        self._default_sampling = {name: default_sampling[name] for name in _RECOMMENDED if name in default_sampling}
        self._is_serving = is_serving
        self._tracing = tracing
        self._readers: defaultdict[tuple[str, str], set[Subscription]] = defaultdict(set)
        """Readers of running requests, by tenant and request id."""
        self._started_s = time.monotonic()

    def add_to(self, server: grpc.aio.Server) -> None:
        """Register the service on a server that has not started."""
        vllm_engine_pb2_grpc.add_VllmEngineServicer_to_server(self, server)

    async def Generate(self, request: vllm_engine_pb2.GenerateRequest, context: Any) -> None:  # noqa: N802
        with span_of_call(self._tracing, GENERATE_SPAN, context):
            await self._generate(request, context)

    async def _generate(self, request: vllm_engine_pb2.GenerateRequest, context: Any) -> None:
        subscription = await self._opener.open(
            context, lambda limits: decode_request(request, limits.max_context_tokens)
        )
        answer = Answer(is_streamed=request.stream)
        with subscription.reading(), self._abortable(subscription, context):
            try:
                await self._answer(subscription, answer, context)
            except SpecdecError:
                if not subscription.is_closed:
                    raise
                await context.write(answer.aborted())

    async def _answer(self, subscription: Subscription, answer: Answer, context: Any) -> None:
        async with aclosing(subscription.events()) as events:
            async for event in events:
                if (message := answer.message_of(event)) is not None:
                    began_s = time.perf_counter()
                    await context.write(message)
                    self._generations.count_client_wait(time.perf_counter() - began_s)

    @contextmanager
    def _abortable(self, subscription: Subscription, context: Any) -> Iterator[None]:
        """Let `Abort` find a reader by its request's id."""
        key = (self._opener.tenant_of(context), subscription.identity.request_id)
        self._readers[key].add(subscription)
        try:
            yield
        finally:
            self._readers[key].discard(subscription)
            if not self._readers[key]:
                del self._readers[key]

    async def Abort(  # noqa: N802
        self, request: vllm_engine_pb2.AbortRequest, context: Any
    ) -> vllm_engine_pb2.AbortResponse:
        """End requests early, as if their callers had left. An id that does not run is ignored."""
        tenant = self._opener.tenant_of(context)
        for request_id in request.request_ids:
            for subscription in tuple(self._readers.get((tenant, request_id), ())):
                subscription.close()
        return vllm_engine_pb2.AbortResponse()

    async def HealthCheck(  # noqa: N802
        self, request: vllm_engine_pb2.HealthCheckRequest, context: Any
    ) -> vllm_engine_pb2.HealthCheckResponse:
        """Raises Unavailable before the first target is connected: the router would register a model without a name."""
        _ = self._pools.target_info
        is_serving = self._is_serving()
        return vllm_engine_pb2.HealthCheckResponse(
            healthy=is_serving, message="serving" if is_serving else "not serving"
        )

    async def GetModelInfo(  # noqa: N802
        self, request: vllm_engine_pb2.GetModelInfoRequest, context: Any
    ) -> vllm_engine_pb2.GetModelInfoResponse:
        target, max_context_tokens = self._pools.target_info, self._pools.max_context_tokens
        return vllm_engine_pb2.GetModelInfoResponse(
            model_path=str(self._tokenizer_directory),
            tokenizer_path=str(self._tokenizer_directory),
            served_model_name=served_name(target.model),
            is_generation=True,
            max_context_length=max_context_tokens,
            max_req_input_len=max_context_tokens - 1,
            vocab_size=target.vocabulary_size,
            eos_token_ids=target.eos_token_ids,
            default_sampling_params_json=json.dumps(self._default_sampling) if self._default_sampling else "",
        )

    async def GetServerInfo(  # noqa: N802
        self, request: vllm_engine_pb2.GetServerInfoRequest, context: Any
    ) -> vllm_engine_pb2.GetServerInfoResponse:
        return vllm_engine_pb2.GetServerInfoResponse(
            active_requests=self._generations.num_running,
            uptime_seconds=time.monotonic() - self._started_s,
            server_type="specdec",
            data_parallel_size=1,
        )

    async def GetLoads(  # noqa: N802
        self, request: vllm_engine_pb2.GetLoadsRequest, context: Any
    ) -> vllm_engine_pb2.GetLoadsResponse:
        """Return the load: the coordinator's own requests, and the mean KV usage of the target replicas."""
        usages = [target.info.kv_usage for target in self._pools.targets() if target.is_alive and target.info]
        num_running = self._generations.num_running
        load = vllm_engine_pb2.SchedulerLoad(
            num_running_reqs=num_running,
            num_total_reqs=num_running,
            token_usage=sum(usages) / len(usages) if usages else 0.0,
        )
        return vllm_engine_pb2.GetLoadsResponse(
            timestamp=datetime.now(UTC).isoformat(), version=__version__, dp_rank_count=1, loads=[load]
        )

    async def GetTokenizer(  # noqa: N802
        self, request: common_pb2.GetTokenizerRequest, context: Any
    ) -> AsyncGenerator[common_pb2.GetTokenizerChunk, None]:
        """Send the tokenizer's files, in parts; the last one has their hash."""
        bundle = await asyncio.to_thread(tokenizer_bundle, self._tokenizer_directory)
        for start in range(0, len(bundle), _BUNDLE_CHUNK_BYTES):
            is_last = start + _BUNDLE_CHUNK_BYTES >= len(bundle)
            yield common_pb2.GetTokenizerChunk(
                data=bundle[start : start + _BUNDLE_CHUNK_BYTES],
                sha256=hashlib.sha256(bundle).hexdigest() if is_last else "",
            )

    async def _refuse(self, request: Any, context: Any) -> None:
        raise Unsupported("this worker offers no embeddings, events of its KV, cache flushes or profiles")

    Embed = SubscribeKvEvents = FlushCache = StartProfile = StopProfile = _refuse
