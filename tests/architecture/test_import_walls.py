"""Who may import whom (docs/architecture.md), read from the code's own import statements and from real imports."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SERVICES = ("draft_service", "target_service", "coordinator")
FOUNDATIONS = {
    "specdec", "specdec.__version__", "specdec.types", "specdec.errors", "specdec.config", "specdec.checkpoint",
    "specdec.vocabulary", "specdec.v1",
}  # fmt: skip

#: What each room may import besides itself and the foundations.
ALLOWED = {
    "specdec.types": set(),
    "specdec.errors": set(),
    "specdec.checkpoint": set(),
    "specdec.vocabulary": set(),
    "specdec.config": set(),
    "specdec.core": set(),
    "specdec.engine": {"specdec.core"},
    "specdec.state": {"specdec.core"},
    "specdec.observability": {"specdec.core"},
    "specdec.rpc": {"specdec.core", "specdec.observability"},
    "specdec.client": {"specdec.rpc"},
    "specdec.cli": {"specdec.client", "specdec.rpc", "specdec.state"},
    **{service: {"specdec.core", "specdec.engine", "specdec.state", "specdec.rpc", "specdec.observability"}
       for service in SERVICES},
}  # fmt: skip


def python_files() -> list[Path]:
    return [
        path
        for top in ("specdec", *SERVICES)
        for path in sorted((ROOT / top).rglob("*.py"))
        if "v1" not in path.relative_to(ROOT).parts
    ]


def room_of(module: str) -> str:
    """The room a dotted module lives in: `specdec.engine`, `coordinator`, `specdec.types` …"""
    parts = module.split(".")
    return ".".join(parts[:2]) if parts[0] == "specdec" and len(parts) > 1 else parts[0]


def imported_modules(path: Path) -> set[str]:
    package = ".".join(path.relative_to(ROOT).parent.parts)
    modules = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            modules.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                up = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*up, base] if base else up)
            # `from specdec import errors` names a module; `from specdec.types import Round` does not.
            modules.update(f"{base}.{alias.name}" if base == "specdec" else base for alias in node.names)
    return modules


@pytest.mark.parametrize("path", python_files(), ids=lambda path: str(path.relative_to(ROOT)))
def test_a_file_imports_only_what_its_room_may(path: Path) -> None:
    room = room_of(".".join(path.relative_to(ROOT).with_suffix("").parts))
    ours = {room_of(name) for name in imported_modules(path) if name.split(".")[0] in ("specdec", *SERVICES)}
    forbidden = ours - FOUNDATIONS - ALLOWED.get(room, set()) - {room}
    assert not forbidden, f"{path.relative_to(ROOT)} reaches into {sorted(forbidden)}"


@pytest.mark.parametrize("path", python_files(), ids=lambda path: str(path.relative_to(ROOT)))
def test_protobuf_types_stop_at_servicers_rpc_and_client(path: Path) -> None:
    relative = path.relative_to(ROOT)
    if relative.name in ("servicer.py", "validation.py") or relative.parts[:2] in (
        ("specdec", "rpc"),
        ("specdec", "client"),
    ):
        return
    imported = {name for name in imported_modules(path) if name.startswith("specdec.v1")}
    assert not imported, f"{relative} imports {sorted(imported)}"


def loaded_after(statement: str, *, hidden: tuple[str, ...] = ()) -> set[str]:
    """Top-level modules in `sys.modules` after `statement` in a fresh interpreter that cannot see `hidden`."""
    hide = "".join(f"sys.modules[{name!r}] = None\n" for name in hidden)
    code = f"import sys\n{hide}{statement}\nprint(*sorted(n for n, m in sys.modules.items() if m is not None))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False)
    assert result.returncode == 0, result.stderr
    return {name.split(".")[0] for name in result.stdout.split()}


def modules_of(package: str) -> list[str]:
    return [
        ".".join(path.relative_to(ROOT).with_suffix("").parts)
        for path in sorted((ROOT / package.replace(".", "/")).rglob("*.py"))
        if path.stem not in ("__init__", "__main__")
    ]


def test_the_coordinator_loads_neither_torch_nor_ray() -> None:
    loaded = loaded_after("\n".join(f"import {name}" for name in modules_of("coordinator")))
    assert not loaded & {"torch", "ray"}


def test_the_client_and_command_line_load_no_torch() -> None:
    names = [*modules_of("specdec.client"), *modules_of("specdec.cli")]
    assert "torch" not in loaded_after("\n".join(f"import {name}" for name in names))


def test_the_engine_imports_without_grpc_and_redis() -> None:
    hidden = ("grpc", "redis", "fakeredis", "pydantic_settings", "prometheus_client")
    loaded = loaded_after("\n".join(f"import {name}" for name in modules_of("specdec.engine")), hidden=hidden)
    assert not loaded & set(hidden)


def test_the_wall_check_sees_a_forbidden_import(tmp_path: Path) -> None:
    """Negative control: a core file that reaches into the engine must be seen."""
    intruder = ROOT / "specdec" / "core" / "random.py"
    tree = intruder.read_text() + "\nfrom specdec.engine import base\n"
    copy = tmp_path / "intruder.py"
    copy.write_text(tree)
    names = set()
    for node in ast.walk(ast.parse(copy.read_text())):
        if isinstance(node, ast.ImportFrom):
            names.add(room_of(node.module or ""))
    assert "specdec.engine" in names - FOUNDATIONS - ALLOWED["specdec.core"] - {"specdec.core"}
