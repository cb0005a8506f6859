"""Histories of fault runs: what the store committed and what clients received, one event a line, and their checker.

An event is a JSON object with the time `at` (seconds since 1970) and a `kind`:

| kind | Fields |
|---|---|
| lease | session, epoch, owner: a coordinator takes the session |
| keep | session, num_tokens: a turn begins, and the log is cut to this length |
| append | session, owner, epoch, start, token_ids: tokens are committed |
| deleted | session |
| received | client, session, request, start, token_ids: a client gets tokens; `start` counts from the session's first |
| read | client, session, request, start, num_tokens, text: likewise, over HTTP, which has texts only |

`tests.support.append_log` has the first four from the store's own log of writes, `tests.support.fault_clients` the
others.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

Event = dict[str, Any]

#: The store's log has whole seconds.
_CLOCK_SLACK_S = 0.05


def write_history(events: Iterable[Event], path: Path) -> None:
    """Write one event a line."""
    path.write_text("".join(f"{json.dumps(event)}\n" for event in events))


def read_history(path: Path) -> list[Event]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def check_history(events: Iterable[Event], decode: Callable[[Sequence[int]], str] | None = None) -> list[str]:
    """Return what is wrong with a history, one sentence a fault; none where it is sound.

    Each session has one writer a token, no epoch twice, and no client sees a token that is not committed, or one twice.

    Args:
        events: the store's events in the store's order, and those of each client in the client's order.
        decode: returns the text of output tokens; needed for events of the kind `read`.
    """
    sessions: defaultdict[str, _Session] = defaultdict(_Session)
    clients: defaultdict[tuple[str, str, str], list[Event]] = defaultdict(list)
    faults: list[str] = []
    for event in events:
        kind, session = event["kind"], event["session"]
        if kind in ("received", "read"):
            clients[event["client"], session, event["request"]].append(event)
        elif fault := getattr(sessions[session], kind)(event):
            faults.append(f"session {session}: {fault}")
    for (client, session, request), received in clients.items():
        problem = sessions[session].compare(received, decode)
        if problem:
            faults.append(f"client {client}, session {session}, request {request}: {problem}")
    return faults


class _Session:
    """The log of one session as the store's events make it."""

    def __init__(self) -> None:
        self._epoch = 0
        self._owner = ""
        self._token_ids: list[int] = []
        self._committed_at: list[float] = []

    def lease(self, event: Event) -> str:
        fault = "" if event["epoch"] > self._epoch else f"epoch {event['epoch']} after epoch {self._epoch}"
        self._epoch, self._owner = event["epoch"], event["owner"]
        return fault

    def keep(self, event: Event) -> str:
        if event["num_tokens"] > len(self._token_ids):
            return f"keeps {event['num_tokens']} of {len(self._token_ids)} tokens"
        del self._token_ids[event["num_tokens"] :], self._committed_at[event["num_tokens"] :]
        return ""

    def append(self, event: Event) -> str:
        start, token_ids = event["start"], event["token_ids"]
        if (event["epoch"], event["owner"]) != (self._epoch, self._owner):
            return f"{event['owner']} writes at {start} under epoch {event['epoch']}; {self._owner} has {self._epoch}"
        if start != len(self._token_ids):
            return f"tokens at {start} are written when the log has {len(self._token_ids)}"
        self._token_ids += token_ids
        self._committed_at += [event["at"]] * len(token_ids)
        return ""

    def deleted(self, event: Event) -> str:
        return ""  # a record that nobody needs any more; what it held stays to be compared

    def compare(self, received: Sequence[Event], decode: Callable[[Sequence[int]], str] | None) -> str:
        """Return what is wrong with the tokens that a client received of one request."""
        first = position = received[0]["start"]
        texts: list[str] = []
        for event in received:
            num_tokens = event["num_tokens"] if event["kind"] == "read" else len(event["token_ids"])
            if event["start"] != position:
                return f"tokens at {event['start']} follow those up to {position}"
            position += num_tokens
            if position > len(self._token_ids):
                return f"tokens up to {position} are received, {len(self._token_ids)} are committed"
            if event["kind"] == "read":
                texts.append(event["text"])
            elif event["token_ids"] != self._token_ids[event["start"] : position]:
                return f"other tokens at {event['start']} than the committed ones"
            if num_tokens and self._committed_at[position - 1] > event["at"] + _CLOCK_SLACK_S:
                return f"the token at {position - 1} is received before it is committed"
        if texts and decode is not None and "".join(texts) != decode(self._token_ids[first:position]):
            return "another text than that of the committed tokens"
        return ""
