"""Logs on stderr, as JSON lines or plain text, with the ids of the current request, session, replica and round.

Ids come from context variables: a coroutine binds them once (`with bind(session_id=…)`), and every record of the
functions it calls has them. Prompts and tokens are logged at DEBUG only. `configure_logging` is called only when a
service starts; importing this module changes nothing.

Records that libraries write about malformed requests are limited to one a second, as a warning (`ClientFaults`). Each
hostile request would otherwise add a line, so that a client could fill the disk and hide other records.
"""

from __future__ import annotations

import json
import logging
import os
import re
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import UTC, datetime
from types import MappingProxyType
from typing import Literal, TextIO

#: Beginnings of such records, by the name of their logger.
_BEGINNINGS = {
    "grpc._cython.cygrpc": ("Invalid encoding on",),
    "uvicorn.error": ("Invalid HTTP request", "Unsupported upgrade request", "No supported WebSocket library"),
}

_INTERVAL_S = 1.0


class ClientFaults(logging.Filter):
    """Drops a record whose like was written less than a second ago."""

    def __init__(self, beginnings: tuple[str, ...]) -> None:
        """`beginnings` of the messages of such records."""
        super().__init__()
        self._beginnings = beginnings
        self._written_s: dict[str, float] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        beginning = next((words for words in self._beginnings if str(record.msg).startswith(words)), None)
        if beginning is None:
            return True
        now_s = time.monotonic()
        if now_s - self._written_s.get(beginning, float("-inf")) < _INTERVAL_S:
            return False
        self._written_s[beginning] = now_s
        record.levelno, record.levelname, record.exc_info = logging.WARNING, "WARNING", None
        return True


def install() -> None:
    """Filter the records of this process. A second call changes nothing."""
    for name, beginnings in _BEGINNINGS.items():
        logger = logging.getLogger(name)
        if not any(isinstance(each, ClientFaults) for each in logger.filters):
            logger.addFilter(ClientFaults(beginnings))


#: Ids that a record may have, in the order in which they are printed.
ID_NAMES = ("request_id", "tenant", "session_id", "replica_id", "epoch", "round_id", "trace_id", "span_id")

#: Id of an HTTP request, as its client or the gateway named it. Records of all services that concern it have it.
X_REQUEST_ID = "x_request_id"

MAX_REQUEST_ID_CHARACTERS = 128

_BOUND_NAMES = (X_REQUEST_ID, *ID_NAMES)
_NOT_IN_REQUEST_IDS = re.compile(r"[^A-Za-z0-9._:@/+=-]")
#: Control characters, which would end a line of text or change a terminal.
_CONTROLS = {number: f"\\x{number:02x}" for number in (*range(0x20), *range(0x7F, 0xA0))} | {
    0x2028: "\\u2028", 0x2029: "\\u2029",
}  # fmt: skip

_NO_IDS: Mapping[str, str | int] = MappingProxyType({})
_ids: ContextVar[Mapping[str, str | int]] = ContextVar("specdec_log_ids", default=_NO_IDS)

# Attributes of every LogRecord; others come from `extra`.
_STANDARD_FIELDS = frozenset(logging.makeLogRecord({}).__dict__) | {"message", "asctime", "taskName", "ids"}


@contextmanager
def bind(**ids: str | int) -> Iterator[None]:
    """Add ids to every record of this context, and of the tasks started in it, until the block ends.

    Raises:
        ValueError: a name is neither in `ID_NAMES` nor `X_REQUEST_ID`.
    """
    token = _ids.set(_with(ids))
    try:
        yield
    finally:
        _ids.reset(token)


def bind_task(**ids: str | int) -> None:
    """Add ids to every further record of the current task, and of the tasks that it starts from now on.

    Raises:
        ValueError: a name is neither in `ID_NAMES` nor `X_REQUEST_ID`.
    """
    _ids.set(_with(ids))


def _with(ids: Mapping[str, str | int]) -> Mapping[str, str | int]:
    for name in ids:
        if name not in _BOUND_NAMES:
            raise ValueError(f"{name} is not one of {', '.join(_BOUND_NAMES)}")
    return {**_ids.get(), **ids}


def clean_request_id(text: str) -> str:
    """Return an id of a request from outside without the characters that ids do not have, and not too long."""
    return _NOT_IN_REQUEST_IDS.sub("", text[:MAX_REQUEST_ID_CHARACTERS])


def bound_request_id() -> str:
    """Return the id of the HTTP request that this context serves; "" if it is not known."""
    return str(_ids.get().get(X_REQUEST_ID, ""))


def configure_logging(
    log_format: Literal["json", "text"], level: str, *, service: str, stream: TextIO | None = None
) -> None:
    """Send this process's log records to `stream` (stderr), replacing any earlier configuration.

    Args:
        log_format: one JSON object a line, or text.
        level: lowest level that is written: debug, info, warning or error.
        service: the process's role (`draft`, `target`, `coordinator`), a field of every JSON record.
    """
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.addFilter(_attach_ids)
    handler.setFormatter(_JsonFormatter(service) if log_format == "json" else _TextFormatter())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    # Other libraries log one line per HTTP request or per compiled graph; only their warnings are shown.
    for name in ("httpx", "httpx2", "uvicorn", "urllib3", "huggingface_hub", "transformers", "asyncio", "grpc"):
        logging.getLogger(name).setLevel(max(logging.WARNING, logging.getLogger().level))
    install()
    # Two libraries write to stderr without `logging` and read these variables at their first use: gRPC's C core reports
    # every connection that a peer closed, and the Hugging Face libraries draw progress bars.
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")


def _attach_ids(record: logging.LogRecord) -> bool:
    record.ids = _ids.get()  # read here, in the context of the code that logs
    return True


def _extra(record: logging.LogRecord) -> dict[str, object]:
    ids: Mapping[str, str | int] = getattr(record, "ids", _NO_IDS)
    fields: dict[str, object] = {name: ids[name] for name in _BOUND_NAMES if name in ids}
    # Names with an underscore are private to a library: Ray adds one to every record of a process that has loaded it.
    fields.update(
        (key, value)
        for key, value in record.__dict__.items()
        if key not in _STANDARD_FIELDS and not key.startswith("_")
    )
    return fields


class _JsonFormatter(logging.Formatter):
    """One JSON object a line: time, level, service, logger, message, ids, then the call's `extra`."""

    def __init__(self, service: str) -> None:
        super().__init__()
        self._service = service

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "service": self._service,
            "logger": record.name,
            "message": record.getMessage(),
            **_extra(record),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str, ensure_ascii=False)


class _TextFormatter(logging.Formatter):
    """`12:00:00.123 INFO specdec.rpc.service_server listening address=127.0.0.1:50061`."""

    def format(self, record: logging.LogRecord) -> str:
        at = datetime.fromtimestamp(record.created).strftime("%H:%M:%S.%f")[:-3]
        fields = "".join(f" {key}={value}" for key, value in _extra(record).items())
        line = f"{at} {record.levelname} {record.name} {record.getMessage()}{fields}".translate(_CONTROLS)
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line
