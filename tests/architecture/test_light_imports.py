"""Packages that a program must be able to import without the heavy dependencies of the services."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from importlib.metadata import PackageNotFoundError, packages_distributions, requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]

#: Dependencies of the services that a client does not install.
SERVICE_DEPENDENCIES = (
    "fakeredis", "numpy", "prometheus_client", "pydantic_settings", "redis", "tokenizers", "torch", "transformers",
)  # fmt: skip

OWN_PACKAGES = ("specdec", "draft_service", "target_service", "coordinator", "gateway")


def run_without(dependencies: tuple[str, ...], statement: str) -> subprocess.CompletedProcess[str]:
    """Run a statement in a new interpreter in which importing one of the dependencies fails."""
    hide = "".join(f"sys.modules[{name!r}] = None\n" for name in dependencies)
    command = [sys.executable, "-c", f"import sys\n{hide}{statement}"]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)


@pytest.mark.parametrize(
    "module",
    [
        "specdec.cli.doctor",
        "specdec.client",
        "specdec.contract.errors",
        "specdec.rpc.channels",
        "specdec.rpc.status_mapping",
        "specdec.contract.tenant",
        "specdec.contract.types",
    ],
)
def test_a_module_of_the_client_imports_without_the_services_dependencies(module: str) -> None:
    imported = run_without(SERVICE_DEPENDENCIES, f"import {module}")
    assert imported.returncode == 0, imported.stderr


def test_a_module_that_needs_a_hidden_dependency_fails_in_this_check() -> None:
    imported = run_without(SERVICE_DEPENDENCIES, "import specdec.rpc.codec")
    assert "numpy" in imported.stderr


@pytest.mark.parametrize("command", ["chat", "doctor", "generate", "health", "promote", "status", "top"])
def test_a_command_that_calls_a_system_runs_with_the_clients_packages_alone(command: str) -> None:
    call = f"from specdec.cli.__main__ import main\nsys.argv = ['specdec', {command!r}, '--help']\nsys.exit(main())"
    shown = run_without(not_installed_with(), call)
    assert shown.returncode == 0, shown.stderr
    assert shown.stdout.startswith(f"usage: specdec {command} ")


def test_a_command_that_needs_the_services_fails_in_this_check() -> None:
    call = "from specdec.cli.__main__ import main\nsys.argv = ['specdec', 'up', '--help']\nsys.exit(main())"
    assert 'run pip install "specdec-serving[serve]"' in run_without(not_installed_with(), call).stderr


def test_the_gateway_imports_with_the_packages_of_its_image_alone() -> None:
    imported = run_without(not_installed_with("gateway", "otel"), "import gateway.__main__")
    assert imported.returncode == 0, imported.stderr


def not_installed_with(*extras: str) -> tuple[str, ...]:
    """Return the top-level modules of installed packages that the project with these extras does not need."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    waiting = project["dependencies"] + [line for extra in extras for line in project["optional-dependencies"][extra]]
    needed: set[str] = set()
    while waiting:
        requirement = Requirement(waiting.pop())
        name = canonicalize_name(requirement.name)
        if name in needed or (requirement.marker is not None and not requirement.marker.evaluate({"extra": ""})):
            continue
        needed.add(name)
        try:
            waiting += requires(name) or []
        except PackageNotFoundError:
            pytest.fail(f"{name} is not installed")
    return tuple(
        module
        for module, names in packages_distributions().items()
        if module not in OWN_PACKAGES and not needed & set(map(canonicalize_name, names))
    )
