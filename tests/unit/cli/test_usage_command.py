"""`specdec usage` on a real Redis: lines, sums, and what is refused in one line."""

from __future__ import annotations

import csv
import io
import json
import uuid

import numpy as np
import pytest

from specdec.cli.__main__ import run
from specdec.contract.payer import Payer
from specdec.contract.types import FinishReason
from specdec.state.redis_store import RedisSessionStore
from specdec.state.store import Commit, RequestRecord
from tests.support.redis_fixture import redis_server, redis_url

__all__ = ["redis_server", "redis_url"]

DAY_S = 86_400.0


@pytest.fixture
def arguments(redis_url: str) -> list[str]:
    """The flags that name a system of this test alone."""
    return ["usage", "--redis-url", redis_url, "--cluster", f"c{uuid.uuid4().hex[:20]}"]


async def record_turns(arguments: list[str], *turns: tuple[str, str, int]) -> None:
    """Record a turn for each tenant, key and number of output tokens."""
    store = RedisSessionStore(arguments[2], cluster=arguments[4], usage_kept_s=7 * DAY_S)
    await store.usage().note_kept(7 * DAY_S)
    for index, (tenant, key_id, num_tokens) in enumerate(turns):
        lease = await store.of_tenant(tenant).acquire(f"s{index}", owner="me", ttl_s=60.0, create=True)
        request = RequestRecord("r", "digest", "{}", turn=0, output_start=2, payer=Payer(key_id, "a-model"))
        await store.begin_request(lease, request, keep=0, token_ids=np.array([1, 2], np.uint32))
        output = np.arange(num_tokens, dtype=np.uint32)
        await store.commit(lease, Commit(0, 2, output, "{}", FinishReason.STOP, b"hash"))
    await store.close()


@pytest.fixture
async def recorded(arguments: list[str]) -> list[str]:
    await record_turns(arguments, ("acme", "a" * 16, 5), ("beta", "b" * 16, 7), ("acme", "", 11))
    return arguments


def test_sums_are_printed_by_tenant_and_by_key(recorded: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*recorded, "--since", "1h", "--by", "tenant"], {}) == 0
    printed = capsys.readouterr()
    assert "these sums may still change; for a bill give --until 60s" in printed.err
    rows = list(csv.DictReader(io.StringIO(printed.out)))
    assert [(row["tenant"], row["turns"], row["prompt_tokens"], row["output_tokens"]) for row in rows] == [
        ("acme", "2", "4", "16"),
        ("beta", "1", "2", "7"),
    ]
    assert run([*recorded, "--by", "key", "--format", "jsonl"], {}) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert run([*recorded, "--by", "tenant", "--until", "60s"], {}) == 0
    assert "may still change" not in capsys.readouterr().err
    assert [(line["key"], line["output_tokens"]) for line in lines] == [("", 11), ("a" * 16, 5), ("b" * 16, 7)]


def test_each_turn_has_a_line_and_a_later_period_has_none(
    recorded: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run([*recorded, "--format", "jsonl"], {}) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(line["tenant"], line["session"], line["outcome"]) for line in lines] == [
        ("acme", "s0", "stop"),
        ("beta", "s1", "stop"),
        ("acme", "s2", "stop"),
    ]
    assert run([*recorded, "--since", lines[1]["time"], "--until", lines[2]["time"], "--by", "model"], {}) == 0
    sums = capsys.readouterr().out.splitlines()
    assert sums[1:] == ["a-model,1,0,2,0,7,0,0"]


@pytest.mark.parametrize(
    ("flags", "code", "words"),
    [
        (["--since", "8d"], 1, "--since 8d: records are kept for 7 days (--usage-days of the coordinators)"),
        (["--since", "1970-01-01"], 1, "give that time or a later one"),
        (["--since", "yesterday"], 2, "--since 'yesterday' must be an age such as"),
        (["--since", "0001-01-01T00:00:00+14:00"], 1, "records are kept for 7 days"),
        (["--since", "1h", "--until", "2h"], 2, "--since 1h must be before --until 2h"),
        (["--by", "session"], 2, "argument --by"),
        (["--cluster", "other"], 1, "no coordinator of the system 'other' keeps usage records in this Redis"),
        (["--redis-url", "http://x"], 1, "must begin with redis://"),
        (["--redis-url", "redis://127.0.0.1:1"], 1, "STORE_UNAVAILABLE"),
        (["--redis-url", ""], 2, "give the Redis of the coordinators, or set SPECDEC_COORDINATOR__REDIS_URL"),
    ],
)
def test_what_cannot_be_answered_is_one_line(
    recorded: list[str], capsys: pytest.CaptureFixture[str], flags: list[str], code: int, words: str
) -> None:
    assert run([*recorded, *flags], {}) == code
    printed = capsys.readouterr()
    assert printed.out == ""
    assert len(printed.err.splitlines()) == 1
    assert words in printed.err


def test_a_period_before_the_first_record_is_answered_with_a_note(
    recorded: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run([*recorded, "--since", "7d"], {}) == 0
    printed = capsys.readouterr()
    assert len(printed.out.splitlines()) == 4
    assert printed.err.startswith("note: the first usage record is of 2")
