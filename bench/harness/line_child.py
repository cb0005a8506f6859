"""A child process that answers one JSON request a line and ends at the end of its input.

Peers run in such children, so that their memory and threads stay apart from the suite's own. Called by `bare`, `peers`
and `llama_cpp`, whose modules are also what their children run.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Any, Self


class LineChild:
    """`python -m MODULE ARGUMENTS`. Use it by `with`; one call at a time."""

    def __init__(self, module: str, *arguments: str, num_threads: int) -> None:
        """Starts the child and waits for its first line, which says that it is ready.

        Args:
            module: module of this package to run.
            arguments: command line of the child.
            num_threads: value of its `--threads` and of OMP_NUM_THREADS.

        Raises:
            RuntimeError: it ended instead.
        """
        self._module = module
        self._process = subprocess.Popen(
            [sys.executable, "-m", module, *arguments, "--threads", str(num_threads)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": str(num_threads), "TRANSFORMERS_VERBOSITY": "error"},
            cwd=Path(__file__).resolve().parents[2],
        )
        self.greeting = self._read()

    def ask(self, request: Any) -> Any:
        """Send one request and return the answer. Raises RuntimeError when the child ends before it answers."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return self._read()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.communicate()

    def _read(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self._module} ended with exit code {self._process.wait()}")
        return json.loads(line)
