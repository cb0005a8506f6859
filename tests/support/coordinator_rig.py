"""Whole coordinators against real draft and target services in one process: real gRPC, real engines, table models.

The models are `TableWorker`s, so what greedy decoding must give is known, and the draft really gets accepted and
rejected. Several coordinators may share a rig's store, one after another or at once. Called by coordinator tests.
"""

from __future__ import annotations

import asyncio
import itertools
import secrets
import tempfile
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any, Self

import grpc

from coordinator.admission.admission import AdmissionSettings
from coordinator.audit.audit_queue import AuditQueue
from coordinator.audit.turn_audit import Auditor
from coordinator.front.access import CoordinatorAccess
from coordinator.front.servicer import CoordinatorServicer
from coordinator.front.tenants import CallTenants
from coordinator.generation.generation_service import GenerationService, GenerationSettings
from coordinator.learning.log import LearningLog
from coordinator.lookup.history import TokenHistories
from coordinator.replicas.pool import ReplicaPools
from coordinator.replicas.replica import DRAFT, TARGET
from coordinator.replicas.target_models import TargetModels
from coordinator.round.draft_source_factory import DraftSourceFactory
from coordinator.routing.promotion import Canary
from coordinator.routing.score_queue import ScoreQueue
from coordinator.text.constraints import prepare_constraints
from coordinator.text.tokenizer import ServedTokenizer
from specdec.access.grants import UNLIMITED, Limits
from specdec.checkpoints.generation_config import recommended_sampling
from specdec.contract.constraint import Constraint
from specdec.contract.tenant import DEFAULT_TENANT
from specdec.contract.types import Mode
from specdec.engine.sessions.calls import DEFAULT_MAX_RUN
from specdec.observability.audit import AuditMetrics
from specdec.observability.coordinator_metrics import CoordinatorMetrics
from specdec.observability.tracing import Tracing
from specdec.rpc.client import open_link
from specdec.rpc.rounds import encode_constraint
from specdec.rpc.service_server import COORDINATOR_SERVICE, ServiceServer
from specdec.state.redis_store import RedisSessionStore, open_store
from specdec.structured.known_constraints import KnownConstraints
from specdec.v1 import coordinator_pb2 as pb
from specdec.v1 import coordinator_pb2_grpc
from tests.support.byte_tokenizer import write_byte_tokenizer
from tests.support.output import Output
from tests.support.table_services import EOS, VOCABULARY, Service, start_service, write_tokenizer

PROMPT = (5, 6, 7, 8)
MESSAGE_LIMIT_BYTES = 1 << 20


@dataclass
class Coordinator:
    """One coordinator with a client's stub to it."""

    generations: GenerationService
    pools: ReplicaPools
    metrics: CoordinatorMetrics
    server: ServiceServer
    stub: coordinator_pb2_grpc.CoordinatorServiceStub
    channel: grpc.aio.Channel
    histories: TokenHistories | None = None
    scores: ScoreQueue | None = None
    canary: Canary | None = None
    """It looks at the store when it is told to."""
    audits: AuditQueue | None = None
    servicer: CoordinatorServicer | None = None
    target_models: TargetModels | None = None
    """It looks at the store when it is told to."""

    async def history_settled(self) -> None:
        """Waits until what was said can be found."""
        assert self.histories is not None
        await eventually(lambda: not self.generations.num_running)  # each has said all that it will
        await self.histories.settle()

    async def scores_settled(self) -> None:
        """Waits until all that was said is scored."""
        assert self.scores is not None
        await eventually(lambda: not self.generations.num_running)
        await self.scores.settle()

    async def audits_settled(self) -> None:
        """Wait until no request runs and no round waits for its audit."""
        assert self.audits is not None
        await eventually(lambda: not self.generations.num_running)
        await self.audits.settle()

    async def stop(self) -> None:
        await self.channel.close()
        await self.generations.drain(0.0)
        if self.audits is not None:
            await self.audits.close()
        await self.server.stop(0.0)
        await self.pools.close()

    async def generate(self, request: pb.GenerateRequest) -> Output:
        """Runs a request to its end."""
        output = Output()
        async for response in self.stub.Generate(request):
            output.add(response)
        return output


