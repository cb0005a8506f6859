"""The blocking client is what the asyncio client generates."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.blocking_client import as_blocking, blocking_modules


@pytest.mark.parametrize(("path", "text"), blocking_modules().items(), ids=lambda value: getattr(value, "name", ""))
def test_a_blocking_module_is_what_make_client_writes(path: Path, text: str) -> None:
    assert path.read_text() == text, f"{path.name} differs from its asyncio module: run `make client`"


def test_the_rules_take_asyncio_out_of_code_and_of_docstrings() -> None:
    source = '''
class AsyncReader:
    async def read(self) -> bytes:
        """Return an `AsyncPart`'s bytes."""
        async with self._lock:
            return await self._read()
'''

    assert (
        as_blocking(source)
        == '''
class Reader:
    def read(self) -> bytes:
        """Return a `Part`'s bytes."""
        with self._lock:
            return self._read()
'''
    )


@pytest.mark.parametrize("line", ["await_all(calls)", "import asyncio", "# once the task is awaited"])
def test_a_line_that_no_rule_makes_blocking_is_refused(line: str) -> None:
    with pytest.raises(ValueError, match=line.replace("(", r"\(").replace(")", r"\)")):
        as_blocking(f"first\n{line}\nlast\n")
