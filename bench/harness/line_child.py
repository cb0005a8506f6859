"""A child process that answers one JSON request a line and ends at the end of its input.

Peers and clients run in such children, so that their memory and threads stay apart from the suite's own. The module of
a subclass is also what its child runs.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Self


class LineChild:
    """`python -m MODULE ARGUMENTS`. Use it by `with`; one call at a time."""

    def __init__(
        self, module: str, *arguments: str, num_threads: int | None = None, environ: Mapping[str, str] | None = None
    ) -> None:
        """Start the child and wait for its first line, which says that it is ready.

        Args:
            module: module of this package to run.
            arguments: command line of the child.
            num_threads: value of its `--threads` and of OMP_NUM_THREADS; None: the child has no such flag.
            environ: variables that are added to this process's environment.

        Raises:
            RuntimeError: it ended instead.
        """
        self._module = module
        threads = {} if num_threads is None else {"OMP_NUM_THREADS": str(num_threads)}
        flags = [] if num_threads is None else ["--threads", str(num_threads)]
        self._process = subprocess.Popen(
            [sys.executable, "-m", module, *arguments, *flags],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"TRANSFORMERS_VERBOSITY": "error"} | threads | dict(environ or {}),
            cwd=Path(__file__).resolve().parents[2],
        )
        self.greeting = self.receive()

    def ask(self, request: Any) -> Any:
        """Send one request and return the answer. Raises RuntimeError when the child ends before it answers."""
        self.send(request)
        return self.receive()

    def send(self, request: Any) -> None:
        """Send one request; `receive` waits for its answer."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate()

    def receive(self) -> Any:
        """Return the next line. Raises RuntimeError when the child ends before it."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self._module} ended with exit code {self._process.wait()}")
        return json.loads(line)


def answer_lines(greeting: Any, answer: Callable[[Any], Any]) -> None:
    """Be the child: greet, and answer each request until the input ends."""
    print(json.dumps(greeting), flush=True)
    for line in sys.stdin:
        print(json.dumps(answer(json.loads(line))), flush=True)
