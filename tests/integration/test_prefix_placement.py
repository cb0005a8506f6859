"""Sessions go to the replica of their KV through any coordinator, with real gRPC, real engines and a real Redis."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest

from coordinator.replicas.replica import DRAFT, TARGET
from specdec.contract.errors import KvMiss
from specdec.contract.types import BLOCK_TOKENS
from tests.support.coordinator_rig import Coordinator, Rig, request
from tests.support.output import Output
from tests.support.redis_fixture import redis_server, redis_url
from tests.support.table_services import Service, start_service

__all__ = ["redis_server", "redis_url"]

NUM_TOKENS = 12
#: A system prompt, as far as these models have one.
PREFIX = tuple(2 + (7 * index + index // 5) % 20 for index in range(8 * BLOCK_TOKENS))


class Watched:
    """Wraps an engine: records the sessions and requests of its calls, and counts misses."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self.sessions: set[str] = set()
        self.start = 0
        """Position from which the latest call sent tokens."""
        self.num_misses = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    async def verify(self, request: Any, on_step: Any = None) -> Any:
        return await self._note(request, self._engine.verify(request, on_step))

    async def propose(self, request: Any) -> Any:
        return await self._note(request, self._engine.propose(request))

    async def _note(self, request: Any, answer: Any) -> Any:
        self.sessions.add(request.position.session_id)
        self.start = request.position.start
        try:
            return await answer
        except KvMiss:
            self.num_misses += 1
            raise


class WatchedRig(Rig):
    """A rig whose targets and drafts are wrapped in `Watched`."""

    def __init__(self, store_url: str) -> None:
        super().__init__(targets=0, drafts=0, store_url=store_url)
        self.watched: dict[str, Watched] = {}

    async def start(self, role: str, listen: str = "127.0.0.1:0") -> Service:
        engines: list[Watched] = []

        def watch(engine: Any) -> Watched:
            engines.append(Watched(engine))
            return engines[-1]

        service = await start_service(role, salt=1 if role == DRAFT else 0, listen=listen, between=watch)
        self.services.append(service)
        self.watched[service.address] = engines[-1]
        return service

    def called_by(self, session_id: str, role: str) -> list[str]:
        """Return the addresses of the replicas of a role that the session called."""
        return [
            service.address for service in self.of_role(role) if session_id in self.watched[service.address].sessions
        ]

    @property
    def num_misses(self) -> int:
        return sum(each.num_misses for each in self.watched.values())

    def forget_calls(self) -> None:
        for each in self.watched.values():
            each.sessions.clear()


@asynccontextmanager
async def watched_rig(store_url: str, *, num_each: int) -> AsyncIterator[WatchedRig]:
    async with WatchedRig(store_url) as rig:
        for role in (TARGET, DRAFT):
            for _ in range(num_each):
                await rig.start(role)
        yield rig


async def turn(coordinator: Coordinator, session_id: str, prompt: Sequence[int], **options: Any) -> Output:
    output = await coordinator.generate(request(prompt, session_id=session_id, max_new_tokens=NUM_TOKENS, **options))
    await asyncio.sleep(0)
    return output


def num_cached(output: Output) -> int:
    assert output.finished is not None
    return output.finished.usage.num_cached_prompt_tokens


async def test_a_turn_through_another_coordinator_finds_its_replicas_without_a_miss(
    redis_url: str,
) -> None:
    async with watched_rig(redis_url, num_each=3) as rig:
        coordinators = [await rig.coordinator(), await rig.coordinator()]
        for index in range(6):
            session_id = f"returning-{index}"
            held = 0
            for number in range(4):
                prompt = PREFIX[index : index + 40] if number == 0 else (3, 4, 5)
                output = await turn(coordinators[number % 2], session_id, prompt)
                # Of what the session held, the target lacked the last token alone: it is in no KV yet.
                assert num_cached(output) >= held - 1
                held += len(prompt) + len(output.token_ids)
            used = rig.called_by(session_id, TARGET) + rig.called_by(session_id, DRAFT)
            assert len(used) == 2
            assert all(rig.watched[address].start > 0 for address in used)
        assert rig.num_misses == 0


async def test_the_stored_location_of_a_session_overrides_a_coordinators_own_memory(redis_url: str) -> None:
    async with watched_rig(redis_url, num_each=2) as rig:
        first, second = await rig.coordinator(), await rig.coordinator()
        one, other = (service.address for service in rig.of_role(TARGET))
        _lose(first, other)
        await turn(first, "moved", PREFIX[:40])
        _lose(second, one)
        await turn(second, "moved", (3, 4, 5))
        assert rig.called_by("moved", TARGET) == [one, other]
        rig.forget_calls()
        for coordinator in (first, second):
            await coordinator.pools.poll()
            await turn(coordinator, "moved", (6,))
        assert rig.called_by("moved", TARGET) == [other]
        assert rig.num_misses == 0


def _lose(coordinator: Coordinator, address: str) -> None:
    """Make a target dead to one coordinator until its next poll."""
    next(replica for replica in coordinator.pools.targets() if replica.address == address).is_alive = False


@pytest.mark.parametrize("has_directory", [True, False])
async def test_new_sessions_go_to_a_replica_that_holds_their_prefix(redis_url: str, has_directory: bool) -> None:
    """Negative control: without the directory they spread, and each replica runs the prefix by itself."""
    async with watched_rig(redis_url, num_each=4) as rig:
        coordinators = [await rig.coordinator(has_directory=has_directory) for _ in range(2)]
        used = set()
        for index in range(8):
            session_id = f"sharing-{has_directory}-{index}"
            coordinator = coordinators[index % 2]
            output = await turn(coordinator, session_id, (*PREFIX, 2 + index, 3))
            used.update(rig.called_by(session_id, TARGET) + rig.called_by(session_id, DRAFT))
            assert num_cached(output) == len(PREFIX) or index == 0 or not has_directory
            await coordinator.pools.poll()
        assert len(used) == 2 if has_directory else len(used) > 2


