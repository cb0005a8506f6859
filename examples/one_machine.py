"""Shared by the demos: runs a system of processes on this machine, and prints an answer as it arrives."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any

from specdec.cli.terminal import TokenWriter
from specdec.client import Client, Completion
from specdec.errors import SpecdecError, error_line


def with_system(flags: Sequence[str], show: Callable[[str], int]) -> int:
    """Run `specdec up` with these flags, call `show` with its endpoint, and stop everything that was started.

    Returns:
        The exit code of `show`, or 1 after an error, which has been printed to stderr.
    """
    up = subprocess.Popen(
        [sys.executable, "-m", "specdec.cli", "up", *flags, "--listen", "127.0.0.1:0"],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert up.stdout is not None  # it was opened above
    try:
        ready = up.stdout.readline().split("grpc=")
        if len(ready) != 2:
            return 1  # `up` has printed the reason
        return show(ready[1].strip())
    except SpecdecError as error:
        print(error_line(error), file=sys.stderr)
        return 1
    finally:
        up.send_signal(signal.SIGTERM)
        up.wait()


def print_answer(client: Client, writer: TokenWriter, prompt: str | None = None, **asked: Any) -> Completion:
    """Print a greedy answer as it arrives, each token in the colour of its source, and delete its session."""
    with client.generate(prompt, stream=True, provenance=True, temperature=0, **asked) as chunks:
        for chunk in chunks:
            writer.write(chunk)
        completion = chunks.result()
    client.delete_session(completion.session_id)
    return completion
