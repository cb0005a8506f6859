"""`make demo`'s script, run as make runs it, and the imports of the other examples."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from specdec.cli.bench import GAIN

ROOT = Path(__file__).resolve().parents[2]


def test_the_demo_streams_a_text_makes_it_in_every_way_and_leaves_nothing_behind() -> None:
    environ = {**os.environ, "NO_COLOR": "1", "SPECDEC_DEMO_RUN": str(os.getpid())}
    result = subprocess.run(
        [sys.executable, "examples/demo.py"], capture_output=True, text=True, cwd=ROOT, env=environ, check=False
    )
    assert result.returncode == 0, result.stderr
    rows = re.findall(r"^(\S+) +([\d.]+) +[\d.]+ +(\d+) +([\d.]+)x ", result.stdout, re.MULTILINE)
    assert [name for name, *_ in rows] == ["target-only", "eagle3", "suffix", "code"], result.stdout
    tokens_a_round = {name: float(tokens) for name, tokens, *_ in rows}
    assert tokens_a_round.pop("target-only") == 1.0
    assert min(tokens_a_round.values()) > 2.0
    assert all(int(rate) > 0 for _, _, rate, _ in rows)
    for name, _, _, speedup in rows[1:]:  # what does not gain on this machine says why
        reason = re.search(
            rf"^{name}: no gain: a round emits [\d.]+ tokens .+ and takes as long as ", result.stdout, re.M
        )
        assert (float(speedup) < GAIN) == (reason is not None) or abs(float(speedup) - GAIN) < 0.01, result.stdout
    assert "All texts are the same, token for token." in result.stdout
    assert "\x1b[" not in result.stdout, "colour was asked not to be used"
    assert not processes_marked(f"SPECDEC_DEMO_RUN={os.getpid()}")


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.py")), ids=lambda path: path.stem)
def test_every_example_finds_what_it_imports(path: Path) -> None:
    """`test_examples` runs those of the public interfaces, and tests/real those that need a real model."""
    code = f"import importlib; importlib.import_module({path.stem!r})"  # a name such as `async` is no identifier
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=path.parent,
        env={**os.environ, "PYTHONPATH": str(ROOT)}, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr


def processes_marked(entry: str) -> list[str]:
    """Live processes other than this one whose environment holds `entry`."""
    found = []
    for environ in Path("/proc").glob("[0-9]*/environ"):
        try:
            if entry.encode() in environ.read_bytes().split(b"\0"):
                found.append(environ.parent.name)
        except OSError:  # it has ended meanwhile, or is not ours
            continue
    return [pid for pid in found if pid != str(os.getpid())]
