"""Turns of any length and number on a small KV pool: reserved turns never wait, and the oldest turn always goes on."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random
from typing import Any

import numpy as np
import pytest

from specdec.contract.errors import KvMiss, SpecdecError
from specdec.contract.types import VerifyRequest
from specdec.engine.sessions.block_manager import BlockManager, blocks_for
from specdec.engine.sessions.calls import Call, Calls
from specdec.engine.sessions.sequence import Sequence
from specdec.engine.sessions.table import SessionTable
from tests.support.round_driver import make_round

NO_TOKENS = np.empty(0, dtype=np.uint32)
NUM_BLOCKS = 12


@dataclass(eq=False)
class Job:
    call: Call
    sequence: Sequence
    num_cached_tokens: int = 0


@dataclass
class Turn:
    name: str
    tokens: list[int]
    max_tokens: int
    reserved_tokens: int
    """Greatest length for which blocks are reserved; 0: none."""
    prompt_tokens: int = field(init=False)
    num_rounds: int = 0
    round_id: int = 0
    start: int = 0
    job: Job | None = None
    error: SpecdecError | None = None

    def __post_init__(self) -> None:
        self.prompt_tokens = len(self.tokens)

    @property
    def is_over(self) -> bool:
        return len(self.tokens) >= self.max_tokens or self.error is not None

    @property
    def is_within_reservation(self) -> bool:
        return bool(self.reserved_tokens) and blocks_for(len(self.tokens)) <= blocks_for(self.reserved_tokens)


class Replica:
    """The gate of a replica, whose forward passes take no time."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.table = SessionTable(BlockManager(NUM_BLOCKS), clock=lambda: self.now_s)
        self.calls: Calls[Job, Turn] = Calls(self.table, self._tell)

    def call(self, turn: Turn) -> None:
        """Begin the next round of a turn, with a repetition after a miss."""
        turn.round_id += 1
        for _ in range(2):
            position = make_round(
                turn.tokens,
                session_id=turn.name,
                round_id=turn.round_id,
                start=turn.start,
                output_start=turn.prompt_tokens,
                max_session_tokens=turn.max_tokens if turn.reserved_tokens else 0,
            )
            call = Call(
                VerifyRequest(position, NO_TOKENS, ()),
                identity=(),
                draft_token_ids=NO_TOKENS,
                num_logit_rows=1,
                max_kv_len=len(turn.tokens),
                reserved_len=turn.reserved_tokens,
                may_refuse=turn.reserved_tokens > 0 and len(turn.tokens) == turn.prompt_tokens,
            )
            sequence = self.calls.admit(call, turn)
            assert sequence is not None
            try:
                self.table.align(sequence, position, NO_TOKENS)
            except KvMiss as miss:
                assert not turn.is_within_reservation  # such a turn loses nothing
                turn.start = miss.have
                continue
            turn.job = Job(call, sequence)
            self.calls.enter(turn.job, turn)
            return
        raise AssertionError("two misses in one round")

    def step(self) -> None:
        """Begin what has blocks, and run it."""
        self.calls.start_waiting()
        self.check()
        for job in list(self.calls.running):
            job.sequence.kv_len = len(job.sequence)
            self.table.publish(job.sequence, len(job.sequence))
            self.calls.finish(job, "answer")
        self.check()

    def check(self) -> None:
        self.table.check_integrity()
        reserved: set[int] = set()
        for job in self.calls.running:
            assert len(job.sequence.block_table) >= blocks_for(job.call.max_kv_len)
        for name in list("abcdefgh"):
            sequence = self.table.get(name)
            if sequence is None or sequence.in_flight or not sequence.reserved_len:
                continue
            # A turn beyond its reservation may have lost all its blocks.
            if sequence.held_until_s > self.now_s and sequence.block_table:
                reserved.update(sequence.block_table)
                assert len(sequence.block_table) >= blocks_for(sequence.reserved_len)
        assert len(reserved) <= NUM_BLOCKS

    def _tell(self, turn: Turn, outcome: Any) -> None:
        turn.job = None
        if isinstance(outcome, SpecdecError):
            turn.error = outcome
            return
        turn.num_rounds += 1
        turn.start = len(turn.tokens)
        turn.tokens = [*turn.tokens, *[2 + turn.num_rounds % 7] * 5][: turn.max_tokens]


@pytest.mark.parametrize("seed", range(40))
def test_turns_with_and_without_reservations_all_end_and_the_oldest_goes_on(seed: int) -> None:
    replica = Replica()
    random = Random(seed)
    turns = []
    for name in "abcdefgh"[: random.randint(1, 8)]:
        prompt = [random.randint(2, 4)] * random.randint(1, 40)
        max_tokens = len(prompt) + random.randint(1, 100)
        turns.append(Turn(name, prompt, max_tokens, random.choice((0, len(prompt) + 1, max_tokens))))
    going = list(turns)
    for _ in range(2000):
        if not going:
            break
        ready = [turn for turn in going if turn.job is None]
        for turn in random.sample(ready, random.randint(0, len(ready))):
            replica.call(turn)
        waited = [turn for turn in going if turn.job is not None and turn.num_rounds and turn.is_within_reservation]
        oldest = min(
            (turn for turn in going if turn.job is not None),
            key=lambda turn: turn.job.sequence.turn_order,
            default=None,
        )
        rounds_before = {turn.name: turn.num_rounds for turn in going}
        replica.step()
        assert all(turn.num_rounds > rounds_before[turn.name] for turn in waited)
        if oldest is not None and oldest.num_rounds and oldest.job is not None:
            # It waits only for turns that are older still.
            assert any(turn.num_rounds and turn is not oldest for turn in going)
        for turn in list(going):
            if turn.is_over:
                going.remove(turn)
                replica.calls.end_turn(turn.name, 1)
        replica.now_s += 0.01
    assert not going
    for turn in turns:
        assert turn.error is None or blocks_for(turn.max_tokens) > NUM_BLOCKS or turn.num_rounds == 0


def test_of_two_turns_without_reservations_the_younger_pauses_and_goes_on_later() -> None:
    replica = Replica()
    turns = [Turn(name, [2 + index] * 60, 150, 0) for index, name in enumerate("ab")]
    order = []
    for _ in range(100):
        for turn in turns:
            if turn.job is None and not turn.is_over:
                replica.call(turn)
                replica.step()
                if turn.is_over:
                    order.append(turn.name)
                    replica.calls.end_turn(turn.name, 1)
        replica.step()
    assert order == ["a", "b"]
    assert 1 <= replica.table.num_preemptions <= 6  # of 36 rounds
