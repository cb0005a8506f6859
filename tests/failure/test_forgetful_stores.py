"""A store that is unreachable, or returns without its latest writes, while a generation runs."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from specdec.client import AsyncClient
from specdec.contract.errors import SessionLost, SpecdecError, Unavailable
from specdec.rpc.status_mapping import from_rpc_error
from specdec.state.key_names import pack_tokens, session_keys
from tests.support.coordinator_rig import PROMPT, Rig, eventually, request
from tests.support.fault_clients import PATIENT
from tests.support.fault_run import fault_seed
from tests.support.interrupted_store import coordinator_on
from tests.support.output import read_rest, read_until
from tests.support.redis_fixture import RedisServer
from tests.support.store_sessions import forget_session
from tests.support.table_services import VOCABULARY, write_tokenizer


class FailingCommits:
    """A session store whose commits fail while a test says so."""

    def __init__(self, store: Any, error: Exception) -> None:
        self._store = store
        self._error = error
        self.num_left = 0

    def of_tenant(self, tenant: str) -> FailingCommits:
        return self

    def __getattr__(self, name: str) -> Any:
        if name == "commit_all" and self.num_left > 0:
            return self._fail
        if name == "commit" and self.num_left > 0:
            return self._fail_again
        if name == "begin_request" and self.num_left > 0:
            return self._fail_one
        return getattr(self._store, name)

    async def _fail(self, commits: Sequence[Any]) -> list[Exception]:
        self.num_left -= 1
        await self.lose()
        return [self._error] * len(commits)

    async def _fail_again(self, *commit: Any) -> None:
        (error,) = await self._fail([commit])
        raise error

    async def _fail_one(self, *_: Any, **__: Any) -> None:
        self.num_left -= 1
        raise self._error

    async def lose(self) -> None:
        """Hook for a further change of the store while commits fail."""


async def reason_of_end(stream: Any, held: Any) -> str:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await read_rest(stream, held)
    return from_rpc_error(caught.value).reason


@pytest.mark.parametrize("num_failures", [1, 4])
async def test_a_store_that_returns_without_the_latest_tokens_is_repaired(num_failures: int) -> None:
    """Also if the last attempt of a commit is the first that reaches it: four fail, and the fifth finds the loss."""
    async with asyncio.timeout(30), Rig(drafts=0) as rig:

        class Crashing(FailingCommits):
            async def lose(self) -> None:
                key = session_keys("default", "s")[1]
                await rig.store._connection.run_command("SET", key, pack_tokens(np.array(PROMPT, np.uint32)), "KEEPTTL")

        store = Crashing(rig.store, Unavailable("away", reason="STORE_UNAVAILABLE"))
        coordinator = await coordinator_on(rig, store)  # type: ignore[arg-type]
        stream = coordinator.stub.Generate(request(session_id="s", max_new_tokens=100))
        held = await read_until(stream, 5)
        store.num_left = num_failures
        await read_rest(stream, held)
        assert held.token_ids == rig.target.worker.greedy_continuation(PROMPT, 100)
        assert (await rig.store.read_tokens("s")).tolist() == [*PROMPT, *held.token_ids]


async def test_a_session_that_lost_shown_tokens_is_not_marked_as_left_in_order() -> None:
    """Otherwise a next turn that depends on the lost tokens would be appended without an error."""
    async with asyncio.timeout(30), Rig(drafts=0) as rig:
        store = FailingCommits(rig.store, SessionLost("lost"))
        coordinator = await coordinator_on(rig, store)  # type: ignore[arg-type]
        stream = coordinator.stub.Generate(request(session_id="s", max_new_tokens=300))
        held = await read_until(stream, 5)
        store.num_left = 1000
        assert await reason_of_end(stream, held) == "SESSION_LOST"
        await eventually(lambda: coordinator.generations.num_running == 0)
        record = await rig.store.load("s")
        assert record is not None
        assert not record.was_left


async def test_a_request_whose_session_vanishes_from_the_store_fails_with_lease_lost() -> None:
    async with asyncio.timeout(30), Rig(drafts=0) as rig:

        class Gone(FailingCommits):
            async def lose(self) -> None:
                await forget_session(rig.store._connection, "s")

        store = Gone(rig.store, SessionLost("lost"))
        coordinator = await coordinator_on(rig, store)  # type: ignore[arg-type]
        stream = coordinator.stub.Generate(request(session_id="s", max_new_tokens=300))
        held = await read_until(stream, 5)
        store.num_left = 1
        assert await reason_of_end(stream, held) == "LEASE_LOST"


class ForgetfulTurns:
    """Turns of many sessions, through two coordinators, on a Redis that crashes and loses its latest writes."""

    def __init__(self, rig: Rig, server: RedisServer, client: AsyncClient, seed: int) -> None:
        self._rig, self._server, self._client = rig, server, client
        self._random = random.Random(seed)
        self._num_changes = 0
        self._turn_ended = asyncio.Event()
        self.num_complete = 0
        self.refusals: Counter[str] = Counter()
        self.problems: list[str] = []

    async def crash_again_and_again(self) -> None:
        """Crash after every few turns, so that a slow machine has no more crashes in a turn than a fast one."""
        while True:
            for _ in range(self._random.randint(3, 15)):
                self._turn_ended.clear()
                await self._turn_ended.wait()
            lost_bytes = int(self._random.expovariate(1 / 1500))
            self._num_changes += 1
            await asyncio.to_thread(self._server.restart_without_its_last, lost_bytes)
            self._num_changes += 1

    async def run_session(self, session_id: str) -> None:
        """Run four turns, or fewer if the store has lost the session: some continue it, some cut it off at a point."""
        log: list[int] = []
        for _ in range(4):
            words = [self._random.randrange(2, VOCABULARY) for _ in range(self._random.randint(1, 30))]
            cuts = self._random.random() < 0.5
            prompt = words if cuts else [*log, *words]
            given: dict[str, Any] = {"prompt_token_ids": words}
            if cuts:
                given = {"messages": [{"role": "user", "content": " ".join(f"w{word}" for word in words)}]}
            num_tokens, num_changes = self._random.randint(1, 40), self._num_changes
            try:
                completion = await self._client.generate(
                    **given, session_id=session_id, max_new_tokens=num_tokens, temperature=0, ignore_eos=True
                )
            except SpecdecError as error:
                self.refusals[error.reason] += 1
                return
            finally:
                self._turn_ended.set()
            expected = self._rig.target.worker.greedy_continuation(prompt, num_tokens)
            stored = await self._stored(session_id)
            log = [*prompt, *expected]
            self.num_complete += 1
            self._compare(session_id, list(completion.token_ids), expected, "the client")
            if self._num_changes == num_changes or len(stored) == len(log):
                self._compare(session_id, stored, log, "the store")

    async def _stored(self, session_id: str) -> list[int]:
        while True:
            try:
                record = await self._rig.store.load(session_id)
                token_ids = (await self._rig.store.read_tokens(session_id)).tolist()
            except Unavailable:  # it starts again
                await asyncio.sleep(0.05)
            else:
                return token_ids[: record.num_tokens if record else 0]

    def _compare(self, session_id: str, found: list[int], expected: list[int], holder: str) -> None:
        if found != expected:
            self.problems.append(f"session {session_id}: {holder} has {found}, not {expected}")


@pytest.mark.parametrize("num_sessions", [30, pytest.param(1250, marks=[pytest.mark.full, pytest.mark.timeout(2700)])])
async def test_turns_on_a_store_that_loses_writes_again_and_again_have_their_text_or_an_error(
    tmp_path: Path, num_sessions: int
) -> None:
    """The model's greedy choices have no ties, so that another token is a fault."""
    server = RedisServer(tmp_path, keeps_log=True)
    server.start()
    write_checkpoint = partial(write_tokenizer, chat_template="{{ messages[0].content }}")
    seed = fault_seed()
    async with Rig(store_url=server.url, write_checkpoint=write_checkpoint) as rig:
        coordinators = [await rig.coordinator(lease_ttl_s=5.0) for _ in range(2)]
        endpoint = f"ipv4:{','.join(coordinator.server.address for coordinator in coordinators)}"
        async with AsyncClient(endpoint, budgets=PATIENT) as client:
            turns = ForgetfulTurns(rig, server, client, seed)
            gate = asyncio.Semaphore(8)

            async def run(number: int) -> None:
                async with gate:
                    await turns.run_session(f"s{number}")

            crashes = asyncio.create_task(turns.crash_again_and_again())
            try:
                await asyncio.gather(*(run(number) for number in range(num_sessions)))
            finally:
                crashes.cancel()
                await asyncio.wait([crashes])
    server.stop()
    print(f"{turns.num_complete} turns complete, refused: {dict(turns.refusals)}")
    assert not turns.problems
    assert turns.num_complete > num_sessions
