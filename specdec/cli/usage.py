"""`specdec usage`: prints the usage records of a system, one a turn or as sums, for bills.

The records are in the system's Redis (`specdec.state.usage_records`).
"""

from __future__ import annotations

import argparse
import asyncio
import csv
import json
import re
import sys
from collections.abc import AsyncIterator, Iterable, Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any

from specdec.cli import Usage
from specdec.contract.errors import InvalidRequest
from specdec.settings.cluster_names import DEFAULT_CLUSTER
from specdec.state.usage_records import BROKEN, UsageRecord, UsageRecords, open_usage

_REDIS_VARIABLE = "SPECDEC_COORDINATOR__REDIS_URL"
_CLUSTER_VARIABLE = "SPECDEC_COORDINATOR__CLUSTER"

_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_DURATION = re.compile(r"(\d{1,9})([smhd])")

#: Age from which sums no longer change: clocks of a store's nodes and of a new primary differ by less.
_SETTLING_S = 60

_COUNTS = ("prompt_tokens", "cached_tokens", "output_tokens", "draft_tokens", "accepted_tokens")


@dataclass(slots=True)
class _Sum:
    """Sums over the turns of one tenant, key or model."""

    turns: int = 0
    broken_turns: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0

    def add(self, record: UsageRecord) -> None:
        self.turns += 1
        self.broken_turns += record.outcome == BROKEN
        for name in _COUNTS:
            setattr(self, name, getattr(self, name) + getattr(record, name))


def add_parser(commands: Any, environ: Mapping[str, str]) -> None:
    parser = commands.add_parser(
        "usage", description="Print the usage records of a system: one line a turn, or sums.", allow_abbrev=False
    )
    parser.add_argument(
        "--since", default="24h", metavar="TIME",
        help="begin: an age such as 90s, 30m, 1h or 7d, or a time such as 2026-11-01 or 2026-11-01T06:00:00Z, in UTC "
        "unless it names a zone; default: 24h",
    )  # fmt: skip
    parser.add_argument(
        "--until", default="0s", metavar="TIME",
        help=f"end, not included, like --since; a bill's is at least {_SETTLING_S} s ago; default: now",
    )  # fmt: skip
    parser.add_argument(
        "--by", choices=("tenant", "key", "model"), help="sums for each tenant, API key or model; default: each turn"
    )
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--format", choices=("csv", "jsonl"), default="csv", help="default: csv")
    form.add_argument(
        "--json", action="store_const", const="jsonl", dest="format",
        help="the same as --format jsonl, and an error is JSON too",
    )  # fmt: skip
    parser.add_argument(
        "--redis-url", default=environ.get(_REDIS_VARIABLE, ""), metavar="URL",
        help=f"Redis of the coordinators; default: {_REDIS_VARIABLE}",
    )  # fmt: skip
    parser.add_argument(
        "--cluster", default=environ.get(_CLUSTER_VARIABLE) or DEFAULT_CLUSTER, metavar="NAME",
        help=f"name of the system in that Redis; default: {_CLUSTER_VARIABLE}, else {DEFAULT_CLUSTER}",
    )  # fmt: skip


def run(args: argparse.Namespace, environ: Mapping[str, str]) -> int:
    """Print the records or sums.

    Raises:
        InvalidRequest: no coordinator keeps records there, those since then are gone, or the URL is malformed.
        Unavailable: the store cannot be reached.
    """
    if not args.redis_url:
        raise Usage(
            f"--redis-url: give the Redis of the coordinators, or set {_REDIS_VARIABLE}; see specdec usage --help"
        )
    since, until = (_TimeFlag(name, getattr(args, name)) for name in ("since", "until"))
    asyncio.run(_print(args, since, until))
    return 0


