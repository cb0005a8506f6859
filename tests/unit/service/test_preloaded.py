"""What the process imports from which `specdec up` forks its replicas."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

_PROGRAM = "import sys; import specdec.service.preloaded; print(*sorted({'torch', 'transformers'} & {*sys.modules}))"


@pytest.mark.parametrize(("name", "imported"), [("a.packed", "torch"), ("a.unfinished", "torch transformers")])
def test_transformers_is_imported_ahead_only_where_no_weights_are_packed(
    name: str, imported: str, tmp_path: Path
) -> None:
    (tmp_path / "specdec" / "packed").mkdir(parents=True)
    (tmp_path / "specdec" / "packed" / name).touch()
    environ = os.environ | {"XDG_CACHE_HOME": str(tmp_path)}
    result = subprocess.run([sys.executable, "-c", _PROGRAM], env=environ, capture_output=True, text=True, check=True)
    assert result.stdout.split() == imported.split()
