"""A draft pool inside an engine: draft tokens by row from real draft services, within a deadline or none."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from types import SimpleNamespace

import numpy as np
import pytest

from coordinator.replicas.replica import DRAFT
from specdec.contract.errors import InvalidSetting, Unavailable, Unsupported
from specdec.contract.tenant import session_on_replica
from specdec.integrations.draft_pool import DraftPool
from specdec.integrations.vllm import DraftPoolProposer
from tests.support.table_services import Service, start_service

GAMMA = 4


@pytest.fixture
async def draft() -> AsyncIterator[Service]:
    service = await start_service(DRAFT, salt=1)
    yield service
    service.worker.gate.set()
    await service.kill()


async def connected(*services: Service, deadline_s: float = 20.0) -> DraftPool:
    """Return a pool of services. Its calls block, so they run on threads."""
    addresses = [service.address for service in services]
    return await asyncio.to_thread(lambda: DraftPool(addresses, vocabulary_fingerprint="table", deadline_s=deadline_s))


async def propose(pool: DraftPool, rows: Mapping[int, Sequence[int]]) -> dict[int, list[int]]:
    arrays = {row: np.array(tokens, dtype=np.uint32) for row, tokens in rows.items()}
    return await asyncio.to_thread(pool.propose, arrays, GAMMA)


def expected(service: Service, rows: Mapping[int, Sequence[int]]) -> dict[int, list[int]]:
    return {row: service.worker.greedy_continuation(tokens, GAMMA) for row, tokens in rows.items()}


def num_run_tokens(service: Service) -> int:
    return sum(len(part.token_ids) for plan in service.worker.steps for part in plan.slices)


async def test_rows_get_the_greedy_tokens_of_the_draft_as_they_grow_and_move(draft: Service) -> None:
    pool = await connected(draft)
    rows = {0: [5, 6, 7], 1: [5, 6, 7], 2: [9, 8]}
    for grown in (rows, {0: [*rows[2], 3], 1: [*rows[0], 4, 2], 3: [11]}, {0: [*rows[2], 3, 3, 9], 3: [11, 12]}):
        assert await propose(pool, grown) == expected(draft, grown)
    await asyncio.to_thread(pool.close)


async def test_a_row_that_moves_keeps_the_tokens_that_the_replica_holds(draft: Service) -> None:
    pool = await connected(draft)
    prompt = [2 + number % 20 for number in range(100)]
    await propose(pool, {0: prompt})
    before = num_run_tokens(draft)
    await propose(pool, {7: [*prompt, 3, 4]})
    assert num_run_tokens(draft) - before < 20
    await asyncio.to_thread(pool.close)


async def test_tokens_that_the_replica_has_lost_are_sent_again(draft: Service) -> None:
    pool = await connected(draft)
    rows = {0: list(range(2, 22))}
    await propose(pool, rows)
    (session,) = pool._sessions._by_row.values()
    await draft.engine.release([session_on_replica("default", session.session_id)])
    longer = {0: [*rows[0], 7]}
    assert await propose(pool, longer) == expected(draft, longer)
    await asyncio.to_thread(pool.close)


async def test_a_replica_that_hangs_costs_one_deadline_and_is_used_again_once_it_answers(draft: Service) -> None:
    pool = await connected(draft, deadline_s=0.3)
    rows = {0: [5, 6, 7]}
    await propose(pool, rows)
    draft.worker.gate.clear()
    began_s = time.monotonic()
    assert await propose(pool, {0: [5, 6, 7, 8]}) == {}
    assert time.monotonic() - began_s >= 0.3
    draft.worker.gate.set()
    longer = {0: [5, 6, 7, 8, 9]}
    async with asyncio.timeout(60):
        while await propose(pool, longer) != expected(draft, longer):
            longer[0].append(3)
    await asyncio.to_thread(pool.close)


async def test_an_engine_goes_on_at_its_deadline_while_the_thread_of_the_links_is_held_up(draft: Service) -> None:
    pool = await connected(draft)
    rows = {0: [5, 6, 7]}
    assert await propose(pool, rows) == expected(draft, rows)
    pool._deadline_s = 0.1
    goes_on = threading.Event()
    pool._loop.call_soon_threadsafe(goes_on.wait)
    try:
        assert await asyncio.wait_for(propose(pool, {0: [5, 6, 7, 8]}), 60) == {}
    finally:
        goes_on.set()
    pool._deadline_s = 20.0
    longer = {0: [5, 6, 7, 8, 9]}
    async with asyncio.timeout(60):
        while (drafts := await propose(pool, longer)) == {}:  # left out until it has answered once more
            pass
    assert drafts == expected(draft, longer)
    await asyncio.to_thread(pool.close)


async def test_without_its_replica_a_pool_gives_no_drafts_and_another_replica_takes_over(draft: Service) -> None:
    other = await start_service(DRAFT, salt=1)
    pool = await connected(draft, other)
    rows = {0: [5, 6, 7], 1: [9, 10]}
    assert await propose(pool, rows) == expected(draft, rows)
    await draft.kill()
    grown = {0: [5, 6, 7, 8], 1: [9, 10, 11]}
    async with asyncio.timeout(60):
        while await propose(pool, grown) != expected(other, grown):
            for tokens in grown.values():
                tokens.append(3)
    await other.kill()
    async with asyncio.timeout(60):
        while await propose(pool, grown):
            for tokens in grown.values():
                tokens.append(4)
    await asyncio.to_thread(pool.close)


async def test_a_draft_with_another_vocabulary_is_refused(draft: Service) -> None:
    with pytest.raises(InvalidSetting, match="start it with a model of this vocabulary"):
        await asyncio.to_thread(lambda: DraftPool([draft.address], vocabulary_fingerprint="another", deadline_s=1.0))


async def test_an_address_without_a_draft_is_refused() -> None:
    with pytest.raises(Unavailable):
        await asyncio.to_thread(lambda: DraftPool(["127.0.0.1:9"], vocabulary_fingerprint="table", deadline_s=1.0))


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({}, "SPECDEC_DRAFT_ENDPOINT is not set"),
        ({"SPECDEC_DRAFT_ENDPOINT": "h:1", "SPECDEC_DRAFT_DEADLINE_MS": "-1"}, "SPECDEC_DRAFT_DEADLINE_MS must be"),
        ({"SPECDEC_DRAFT_ENDPOINT": "h:1", "SPECDEC_DRAFT_DEADLINE_MS": "soon"}, "SPECDEC_DRAFT_DEADLINE_MS must be"),
    ],
)
def test_a_wrong_variable_of_the_environment_is_named(
    monkeypatch: pytest.MonkeyPatch, environ: dict[str, str], message: str
) -> None:
    monkeypatch.delenv("SPECDEC_DRAFT_ENDPOINT", raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(InvalidSetting, match=message):
        DraftPoolProposer(vllm_config(world_size=1))


def test_several_ranks_are_refused() -> None:
    with pytest.raises(Unsupported, match="--tensor-parallel-size 1"):
        DraftPoolProposer(vllm_config(world_size=2))


def vllm_config(world_size: int) -> SimpleNamespace:
    """Return the fields of vLLM's configuration that the proposer reads."""
    return SimpleNamespace(
        parallel_config=SimpleNamespace(world_size=world_size),
        model_config=SimpleNamespace(tokenizer="unused", max_model_len=128),
        speculative_config=SimpleNamespace(num_speculative_tokens=GAMMA),
    )
