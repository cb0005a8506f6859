"""Usage records on Redis: one for each turn that has ended, in streams that are trimmed by age.

    specdec:usage:{SHARD}:records   stream: a record a turn, as `record_turn.lua` writes it
    specdec:usage:{SHARD}:open      sorted set: TENANT:SESSION of turns without a record, by the time to look at them
    specdec:usage:kept              string: ms for which records are kept, and the time in ms since which all are there

The script that ends a turn writes its record in the same atomic step, so both keys lie in the slot of the session: a
Redis Cluster has a shard for each slot, another Redis has one. The coordinators call `record_expired`, `specdec usage`
reads the records.
"""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from redis.crc import key_slot
from redis.exceptions import NoPermissionError

from specdec.contract.errors import InvalidSetting, Unavailable
from specdec.contract.types import FinishReason
from specdec.settings.cluster_names import DEFAULT_CLUSTER
from specdec.state.connection import DamagedValue, RedisConnection
from specdec.state.key_names import key_prefix, session_keys
from specdec.state.redis_cluster import NUM_SLOTS

_log = logging.getLogger(__name__)

#: Outcome of a turn that has not reached the end of its output.
BROKEN = "broken"

#: Records of one reply, and open turns that are looked at together.
_PAGE = 500

#: Shards that are asked together, because commits wait behind them.
_SHARDS_AT_ONCE = 64

_ONLY_SHARD = "0"


@dataclass(frozen=True, slots=True)
class UsageRecord:
    """The usage of one turn. Its counts are those of the answer that the client got."""

    time_ms: int
    """Time at which the record was written, in ms since 1970: the end of the turn, or of the time to resume it."""
    tenant: str
    key: str
    """Id of the API key that began the turn; "" without one."""
    model: str
    session: str
    request: str
    """Id of the request."""
    prompt_tokens: int
    """Tokens of the session before the output."""
    cached_tokens: int
    """Prompt tokens whose KV was held."""
    output_tokens: int
    draft_tokens: int
    accepted_tokens: int
    outcome: str
    """Finish reason in small letters, or `BROKEN`."""


class UsageRecords:
    """The usage records of one system. Safe for any number of tasks of one event loop.

    All methods raise Unavailable (STORE_UNAVAILABLE) if the store cannot be reached.
    """

    def __init__(self, connection: RedisConnection, *, cluster: str = DEFAULT_CLUSTER) -> None:
        self._connection = connection
        self._cluster = cluster
        self._shards = slot_tags() if connection.is_cluster else (_ONLY_SHARD,)
        self._kept_key = f"{key_prefix(cluster)}usage:kept"

    async def check_rights(self) -> None:
        """Check that the user of the store may write records; another failure is left to the first turn.

        Raises:
            InvalidSetting: it may not, as one that was made for an earlier version.
        """
        probe = f"{key_prefix(self._cluster)}usage:probe"
        try:
            await self._connection.run_command("XADD", probe, "*", "probe", "")
            await self._connection.run_command("XTRIM", probe, "MINID", "~", "0")
            await self._connection.run_command("EXISTS", probe)
            await self._connection.run_command("DEL", probe)
        except Unavailable as error:
            if isinstance(error.__cause__, NoPermissionError):
                raise InvalidSetting(
                    "redis_url: the user of Redis may not write usage records (XADD, XTRIM, EXISTS): give it the "
                    "commands of docs/how-to/run-redis.md, or set --usage-days 0",
                    field="redis_url",
                ) from error

    async def note_kept(self, kept_s: float) -> None:
        """Store for how long records are kept, and since when, for readers. Records that were removed while the time
        was shorter do not come back."""
        kept_ms = round(kept_s * 1000)
        _, begin_ms = _read_kept(await self._connection.run_command("GET", self._kept_key))
        now_ms = await self.server_ms()
        if begin_ms > now_ms:  # the store's clock was set back
            begin_ms = 0
        # A step forward of one clock alone, the store's or this process's, makes no record old.
        begin_ms = max(begin_ms, min(now_ms, round(time.time() * 1000)) - kept_ms)
        await self._connection.run_command("SET", self._kept_key, f"{kept_ms} {begin_ms}")

    async def trim(self) -> None:
        """Remove the records from before the time that `note_kept` has stored, by whole nodes of the streams. A system
        that keeps none any more leaves them to expire."""
        kept_ms, begin_ms = await self.kept()
        if kept_ms:
            async for shard, num_removed in self._ask_shards("trim_usage", _records_key, [begin_ms]):
                while num_removed:
                    records = [_records_key(self._cluster, shard)]
                    num_removed = await self._connection.run_script("trim_usage", records, [begin_ms])

    async def record_expired(self) -> int:
        """Write the records of turns that were not resumed before their sessions expired; return their number."""
        num_recorded = 0
        async for shard, names in self._ask_shards("overdue_turns", _open_key, [_PAGE]):
            while names:
                num_recorded += await self._record(shard, names)
                is_full = len(names) == _PAGE
                open_turns = [_open_key(self._cluster, shard)]
                names = await self._connection.run_script("overdue_turns", open_turns, [_PAGE]) if is_full else ()
        return num_recorded

    async def _ask_shards(
        self, script: str, key_of: Callable[[str, str], str], args: Sequence[str | int]
    ) -> AsyncIterator[tuple[str, Any]]:
        """Run a script on a key of each shard; yield shards and answers. Raises Unavailable."""
        for first in range(0, len(self._shards), _SHARDS_AT_ONCE):
            shards = self._shards[first : first + _SHARDS_AT_ONCE]
            calls = [([key_of(self._cluster, shard)], args) for shard in shards]
            for shard, answer in zip(shards, await self._connection.run_scripts(script, calls), strict=True):
                if isinstance(answer, Unavailable):
                    raise answer
                yield shard, answer

    async def _record(self, shard: str, names: Sequence[bytes]) -> int:
        usage = (_records_key(self._cluster, shard), _open_key(self._cluster, shard))
        calls: list[Any] = []
        for name in names:
            tenant, _, session_id = name.decode().partition(":")
            calls.append(((*session_keys(tenant, session_id, self._cluster), *usage), ()))
        num_recorded = 0
        for name, answer in zip(names, await self._connection.run_scripts("record_expired", calls), strict=True):
            if isinstance(answer, DamagedValue):  # nothing is known of the turn any more
                _log.warning("no usage record of a damaged session: %s: %s", ascii(name)[1:], answer)
                await self._connection.run_command("ZREM", usage[1], name)
            elif isinstance(answer, Unavailable):
                raise answer
            else:
                num_recorded += answer
        return num_recorded

    async def server_ms(self) -> int:
        """Return the store's time, in ms since 1970."""
        seconds, microseconds = await self._connection.run_command("TIME")
        return int(seconds) * 1000 + int(microseconds) // 1000

    async def kept(self) -> tuple[int, int]:
        """Return for how many ms records are kept, and the time before which some may have been removed, in ms since
        1970, as a coordinator has noted them lately. Both are 0 if none has."""
        return _read_kept(await self._connection.run_command("GET", self._kept_key))

    async def first_ms(self) -> int:
        """Return the time of the first record, in ms since 1970; 0 if there is none."""
        first_ms = 0
        async for _, entries in self._ask_shards("read_usage", _records_key, ["-", "+", 1]):
            if entries:
                time_ms = _time_ms(entries[0][0], _fields_of(entries[0][1]))
                first_ms = min(first_ms or time_ms, time_ms)
        return first_ms

    async def read(self, since_ms: int, until_ms: int) -> AsyncIterator[UsageRecord]:
        """Yield the records of since_ms <= time < until_ms, those of one shard in their order, each turn once."""
        # An id is the time of its record or later: after the store's clock was set back, ids go on from the latest one.
        # So what was written in the period may stand anywhere behind its begin.
        for shard in self._shards:
            seen: set[int] = set()
            key, start = _records_key(self._cluster, shard), str(since_ms)
            while entries := await self._connection.run_script("read_usage", [key], [start, "+", _PAGE]):
                for entry_id, flat in entries:
                    fields = _fields_of(flat)
                    time_ms = _time_ms(entry_id, fields)
                    turn = hash(tuple(fields[name] for name in (b"tenant", b"session", b"request", b"id")))
                    if since_ms <= time_ms < until_ms and turn not in seen:
                        seen.add(turn)
                        yield _record_of(time_ms, fields)
                start = f"({entries[-1][0].decode()}"

    async def close(self) -> None:
        await self._connection.close()


