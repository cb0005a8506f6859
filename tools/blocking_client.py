"""Write the blocking client from the asyncio one, module by module: `make client`. A test compares them.

The rules below are the only differences. What gRPC's two APIs do differently is in `specdec/client/coordinators.py`.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

CLIENT = Path(__file__).parents[1] / "specdec/client"

#: The asyncio modules; each gives one blocking module.
MODULES = ("async_coordinators", "async_stream", "async_client")

#: Pattern and replacement, applied in this order: sentences before words.
_RULES = (
    ("The asyncio client: one connection, any number of concurrent calls.", "The blocking client."),
    (r"`sync_client` is generated from it\.", "Several threads may share it."),
    ("The asyncio client's stream", "The blocking client's stream"),
    (", for the event loop of its first call", ", for any number of threads"),
    ("Cancelling the task .* cancels the call", "One thread at a time may read a stream; any thread may close it"),
    ("A task that iterates", "A thread that iterates"),
    ("awaiting or iterating raises", "waiting or iterating raises"),
    ("awaiting a completion raises", "waiting for a completion raises"),
    ("an awaitable `Completion`", "waits for the `Completion`"),
    ("await `", "call `"),
    (r"\ban (`?)Async(?=[A-Z])", r"a \1"),
    (r"Coroutine\[Any, Any, (\w+)\]", r"\1"),
    (r"\basync (?=def|for|with)", ""),
    (r"\bawait ", ""),
    (r"\bAsync(?=[A-Z])", ""),
    (r"\basync_(?=client|coordinators|stream)", "sync_"),
    ("__a(?=enter__|exit__|next__)", "__"),
    ("StopAsyncIteration", "StopIteration"),
    (r"\baclose\b", "close"),
)


def blocking_modules() -> Mapping[Path, str]:
    """Return the text of each blocking module, by its path."""
    return {CLIENT / f"{name.removeprefix('a')}.py": _blocking_module(CLIENT / f"{name}.py") for name in MODULES}


def as_blocking(text: str) -> str:
    """Return the text of an asyncio module for threads. Raises ValueError for a line that no rule makes blocking."""
    for pattern, replacement in _RULES:
        text = re.sub(pattern, replacement, text)
    if rest := re.search(r".*([Aa]sync|await).*", text):
        raise ValueError(f"no rule makes this line blocking: {rest[0].strip()}")
    return text


def _blocking_module(source: Path) -> str:
    """Return a module with its imports sorted, without unused ones, and with its lines as ruff breaks them."""
    text = f"# Written by `make client` from the asyncio module; change that one.\n{as_blocking(source.read_text())}"
    for command in (("check", "--fix", "--quiet", "--select", "F401,I"), ("format", "--quiet")):
        ruff = (sys.executable, "-m", "ruff", *command, "--stdin-filename", str(source), "-")
        text = subprocess.run(ruff, input=text, capture_output=True, text=True, check=True).stdout
    return text


if __name__ == "__main__":
    for path, text in blocking_modules().items():
        path.write_text(text)