class Rig:
    """Services, a store, and coordinators on them. Use as an async context manager."""

    def __init__(
        self,
        *,
        targets: int = 1,
        drafts: int = 1,
        draft_salt: int = 1,
        store_url: str = "",
        local_drafts: Mapping[str, int] = MappingProxyType({}),
        write_checkpoint: Callable[[Path], None] = write_tokenizer,
        check_caller: Callable[[str, Any], None] | None = None,
        num_blocks: int = 256,
        vocabulary: str = "table",
        constrained: bool = False,
        max_run: int = DEFAULT_MAX_RUN,
    ) -> None:
        """`store_url`: of the session store; one of its own in memory if empty. `local_drafts`: of the targets.

        `write_checkpoint`: writes the tokenizer into a directory, and what is to lie beside it.
        `check_caller`: guard of the services. `num_blocks`: KV blocks of each.
        `vocabulary`: fingerprint that the coordinator requires of replicas; "" for that of its tokenizer.
        `constrained`: targets follow constraints on a tokenizer of bytes. `max_run`: of the targets.
        """
        self._constrained = constrained
        self._max_run = max_run
        self._vocabulary = vocabulary
        self._num_blocks = num_blocks
        self._write_checkpoint = write_byte_tokenizer if constrained else write_checkpoint
        self._check_caller = check_caller
        self._local_drafts = local_drafts
        self._store_url = store_url or f"memory://{secrets.token_hex(8)}"
        self._counts = {TARGET: targets, DRAFT: drafts}
        self._draft_salt = draft_salt
        self._directory = tempfile.TemporaryDirectory()
        self._coordinators: list[Coordinator] = []
        self._stores: list[RedisSessionStore] = []
        self._ids = itertools.count()
        self.services: list[Service] = []

    async def __aenter__(self) -> Self:
        directory = Path(self._directory.name)
        self._write_checkpoint(directory)
        self.tokenizer = ServedTokenizer(str(directory))
        self._default_sampling = recommended_sampling(directory)
        self.store = self.open_store()
        for role, count in self._counts.items():
            for _ in range(count):
                self.services.append(await self.start(role))
        return self

    async def start(self, role: str, **options: Any) -> Service:
        """Start one more service, and leave it to the caller to end it; `options` are `start_service`'s."""
        own: dict[str, Any] = {"salt": self._draft_salt}
        if role == TARGET:
            constraints = KnownConstraints(str(self.directory), (EOS,), VOCABULARY) if self._constrained else None
            own = {
                "salt": 0,
                "local_drafts": self._local_drafts,
                "constraints": constraints,
                "max_run": self._max_run,
            }
        return await start_service(
            role, check_caller=self._check_caller, num_blocks=self._num_blocks, **{**own, **options}
        )

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for coordinator in self._coordinators:
            await coordinator.stop()
        for service in self.services:
            await service.kill()
        for store in self._stores:
            await store.close()
        self._directory.cleanup()

    def open_store(self, tenant: str = DEFAULT_TENANT) -> RedisSessionStore:
        """A tenant's part of the rig's store."""
        self._stores.append(open_store(self._store_url, tenant=tenant, usage_kept_s=3600.0))
        return self._stores[-1]

    @property
    def directory(self) -> Path:
        """Directory of the tokenizer."""
        return Path(self._directory.name)

    def of_role(self, role: str) -> list[Service]:
        return [service for service in self.services if service.role == role]

    @property
    def target(self) -> Service:
        return self.of_role(TARGET)[0]

    @property
    def draft(self) -> Service:
        return self.of_role(DRAFT)[0]

    async def coordinator(
        self,
        *,
        tenant: str = DEFAULT_TENANT,
        tenant_header: bool = False,
        has_directory: bool = True,
        lookup: Sequence[str] = (),
        routes: bool = False,
        num_alive: int | None = None,
        target_wait_s: float = 0.0,
        learning_log: LearningLog | None = None,
        audit_share: float = 0.0,
        audit_wait_s: float = 60.0,
        tracing: Tracing | None = None,
        max_queue: int = 64,
        max_running: int | None = None,
        max_wait_s: float = 1e6,
        tenant_limits: Limits = UNLIMITED,
        access: CoordinatorAccess | None = None,
        addresses: Mapping[str, str] = MappingProxyType({}),
        **settings: Any,
    ) -> Coordinator:
        """Starts a coordinator connected to every service.

        Args:
            tenant: whose it is.
            tenant_header: its calls may name their tenants.
            has_directory: it knows who holds which prefix.
            lookup: pools of drafts that it finds in text.
            routes: it routes requests among draft models.
            num_alive: services that it is to accept; None: all.
            target_wait_s: how long its requests wait for a lost target.
            learning_log: where it logs what the target says; closed with it.
            audit_share: share of rounds that it verifies again.
            audit_wait_s: how long an audit waits for its target to be idle.
            tracing: records its requests.
            max_queue: requests that it admits at once.
            max_running: requests that it runs at once.
            max_wait_s: predicted wait beyond which it refuses.
            tenant_limits: limits of each tenant.
            access: what its callers may do; None: everything.
            addresses: where it calls a service instead of at the service's own address, which is the key.
            settings: of `GenerationSettings`.
        """
        store = self.store if tenant == DEFAULT_TENANT else self.open_store(tenant)
        pools = ReplicaPools(
            self._vocabulary or self.tokenizer.fingerprint,
            partial(open_link, metadata=access.link_metadata if access else ()),
            static_endpoints=[
                (service.role, addresses.get(service.address, service.address)) for service in self.services
            ],
            lookup_pools=lookup,
            target_wait_s=target_wait_s,
            prepare_for=partial(prepare_constraints, self.tokenizer),
        )
        histories = TokenHistories(10_000) if "suffix" in lookup else None
        scores = ScoreQueue(pools, retry_s=0.05) if routes else None
        target_models = TargetModels(pools, store.target_shares())
        canary = Canary(store.promotions()) if routes else None
        metrics = CoordinatorMetrics("table", max_tenants=2)
        metrics.watch_store(lambda: store.num_failures)
        audits = AuditQueue(AuditMetrics(metrics.registry, "table"), max_wait_s=audit_wait_s) if audit_share else None
        draft_sources = DraftSourceFactory(pools, histories, scores, canary, self.tokenizer.decode)
        generation_settings = GenerationSettings(
            **{
                "coordinator_id": f"c{next(self._ids)}",
                "lease_ttl_s": 30.0,  # a starved machine must not lose leases
                "draft_timeout_s": None,
                "admission": AdmissionSettings(max_queue, max_running, max_wait_s, tenant_limits=tenant_limits),
                **settings,
            }
        )
        generations = GenerationService(
            generation_settings,
            store=store,
            pools=pools,
            target_models=target_models,
            tokenizer=self.tokenizer,
            draft_sources=draft_sources,
            metrics=metrics,
            quotas=store.quotas(generation_settings.coordinator_id, lease_ttl_s=generation_settings.lease_ttl_s),
            directory=store.prefixes() if has_directory else None,
            learning_log=learning_log,
            auditor=None if audits is None else Auditor(audits, audit_share),
        )
        server = ServiceServer(
            "127.0.0.1:0",
            service_names=(COORDINATOR_SERVICE,),
            max_message_bytes=MESSAGE_LIMIT_BYTES,
            check_caller=access.public.check if access else None,
        )
        servicer = CoordinatorServicer(
            generations=generations,
            store=store,
            pools=pools,
            target_models=target_models,
            draft_sources=draft_sources,
            tokenizer=self.tokenizer,
            allows_grammars=True,
            default_mode=Mode.REJECTION,
            tenants=CallTenants(tenant, reads_header=tenant_header),
            default_sampling=self._default_sampling,
            canary=canary,
            tracing=tracing,
        )
        servicer.add_to(server.grpc_server)
        await server.start()
        num_wanted = len(self.services) if num_alive is None else num_alive
        while sum(replica.is_alive for replica in pools.all_replicas()) < num_wanted:
            await pools.poll()  # again where a starved service was late to describe itself
        channel = grpc.aio.insecure_channel(server.address, options=(("grpc.max_send_message_length", -1),))
        stub = coordinator_pb2_grpc.CoordinatorServiceStub(channel)
        coordinator = Coordinator(
            generations,
            pools,
            metrics,
            server,
            stub,
            channel,
            histories,
            scores,
            canary,
            audits,
            servicer,
            target_models,
        )
        self._coordinators.append(coordinator)
        return coordinator

    def greedy(self, prompt: Sequence[int], num_tokens: int) -> list[int]:
        """Return what greedy decoding on the target gives, EOS included."""
        output = self.target.worker.greedy_continuation(prompt, num_tokens)
        return output[: output.index(EOS) + 1] if EOS in output else output