async def test_the_load_of_a_replica_is_weighted_by_the_measured_rows_of_a_request(redis_url: str) -> None:
    async with watched_rig(redis_url, num_each=1) as rig:
        coordinator = await rig.coordinator()
        for _ in range(2):
            output = await turn(coordinator, "", PREFIX)
        stats = output.finished.stats
        rule = coordinator.generations._factory._placement.rule
        assert rule.request_rows == stats.num_rounds + stats.num_draft_tokens


async def test_a_prefix_is_known_to_other_sessions_before_its_turn_has_ended(redis_url: str) -> None:
    async with watched_rig(redis_url, num_each=4) as rig:
        first, second = await rig.coordinator(), await rig.coordinator()
        stream = first.stub.Generate(request((*PREFIX, 9), session_id="running", max_new_tokens=300))
        for _ in range(3):  # started, and two rounds
            await stream.read()
        output = await turn(second, "beside", (*PREFIX, 8))
        assert rig.called_by("beside", TARGET) == rig.called_by("running", TARGET)
        assert num_cached(output) == len(PREFIX)
        stream.cancel()


async def test_a_session_that_starts_with_another_sessions_output_goes_to_its_replica(redis_url: str) -> None:
    """Clients that send the whole conversation with every request make such sessions."""
    async with watched_rig(redis_url, num_each=4) as rig:
        first, second = await rig.coordinator(), await rig.coordinator()
        prompt = PREFIX[3:13]
        opening = await first.generate(request(prompt, session_id="told", max_new_tokens=100))
        conversation = (*prompt, *opening.token_ids, 4, 5)
        output = await turn(second, "retold", conversation)
        assert rig.called_by("retold", TARGET) == rig.called_by("told", TARGET)
        assert rig.called_by("retold", DRAFT) == rig.called_by("told", DRAFT)
        assert num_cached(output) >= 96


async def test_a_dead_replica_in_the_directory_is_skipped(redis_url: str) -> None:
    async with watched_rig(redis_url, num_each=2) as rig:
        first, second = await rig.coordinator(), await rig.coordinator()
        opening = await turn(first, "orphan", PREFIX)
        for role in (TARGET, DRAFT):
            (address,) = rig.called_by("orphan", role)
            await next(service for service in rig.of_role(role) if service.address == address).kill()
        # The second one has not noticed: the replicas are alive to it until a call fails.
        output = await turn(second, "orphan", (3, 4, 5))
        assert output.token_ids == rig.target.worker.greedy_continuation(
            [*PREFIX, *opening.token_ids, 3, 4, 5], NUM_TOKENS
        )
        assert (await turn(second, "new", (*PREFIX, 4))).token_ids == rig.target.worker.greedy_continuation(
            [*PREFIX, 4], NUM_TOKENS
        )
        assert len(rig.called_by("orphan", TARGET)) == 2


async def test_a_hung_target_in_the_directory_is_left_and_then_skipped(redis_url: str) -> None:
    async with watched_rig(redis_url, num_each=2) as rig:
        for service in rig.services:  # a hang can be told once there is a step to compare it with
            await service.engine.warm_up()
        first, second = await rig.coordinator(), await rig.coordinator()
        await turn(first, "holder", PREFIX)
        (address,) = rig.called_by("holder", TARGET)
        (hung,) = (service for service in rig.of_role(TARGET) if service.address == address)
        (other,) = (service for service in rig.of_role(TARGET) if service is not hung)
        hung.worker.gate.clear()
        try:
            async with asyncio.timeout(30.0):
                # The prefix is not noted yet. The first session goes where its prefix is, and the others follow.
                output = await turn(second, "early", (*PREFIX, 4))
                assert output.token_ids == other.worker.greedy_continuation([*PREFIX, 4], NUM_TOKENS)
                assert set(rig.called_by("early", TARGET)) == {hung.address, other.address}
                await second.pools.poll()
                await turn(second, "late", (*PREFIX, 5))
                assert rig.called_by("late", TARGET) == [other.address]
        finally:
            hung.worker.gate.set()


async def test_a_replica_that_restarted_without_kv_is_sent_all_tokens_without_a_miss(redis_url: str) -> None:
    async with watched_rig(redis_url, num_each=1) as rig:
        first = await rig.coordinator()
        opening = await turn(first, "cold", PREFIX)
        for service in list(rig.services):
            rig.services.remove(service)
            await service.kill()
            await rig.start(service.role, listen=service.address)
        second = await rig.coordinator()
        output = await turn(second, "cold", (3, 4, 5))
        assert output.token_ids == rig.target.worker.greedy_continuation(
            [*PREFIX, *opening.token_ids, 3, 4, 5], NUM_TOKENS
        )
        assert num_cached(output) == 0
        assert rig.num_misses == 0


async def test_a_replica_that_has_forgotten_the_session_costs_one_miss_each(redis_url: str) -> None:
    async with watched_rig(redis_url, num_each=1) as rig:
        first, second = await rig.coordinator(), await rig.coordinator()
        opening = await turn(first, "evicted", PREFIX)
        for service in rig.services:
            await service.engine.release(["evicted"])
        output = await turn(second, "evicted", (3, 4, 5))
        assert output.token_ids == rig.target.worker.greedy_continuation(
            [*PREFIX, *opening.token_ids, 3, 4, 5], NUM_TOKENS
        )
        assert [each.num_misses for each in rig.watched.values()] == [1, 1]
