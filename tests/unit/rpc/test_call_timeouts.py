"""Timeouts of calls to a replica that is silent, and to one that answers other calls."""

from __future__ import annotations

import asyncio
import time
from itertools import count

import pytest

from specdec.rpc.client import DraftLink
from specdec.rpc.open_calls import CallTimeout
from tests.unit.rpc.test_links import DraftReplica, ask, draft_link

#: Much longer than an answer takes here.
SILENCE_S = 0.4
NEVER_S = 600.0


async def keep_busy(link: DraftLink) -> None:
    """Make calls that are answered, one after another."""
    for number in count():
        await link.propose(ask(f"other {number}"))
        await asyncio.sleep(SILENCE_S / 20)


async def test_a_call_to_a_silent_replica_times_out_after_the_silence_limit() -> None:
    async with DraftReplica() as replica, draft_link(replica) as link:
        await link.propose(ask("heard before"))
        with pytest.raises(TimeoutError):
            await link.propose(ask("hold"), call_timeout=CallTimeout(SILENCE_S, NEVER_S))


async def test_a_call_waits_for_a_replica_that_answers_other_calls() -> None:
    async with DraftReplica() as replica, draft_link(replica) as link:
        busy = asyncio.create_task(keep_busy(link))
        held = asyncio.create_task(link.propose(ask("hold"), call_timeout=CallTimeout(SILENCE_S, NEVER_S)))
        await asyncio.sleep(3 * SILENCE_S)
        assert not held.done()
        replica.engine.release_held.set()
        assert len((await held).draft_token_ids) == 3
        busy.cancel()


async def test_a_stall_of_the_own_event_loop_does_not_time_a_call_out() -> None:
    async with DraftReplica() as replica, draft_link(replica) as link:
        await link.propose(ask("heard before"))
        asked = asyncio.create_task(link.propose(ask(), call_timeout=CallTimeout(SILENCE_S, NEVER_S)))
        await asyncio.sleep(0)
        time.sleep(3 * SILENCE_S)  # noqa: ASYNC251 - what is tested
        assert len((await asked).draft_token_ids) == 3


async def test_a_call_times_out_when_the_replica_falls_silent_later() -> None:
    async with DraftReplica() as replica, draft_link(replica) as link:
        busy = asyncio.create_task(keep_busy(link))
        held = asyncio.create_task(link.propose(ask("hold"), call_timeout=CallTimeout(SILENCE_S, NEVER_S)))
        await asyncio.sleep(2 * SILENCE_S)
        busy.cancel()
        with pytest.raises(TimeoutError):
            await held


async def test_a_call_times_out_after_the_total_limit_although_others_are_answered() -> None:
    async with DraftReplica() as replica, draft_link(replica) as link:
        busy = asyncio.create_task(keep_busy(link))
        with pytest.raises(TimeoutError):
            await link.propose(ask("hold"), call_timeout=CallTimeout(SILENCE_S, 2 * SILENCE_S))
        assert not busy.done()
        busy.cancel()