def open_usage(url: str, *, cluster: str = DEFAULT_CLUSTER) -> UsageRecords:
    """Return the usage records at a URL, not connected yet. Raises InvalidRequest for a malformed URL."""
    return UsageRecords(RedisConnection(url), cluster=cluster)


def usage_keys(session_id: str, cluster: str, *, is_sharded: bool) -> tuple[str, str]:
    """Return the keys of the usage records and of the open turns in the slot of a session."""
    shard = slot_tags()[key_slot(session_id.encode())] if is_sharded else _ONLY_SHARD
    return _records_key(cluster, shard), _open_key(cluster, shard)


@cache
def slot_tags() -> tuple[str, ...]:
    """Return a hash tag for each slot of a Redis Cluster. They never change, since keys contain them."""
    tags: dict[int, str] = {}
    number = 0
    while len(tags) < NUM_SLOTS:
        tags.setdefault(key_slot(str(number).encode()), str(number))
        number += 1
    return tuple(tags[slot] for slot in range(NUM_SLOTS))


def _records_key(cluster: str, shard: str) -> str:
    return f"{key_prefix(cluster)}usage:{{{shard}}}:records"


def _open_key(cluster: str, shard: str) -> str:
    return f"{key_prefix(cluster)}usage:{{{shard}}}:open"


def _read_kept(value: bytes | None) -> tuple[int, int]:
    """Return the two numbers that `note_kept` has stored; 0 and 0 for any other value."""
    parts = (value or b"").split()
    return (int(parts[0]), int(parts[1])) if len(parts) == 2 and all(part.isdigit() for part in parts) else (0, 0)


def _fields_of(flat: Sequence[bytes]) -> dict[bytes, str]:
    return {name: value.decode("utf-8", "replace") for name, value in zip(flat[::2], flat[1::2], strict=True)}


def _time_ms(entry_id: bytes, fields: dict[bytes, str]) -> int:
    return int(fields.get(b"time") or entry_id.partition(b"-")[0])


def _record_of(time_ms: int, fields: dict[bytes, str]) -> UsageRecord:
    outcome = int(fields[b"outcome"])
    return UsageRecord(
        time_ms,
        fields[b"tenant"],
        fields[b"key"],
        fields[b"model"],
        fields[b"session"],
        fields[b"request"],
        int(fields[b"prompt"]),
        int(fields[b"cached"]),
        int(fields[b"output"]),
        int(fields[b"drafted"]),
        int(fields[b"accepted"]),
        FinishReason(outcome).name.lower() if outcome else BROKEN,
    )
