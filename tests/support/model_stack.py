"""Draft, target and coordinator on given workers, in one process: real gRPC, real engines, any store.

For long products over many models, where three processes a case would spend their time importing. What must be shown of
processes is shown with `tests.support.stack`. Not a mock of anything: every part is what the services run. Called by
tests.
"""

from __future__ import annotations

import secrets
from collections.abc import Collection, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch

from coordinator.admission.admission import AdmissionSettings
from coordinator.front.servicer import CoordinatorServicer
from coordinator.front.tenants import CallTenants
from coordinator.generation.generation_service import GenerationService, GenerationSettings
from coordinator.learning.log import LearningLog
from coordinator.replicas.pool import ReplicaPools
from coordinator.replicas.replica import DRAFT, TARGET
from coordinator.replicas.target_models import TargetModels
from coordinator.round.draft_source_factory import DraftSourceFactory
from coordinator.text.tokenizer import ServedTokenizer
from draft_service.fan_out_policy import Predraft
from draft_service.proposer import DraftOptions, Proposer
from draft_service.servicer import DraftServicer
from specdec.client import AsyncClient
from specdec.contract.types import Mode
from specdec.engine.base import StepPlan, Worker
from specdec.engine.loop.replica_engine import ReplicaOptions
from specdec.observability.coordinator_metrics import CoordinatorMetrics
from specdec.observability.engine_metrics import EngineMetrics
from specdec.rpc.client import open_link
from specdec.rpc.service_server import COORDINATOR_SERVICE, DRAFT_SERVICE, TARGET_SERVICE, ServiceServer
from specdec.state.redis_store import open_store
from target_service.servicer import TargetServicer
from target_service.verifier import Verifier


