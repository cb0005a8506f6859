"""Ctrl-C in the first moments of a command, while its modules are imported."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest

#: Sends the signal while a module is looked for, then runs a command line.
PROGRAM = """
    import os, runpy, signal, sys

    class Interrupting:
        def find_spec(self, name, path=None, target=None):
            if name == {module!r}:
                os.kill(os.getpid(), signal.SIGINT)
            return None

    signal.signal(signal.SIGINT, signal.{before})
    sys.meta_path.insert(0, Interrupting())
    sys.argv[1:] = {argv!r}
    runpy.run_module("specdec.cli", run_name="__main__", alter_sys=True)
"""


def run_interrupted(module: str, *argv: str, before: str = "default_int_handler") -> subprocess.CompletedProcess[str]:
    program = textwrap.dedent(PROGRAM).format(module=module, argv=list(argv), before=before)
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)


@pytest.mark.parametrize("module", ["specdec.cli.generate", "grpc", "rich", "tenacity", "specdec.client.results"])
def test_it_is_exit_code_130_and_no_traceback(module: str) -> None:
    done = run_interrupted(module, "generate", "hi")
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_an_interrupt_is_ignored_if_the_caller_ignores_it() -> None:
    done = run_interrupted("grpc", "health", before="SIG_IGN")
    assert done.returncode == 2
    assert "the following arguments are required" in done.stderr
