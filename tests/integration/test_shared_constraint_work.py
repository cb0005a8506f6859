"""Work that constrained requests share with others: tables of tokens, threads of masks, the process that compiles.

One request's slow constraint must not make others wait. The services are real, on table models.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import threading
import time
import weakref
from typing import Any

import grpc
import pytest

from specdec.contract.constraint import Constraint
from specdec.contract.tenant import TENANT_KEY
from specdec.structured import mask_threads
from specdec.structured.matcher import LegalTokens, Matcher
from specdec.structured.paced_threads import SLOW_CPU_S
from tests.failure.test_hostile_text import children_of
from tests.integration.test_constrained_requests import CASES, MODES, Case
from tests.support.coordinator_rig import PROMPT, Rig, eventually, request
from tests.support.table_worker import held_steps_are_no_hangs

__all__ = ["held_steps_are_no_hangs"]

NUM_SLOW = 6
NUM_CONSTRAINTS = 20
SLOW = Constraint.regex("[abc]{16}")


def tables_built(caplog: pytest.LogCaptureFixture) -> int:
    return sum(record.message.startswith("token table built") for record in caplog.records)


async def test_tables_of_tokens_are_built_before_a_service_is_used(caplog: pytest.LogCaptureFixture) -> None:
    """Meanwhile no other thread of the process runs, so streams would wait."""
    caplog.set_level(logging.DEBUG)
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

    def legal_along(self, *args: Any) -> LegalTokens:
        if self._constraint == SLOW:
            if id(self) in self.begun:
                self.gate.wait()
            began_s = time.thread_time()
            while time.thread_time() - began_s <= SLOW_CPU_S:
                pass
            self.begun.add(id(self))
        return super().legal_along(*args)


async def test_slow_masks_of_many_sessions_leave_threads_to_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """There are more slow sessions than threads."""
    HeldMatcher.gate, HeldMatcher.begun = threading.Event(), set()
    monkeypatch.setattr(mask_threads, "Matcher", HeldMatcher)
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


async def test_constraints_of_one_tenant_delay_anothers_by_one_compilation() -> None:
    """The process that compiles is stopped while a tenant sends many constraints, then another tenant one."""
    ended: list[str] = []

    async def refused(tenant: str, number: int) -> None:
        schema = {"uniqueItems": True, "title": f"{tenant} {number}"}
        asked = request(constraint=Constraint.json_schema(schema))
        with pytest.raises(grpc.aio.AioRpcError, match="uniqueItems"):
            await coordinator.stub.Generate(asked, metadata=[(TENANT_KEY, tenant)]).read()
        ended.append(tenant)

    others = children_of(os.getpid())
    async with Rig(constrained=True, drafts=0) as rig:
        coordinator = await rig.coordinator(tenant_header=True)
        await refused("many", 0)
        (child,) = children_of(os.getpid()) - others
        os.kill(int(child), signal.SIGSTOP)
        tasks = [asyncio.create_task(refused("many", number)) for number in range(1, NUM_CONSTRAINTS)]
        assert coordinator.servicer is not None
        turns = coordinator.servicer._constraints._turns
        await eventually(lambda: len(turns._waiting.get("many", ())) == NUM_CONSTRAINTS - 2)
        tasks.append(asyncio.create_task(refused("one", 0)))
        await eventually(lambda: "one" in turns._waiting)
        os.kill(int(child), signal.SIGCONT)
        await asyncio.gather(*tasks)
        assert ended.index("one") <= 4


class CountedMatcher(Matcher):
    """A matcher that is counted while it exists."""

    existing: weakref.WeakSet[Matcher]

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.existing.add(self)


async def test_a_target_keeps_no_matcher_of_a_turn_that_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """The matcher of a large constraint takes tens of megabytes, and sessions stay for long."""
    CountedMatcher.existing = weakref.WeakSet()
    monkeypatch.setattr(mask_threads, "Matcher", CountedMatcher)
    async with Rig(constrained=True, drafts=0) as rig:
        coordinator = await rig.coordinator()
        for case in CASES[:6]:
            assert (await coordinator.generate(case.asked(mode=MODES["block"]))).token_ids
        await eventually(lambda: not CountedMatcher.existing)


async def test_a_constraint_is_compiled_again_if_its_process_was_killed() -> None:
    others = children_of(os.getpid())
    async with Rig(constrained=True, drafts=0) as rig:
        coordinator = await rig.coordinator()
        assert (await coordinator.generate(request(constraint=Constraint.choice(["ab"])))).text == "ab"
        (child,) = children_of(os.getpid()) - others
        os.kill(int(child), signal.SIGSTOP)  # so that the request is sent before the end is noticed
        asked = asyncio.create_task(coordinator.generate(request(constraint=Constraint.choice(["abc"]))))
        assert coordinator.servicer is not None
        turns = coordinator.servicer._constraints._turns
        await eventually(lambda: turns._is_taken)
        os.kill(int(child), signal.SIGKILL)
        assert (await asked).text == "abc"


async def test_a_resumption_with_a_constraint_is_refused() -> None:
    async with Rig(constrained=True, drafts=0) as rig:
        coordinator = await rig.coordinator()
        await coordinator.generate(request(constraint=Constraint.choice(["ab"]), session_id="s"))
        asked = request(None, session_id="s", resume_from=0, constraint=Constraint.choice(["b"]))
        with pytest.raises(grpc.aio.AioRpcError, match="resume_from must come without constraint, tools and adapter"):
            await coordinator.generate(asked)
