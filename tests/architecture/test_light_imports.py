"""Packages that a program must be able to import without the heavy dependencies of the services."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

#: Dependencies of the services that a client does not install.
SERVICE_DEPENDENCIES = (
    "fakeredis", "numpy", "prometheus_client", "pydantic_settings", "redis", "tokenizers", "torch", "transformers",
)  # fmt: skip


def run_without(dependencies: tuple[str, ...], statement: str) -> subprocess.CompletedProcess[str]:
    """Run a statement in a new interpreter in which importing one of the dependencies fails."""
    hide = "".join(f"sys.modules[{name!r}] = None\n" for name in dependencies)
    command = [sys.executable, "-c", f"import sys\n{hide}{statement}"]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)


@pytest.mark.parametrize(
    "module",
    [
        "specdec.client",
        "specdec.errors",
        "specdec.rpc.channels",
        "specdec.rpc.status",
        "specdec.tenant",
        "specdec.types",
    ],
)
def test_a_module_of_the_client_imports_without_the_services_dependencies(module: str) -> None:
    imported = run_without(SERVICE_DEPENDENCIES, f"import {module}")
    assert imported.returncode == 0, imported.stderr


def test_a_module_that_needs_a_hidden_dependency_fails_in_this_check() -> None:
    imported = run_without(SERVICE_DEPENDENCIES, "import specdec.rpc.codec")
    assert "numpy" in imported.stderr
