"""Checks of the Redis that holds sessions and the registry: settings, persistence, memory, access and clock."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any

from specdec.cli.checks.finding import Finding, fail, ok, warn
from specdec.contract.errors import SpecdecError, Unavailable
from specdec.settings.addresses import is_loopback, join_address
from specdec.settings.redis_url import CLUSTER, RedisUrl, parse_redis_url

_MIN_VERSION = (7, 0)
_NUM_PINGS = 9
#: Answer time above which commits are noticed beside a round of a fast GPU.
_SLOW_S = 0.005
#: Shares of `maxmemory`, or of the machine's memory, above which there is a warning and a failure.
_FULL_WARN, _FULL_FAIL = 0.8, 0.95
#: Difference of clocks above which tokens and certificates may be refused, and above which they are.
_SKEW_WARN_S, _SKEW_FAIL_S = 2.0, 60.0


@dataclass(slots=True)
class _State:
    """Answers of Redis about itself."""

    latency_s: float
    skew_s: float
    """Its clock minus this machine's."""
    info: Mapping[str, Any]
    cluster: str = ""
    """Answer of CLUSTER INFO; "" from a server outside of clusters."""
    user: str = ""
    settings: dict[str, str] = field(default_factory=dict)
    """Settings that this user may read."""
    has_open_default: bool = False
    """Set if the user `default` needs no password."""


def check_redis(url: str) -> Iterator[Finding]:
    """Check the Redis of `--redis-url`: its server, the primary of its Sentinels, or the nodes that it names."""
    try:
        parsed = parse_redis_url(url)
    except ValueError as error:
        yield fail("redis", f"--redis-url {error}", "correct the URL")
        return
    if parsed.kind != CLUSTER:
        yield from _check_server(url, parsed, is_node=False)
        return
    for host, port in parsed.addresses:
        for finding in _check_server(parsed.of_server(host, port), parsed, is_node=True):
            yield replace(finding, found=f"{join_address(host, port)}: {finding.found}")


def _check_server(url: str, parsed: RedisUrl, *, is_node: bool) -> Iterator[Finding]:
    """Check one server; a node of a cluster may be a replica, and knows the state of the cluster."""
    try:
        state = asyncio.run(_read(url))
    except Unavailable as error:
        yield fail("redis", error.message, "start Redis, or correct --redis-url, its user and its password")
        return
    if not state.info:
        user = f"user {state.user}" if state.user else "the user of this URL"
        yield warn("redis", f"answers in {state.latency_s * 1000:.2g} ms; {user} may not send INFO",
                   "give a user with +info +config|get +acl|whoami, to have its settings checked")  # fmt: skip
        yield _access(parsed, state)
        yield clock_finding("Redis is", state.skew_s, uncertain_s=state.latency_s)
        return
    yield _server(state)
    yield _cluster(state) if is_node else _role(state)
    yield from (_eviction(state), _memory(state), _persistence(state))
    yield from _writes(state)
    yield _access(parsed, state)
    yield clock_finding("Redis is", state.skew_s, uncertain_s=state.latency_s)


async def _read(url: str) -> _State:
    from specdec.state.connection import RedisConnection

    connection = RedisConnection(url)
    try:
        await connection.run_command("PING")
        times = []
        for _ in range(_NUM_PINGS):
            began_s = time.perf_counter()
            await connection.run_command("PING")
            times.append(time.perf_counter() - began_s)
        asked_s = time.time()
        seconds, microseconds = await connection.run_command("TIME")
        skew_s = int(seconds) + int(microseconds) / 1e6 - (asked_s + time.time()) / 2
        # Some hosts, and users with few rights, permit none of these.
        state = _State(median(times), skew_s, await _permitted(connection, "INFO") or {})
        state.cluster = _text(await _permitted(connection, "CLUSTER", "INFO"))
        state.user = _text(await _permitted(connection, "ACL", "WHOAMI"))
        for name in ("appendfsync", "save"):
            answer = await _permitted(connection, "CONFIG", "GET", name) or ()
            state.settings |= dict(zip(map(_text, answer[::2]), map(_text, answer[1::2]), strict=True))
        default = await _permitted(connection, "ACL", "GETUSER", "default") or ()
        fields = dict(zip(map(_text, default[::2]), default[1::2], strict=True))
        state.has_open_default = {b"on", b"nopass"} <= set(fields.get("flags", ()))
        return state
    finally:
        await connection.close()


async def _permitted(connection: Any, *command: str) -> Any:
    """Return the answer of a command; None if this user may not send it."""
    try:
        return await connection.run_command(*command)
    except SpecdecError:
        return None


def _text(value: Any) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value or "")


def _server(state: _State) -> Finding:
    version = str(state.info.get("redis_version", "unknown"))
    found = f"version {version}, answers in {state.latency_s * 1000:.2g} ms"
    if tuple(int(part) for part in version.split(".")[:2] if part.isdecimal()) < _MIN_VERSION:
        return fail("redis", found, "specdec's scripts need Redis 7.0 or newer")
    if state.latency_s > _SLOW_S:
        return warn("redis", f"{found}; every round commits to it", "place Redis nearer to the coordinators")
    return ok("redis", found)