class ModelStack:
    """One target, any number of draft pools (one replica each), one coordinator. Use as an async context manager."""

    client: AsyncClient

    def __init__(
        self,
        tokenizer: str | Path,
        target: Worker,
        drafts: dict[str, Worker],
        *,
        redis_url: str = "",
        max_support: int | None = None,
        predrafting: Collection[str] = (),
        patience: int = 0,
        proposer_type: type[Proposer] = Proposer,
        verifier_type: type[Verifier] = Verifier,
        learning_log: LearningLog | None = None,
    ) -> None:
        """
        Args:
            tokenizer: directory of the target's tokenizer.
            target: its worker.
            drafts: pool name to worker; no two engines may share a worker.
            redis_url: the store; one of its own in memory if empty.
            max_support: most entries of a draft's support.
            predrafting: the pools that draft the next round before it is asked for.
            patience: steps of branches that each of those may run before a step of the target, so that the share of
                hits does not depend on the machine.
            proposer_type: what negative controls replace, as is
            verifier_type.
            learning_log: where the coordinator logs what the target says; closed with it.
        """
        self._learning_log = learning_log
        self._tokenizer = ServedTokenizer(str(tokenizer))
        self._target_worker = target
        self._draft_workers = drafts
        self._redis_url = redis_url or f"memory://{secrets.token_hex(8)}"
        self._max_support = max_support
        self._predrafting = predrafting
        self._patience = patience
        self._proposer_type = proposer_type
        self._verifier_type = verifier_type
        self._draft_metrics: dict[str, EngineMetrics] = {}
        self._ending = AsyncExitStack()
        self.draft_addresses: dict[str, str] = {}

    async def __aenter__(self) -> Self:
        patient = _PatientWorker(self._target_worker, self._patience)
        target = self._verifier_type(patient, ReplicaOptions(replica_id="target", model="target"))
        servicer = TargetServicer(target, EngineMetrics("target", role=TARGET))
        endpoints = [(TARGET, await self._serve(TARGET_SERVICE, servicer, target))]
        for pool, worker in self._draft_workers.items():
            is_ahead = pool in self._predrafting
            metrics = self._draft_metrics[pool] = EngineMetrics(pool, role=DRAFT)
            draft = self._proposer_type(
                worker,
                ReplicaOptions(replica_id=pool, model=pool, pool=pool),
                DraftOptions(self._max_support, predraft=Predraft.ON if is_ahead else Predraft.OFF),
                observer=metrics,
            )
            if is_ahead:
                patient.drafts.append(draft)
            draft_servicer = DraftServicer(draft, metrics)
            self.draft_addresses[pool] = await self._serve(DRAFT_SERVICE, draft_servicer, draft)
            endpoints.append((DRAFT, self.draft_addresses[pool]))
        self.client = AsyncClient(await self._coordinate(endpoints))
        self._ending.push_async_callback(self.client.close)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._ending.aclose()

    async def generate(self, prompt_token_ids: Sequence[int], **options: Any) -> Any:
        """A completion in a session of its own that is deleted afterwards."""
        completion = await self.client.generate(prompt_token_ids=list(prompt_token_ids), **options)
        await self.client.delete_session(completion.session_id)
        return completion

    def num_predrafted(self, pool: str, *outcomes: str) -> float:
        """Rounds of a pool that ended so: hit, extended, miss or unasked."""
        registry, labels = self._draft_metrics[pool].registry, {"model_name": pool, "role": DRAFT, "pool": "default"}
        name = "specdec:predraft_rounds_total"
        return sum(registry.get_sample_value(name, labels | {"outcome": outcome}) or 0.0 for outcome in outcomes)

    async def _serve(self, service_name: str, servicer: Any, engine: Any) -> str:
        self._ending.push_async_callback(engine.close)
        server = ServiceServer("127.0.0.1:0", service_names=(service_name,))
        servicer.add_to(server.grpc_server)
        await server.start()
        self._ending.push_async_callback(server.stop, 0.0)
        await server.set_serving()
        return server.address

    async def _coordinate(self, endpoints: list[tuple[str, str]]) -> str:
        store = open_store(self._redis_url)
        self._ending.push_async_callback(store.close)
        pools = ReplicaPools(self._target_worker.shape.vocabulary_fingerprint, open_link, static_endpoints=endpoints)
        self._ending.push_async_callback(pools.close)
        target_models = TargetModels(pools, store.target_shares())
        draft_sources = DraftSourceFactory(pools, None)
        generations = GenerationService(
            GenerationSettings(
                coordinator_id="c", lease_ttl_s=30.0, draft_timeout_s=None, admission=AdmissionSettings(256, 256)
            ),
            store=store,
            pools=pools,
            target_models=target_models,
            tokenizer=self._tokenizer,
            draft_sources=draft_sources,
            metrics=CoordinatorMetrics("target"),
            learning_log=self._learning_log,
        )
        server = ServiceServer("127.0.0.1:0", service_names=(COORDINATOR_SERVICE,))
        CoordinatorServicer(
            generations=generations,
            store=store,
            pools=pools,
            target_models=target_models,
            draft_sources=draft_sources,
            tokenizer=self._tokenizer,
            default_mode=Mode.REJECTION,
            tenants=CallTenants(),
        ).add_to(server.grpc_server)
        await server.start()
        self._ending.push_async_callback(server.stop, 0.0)
        self._ending.push_async_callback(generations.drain, 0.0)
        await pools.poll()
        while any(state == "down" for _role, _pool, state in pools.places()):
            await pools.poll()  # on a busy machine a connection may time out before its server answers
        return server.address


class _PatientWorker(Worker):
    """Implements `specdec.engine.base.Worker` by another one whose steps wait for branches to grow."""

    def __init__(self, worker: Worker, num_turns: int) -> None:
        self.shape = worker.shape
        self.drafts: list[Proposer] = []
        self._worker = worker
        self._num_turns = num_turns

    def execute(self, plan: StepPlan) -> torch.Tensor:
        for draft in self.drafts:
            for _ in range(self._num_turns):
                draft.check_integrity()  # a turn of its device thread: a step of branches unless a call runs
        return self._worker.execute(plan)
