"""Sessions whose keys in Redis were altered: every call says SESSION_LOST or serves the session, other sessions go on,
and a damaged session can be deleted and begun anew."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
import pytest

from specdec.rpc.status_mapping import from_rpc_error
from specdec.state.connection import RedisConnection
from specdec.state.key_names import session_keys
from specdec.state.session_fields import RUNNING
from specdec.v1 import coordinator_pb2 as pb
from tests.support.coordinator_rig import PROMPT, Coordinator, Rig, request
from tests.support.output import read_rest, read_until
from tests.support.redis_fixture import redis_server, redis_url

__all__ = ["redis_server", "redis_url"]

#: Sessions that are injured at once.
NUM_AT_ONCE = 16
#: Long enough for a starved machine to renew its leases, short enough to wait for one that an injury keeps.
LEASE_TTL_S = 5.0

NUMBERS = (b"", b"x", b"-1", b"1.5", b"nan", b"inf", b"1e400", b"9" * 30, b"\xff\xfe", b"\xd9\xa1")
TEXTS = (b"", b"{", b"[]", b"null", b"NaN", b"[" * 5000, b"\xff\xfe", b'{"sampling": 1}', b'"x"')
FIELDS = {
    **dict.fromkeys(("epoch", "round", "turn", "output_start", "finish_reason", "length", "lease_ttl"), NUMBERS),
    **dict.fromkeys(("parameters_json", "stats_json"), TEXTS),
    "request_id": (b"", b"\xff", b"other"),
    "request_digest": (b"", b"\xff", b"other"),
    "chain_hash": (b"x", b"\xff", b"00", b"0" * 32),
    "length_at": (b"", b"\xff", b"9:9"),
    "begun": (b"", b"x", b"\xff"),
    "left": (b"", b"x", b"\xff"),
    "homes": (b"", b"x", b"\xff", b"a:" + b"9" * 40),
}
PARAMETERS: dict[tuple[str, ...], tuple[Any, ...]] = {
    ("sampling", "law", "temperature"): ("x", -1.0, float("nan"), None, [], 1e400),
    ("sampling", "law", "top_p"): ("x", 0.0, 2.0, None),
    ("sampling", "law", "top_k"): ("x", -1, 1.5, 2**40),
    ("sampling", "law", "logit_bias"): ("x", [[1]], [[1, "x"]], [[-1, 1.0]], None),
    ("sampling", "law", "end_token_ids"): ("x", [-1], [2**40], None),
    ("sampling", "law", "min_new_tokens"): ("x", -1, 2**40),
    ("sampling", "max_new_tokens"): ("x", 0, -1, 2**40, None),
    ("sampling", "seed"): ("x", -1, 2**64, 1.5, None),
    ("sampling", "num_logprobs"): ("x", -1, 2**40),
    ("sampling", "stop"): ([1], 5, None),
    ("sampling", "stop_token_ids"): (["x"], 5, None),
    ("sampling", "unknown"): (1,),
    ("speculation", "mode"): (0, 99, "x", None),
    ("speculation", "gamma"): ("x", -1, 2**40),
    ("speculation", "draft_pool"): (1, None),
    ("target_fingerprint",): (1, None),
    ("sampling",): (None, 1, []),
    ("speculation",): (None, 1, []),
}
STATS = {"num_rounds": ("x", -1, 2**40, None), "ttft_s": ("x", -1.0, float("nan"), None),
         "accepted_per_position": (1, ["x"], [-1], None), "wire_bytes": ("x", -1, 2**80), "unknown": (1,)}  # fmt: skip

Injury = Callable[[RedisConnection], Awaitable[Any]]


def injuries(session_id: str) -> dict[str, Injury]:
    """Return every injury of a session by its name."""
    meta, tokens, lease, deleted = session_keys("default", session_id)
    found: dict[str, Injury] = {}
    for key, name in ((meta, "meta"), (tokens, "tokens"), (lease, "lease"), (deleted, "deleted")):
        for kind, write in (("string", "SET"), ("list", "RPUSH"), ("set", "SADD"), ("hash", "HSET")):
            found[f"{name} is a {kind}"] = replaced(key, write)
    for field, values in FIELDS.items():
        found[f"no {field}"] = command("HDEL", meta, field)
        for value in values:
            found[f"{field} is {value[:20]!r}"] = command("HSET", meta, field, value)
    for path, new_values in PARAMETERS.items():
        for new in new_values:
            found[f"{'.'.join(path)} is {new!r}"] = in_json(meta, "parameters_json", path, new)
    for name, new_values in STATS.items():
        for new in new_values:
            found[f"stats.{name} is {new!r}"] = in_json(meta, "stats_json", (name,), new)
    for name, value in (("empty", b""), ("odd", b"x"), ("cut", b"abcd" * 3), ("unknown ids", b"\xff" * 400)):
        found[f"tokens are {name}"] = command("SET", tokens, value)
    found["one token is another"] = command("SETRANGE", tokens, 4, b"\x07\0\0\0")
    found["one token is unknown"] = command("SETRANGE", tokens, 20, b"\xff\xff\xff\xff")
    found["deleted is no number"] = command("SET", deleted, b"x")
    found["deleted is infinite"] = command("SET", deleted, b"inf")
    return found


def command(*parts: Any) -> Injury:
    return lambda raw: raw.run_command(*parts)


def replaced(key: str, name: str) -> Injury:
    async def injure(raw: RedisConnection) -> None:
        await raw.run_command("DEL", key)
        await raw.run_command(name, key, *(("f", "v") if name == "HSET" else ("v",)))

    return injure


def in_json(key: str, field: str, path: tuple[str, ...], value: Any) -> Injury:
    async def injure(raw: RedisConnection) -> None:
        record = json.loads(await raw.run_command("HGET", key, field))
        place = record
        for name in path[:-1]:
            place = place[name]
        place[path[-1]] = value
        await raw.run_command("HSET", key, field, json.dumps(record))

    return injure


@pytest.fixture
async def raw(redis_url: str) -> AsyncIterator[RedisConnection]:
    connection = RedisConnection(redis_url)
    yield connection
    await connection.close()


async def outcome(call: Awaitable[Any]) -> str:
    """Return the reason of a call's error; "" if it was served."""
    try:
        await call
    except grpc.aio.AioRpcError as caught:
        error = from_rpc_error(caught)
        assert len(error.message) < 1000
        assert "Traceback" not in error.message
        return error.reason
    return ""


