"""Draft, target and coordinator on given workers, in one process: real gRPC, real engines, any store.

For long products over many models, where three processes a case would spend their time importing. What must be shown of
processes is shown with `tests.support.stack`. Not a mock of anything: every part is what the services run. Called by
tests.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch

from coordinator.learning.log import LearningLog
from coordinator.replicas.replica import DRAFT, TARGET
from draft_service.fan_out_policy import Predraft
from draft_service.proposer import DraftOptions, Proposer
from specdec.client import AsyncClient
from specdec.engine.base import StepPlan, Worker
from specdec.engine.loop.replica_engine import ReplicaOptions
from specdec.observability.engine_metrics import EngineMetrics
from target_service.verifier import Verifier
from tests.support.coordinator_rig import Rig
from tests.support.table_services import serve_engine


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
        verifier_type: Callable[..., Verifier] = Verifier,
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

        def link_tokenizer(directory: Path) -> None:
            for file in Path(tokenizer).iterdir():
                if file.name != "generation_config.json":  # tests state what they sample with
                    (directory / file.name).symlink_to(file.resolve())

        self._rig = Rig(
            targets=0, drafts=0, store_url=redis_url, write_checkpoint=link_tokenizer,
            vocabulary=target.shape.vocabulary_fingerprint,
        )  # fmt: skip
        self._target_worker = target
        self._draft_workers = drafts
        self._max_support = max_support
        self._predrafting = predrafting
        self._patience = patience
        self._proposer_type = proposer_type
        self._verifier_type = verifier_type
        self._draft_metrics: dict[str, EngineMetrics] = {}
        self._ending = AsyncExitStack()
        self.draft_addresses: dict[str, str] = {}

    async def __aenter__(self) -> Self:
        await self._ending.enter_async_context(self._rig)
        patient = _PatientWorker(self._target_worker, self._patience)
        target = self._verifier_type(patient, ReplicaOptions(replica_id="target", model="target"))
        services = [await serve_engine(TARGET, target)]
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
            services.append(await serve_engine(DRAFT, draft, metrics))
            self.draft_addresses[pool] = services[-1].address
        self._rig.services += services
        coordinator = await self._rig.coordinator(
            has_directory=False, learning_log=self._learning_log, max_queue=256, max_running=256
        )
        self.client = AsyncClient(coordinator.server.address)
        self._ending.push_async_callback(self.client.close)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._ending.aclose()

    async def generate(self, prompt_token_ids: Sequence[int], **options: Any) -> Any:
        """Return a completion in a session of its own, which is deleted afterwards."""
        completion = await self.client.generate(prompt_token_ids=list(prompt_token_ids), **options)
        await self.client.delete_session(completion.session_id)
        return completion

    def num_predrafted(self, pool: str, *outcomes: str) -> float:
        """Return the number of a pool's rounds that ended so: hit, extended, miss or unasked."""
        registry, labels = self._draft_metrics[pool].registry, {"model_name": pool, "role": DRAFT, "pool": "default"}
        name = "specdec:predraft_rounds_total"
        return sum(registry.get_sample_value(name, labels | {"outcome": outcome}) or 0.0 for outcome in outcomes)


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
