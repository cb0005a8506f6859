"""The checker of fault histories finds each kind of fault, and the reader of the store's log gives what was written."""

from __future__ import annotations

import asyncio
import copy
import math
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from specdec.state.redis_store import open_store
from specdec.state.store import Commit, RequestRecord
from tests.support.append_log import ARGUMENTS, note_time, read_append_log, step_clock
from tests.support.history import Event, check_history, read_history, write_history
from tests.support.redis_fixture import RedisServer
from tests.support.stepped_clocks import SteppedClock, build_library, compiler

STORE = {"session": "s"}
CLIENT = {"session": "s", "client": "c", "request": "r"}


def sound() -> list[Event]:
    """Return a history of two owners and two clients without a fault."""
    return [
        {"at": 1.0, "kind": "lease", "epoch": 10, "owner": "a", **STORE},
        {"at": 1.0, "kind": "append", "epoch": 10, "owner": "a", "start": 0, "token_ids": [5, 6], **STORE},
        {"at": 2.0, "kind": "append", "epoch": 10, "owner": "a", "start": 2, "token_ids": [7, 8], **STORE},
        {"at": 5.0, "kind": "lease", "epoch": 20, "owner": "b", **STORE},
        {"at": 5.0, "kind": "append", "epoch": 20, "owner": "b", "start": 4, "token_ids": [9], **STORE},
        {"at": 2.5, "kind": "received", "start": 2, "token_ids": [7, 8], **CLIENT},
        {"at": 5.5, "kind": "received", "start": 4, "token_ids": [9], **CLIENT},
        {"at": 2.5, "kind": "read", "start": 2, "num_tokens": 2, "text": "7 8 ", **CLIENT, "client": "h"},
        {"at": 5.5, "kind": "read", "start": 4, "num_tokens": 1, "text": "9 ", **CLIENT, "client": "h"},
    ]


def faults_of(events: list[Event]) -> list[str]:
    return check_history(events, lambda token_ids: "".join(f"{token_id} " for token_id in token_ids))


def test_a_sound_history_has_no_fault_and_survives_its_file(tmp_path: Path) -> None:
    write_history(sound(), tmp_path / "history.jsonl")
    assert read_history(tmp_path / "history.jsonl") == sound()
    assert faults_of(sound()) == []


def set_field(index: int, name: str, value: object) -> Callable[[list[Event]], None]:
    def break_it(events: list[Event]) -> None:
        events[index][name] = value

    return break_it


@pytest.mark.parametrize(
    ("break_it", "words"),
    [
        (set_field(3, "epoch", 10), "epoch 10 after epoch 10"),
        (set_field(4, "owner", "a"), "a writes at 4 under epoch 20; b has 20"),
        (set_field(4, "epoch", 10), "b writes at 4 under epoch 10; b has 20"),
        (set_field(4, "start", 3), "tokens at 3 are written when the log has 4"),
        (lambda events: events.pop(4), "tokens up to 5 are received, 4 are committed"),
        (set_field(6, "token_ids", [1]), "other tokens at 4 than the committed ones"),
        (set_field(6, "at", 4.0), "the token at 4 is received before it is committed"),
        (set_field(6, "start", 3), "tokens at 3 follow those up to 4"),
        (lambda events: events.insert(6, events[5]), "tokens at 2 follow those up to 4"),
        (lambda events: events.reverse() or events.sort(key=lambda event: event["kind"] in ("received", "read")), ""),
        (set_field(8, "text", "8 "), "another text than that of the committed tokens"),
        (set_field(7, "num_tokens", 1), "tokens at 4 follow those up to 3"),
    ],
)
def test_each_broken_history_is_found(break_it: Callable[[list[Event]], object], words: str) -> None:
    events = copy.deepcopy(sound())
    break_it(events)
    found = faults_of(events)
    assert found
    assert any(words in fault for fault in found), found


async def test_the_log_of_a_real_store_is_read_as_it_was_written(tmp_path: Path) -> None:
    redis = RedisServer(tmp_path, keeps_log=True, arguments=ARGUMENTS)
    redis.start()
    try:
        store = open_store(redis.url)
        lease = await store.acquire("s", owner="a", ttl_s=30.0, create=True)
        record = RequestRecord("r", "digest", "{}", turn=0, output_start=2)
        await store.begin_request(lease, record, keep=0, token_ids=np.array([5, 6], np.uint32))
        await store.commit(lease, Commit(0, 2, np.array([7, 8], np.uint32), "{}", None, b""))
        redis.restart_without_its_last(0)
        await store.release(lease)
        other = await store.acquire("s", owner="b", ttl_s=30.0, create=False)
        await store.begin_request(other, record, keep=4, token_ids=np.empty(0, np.uint32))
        await store.commit(other, Commit(1, 4, np.array([9], np.uint32), "{}", None, b""))
        await store.close()
        events = read_append_log(tmp_path)
    finally:
        redis.stop()
    appended = [(event["owner"], event["start"], event["token_ids"]) for event in events if event["kind"] == "append"]
    assert appended == [("a", 0, [5, 6]), ("a", 2, [7, 8]), ("b", 4, [9])]
    assert [event["epoch"] for event in events if event["kind"] == "lease"] == [lease.epoch, other.epoch]
    assert check_history(events) == []


@pytest.mark.skipif(compiler() is None, reason="a stepped clock needs a C compiler (cc)")
@pytest.mark.parametrize("ahead_s", [100.0, -100.0])
async def test_the_times_of_a_log_are_right_across_a_step_of_its_clock(tmp_path: Path, ahead_s: float) -> None:
    clock = SteppedClock(tmp_path / "clock", build_library(tmp_path))
    redis = RedisServer(tmp_path, keeps_log=True, arguments=ARGUMENTS, machine=clock.command)
    redis.start()
    began_s = math.floor(time.time())
    try:
        step_clock(redis.url, clock, 0.0)  # a log without a time would give its first second none
        store = open_store(redis.url)
        await store.acquire("early", owner="a", ttl_s=30.0, create=True)
        step_clock(redis.url, clock, ahead_s)
        await asyncio.sleep(1.1)  # the log has whole seconds
        await store.acquire("late", owner="a", ttl_s=30.0, create=True)
        noted_s = time.time()
        note_time(redis.url, clock)
        await store.acquire("latest", owner="a", ttl_s=30.0, create=True)
        await store.close()
        events = read_append_log(tmp_path)
    finally:
        redis.stop()
    times_s = [event["at"] for event in events]
    assert [event["session"] for event in events] == ["early", "late", "latest"]
    assert times_s == sorted(times_s)
    assert began_s <= times_s[0]
    assert math.floor(noted_s) <= times_s[2] <= time.time()
