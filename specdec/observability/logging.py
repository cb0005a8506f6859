"""Logs: JSON lines or plain text on stderr, each with the ids of what was being done.

Ids come from context variables, so a coroutine binds them once (`with bind(session_id=…)`) and everything it calls logs
them. Prompts and tokens are logged at DEBUG only. Not here: deciding to log; metrics. `configure_logging` is called
where a service starts and nowhere else; importing this module changes nothing.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import UTC, datetime
from types import MappingProxyType
from typing import Literal, TextIO

#: The ids a record may carry, in the order they are printed.
ID_NAMES = ("request_id", "session_id", "replica_id", "epoch", "round_id")

_NO_IDS: Mapping[str, str | int] = MappingProxyType({})
_ids: ContextVar[Mapping[str, str | int]] = ContextVar("specdec_log_ids", default=_NO_IDS)

# What every LogRecord has; the rest came in through `extra`.
_STANDARD_FIELDS = frozenset(logging.makeLogRecord({}).__dict__) | {"message", "asctime", "taskName", "ids"}


@contextmanager
def bind(**ids: str | int) -> Iterator[None]:
    """Adds ids to every record of this context, and of the tasks started in it, until the block ends.

    Raises:
        ValueError: a name that is not in `ID_NAMES`.
    """
    for name in ids:
        if name not in ID_NAMES:
            raise ValueError(f"{name} is not one of {', '.join(ID_NAMES)}")
    token = _ids.set({**_ids.get(), **ids})
    try:
        yield
    finally:
        _ids.reset(token)


def configure_logging(
    log_format: Literal["json", "text"], level: str, *, service: str, stream: TextIO | None = None
) -> None:
    """Sends this process's log records to `stream` (stderr), replacing what was configured before.

    Args:
        log_format: one JSON object a line, or text for people.
        level: least severe level written: debug, info, warning or error.
        service: the process's role (`draft`, `target`, `coordinator`), a field of every JSON record.
    """
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.addFilter(_attach_ids)
    handler.setFormatter(_JsonFormatter(service) if log_format == "json" else _TextFormatter())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    # Other libraries' chatter (one line per HTTP request, per compiled graph) is not ours to print below WARNING.
    for name in ("httpx", "urllib3", "huggingface_hub", "transformers", "asyncio", "grpc"):
        logging.getLogger(name).setLevel(max(logging.WARNING, logging.getLogger().level))
    # Two more write to stderr past `logging`; each looks at its variable when first used. gRPC's C core tells of every
    # connection that a peer closed, and the Hugging Face libraries draw progress bars.
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")


def _attach_ids(record: logging.LogRecord) -> bool:
    record.ids = _ids.get()  # the context of the code that logs, not of a writer thread
    return True


def _extra(record: logging.LogRecord) -> dict[str, object]:
    ids: Mapping[str, str | int] = getattr(record, "ids", _NO_IDS)
    fields: dict[str, object] = {name: ids[name] for name in ID_NAMES if name in ids}
    # What begins with an underscore is a library's own: Ray stamps every record of a process that has loaded it.
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
    """`12:00:00.123 INFO specdec.rpc.server listening address=127.0.0.1:50061`."""

    def format(self, record: logging.LogRecord) -> str:
        at = datetime.fromtimestamp(record.created).strftime("%H:%M:%S.%f")[:-3]
        fields = "".join(f" {key}={value}" for key, value in _extra(record).items())
        line = f"{at} {record.levelname} {record.name} {record.getMessage()}{fields}"
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line