class _TimeFlag:
    """The value of --since or --until."""

    def __init__(self, name: str, text: str) -> None:
        """Raises Usage for a text that is neither an age nor a time."""
        self.name, self.text = name, text
        self._age_ms = 0
        self._time_ms: int | None = None
        if found := _DURATION.fullmatch(text):
            self._age_ms = int(found[1]) * _SECONDS[found[2]] * 1000
            return
        try:
            time = datetime.fromisoformat(text)
            self._time_ms = round((time if time.tzinfo else time.replace(tzinfo=UTC)).timestamp() * 1000)
        except (ValueError, OverflowError):
            raise Usage(
                f"--{name} {text[:40]!r} must be an age such as 90s, 30m, 1h or 7d, or a time such as "
                "2026-11-01T06:00:00Z; see specdec usage --help"
            ) from None

    def ms(self, now_ms: int) -> int:
        """Return the time in ms since 1970."""
        return now_ms - self._age_ms if self._time_ms is None else self._time_ms


async def _print(args: argparse.Namespace, since: _TimeFlag, until: _TimeFlag) -> None:
    usage = open_usage(args.redis_url, cluster=args.cluster)
    try:
        now_ms = await usage.server_ms()
        since_ms, until_ms = since.ms(now_ms), until.ms(now_ms)
        if since_ms >= until_ms:
            raise Usage(f"--since {since.text} must be before --until {until.text}")
        await _check_kept(usage, args.cluster, since, since_ms, now_ms)
        records = usage.read(since_ms, until_ms)
        if args.by is None:
            await _print_turns(records, args.format)
        else:
            if until_ms > now_ms - _SETTLING_S * 1000:
                print(
                    f"note: these sums may still change; for a bill give --until {_SETTLING_S}s or an earlier time",
                    file=sys.stderr,
                )
            sums = await _sums(records, args.by)
            rows = [{args.by: name, **asdict(sums[name])} for name in sorted(sums)]
            _write(rows, [args.by, *_Sum.__dataclass_fields__], args.format)
    finally:
        await usage.close()


async def _check_kept(usage: UsageRecords, cluster: str, since: _TimeFlag, since_ms: int, now_ms: int) -> None:
    """Refuse a query for records that are not kept; say on stderr if they begin later than it asks for."""
    kept_ms, begin_ms = await usage.kept()
    first_ms = await usage.first_ms()
    if not kept_ms:
        raise InvalidRequest(
            f"no coordinator of the system {cluster!r} keeps usage records in this Redis: check --redis-url and "
            "--cluster, and that --usage-days of the coordinators is above 0",
            field="redis_url",
        )
    begin_ms = max(begin_ms, now_ms - kept_ms)
    if since_ms < begin_ms:
        raise InvalidRequest(
            f"--since {since.text}: records are kept for {kept_ms / 86_400_000:g} days (--usage-days of the "
            f"coordinators), and those before {_text(begin_ms)} are gone; give that time or a later one",
            field="since",
        )
    if not first_ms:
        print("note: there are no usage records yet", file=sys.stderr)
    elif first_ms > since_ms:
        print(f"note: the first usage record is of {_text(first_ms)}", file=sys.stderr)


async def _print_turns(records: AsyncIterator[UsageRecord], form: str) -> None:
    columns = ["time", *(name for name in UsageRecord.__dataclass_fields__ if name != "time_ms")]
    _write((), columns, form)
    async for record in records:
        fields = asdict(record)
        row = {"time": _text(fields.pop("time_ms")), **fields}
        _write([row], columns, form, has_header=False)


async def _sums(records: AsyncIterator[UsageRecord], by: str) -> dict[str, _Sum]:
    sums: dict[str, _Sum] = {}
    async for record in records:
        sums.setdefault(getattr(record, by), _Sum()).add(record)
    return sums


def _write(rows: Iterable[Mapping[str, Any]], columns: list[str], form: str, *, has_header: bool = True) -> None:
    if form == "csv":
        writer = csv.DictWriter(sys.stdout, columns, lineterminator="\n")
        if has_header:
            writer.writeheader()
        writer.writerows(rows)
    else:
        for row in rows:
            print(json.dumps(row, ensure_ascii=False))


def _text(time_ms: int) -> str:
    """Return a time as text, in UTC to the millisecond."""
    time = datetime.fromtimestamp(time_ms / 1000, UTC)
    return time.isoformat(timespec="milliseconds").replace("+00:00", "Z")
