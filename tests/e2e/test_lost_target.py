"""A target killed under `specdec generate`: the wait is told, and the text goes on where it stopped."""

from __future__ import annotations

import subprocess
from pathlib import Path

from tests.support.stack import Stack
from tests.support.up_rig import ENVIRON, SPECDEC, specdec

DEMO = Path(__file__).resolve().parents[2] / "models" / "demo"
ARGS = ("generate", "import os", "--temperature", "0", "--max-new-tokens", "1500", "--gamma", "2")


def test_a_killed_target_is_told_as_lost_and_the_text_goes_on_when_it_is_back() -> None:
    with Stack(DEMO / "target", DEMO / "draft") as stack:
        command = [*SPECDEC, *ARGS, "--endpoint", stack.endpoint]
        asking = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=ENVIRON)
        assert asking.stdout is not None
        assert asking.stderr is not None
        first = asking.stdout.read(8)
        stack.kill("target")
        assert asking.stderr.readline() == "target lost, waiting\n"
        stack.restart("target")
        rest, stderr = asking.communicate()
        assert asking.returncode == 0, stderr
        assert stderr.startswith("rounds ")
        assert first + rest == specdec(*ARGS, "--endpoint", stack.endpoint).stdout
