"""Rounds of one session, one at a time, on real draft and target services in one process: real gRPC, table models.

The requests to the services are recorded, and the services may be told to fail or hang instead of answering. There
is no store and no text, and nothing is published; `coordinator_rig` has whole coordinators.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self

from coordinator.replicas.placement import SessionReplicas
from coordinator.replicas.pool import ReplicaPools
from coordinator.replicas.replica import DRAFT, TARGET
from coordinator.round.draft_calls import DraftCalls
from coordinator.round.draft_deadline import DraftDeadline
from coordinator.round.draft_sources import ReplicaDraftSource
from coordinator.round.gamma import GammaChooser
from coordinator.round.outcome import RoundOutcome
from coordinator.round.pool_stats import DraftPoolStats, RoundTimes
from coordinator.round.runner import MAX_AHEAD, RoundRunner
from coordinator.round.session_calls import SessionCalls
from coordinator.round.session_tokens import SessionTokens
from coordinator.round.setting import RoundSetting
from coordinator.round.target_calls import TargetCalls
from specdec.contract.types import Mode, Proposal, ProposeRequest, SamplingFilters, Verification, VerifyRequest
from specdec.rpc.client import open_link
from tests.support.coordinator_rig import PROMPT
from tests.support.table_services import VOCABULARY, Service, start_service

SEED = 5


class NotedEngine:
    """An engine that records its requests, and may be told not to answer."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self.asked: list[Any] = []
        """Every request, unanswered ones included."""
        self.answered: list[Any] = []
        self.error: BaseException | None = None
        """Error that replaces every answer."""
        self.drafts_nothing = False
        """True: every proposal is without tokens."""
        self.gates: dict[str, asyncio.Event] = {}
        """Events that the calls of a session wait for, by session."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    async def propose(self, request: ProposeRequest) -> Proposal:
        await self._note(request)
        proposal: Proposal = await self._engine.propose(request)
        if self.drafts_nothing:
            proposal.draft_token_ids, proposal.supports, proposal.lost_mass = proposal.draft_token_ids[:0], (), ()
        self.answered.append(proposal)
        return proposal

    async def verify(self, request: VerifyRequest, on_step: Any = None) -> Verification:
        await self._note(request)
        verification: Verification = await self._engine.verify(request, on_step)
        self.answered.append(verification)
        return verification

    async def _note(self, request: Any) -> None:
        self.asked.append(request)
        if (gate := self.gates.get(request.position.session_id)) is not None:
            await gate.wait()
        if self.error is not None:
            raise self.error

    @property
    def starts(self) -> list[int]:
        """Position from which each request sent the session's tokens."""
        return [request.position.start for request in self.asked]


class NotedGamma(GammaChooser):
    """A chooser that records the rounds it observes."""

    def __init__(self, gamma: int) -> None:
        super().__init__(DraftPoolStats(), fixed=gamma, max_gamma=16)
        self.told: list[RoundTimes] = []

    def observe(self, times: RoundTimes) -> None:
        self.told.append(times)
        super().observe(times)


class NotedDeadline(DraftDeadline):
    """A deadline that records its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[tuple[int, int]] = []
        """Draft tokens and prefilled tokens of every deadline."""
        self.told: list[tuple[int, int]] = []
        """The same of every observed answer."""

    def deadline_s(self, num_tokens: int, num_prefilled: int) -> float:
        self.asked.append((num_tokens, num_prefilled))
        return super().deadline_s(num_tokens, num_prefilled)

    def observe(self, num_tokens: int, num_prefilled: int, wait_s: float) -> None:
        self.told.append((num_tokens, num_prefilled))
        super().observe(num_tokens, num_prefilled, wait_s)


class Rounds:
    """One session's rounds, without a limit on its output."""

    def __init__(
        self,
        pools: ReplicaPools,
        *,
        session_id: str = "s",
        prompt: Sequence[int] = PROMPT,
        gamma: int = 3,
        temperature: float = 0.0,
        mode: Mode = Mode.REJECTION,
        draft_timeout_s: float | None = None,
        epoch: int = 1,
        turn: int = 0,
        num_logprobs: int | None = None,
        vocabulary_size: int = VOCABULARY,
        kv_wait_s: float = 0.0,
    ) -> None:
        setting = RoundSetting(
            session_id=session_id,
            epoch=epoch,
            turn=turn,
            output_start=len(prompt),
            filters=SamplingFilters(temperature=temperature),
            seed=SEED,
            mode=mode,
            num_logprobs=num_logprobs,
            vocabulary_size=vocabulary_size,
            draft_timeout_s=draft_timeout_s,
            kv_wait_s=kv_wait_s,
        )
        self.tokens = SessionTokens(prompt)
        self.replicas = SessionReplicas(session_id, pools)
        self.replicas.draft_pool = "default"
        self.replicas.target_fingerprint = pools.target_info.model_fingerprint
        self.gamma = NotedGamma(gamma)
        self.draft_deadline = NotedDeadline()
        calls = SessionCalls(setting, self.tokens, self.replicas)
        draft_calls = DraftCalls("default", setting, self.replicas, calls, self.draft_deadline)
        drafts = ReplicaDraftSource(self.gamma, draft_calls)
        target_calls = TargetCalls(setting, self.replicas, calls)
        self._runner = RoundRunner(setting, self.tokens, self.replicas, drafts, target_calls)
        self._num_run = 0

    async def run(self, remaining: int = 1000) -> RoundOutcome:
        """Run one round and commit it."""
        outcome = await self._runner.run(self._num_run, remaining)
        self._num_run += 1
        self.tokens.extend(outcome.token_ids)
        return outcome

    async def run_beyond_a_run(self) -> None:
        """Run as many rounds as a run may have answered before the last of them was taken."""
        for _ in range(MAX_AHEAD):
            await self.run()


class RoundRig:
    """The services, and pools connected to them. An async context manager."""

    def __init__(self, *, targets: int = 1, drafts: int = 1, draft_salt: int = 1, **draft_options: Any) -> None:
        """`draft_salt` 0 makes the draft's model the target's; `draft_options` are `start_service`'s."""
        self._counts = {TARGET: targets, DRAFT: drafts}
        self._draft_salt = draft_salt
        self._draft_options = draft_options
        self._services: dict[str, list[Service]] = {TARGET: [], DRAFT: []}
        self.targets: list[NotedEngine] = []
        self.drafts: list[NotedEngine] = []

    async def __aenter__(self) -> Self:
        for role, count in self._counts.items():
            noted = self.targets if role == TARGET else self.drafts

            def between(engine: Any, noted: list[NotedEngine] = noted) -> NotedEngine:
                noted.append(NotedEngine(engine))
                return noted[-1]

            for _ in range(count):
                salt, options = (0, {}) if role == TARGET else (self._draft_salt, self._draft_options)
                service = await start_service(role, salt=salt, between=between, **options)
                self._services[role].append(service)
        self.pools = await self.connect()
        return self

    async def connect(self) -> ReplicaPools:
        """Return the pools of one more coordinator; the caller closes them."""
        endpoints = [(role, service.address) for role in self._services for service in self.of(role)]
        pools = ReplicaPools("table", open_link, static_endpoints=endpoints)
        while sum(replica.is_alive for replica in pools.all_replicas()) < sum(self._counts.values()):
            await pools.poll()
        return pools

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.pools.close()
        for service in [*self.of(TARGET), *self.of(DRAFT)]:
            await service.kill()

    def of(self, role: str) -> list[Service]:
        return self._services[role]

    def rounds(self, **options: Any) -> Rounds:
        return Rounds(self.pools, **options)
