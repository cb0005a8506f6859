"""Requests and rounds of a session in every session store (contract: `specdec.state.store`)."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace

import numpy as np
import pytest

from specdec.contract.errors import LeaseLost, SessionLost
from specdec.contract.types import FinishReason
from specdec.state.store import Commit, Lease, SessionStore
from tests.support.store_sessions import LONG_TTL_S, REQUEST, a_round, held_tokens, take_over, tokens


async def test_a_started_request_is_read_back_with_all_fields(
    store: SessionStore, session_id: str, lease: Lease
) -> None:
    record = await store.load(session_id)
    assert record is not None
    assert record.request == REQUEST
    assert record.session_id == session_id
    assert (record.epoch, record.round_id, record.num_tokens, record.owner) == (lease.epoch, 0, 3, "me")
    assert record.status == "running"
    assert 0 < record.expires_in_s <= 3600
    assert await held_tokens(store, session_id) == [1, 2, 3]


async def test_an_ended_request_may_be_stored_again(store: SessionStore, session_id: str, lease: Lease) -> None:
    ended = replace(REQUEST, finish_reason=FinishReason.STOP, stats_json='{"num_rounds": 7}')
    await store.begin_request(lease, ended, keep=3, token_ids=tokens(4))
    record = await store.load(session_id)
    assert record is not None
    assert record.request == ended


async def test_parameters_of_any_text_survive(store: SessionStore, session_id: str, lease: Lease) -> None:
    odd = replace(REQUEST, parameters_json=json.dumps({"stop": ["\r\n", "\0", "naïve 😀"]}, ensure_ascii=False))
    await store.begin_request(lease, odd, keep=3, token_ids=tokens())
    record = await store.load(session_id)
    assert record is not None
    assert record.request == odd


async def test_tokens_of_every_byte_pattern_survive(store: SessionStore, session_id: str, lease: Lease) -> None:
    odd = np.asarray([0, 10, 13, 0x0D0A, 0x0A0D0A0D, 2**31, 2**32 - 1], np.uint32)
    await store.begin_request(lease, REQUEST, keep=0, token_ids=odd)
    assert await held_tokens(store, session_id) == odd.tolist()


async def test_a_long_log_is_read_whole_and_from_any_position(
    store: SessionStore, session_id: str, lease: Lease
) -> None:
    log = np.random.default_rng(7).integers(0, 2**32, 300_000, dtype=np.uint32)
    log[:100_000] = 7  # without a byte that ends a line
    await store.begin_request(lease, REQUEST, keep=0, token_ids=log)
    whole, end = await store.read_tokens(session_id), await store.read_tokens(session_id, 299_990)
    assert whole.dtype == np.uint32
    assert np.array_equal(whole, log)
    assert np.array_equal(end, log[299_990:])
    assert len(await store.read_tokens(session_id, 300_000)) == 0


@pytest.mark.parametrize("keep", [0, 1, 2, 3])
async def test_a_new_turn_keeps_the_requested_prefix_of_the_log(
    store: SessionStore, session_id: str, lease: Lease, keep: int
) -> None:
    await store.begin_request(lease, replace(REQUEST, turn=1), keep=keep, token_ids=tokens(8, 9))
    assert await held_tokens(store, session_id) == [*[1, 2, 3][:keep], 8, 9]


async def test_starting_a_request_again_changes_nothing(store: SessionStore, session_id: str, lease: Lease) -> None:
    for _ in range(2):
        await store.begin_request(lease, replace(REQUEST, turn=1), keep=2, token_ids=tokens(8, 9))
    assert await held_tokens(store, session_id) == [1, 2, 8, 9]


async def test_keeping_more_tokens_than_the_log_holds_is_a_lost_session(
    store: SessionStore, session_id: str, lease: Lease
) -> None:
    with pytest.raises(SessionLost, match="3 tokens where 4"):
        await store.begin_request(lease, REQUEST, keep=4, token_ids=tokens(8))
    assert await held_tokens(store, session_id) == [1, 2, 3]


async def test_rounds_append_in_order_and_the_last_one_ends_the_request(
    store: SessionStore, session_id: str, lease: Lease
) -> None:
    await store.commit(lease, a_round(0, 3, 4, 5))
    await store.commit(lease, a_round(1, 5, 6))
    await store.commit(lease, a_round(2, 6, finish_reason=FinishReason.LENGTH))
    record = await store.load(session_id)
    assert record is not None
    assert record.request is not None
    assert (record.round_id, record.num_tokens, record.status) == (3, 6, "idle")
    assert record.request.finish_reason is FinishReason.LENGTH
    assert json.loads(record.request.stats_json) == {"num_rounds": 2}
    assert (await store.read_tokens(session_id, 3)).tolist() == [4, 5, 6]


async def test_the_same_round_with_the_same_tokens_succeeds_once(
    store: SessionStore, session_id: str, lease: Lease
) -> None:
    for _ in range(3):
        await store.commit(lease, a_round(0, 3, 4, 5))
    assert await held_tokens(store, session_id) == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("other", [(4, 6), (4,), (4, 5, 6), ()])
async def test_the_same_round_with_other_tokens_fails(
    store: SessionStore, session_id: str, lease: Lease, other: tuple[int, ...]
) -> None:
    await store.commit(lease, a_round(0, 3, 4, 5))
    with pytest.raises(LeaseLost):
        await store.commit(lease, a_round(0, 3, *other))
    assert await held_tokens(store, session_id) == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("commit", [a_round(5, 4, 9), a_round(1, 3, 9), a_round(0, 4, 9)])
async def test_a_round_that_does_not_follow_fails(
    store: SessionStore, session_id: str, lease: Lease, commit: Commit
) -> None:
    await store.commit(lease, a_round(0, 3, 4))
    with pytest.raises(LeaseLost):
        await store.commit(lease, commit)
    assert await held_tokens(store, session_id) == [1, 2, 3, 4]


async def test_a_round_of_the_previous_turn_is_not_committed_again(
    store: SessionStore, session_id: str, lease: Lease
) -> None:
    await store.commit(lease, a_round(0, 3, 4, finish_reason=FinishReason.STOP))
    await store.begin_request(lease, replace(REQUEST, turn=1), keep=3, token_ids=tokens(4))
    with pytest.raises(LeaseLost):
        await store.commit(lease, a_round(0, 3, 4))
    await store.commit(lease, a_round(1, 4, 5))
    assert await held_tokens(store, session_id) == [1, 2, 3, 4, 5]


async def test_one_store_serves_many_sessions_at_once(store: SessionStore, session_id: str) -> None:
    async def run_session(number: int) -> list[int]:
        name = f"{session_id}-{number}"
        lease = await store.acquire(name, owner=f"owner-{number}", ttl_s=LONG_TTL_S, create=True)
        await store.begin_request(lease, REQUEST, keep=0, token_ids=tokens(number))
        for round_id in range(5):
            await store.commit(lease, a_round(round_id, 1 + round_id, number + round_id))
        await store.release(lease)
        return await held_tokens(store, name)

    logs = await asyncio.gather(*(run_session(number) for number in range(20)))
    assert logs == [[number, *range(number, number + 5)] for number in range(20)]


async def test_commits_sent_together_succeed_and_fail_independently(store: SessionStore, session_id: str) -> None:
    mine = await store.acquire(session_id, owner="me", ttl_s=LONG_TTL_S, create=True)
    await take_over(store, mine, 0)
    other = f"{session_id}-other"
    lost = await store.acquire(other, owner="me", ttl_s=LONG_TTL_S, create=True)
    await store.release(lost)
    answers = await store.commit_all([(lost, a_round(0, 0, 7)), (mine, a_round(0, 0, 8)), (mine, a_round(1, 9, 9))])
    assert isinstance(answers[0], LeaseLost)
    assert answers[1] is None
    assert isinstance(answers[2], SessionLost)
    assert await held_tokens(store, session_id) == [8]
    await store.delete(other)
