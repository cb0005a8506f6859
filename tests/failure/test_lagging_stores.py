"""A session that goes on after its Redis was replaced by one whose clock is behind, or that lost its last writes.

Replicas have seen a newer epoch than the new server gives. The coordinator holds the lease, so it takes a higher epoch;
the client sees nothing of it. An older owner stays fenced.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import grpc
import pytest

from coordinator.replicas.replica import DRAFT, TARGET
from specdec.contract.errors import StaleEpoch
from specdec.contract.types import VerifyRequest
from specdec.rpc.status_mapping import from_rpc_error
from specdec.state.connection import RedisConnection
from specdec.state.key_names import replica_keys, session_keys
from specdec.state.redis_store import open_registry, open_store
from specdec.state.store import ReplicaRecord
from specdec.v1 import coordinator_pb2 as pb
from tests.support.coordinator_rig import PROMPT, Rig, eventually, request
from tests.support.output import read_rest, read_until
from tests.support.redis_fixture import redis_server, redis_url
from tests.support.table_services import start_service

__all__ = ["redis_server", "redis_url"]

LAG_US = 600_000_000
KEYS = session_keys("default", "s", "default")


class Failover:
    """Replaces the state of one session as a failover to another server does."""

    def __init__(self, url: str) -> None:
        self._raw = RedisConnection(url)
        self._store = open_store(url)

    async def begin_ahead(self) -> None:
        """Let the session's epochs be those of a clock that is ahead."""
        lease = await self._store.acquire("s", owner="before", ttl_s=30.0, create=True)
        await self._raw.run_command("HSET", KEYS[0], "epoch", lease.epoch + LAG_US)
        await self._raw.run_command("DEL", KEYS[2])

    async def lose_epoch(self) -> None:
        """Continue on a server that lacks the last lease and whose clock is behind."""
        epoch = int(await self._raw.run_command("HGET", KEYS[0], "epoch"))
        await self._raw.run_command("HSET", KEYS[0], "epoch", epoch - LAG_US - 1000, "left", epoch - LAG_US - 1000)
        await self._raw.run_command("DEL", KEYS[2])

    async def lose_session(self) -> None:
        await self._raw.run_command("DEL", *KEYS)

    async def epoch(self) -> int:
        return int(await self._raw.run_command("HGET", KEYS[0], "epoch") or 0)

    async def close(self) -> None:
        await self._raw.close()
        await self._store.close()


@pytest.fixture
async def failover(redis_url: str) -> Any:
    failover = Failover(redis_url)
    await failover.lose_session()
    yield failover
    await failover.lose_session()
    await failover.close()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("loses_session", [True, False])
async def test_a_next_turn_is_served_at_once_on_a_server_whose_clock_is_behind(
    failover: Failover, redis_url: str, loses_session: bool, temperature: float
) -> None:
    async with Rig(store_url=redis_url) as rig:
        coordinator = await rig.coordinator()
        alone = await coordinator.generate(request(temperature=temperature, seed=3))
        await failover.begin_ahead()
        first = await coordinator.generate(request(session_id="s", temperature=temperature, seed=3))
        seen = await failover.epoch()
        await (failover.lose_session() if loses_session else failover.lose_epoch())

        coordinator = await rig.coordinator()  # the one before remembers what it wrote
        again = await coordinator.generate(request(session_id="s", temperature=temperature, seed=3))
        assert first.token_ids == alone.token_ids
        if loses_session:  # the same turn once more: the same text
            assert again.token_ids == alone.token_ids
        assert len(again.token_ids) == 24
        assert again.finished.stats.num_draft_tokens > 0
        assert await failover.epoch() > seen


async def test_an_unfinished_turn_is_resumed_on_a_server_whose_clock_is_behind(
    failover: Failover, redis_url: str
) -> None:
    async with Rig(store_url=redis_url) as rig:
        coordinator = await rig.coordinator()
        await failover.begin_ahead()
        stream = coordinator.stub.Generate(request(session_id="s", max_new_tokens=200))
        output = await read_until(stream, 10)
        stream.cancel()
        await eventually(lambda: not coordinator.generations.num_running)
        await failover.lose_epoch()

        coordinator = await rig.coordinator()
        resumed = coordinator.stub.Generate(
            request(None, session_id="s", resume_from=len(output.token_ids), mode=pb.SPECULATION_MODE_UNSPECIFIED)
        )
        await read_rest(resumed, output)
        assert output.token_ids == rig.target.worker.greedy_continuation(PROMPT, 200)


