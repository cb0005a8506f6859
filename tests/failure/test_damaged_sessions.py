"""Sessions whose keys in Redis were altered: every call says SESSION_LOST or serves the session, other sessions go on,
and a damaged session can be deleted and begun anew."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
import pytest

from specdec.rpc.status import from_rpc_error
from specdec.state.connection import RedisConnection
from specdec.state.keys import session_keys
from specdec.v1 import coordinator_pb2 as pb
from tests.support.coordinator_rig import PROMPT, Coordinator, Rig, eventually, read_rest, read_until, request
from tests.support.redis_fixture import redis_server, redis_url

__all__ = ["redis_server", "redis_url"]

META, TOKENS, LEASE, DELETED = session_keys("default", "s", "default")
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


def injuries() -> dict[str, Injury]:
    """Return every injury by its name."""
    found: dict[str, Injury] = {}
    for key, name in ((META, "meta"), (TOKENS, "tokens"), (LEASE, "lease"), (DELETED, "deleted")):
        for kind, write in (("string", "SET"), ("list", "RPUSH"), ("set", "SADD"), ("hash", "HSET")):
            found[f"{name} is a {kind}"] = replaced(key, write)
    for field, values in FIELDS.items():
        found[f"no {field}"] = command("HDEL", META, field)
        for value in values:
            found[f"{field} is {value[:20]!r}"] = command("HSET", META, field, value)
    for path, new_values in PARAMETERS.items():
        for new in new_values:
            found[f"{'.'.join(path)} is {new!r}"] = in_json("parameters_json", path, new)
    for name, new_values in STATS.items():
        for new in new_values:
            found[f"stats.{name} is {new!r}"] = in_json("stats_json", (name,), new)
    for name, value in (("empty", b""), ("odd", b"x"), ("cut", b"abcd" * 3), ("unknown ids", b"\xff" * 400)):
        found[f"tokens are {name}"] = command("SET", TOKENS, value)
    found["one token is another"] = command("SETRANGE", TOKENS, 4, b"\x07\0\0\0")
    found["one token is unknown"] = command("SETRANGE", TOKENS, 20, b"\xff\xff\xff\xff")
    found["deleted is no number"] = command("SET", DELETED, b"x")
    found["deleted is infinite"] = command("SET", DELETED, b"inf")
    return found


def command(*parts: Any) -> Injury:
    return lambda raw: raw.run_command(*parts)


def replaced(key: str, name: str) -> Injury:
    async def injure(raw: RedisConnection) -> None:
        await raw.run_command("DEL", key)
        await raw.run_command(name, key, *(("f", "v") if name == "HSET" else ("v",)))

    return injure


def in_json(field: str, path: tuple[str, ...], value: Any) -> Injury:
    async def injure(raw: RedisConnection) -> None:
        record = json.loads(await raw.run_command("HGET", META, field))
        place = record
        for name in path[:-1]:
            place = place[name]
        place[path[-1]] = value
        await raw.run_command("HSET", META, field, json.dumps(record))

    return injure


@pytest.fixture
async def raw(redis_url: str) -> AsyncIterator[RedisConnection]:
    connection = RedisConnection(redis_url)
    yield connection
    await connection.run_command("DEL", META, TOKENS, LEASE, DELETED)
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


async def begun(coordinator: Coordinator, *, is_unfinished: bool) -> None:
    """Begin the session anew: with a turn that has ended, or with one whose client left."""
    await coordinator.stub.DeleteSession(pb.DeleteSessionRequest(session_id="s"))
    if not is_unfinished:
        await coordinator.generate(request(session_id="s", request_id="r", max_new_tokens=12))
        return
    stream = coordinator.stub.Generate(request(session_id="s", request_id="r", max_new_tokens=400))
    await read_until(stream, 8)
    stream.cancel()
    await eventually(lambda: not coordinator.generations.num_running)


#: SESSION_LOST says what is wrong. The others are right where the injury makes the session look so: gone, held by
#: another owner, at another request, or beyond what a request says.
ALLOWED = {"", "SESSION_LOST", "SESSION_NOT_FOUND", "SESSION_BUSY", "INVALID_REQUEST", "CONTEXT_TOO_LONG"}


@pytest.mark.parametrize("is_unfinished", [False, True], ids=["ended", "unfinished"])
async def test_no_injury_of_a_session_is_an_internal_error_or_reaches_another_one(
    redis_url: str, raw: RedisConnection, is_unfinished: bool, caplog: pytest.LogCaptureFixture
) -> None:
    wrong: dict[str, list[str]] = {}
    num_lost = 0
    async with Rig(store_url=redis_url) as rig:
        writer = await rig.coordinator(lease_ttl_s=LEASE_TTL_S)
        reader = await rig.coordinator(lease_ttl_s=LEASE_TTL_S)  # knows nothing of the session but what the store has
        for name, injure in injuries().items():
            await raw.run_command("DEL", META, TOKENS, LEASE, DELETED)
            await begun(writer, is_unfinished=is_unfinished)
            await injure(raw)
            calls = [
                reader.stub.GetSession(pb.GetSessionRequest(session_id="s", include_token_ids=True)),
                reader.generate(request(None, session_id="s", resume_from=2, mode=pb.SPECULATION_MODE_UNSPECIFIED)),
                reader.generate(request(session_id="s", max_new_tokens=4)),
            ]
            reasons = [await outcome(call) for call in calls]
            num_lost += "SESSION_LOST" in reasons
            reasons.append(await outcome(reader.stub.DeleteSession(pb.DeleteSessionRequest(session_id="s"))))
            if not set(reasons[:3]) <= ALLOWED or reasons[3]:
                wrong[name] = reasons
        assert wrong == {}
        assert num_lost > 100
        again = await reader.generate(request(session_id="s"))
        other = await writer.generate(request(session_id="other", max_new_tokens=8))
        assert again.token_ids == rig.target.worker.greedy_continuation(PROMPT, 24)
        assert len(other.token_ids) == 8
        await writer.stub.DeleteSession(pb.DeleteSessionRequest(session_id="other"))
    assert not [record.getMessage() for record in caplog.records if record.exc_info]


@pytest.mark.parametrize(
    "name",
    ["meta is a string", "tokens is a list", "lease is a hash", "deleted is a set", "epoch is b'x'", "round is b'x'",
     "length is b'x'", "no length", "no begun", "tokens are empty", "deleted is no number"],
)  # fmt: skip
async def test_an_injury_under_a_running_stream_ends_it_with_its_reason_or_is_mended(
    redis_url: str, raw: RedisConnection, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with Rig(store_url=redis_url) as rig:
        coordinator = await rig.coordinator(lease_ttl_s=LEASE_TTL_S)
        stream = coordinator.stub.Generate(request(session_id="s", max_new_tokens=300, gamma=0))
        other = coordinator.stub.Generate(request(session_id="other", max_new_tokens=300, gamma=0))
        output, beside = await read_until(stream, 5), await read_until(other, 5)
        await injuries()[name](raw)
        reason = await outcome(read_rest(stream, output))
        assert reason in ("", "SESSION_LOST", "LEASE_LOST", "SESSION_NOT_FOUND")
        greedy = rig.target.worker.greedy_continuation(PROMPT, 300)
        assert output.token_ids == greedy[: len(output.token_ids)]
        await read_rest(other, beside)
        assert beside.token_ids == greedy
        for session_id in ("s", "other"):
            await coordinator.stub.DeleteSession(pb.DeleteSessionRequest(session_id=session_id))
    assert not [record.getMessage() for record in caplog.records if record.exc_info]