def _role(state: _State) -> Finding:
    role = str(state.info.get("role", "unknown"))
    if role == "slave":
        primary = f"{state.info.get('master_host')}:{state.info.get('master_port')}"
        return fail("redis role", f"a replica of {primary}, which refuses writes", "give --redis-url of the primary")
    return ok("redis role", f"primary, {state.info.get('connected_slaves', 0)} replicas")


def _cluster(state: _State) -> Finding:
    fields = dict(line.split(":", 1) for line in state.cluster.splitlines() if ":" in line)
    if fields.get("cluster_state") != "ok":
        found = f"state {fields.get('cluster_state', 'unknown')}, {fields.get('cluster_slots_ok', '0')} slots served"
        return fail("redis cluster", found, "look at CLUSTER NODES; a plain server needs redis:// in --redis-url")
    return ok("redis cluster", f"state ok, {fields.get('cluster_size', '?')} primaries")


def _eviction(state: _State) -> Finding:
    policy = str(state.info.get("maxmemory_policy", "unknown"))
    if policy not in ("noeviction", "unknown"):
        return fail("redis eviction", f"maxmemory-policy {policy}: Redis drops sessions when its memory is full",
                    "CONFIG SET maxmemory-policy noeviction, and the same in redis.conf")  # fmt: skip
    return ok("redis eviction", f"maxmemory-policy {policy}")


def _memory(state: _State) -> Finding:
    used, limit = int(state.info.get("used_memory", 0)), int(state.info.get("maxmemory", 0))
    total = limit or int(state.info.get("total_system_memory", 0))
    found = f"{used / 1e6:.0f} MB used of " + (f"{limit / 1e6:.0f} MB" if limit else f"{total / 1e9:.0f} GB, no limit")
    advice = "raise maxmemory, or lower --session-ttl-s of the coordinators"
    if not total or used < _FULL_WARN * total:
        return ok("redis memory", found)
    return fail("redis memory", f"{found}: writes fail soon", advice) if used > _FULL_FAIL * total else warn(
        "redis memory", found, advice
    )  # fmt: skip


def _persistence(state: _State) -> Finding:
    if not int(state.info.get("aof_enabled", 0)):
        kept = f"snapshots alone ({state.settings['save']})" if state.settings.get("save") else "nothing on disk"
        return warn("redis persistence", f"{kept}: a crash of Redis loses sessions",
                    "CONFIG SET appendonly yes, and the same in redis.conf")  # fmt: skip
    policy = state.settings.get("appendfsync", "unknown")
    losses = {"always": "loses no commit", "everysec": "loses up to a second"}
    if policy == "no":
        return warn("redis persistence", "appendfsync no: a crash of the machine loses up to 30 s of commits",
                    "CONFIG SET appendfsync everysec")  # fmt: skip
    return ok("redis persistence", f"appendfsync {policy}: a crash {losses.get(policy, 'loses what this says')}")


def _writes(state: _State) -> Iterator[Finding]:
    """Yield a failure for each log or snapshot that Redis could not write; it refuses commands then."""
    names = {
        "aof_last_write_status": "its log of writes",
        "aof_last_bgrewrite_status": "a shorter log of writes",
        "rdb_last_bgsave_status": "its last snapshot",
    }
    for name, what in names.items():
        if str(state.info.get(name, "ok")) != "ok":
            yield fail("redis disk", f"Redis cannot write {what}", "free space on its disk, and look at its log")


def _access(url: RedisUrl, state: _State) -> Finding:
    user = f"user {state.user or 'unknown'}"
    if all(is_loopback(join_address(host, port)) for host, port in url.addresses):  # none for a Unix socket
        return ok("redis access", f"{user}, on this machine")
    if state.has_open_default:
        return fail("redis access", "the user default needs no password: any program that reaches the port may write",
                    "give Redis a password or ACL users")  # fmt: skip
    if not url.is_tls:
        return warn("redis access", f"{user}, without TLS",
                    "serve TLS and give --redis-url rediss://, or keep Redis in a network of its own")  # fmt: skip
    if dict(url.options).get("ssl_cert_reqs", "required") != "required":
        return warn("redis access", f"{user}, TLS without a check of the certificate", "give ssl_ca_certs in the URL")
    return ok("redis access", f"{user}, TLS")


def clock_finding(whose: str, skew_s: float, *, uncertain_s: float) -> Finding:
    """Return what a difference between another clock and this machine's means.

    Args:
        whose: beginning of the sentence, such as "Redis is".
        skew_s: the other clock minus this machine's, in seconds.
        uncertain_s: how exactly that is known.
    """
    found = f"{whose} {abs(skew_s):.3g} s {'ahead of' if skew_s > 0 else 'behind'} this machine"
    advice = "run NTP on both machines: certificates, keys with an end and logs go by the clock"
    if abs(skew_s) > _SKEW_FAIL_S + uncertain_s:
        return fail("clock", found, advice)
    if abs(skew_s) > _SKEW_WARN_S + uncertain_s:
        return warn("clock", found, advice)
    return ok("clock", f"{whose} within {max(abs(skew_s), uncertain_s):.2g} s of this machine")
