"""Reads the append-only log of a Redis as the events of a history (`tests.support.history`).

The store writes each change of a session there before it answers (`appendfsync always`), in the order in which it made
them, with the time in whole seconds (`aof-timestamp-enabled yes`). The log outlives a killed Redis.

`step_clock` steps the clock of a Redis and writes there by how much, so that the times of events stay right.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from pathlib import Path

import redis

from specdec.state.key_names import TOKEN_BYTES
from tests.support.history import Event
from tests.support.stepped_clocks import SteppedClock

#: What a Redis needs so that its log is a history.
ARGUMENTS = ("--aof-timestamp-enabled", "yes", "--auto-aof-rewrite-percentage", "0", "--aof-use-rdb-preamble", "no")

#: Holds `_CLOCK_MOVES` while the clock of the Redis is being stepped, and afterwards the true time and how far ahead of
#: it the clock is: two numbers of seconds. Events in between have the last time that is known, which is too early.
_CLOCK_KEY = b"clock-of-this-redis"
_CLOCK_MOVES = b"moves"

_KEY = re.compile(rb"\{(?P<session>[^{}]+)\}:(?P<part>meta|tokens|lease|deleted)$")


def read_append_log(directory: Path) -> list[Event]:
    """Return the events of all sessions from the log in a Redis' directory."""
    logs = sorted((directory / "appendonlydir").glob("*.incr.aof"), key=lambda path: int(path.name.split(".")[-3]))
    reader = _Reader()
    return [event for log in logs for event in reader.read(log.read_bytes())]


def step_clock(url: str, clock: SteppedClock, ahead_s: float) -> None:
    """Set the clock of the Redis at `url` ahead of the machine's, or behind it where `ahead_s` is negative."""
    with redis.Redis.from_url(url) as client:
        client.set(_CLOCK_KEY, _CLOCK_MOVES)
        clock.step(ahead_s)
    note_time(url, clock)


def note_time(url: str, clock: SteppedClock) -> None:
    """Write the true time into the log of the Redis at `url`.

    Redis writes none until its clock has passed the latest time that it has written, so that a step back hides times.
    """
    with redis.Redis.from_url(url) as client:
        client.set(_CLOCK_KEY, f"{time.time():.6f} {clock.offset_s:.6f}")


class _Reader:
    """Turns commands into events; one for all parts of a log."""

    def __init__(self) -> None:
        self._at = 0.0
        self._ahead_s: float | None = 0.0
        self._epochs: dict[str, int] = {}
        self._owners: dict[str, str] = {}
        self._num_tokens: dict[str, int] = {}

    def read(self, content: bytes) -> Iterator[Event]:
        position = 0
        while position < len(content):
            end = content.index(b"\r\n", position)
            line, position = content[position:end], end + 2
            if line.startswith(b"#TS:"):
                if self._ahead_s is not None:
                    self._at = float(line[4:]) - self._ahead_s
                continue
            words: list[bytes] = []
            for _ in range(int(line[1:])):
                end = content.index(b"\r\n", position)
                size, start = int(content[position + 1 : end]), end + 2
                words.append(content[start : start + size])
                position = start + size + 2
            if position > len(content):
                return  # the last command was cut off
            yield from self._events(words)

    def _events(self, words: list[bytes]) -> Iterator[Event]:
        command = words[0].upper()
        if command == b"SET" and words[1] == _CLOCK_KEY:
            self._set_clock(words[2])
            return
        for name in words[1:] if command in (b"DEL", b"UNLINK") else words[1:2]:
            found = _KEY.search(name)
            if found:
                session, part = found["session"].decode(), found["part"].decode()
                for event in self._of_key(command, session, part, words):
                    yield {"at": self._at, "session": session, **event}

    def _set_clock(self, value: bytes) -> None:
        if value == _CLOCK_MOVES:
            self._ahead_s = None
        else:
            self._at, self._ahead_s = (float(number) for number in value.split())

    def _of_key(self, command: bytes, session: str, part: str, words: list[bytes]) -> Iterator[Event]:
        if part == "meta" and command == b"HSET":
            fields = dict(zip(words[2::2], words[3::2], strict=True))
            if b"epoch" in fields:
                self._epochs[session] = int(fields[b"epoch"])
        elif part == "lease" and command == b"SET":
            self._owners[session] = words[2].decode()
            yield {"kind": "lease", "epoch": self._epochs[session], "owner": self._owners[session]}
        elif part == "tokens" and command == b"SET":
            self._num_tokens[session] = len(words[2]) // TOKEN_BYTES
            yield {"kind": "keep", "num_tokens": self._num_tokens[session]}
        elif part == "tokens" and command in (b"DEL", b"UNLINK"):
            self._num_tokens[session] = 0
            yield {"kind": "keep", "num_tokens": 0}
        elif part == "tokens" and command == b"SETRANGE":
            start, packed = int(words[2]) // TOKEN_BYTES, words[3]
            token_ids = [
                int.from_bytes(packed[index : index + TOKEN_BYTES], "little")
                for index in range(0, len(packed), TOKEN_BYTES)
            ]
            self._num_tokens[session] = start + len(token_ids)
            yield {
                "kind": "append",
                "epoch": self._epochs[session],
                "owner": self._owners[session],
                "start": start,
                "token_ids": token_ids,
            }
        elif part == "deleted" and command == b"SET":
            yield {"kind": "deleted"}