def request(
    prompt: Sequence[int] | None = PROMPT,
    *,
    session_id: str = "",
    request_id: str = "",
    mode: int = pb.SPECULATION_MODE_REJECTION,
    gamma: int | None = 3,
    draft_pool: str = "",
    resume_from: int | None = None,
    provenance: bool = False,
    constraint: Constraint | None = None,
    adapter: str | None = None,
    **sampling: Any,
) -> pb.GenerateRequest:
    """A request of token ids, greedy and 24 tokens long unless said otherwise."""
    options = {"max_new_tokens": 24, "temperature": 0.0, "ignore_eos": True, **sampling}
    return pb.GenerateRequest(
        session_id=session_id,
        request_id=request_id,
        prompt_token_ids=None if prompt is None else pb.TokenIds(ids=prompt),
        sampling=pb.SamplingParams(**options) if resume_from is None else None,
        speculation=pb.SpeculationParams(mode=mode, gamma=gamma, draft_pool=draft_pool),
        resume_from=resume_from,
        return_provenance=provenance,
        constraint=None if constraint is None else encode_constraint(constraint),
        adapter=adapter,
    )


@asynccontextmanager
async def started_coordinator(**options: Any) -> AsyncIterator[tuple[Rig, Coordinator]]:
    """A rig with one coordinator."""
    async with Rig(**options) as rig:
        yield rig, await rig.coordinator()


async def eventually(condition: Callable[[], bool]) -> None:
    """Gives the loop its turns until `condition()` is true."""
    while True:
        if condition():
            return
        await asyncio.sleep(0)
