"""What a test's code logs as a service would write it. Fixture `stream`; the root logger is put back afterwards."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator
from typing import Any

import pytest


@pytest.fixture
def stream() -> Iterator[io.StringIO]:
    """For `configure_logging`."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield io.StringIO()
    root.handlers[:] = handlers
    root.setLevel(level)


def lines(stream: io.StringIO) -> list[dict[str, Any]]:
    """The JSON records written so far."""
    return [json.loads(line) for line in stream.getvalue().splitlines()]