async def begun(coordinator: Coordinator, raw: RedisConnection, session_id: str, *, is_unfinished: bool) -> None:
    """Begin a session: with a turn that has ended, or with one whose client left."""
    if not is_unfinished:
        await coordinator.generate(request(session_id=session_id, request_id="r", max_new_tokens=12))
        return
    meta, _, lease, _ = session_keys("default", session_id)
    while await raw.run_command("HGET", meta, "finish_reason") != b"%d" % RUNNING:
        await coordinator.stub.DeleteSession(pb.DeleteSessionRequest(session_id=session_id))
        stream = coordinator.stub.Generate(request(session_id=session_id, request_id="r", max_new_tokens=48))
        await read_until(stream, 8)
        stream.cancel()
        while await raw.run_command("EXISTS", lease):  # noqa: ASYNC110  Redis sends no event when a key expires
            await asyncio.sleep(0.01)


#: SESSION_LOST says what is wrong. The others are right where the injury makes the session look so: gone, held by
#: another owner, at another request, or beyond what a request says.
ALLOWED = {"", "SESSION_LOST", "SESSION_NOT_FOUND", "SESSION_BUSY", "INVALID_REQUEST", "CONTEXT_TOO_LONG"}


@pytest.mark.parametrize("one_of", [3, pytest.param(1, marks=pytest.mark.full)])
@pytest.mark.parametrize("is_unfinished", [False, True], ids=["ended", "unfinished"])
async def test_no_injury_of_a_session_is_an_internal_error_or_reaches_another_one(
    redis_url: str, raw: RedisConnection, is_unfinished: bool, one_of: int, caplog: pytest.LogCaptureFixture
) -> None:
    wrong: dict[str, list[str]] = {}
    num_lost = 0
    gate = asyncio.Semaphore(NUM_AT_ONCE)
    async with Rig(store_url=redis_url) as rig:
        writer = await rig.coordinator(lease_ttl_s=LEASE_TTL_S)
        reader = await rig.coordinator(lease_ttl_s=LEASE_TTL_S)  # knows nothing of the session but what the store has

        async def suffer(session_id: str, name: str) -> None:
            nonlocal num_lost
            async with gate:
                await begun(writer, raw, session_id, is_unfinished=is_unfinished)
                await injuries(session_id)[name](raw)
                calls = [
                    reader.stub.GetSession(pb.GetSessionRequest(session_id=session_id, include_token_ids=True)),
                    reader.generate(
                        request(None, session_id=session_id, resume_from=2, mode=pb.SPECULATION_MODE_UNSPECIFIED)
                    ),
                    reader.generate(request(session_id=session_id, max_new_tokens=4)),
                ]
                reasons = [await outcome(call) for call in calls]
                num_lost += "SESSION_LOST" in reasons
                reasons.append(await outcome(reader.stub.DeleteSession(pb.DeleteSessionRequest(session_id=session_id))))
                await raw.run_command("DEL", *session_keys("default", session_id))
                if not set(reasons[:3]) <= ALLOWED or reasons[3]:
                    wrong[name] = reasons

        names = list(injuries("s"))[::one_of]
        await asyncio.gather(*(suffer(f"s{number}", name) for number, name in enumerate(names)))
        assert wrong == {}
        assert num_lost > 100 // one_of
        again = await reader.generate(request(session_id="s0"))
        other = await writer.generate(request(session_id="other", max_new_tokens=8))
        assert again.token_ids == rig.target.worker.greedy_continuation(PROMPT, 24)
        assert len(other.token_ids) == 8
        for session_id in ("s0", "other"):
            await writer.stub.DeleteSession(pb.DeleteSessionRequest(session_id=session_id))
    assert not [record.getMessage() for record in caplog.records if record.exc_info]


