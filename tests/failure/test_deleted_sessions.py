"""Sessions that one coordinator deletes, and perhaps creates again, while another runs a request on them.

The reader of that request learns of the deletion, whatever the request fails with or waits for. Nothing of the deleted
session comes back, and the text of another request is never shown as its own.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Sequence
from typing import Any

import pytest

from specdec.client import AsyncClient, Client
from specdec.contract.errors import NotFound, ResourceExhausted, SpecdecError
from specdec.state.store import Commit, Lease
from specdec.v1 import coordinator_pb2 as pb
from tests.support.coordinator_rig import PROMPT, Coordinator, Rig, eventually, request
from tests.support.interrupted_store import InterruptedStore, coordinator_on, keys_of, reason_of
from tests.support.output import read_until
from tests.support.store_sessions import lose_tokens

GREEDY = {"temperature": 0.0, "ignore_eos": True}


def hold_verify(coordinator: Coordinator, error: SpecdecError | None = None) -> tuple[asyncio.Event, asyncio.Event]:
    """Hold a coordinator's next call of its target, and then fail it with `error`, if given.

    Returns:
        Set when the call is held up; and what lets it go.
    """
    held_up, go = asyncio.Event(), asyncio.Event()
    (target,) = coordinator.pools.targets()
    open_run = target.link.open_run

    class HeldRun:
        def __init__(self, run: Any) -> None:
            self._run = run

        def __getattr__(self, name: str) -> Any:
            return getattr(self._run, name)

        async def next(self) -> Any:
            if not go.is_set():
                held_up.set()
                await go.wait()
                if error is not None:
                    raise error
            return await self._run.next()

    target.link.open_run = lambda *args, **options: HeldRun(open_run(*args, **options))
    return held_up, go


@pytest.mark.parametrize("error", [None, ResourceExhausted("no KV blocks left")], ids=["stale", "no-room"])
@pytest.mark.parametrize("is_remade", [False, True], ids=["deleted", "remade"])
async def test_a_reader_learns_of_the_deletion_whatever_error_the_round_had(
    error: SpecdecError | None, is_remade: bool
) -> None:
    """A client that gets another error retries, and would bring the session back or enter another conversation."""
    async with asyncio.timeout(60), Rig(drafts=0) as rig:
        first, second = await rig.coordinator(), await rig.coordinator()
        held_up, go = hold_verify(first, error)
        async with AsyncClient(first.server.address) as client:
            options = {"session_id": "s", "max_new_tokens": 20, **GREEDY}
            reading = asyncio.create_task(client.generate(prompt_token_ids=PROMPT, stream=True, **options).result())
            await held_up.wait()
            await second.stub.DeleteSession(pb.DeleteSessionRequest(session_id="s"))
            if is_remade:
                await second.generate(request([7, 8], session_id="s", max_new_tokens=20))
            go.set()
            with pytest.raises(NotFound, match=re.escape("session 's' was deleted")):
                await reading
        await eventually(lambda: first.generations.num_running == 0)
        assert len(await rig.store.read_tokens("s")) == (22 if is_remade else 0)
        # The KV that the held round made after the deletion is freed too.
        assert rig.target.engine.info().num_sessions == is_remade


@pytest.mark.parametrize("request_id", ["r1", ""], ids=["by-its-id", "the-last"])
@pytest.mark.parametrize("has_finished", [False, True], ids=["left", "finished"])
@pytest.mark.parametrize("is_deleted", [False, True], ids=["next-turn", "remade"])
async def test_resuming_a_request_does_not_show_the_text_of_a_request_that_replaced_it(
    request_id: str, has_finished: bool, is_deleted: bool
) -> None:
    async with asyncio.timeout(60), Rig(drafts=0) as rig:
        first = await rig.coordinator()
        asked = request(session_id="s", request_id="r1", max_new_tokens=12 if has_finished else 200)
        if has_finished:
            await first.generate(asked)
        else:
            stream = first.stub.Generate(asked)
            await read_until(stream, 5)
            stream.cancel()
        await eventually(lambda: first.generations.num_running == 0)

        async def go_on(*_: object) -> None:
            if is_deleted:
                await rig.store.delete("s")
            await first.generate(request([7, 8], session_id="s", request_id="r2", max_new_tokens=30))

        # Between two reads of the store: the one that finds the request, and the one that reads its tokens.
        store = InterruptedStore(rig.store, "read_tokens" if has_finished else "acquire", before=go_on)
        second = await coordinator_on(rig, store)
        resumed = request(None, session_id="s", request_id=request_id, resume_from=5)
        assert await reason_of(second, resumed) == "SESSION_LOST"


async def test_a_session_created_again_between_lease_and_check_is_reported_as_deleted() -> None:
    async with asyncio.timeout(60), Rig(drafts=0) as rig:
        other = await rig.coordinator()

        async def remake(*_: object) -> None:
            await rig.store.delete("s")
            await other.generate(request([7, 8], session_id="s", max_new_tokens=6))

        late = await coordinator_on(rig, InterruptedStore(rig.store, "acquire", after=remake))
        assert await reason_of(late, request(session_id="s")) == "SESSION_NOT_FOUND"
        assert len(await rig.store.read_tokens("s")) == 8


async def test_an_admission_that_a_drain_overtakes_still_reports_a_deletion() -> None:
    async with Rig(drafts=0) as rig:

        async def drain_and_delete(*_: object) -> None:
            await coordinator.generations.drain(0.0)
            await rig.store.delete("s")

        coordinator = await coordinator_on(rig, InterruptedStore(rig.store, "begin_request", after=drain_and_delete))
        assert await reason_of(coordinator, request(session_id="s")) == "SESSION_NOT_FOUND"


async def test_a_session_deleted_before_the_repair_of_its_log_stays_deleted() -> None:
    async with asyncio.timeout(60), Rig(drafts=0) as rig:

        async def lose(commits: Sequence[tuple[Lease, Commit]]) -> None:
            await lose_tokens(rig.store._connection, "s", keep=2)
            first_store.interrupt_next("load", delete)

        async def delete(*_: object) -> None:
            await rig.store.delete("s")

        first_store = InterruptedStore(rig.store, "commit_all", before=lose)
        coordinator = await coordinator_on(rig, first_store)
        assert await reason_of(coordinator, request(session_id="s", max_new_tokens=20)) == "SESSION_NOT_FOUND"
        assert await keys_of(rig) == []


async def test_a_session_whose_creation_was_undone_by_another_coordinator_is_created() -> None:
    async with Rig(drafts=0) as rig:
        other = await rig.store.acquire("s", owner="other", ttl_s=30.0, create=True)

        async def give_up(*_: object) -> None:
            await rig.store.discard(other)

        coordinator = await coordinator_on(rig, InterruptedStore(rig.store, "acquire", before=give_up))
        await coordinator.generate(request(session_id="s", max_new_tokens=6))
        assert len(await rig.store.read_tokens("s")) == len(PROMPT) + 6


async def test_the_sdk_expects_no_length_of_a_session_that_it_deleted_and_starts_again() -> None:
    async with Rig(drafts=0) as rig:
        coordinator = await rig.coordinator()
        options = {"max_new_tokens": 20, "stream": True, **GREEDY}
        async with AsyncClient(coordinator.server.address) as client:
            stream = client.generate(prompt_token_ids=PROMPT, session_id="a", **options)
            await anext(stream)
            await eventually(lambda: coordinator.generations.num_running == 0)
            await client.delete_session("a")
            assert (await stream.result()).usage.num_output_tokens == 20  # which is read after the deletion
            anew = await client.generate(prompt_token_ids=[7, 8], session_id="a", max_new_tokens=5)
            assert anew.usage.num_prompt_tokens == 2

        def talk() -> None:
            with Client(coordinator.server.address) as client:
                stream = client.generate(prompt_token_ids=PROMPT, session_id="b", **options)
                next(stream)
                while coordinator.generations.num_running:
                    time.sleep(0.01)
                client.delete_session("b")
                assert stream.result().usage.num_output_tokens == 20
                anew = client.generate(prompt_token_ids=[7, 8], session_id="b", max_new_tokens=5)
                assert anew.usage.num_prompt_tokens == 2

        await asyncio.to_thread(talk)


@pytest.mark.parametrize("num_shown", [0, 10])
@pytest.mark.parametrize("is_remade", [False, True], ids=["deleted", "remade"])
async def test_a_session_deleted_at_another_coordinator_ends_for_its_reader_and_stays_deleted(
    num_shown: int, is_remade: bool
) -> None:
    async with asyncio.timeout(60), Rig() as rig:
        held_up, deleted = asyncio.Event(), asyncio.Event()

        async def wait(commits: Sequence[tuple[Lease, Commit]]) -> None:
            if commits[0][1].base_len < len(PROMPT) + num_shown:
                store.interrupt_next("commit_all", wait)
            else:
                held_up.set()
                await deleted.wait()

        store = InterruptedStore(rig.store, "commit_all", before=wait)
        first, second = await coordinator_on(rig, store), await rig.coordinator()
        async with AsyncClient(first.server.address) as client:
            options = {"session_id": "s", "max_new_tokens": 100, "temperature": 0.0}
            stream = client.generate(prompt_token_ids=PROMPT, stream=True, **options)
            reading = asyncio.create_task(stream.result())
            await held_up.wait()
            await second.stub.DeleteSession(pb.DeleteSessionRequest(session_id="s"))
            if is_remade:
                anew = await second.generate(request([7, 8], session_id="s", max_new_tokens=20))
                assert anew.token_ids == rig.target.worker.greedy_continuation([7, 8], 20)
            deleted.set()
            with pytest.raises(NotFound, match=re.escape("session 's' was deleted")):
                await reading
        await eventually(lambda: first.generations.num_running == 0)
        assert len(await rig.store.read_tokens("s")) == (22 if is_remade else 0)
        assert bool(await keys_of(rig)) == is_remade


async def test_a_session_deleted_at_another_coordinator_during_its_creation_stays_deleted() -> None:
    async with Rig() as rig:

        async def delete(*_: object) -> None:
            await rig.store.delete("s")

        taken = InterruptedStore(rig.store, "acquire", after=delete)
        begun = InterruptedStore(rig.store, "begin_request", before=delete)
        for store in (taken, begun):
            coordinator = await coordinator_on(rig, store)
            assert await reason_of(coordinator, request(session_id="s")) == "SESSION_NOT_FOUND"
            assert await keys_of(rig) == []
