"""Hostile callers of a hybrid whose states and KV are too few for them: every text is still the greedy one.

Target and draft refuse a step that begins with the state of other tokens (`tests.support.recurrent_table_worker`).
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from random import Random

import pytest

from draft_service.proposer import Proposer
from specdec.contract.engine_api import EndedTurn
from specdec.contract.errors import ResourceExhausted
from specdec.contract.types import Proposal, RunLimit, SessionPosition, VerifyRequest
from specdec.engine.loop.replica_engine import ReplicaEngine, ReplicaOptions
from specdec.engine.sessions.kv_queue import WaitLimits
from target_service.verifier import Verifier
from tests.support.recurrent_table_worker import RecurrentTableWorker
from tests.support.round_driver import NO_DRAFT, RoundDriver

NUM_SESSIONS, NUM_ACTIONS = 6, 14
#: Prompts of common beginnings, so that sessions begin at each other's snapshots and then part.
TEXTS = ([3] * 90, [3] * 41 + [4] * 49, [3] * 66 + [5] * 24, [4, 3] * 45)


class Caller(RoundDriver):
    """One hostile session."""

    reserves = False

    def _round(self, start: int) -> SessionPosition:
        start = min(start, len(self.tokens) - 1)  # a request without tokens is refused when it is decoded
        most = self.output_start + 60 if self.reserves else 0
        return replace(super()._round(start), max_session_tokens=most)

    async def _propose(self, start: int, gamma: int) -> Proposal:
        try:
            return await super()._propose(start, gamma)
        except ResourceExhausted:
            return NO_DRAFT

    async def act(self, random: Random, engines: list[ReplicaEngine]) -> None:
        action = random.choice(("round",) * 6 + ("cancel", "epoch", "turn", "release", "end", "run"))
        if action == "round":
            await self.run_round(random.randint(0, 9))
        elif action == "cancel":
            task = asyncio.create_task(self.run_round(random.randint(0, 9)))
            for _ in range(random.randint(0, 12)):
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        elif action == "epoch":  # the store lost the newest tokens
            self.tokens = self.tokens[: max(self.output_start, len(self.tokens) - random.randint(0, 20))]
            self.epoch, self.round_id = self.epoch + 1, 0
        elif action == "turn":
            await self._end(engines)
            cut = self.tokens[: random.randint(1, len(self.tokens))]
            self.tokens = [*cut, *random.choice(TEXTS)[: random.randint(1, 40)]][:150]
            self.output_start = len(self.tokens)
            self.epoch, self.round_id = self.epoch + 1, 0
            self.draft_start = self.target_start = min(self.target_start, len(cut))
        elif action == "release":
            await random.choice(engines).release([self.session_id])
        elif action == "end":
            await self._end(engines)
        else:
            await self._run(random)

    async def _run(self, random: Random) -> None:
        """A run of the target, of which the caller takes only the first tokens."""
        self.round_id += 1
        limit = RunLimit(len(self.tokens) + random.randint(1, 9), frozenset())
        request = VerifyRequest(self._round(0), NO_DRAFT.draft_token_ids, (), run=limit)
        answers: list = []
        answers.append(await self.verifier.verify(request, answers.append))
        self.tokens += [answer.decided_token_id for answer in answers[: random.randint(1, len(answers))]]
        self.target_start = random.choice((0, len(self.tokens) - 1))
        self.epoch, self.round_id = self.epoch + 1, 0

    async def _end(self, engines: list[ReplicaEngine]) -> None:
        for engine in engines:
            await engine.end_turns([EndedTurn(self.session_id, self.epoch)])


async def _live(caller: Caller, random: Random, engines: list[ReplicaEngine], worker: RecurrentTableWorker) -> None:
    prompt = random.choice(TEXTS)[: random.randint(1, 90)]
    caller.tokens, caller.output_start = list(prompt), len(prompt)
    caller.reserves = random.random() < 0.3
    for _ in range(NUM_ACTIONS):
        await caller.act(random, engines)
        assert caller.output == worker.greedy_continuation(caller.tokens[: caller.output_start], len(caller.output))
    await caller._end(engines)


@pytest.mark.parametrize("seed", range(8))
async def test_every_text_is_the_greedy_one_and_all_slots_come_back(seed: int) -> None:
    random = Random(seed)
    num_states, num_blocks = random.choice((3, 4, 7, 12)), random.choice((14, 20, 40))
    options = ReplicaOptions(
        max_step_tokens=random.choice((7, 32, 100)), wait_limits=WaitLimits(max_waiting=99, max_wait_s=600.0)
    )
    workers = [RecurrentTableWorker(num_states=num_states, num_blocks=num_blocks, salt=salt) for salt in (0, 1)]
    verifier, proposer = Verifier(workers[0], options), Proposer(workers[1], options)
    engines: list[ReplicaEngine] = [verifier, proposer]
    callers = [Caller(f"s{index}", [3], proposer, verifier) for index in range(NUM_SESSIONS)]
    await asyncio.gather(*(_live(caller, Random(f"{seed} {index}"), engines, workers[0])
                           for index, caller in enumerate(callers)))  # fmt: skip
    for engine in engines:
        await engine.release([caller.session_id for caller in callers])
        engine.check_integrity()
        assert engine.stats().session_state_bytes == 0
        await engine.close()