async def test_an_injury_under_a_running_stream_ends_it_with_its_reason_or_is_mended(
    redis_url: str, raw: RedisConnection, caplog: pytest.LogCaptureFixture
) -> None:
    """The streams of all injured sessions and of a healthy one run at once."""
    names = ["meta is a string", "tokens is a list", "lease is a hash", "deleted is a set", "epoch is b'x'",
             "round is b'x'", "length is b'x'", "no length", "no begun", "tokens are empty",
             "deleted is no number"]  # fmt: skip
    session_ids = [f"s{number}" for number in range(len(names))]
    async with Rig(store_url=redis_url) as rig:
        coordinator = await rig.coordinator(lease_ttl_s=LEASE_TTL_S)
        streams = [
            coordinator.stub.Generate(request(session_id=session_id, max_new_tokens=300, gamma=0))
            for session_id in [*session_ids, "other"]
        ]
        *outputs, beside = await asyncio.gather(*(read_until(stream, 5) for stream in streams))
        await asyncio.gather(*(injuries(session_ids[at])[name](raw) for at, name in enumerate(names)))
        *reasons, of_other = await asyncio.gather(
            *(outcome(read_rest(stream, output)) for stream, output in zip(streams, [*outputs, beside], strict=True))
        )
        assert set(reasons) <= {"", "SESSION_LOST", "LEASE_LOST", "SESSION_NOT_FOUND"}
        assert "SESSION_LOST" in reasons  # some were still running when they were injured
        greedy = rig.target.worker.greedy_continuation(PROMPT, 300)
        for output in outputs:
            assert output.token_ids == greedy[: len(output.token_ids)]
        assert (of_other, beside.token_ids) == ("", greedy)
        for session_id in [*session_ids, "other"]:
            await coordinator.stub.DeleteSession(pb.DeleteSessionRequest(session_id=session_id))
            await raw.run_command("DEL", *session_keys("default", session_id))
    assert not [record.getMessage() for record in caplog.records if record.exc_info]
