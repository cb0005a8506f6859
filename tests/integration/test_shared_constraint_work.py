"""Work that constrained requests share with others: tables of tokens, threads of masks, the process that compiles.

One request's slow constraint must not make others wait. The services are real, on table models.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from typing import Any

import pytest

from specdec.contract.constraint import Constraint
from specdec.engine.loop import constraint_masks
from specdec.structured.matcher import Mask, Matcher
from tests.integration.test_constrained_requests import CASES, MODES, Case
from tests.support.coordinator_rig import PROMPT, Rig, eventually
from tests.support.table_worker import held_steps_are_no_hangs

__all__ = ["held_steps_are_no_hangs"]

NUM_SLOW = 6
SLOW = Constraint.regex("[abc]{16}")


def tables_built(caplog: pytest.LogCaptureFixture) -> int:
    return sum(record.message.startswith("token table built") for record in caplog.records)


async def test_tables_of_tokens_are_built_before_a_service_is_used(caplog: pytest.LogCaptureFixture) -> None:
    """Meanwhile no other thread of the process runs, so streams would wait."""
    caplog.set_level(logging.INFO)
    async with Rig(constrained=True) as rig:
        await rig.target.engine.warm_up()
        assert tables_built(caplog) == 1
        coordinator = await rig.coordinator()
        assert tables_built(caplog) == 2
        case = CASES[0]
        output = await coordinator.generate(case.asked(mode=MODES["rejection"]))
        assert output.token_ids == case.expected(rig)
        assert tables_built(caplog) == 3  # the third belongs to `expected`


class HeldMatcher(Matcher):
    """A matcher whose masks are slow for one constraint: the first take processor time, the next wait for a gate."""

    gate: threading.Event
    begun: set[int]
    """Matchers of the slow constraint that have computed masks."""

    def masks_along(self, *args: Any) -> list[Mask]:
        if self._constraint == SLOW:
            if id(self) in self.begun:
                self.gate.wait()
            began_s = time.thread_time()
            while time.thread_time() - began_s <= constraint_masks._SLOW_CPU_S:
                pass
            self.begun.add(id(self))
        return super().masks_along(*args)


async def test_slow_masks_of_many_sessions_leave_threads_to_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """There are more slow sessions than threads."""
    HeldMatcher.gate, HeldMatcher.begun = threading.Event(), set()
    monkeypatch.setattr(constraint_masks, "Matcher", HeldMatcher)
    slow = Case(SLOW, None, {}, PROMPT)
    async with Rig(constrained=True, drafts=0, max_run=1) as rig:
        coordinator = await rig.coordinator()
        try:
            held = [asyncio.create_task(coordinator.generate(slow.asked(mode=MODES["block"]))) for _ in range(NUM_SLOW)]
            await eventually(lambda: len(HeldMatcher.begun) == NUM_SLOW)
            for case in CASES[:4]:
                output = await coordinator.generate(case.asked(mode=MODES["coupled"]))
                assert output.token_ids == case.expected(rig)
            assert not any(task.done() for task in held)
        finally:
            HeldMatcher.gate.set()
        for output in await asyncio.gather(*held):
            assert output.token_ids == slow.expected(rig)
