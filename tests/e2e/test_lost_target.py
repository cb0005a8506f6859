"""A target killed under `specdec generate`: the wait is told, and the text goes on where it stopped."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

from tests.support.stack import Stack
from tests.support.up_rig import ENVIRON, SPECDEC, specdec

DEMO = Path(__file__).resolve().parents[2] / "models" / "demo"
ARGS = ("generate", "import os", "--temperature", "0", "--max-new-tokens", "500", "--gamma", "2")


def test_a_killed_target_is_reported_as_lost_and_the_text_continues_after_its_restart(tmp_path: Path) -> None:
    text = tmp_path / "text"
    with Stack(DEMO / "target", DEMO / "draft") as stack, text.open("wb") as stdout:
        command = [*SPECDEC, *ARGS, "--endpoint", stack.endpoint]
        asking = subprocess.Popen(command, stdout=stdout, stderr=subprocess.PIPE, text=True, env=ENVIRON)
        assert asking.stderr is not None
        while not text.stat().st_size:
            assert asking.poll() is None
            time.sleep(0.01)
        stack.kill("target")
        assert asking.stderr.readline() == "target lost, waiting for it to come back\n"
        stack.restart("target")
        stderr = asking.stderr.read()
        assert asking.wait() == 0, stderr
        assert stderr.startswith("500 tokens in ")
        assert text.read_text() == specdec(*ARGS, "--endpoint", stack.endpoint).stdout
