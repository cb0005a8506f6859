"""The examples that need a real model, run as make runs them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("name", ["demo_real.py", "demo_pair.py"])
def test_an_example_answers_as_transformers_does(name: str) -> None:
    result = subprocess.run([sys.executable, f"examples/{name}"], capture_output=True, text=True, cwd=ROOT, check=False)
    assert result.returncode == 0, result.stderr
    assert "Transformers" in result.stdout
    assert "\x1b[" not in result.stdout