async def test_a_draft_that_alone_has_seen_the_newer_epoch_drafts_again(failover: Failover, redis_url: str) -> None:
    async with Rig(store_url=redis_url) as rig:
        coordinator = await rig.coordinator()
        await failover.begin_ahead()
        await coordinator.generate(request(session_id="s"))
        await failover.lose_session()
        await rig.target.kill()
        rig.services.remove(rig.target)
        rig.services.append(await start_service(TARGET, salt=0))

        coordinator = await rig.coordinator()
        output = await coordinator.generate(request(session_id="s"))
        assert output.token_ids == rig.target.worker.greedy_continuation(PROMPT, 24)
        assert output.finished.stats.num_target_only_steps <= 2
        assert output.finished.stats.num_draft_tokens > 0


async def test_an_owner_whose_session_was_taken_over_ends_and_the_new_one_goes_on(
    failover: Failover, redis_url: str
) -> None:
    async with Rig(store_url=redis_url) as rig:
        old, new = await rig.coordinator(), await rig.coordinator()
        stream = old.stub.Generate(request(session_id="s", max_new_tokens=400, gamma=0))
        output = await read_until(stream, 5)
        await failover._raw.run_command("DEL", KEYS[2])  # as if the lease had run out while the owner stood still
        resumed = new.stub.Generate(
            request(None, session_id="s", resume_from=len(output.token_ids), mode=pb.SPECULATION_MODE_UNSPECIFIED)
        )
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await read_rest(stream, output)
        assert from_rpc_error(caught.value).reason in ("LEASE_LOST", "STALE_EPOCH")
        assert len((await read_rest(resumed, type(output)())).token_ids) > 0


@pytest.mark.parametrize("epoch", [0, 1, 2**53, 2**63, 2**64 - 1])
async def test_an_epoch_that_no_clock_gives_ends_the_request_and_leaves_the_sessions_own(
    failover: Failover, redis_url: str, epoch: int
) -> None:
    class Refusing:
        def __init__(self, engine: Any) -> None:
            self._engine = engine

        def __getattr__(self, name: str) -> Any:
            return getattr(self._engine, name)

        async def verify(self, asked: VerifyRequest, on_step: Any = None) -> Any:
            raise StaleEpoch("a newer one has been seen", epoch=epoch)

    async with Rig(store_url=redis_url, targets=0, drafts=0) as rig:
        rig.services.append(await start_service(TARGET, salt=0, between=Refusing))
        coordinator = await rig.coordinator()
        await failover.begin_ahead()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await coordinator.generate(request(session_id="s"))
        assert from_rpc_error(caught.value).reason == "STALE_EPOCH"
        assert await failover.epoch() < 2**53


async def test_dead_replicas_of_a_server_whose_clock_was_ahead_are_forgotten(redis_url: str) -> None:
    registry, raw = open_registry(redis_url, cluster="lag"), RedisConnection(redis_url)
    expiry = replica_keys(DRAFT, "lag")[1]
    async with Rig(drafts=1, targets=0) as rig:
        info = rig.draft.engine.info()
        for name in ("dead", "alive"):
            await registry.publish(ReplicaRecord("h:1", replace(info, replica_id=name)), ttl_s=10.0)
        for name in ("dead", "alive"):  # the clock of the server before was ten minutes ahead
            await raw.run_command("ZINCRBY", expiry, LAG_US / 1000, name)
        await registry.publish(ReplicaRecord("h:1", replace(info, replica_id="alive")), ttl_s=10.0)
        scores = [float(await raw.run_command("ZSCORE", expiry, name)) for name in ("dead", "alive")]
        now_ms = 1000 * int((await raw.run_command("TIME"))[0])
        assert all(now_ms < score <= now_ms + 11_000 for score in scores)
    await raw.run_command("DEL", *replica_keys(DRAFT, "lag"))
    await registry.close()
    await raw.close()
