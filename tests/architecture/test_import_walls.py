"""Who may import whom (docs/architecture.md), read from the code's own import statements and from real imports."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SERVICES = ("draft_service", "target_service", "coordinator")
LAYERS = tomllib.loads((ROOT / "tests/architecture/layers.toml").read_text(encoding="utf-8"))
#: Packages whose own packages are rooms: a module of theirs lives one level further down.
DIVIDED: tuple[str, ...] = tuple(LAYERS["divided"])
IMPORTS: dict[str, list[str]] = LAYERS["imports"]
STARTS: dict[str, list[str]] = LAYERS["starts"]
FLOORS: dict[str, int] = LAYERS["floors"]


def python_files() -> list[Path]:
    return [
        path
        for top in ("specdec", *SERVICES)
        for path in sorted((ROOT / top).rglob("*.py"))
        if "v1" not in path.relative_to(ROOT).parts and path.name != "__init__.py"
    ]


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts)


def room_of(module: str) -> str:
    """The room a dotted module lives in: `specdec.engine.loop`, `coordinator.round`, `specdec.types` ..."""
    parts = module.split(".")
    depth = 2 if parts[0] == "specdec" else 1
    if ".".join(parts[:depth]) in DIVIDED:
        depth += 1
    return ".".join(parts[:depth])


def imported_modules(source: str, package: str) -> set[str]:
    """Dotted modules that a file of `package` imports, those inside functions too."""
    modules = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            modules.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                up = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*up, base] if base else up)
            # `from specdec import errors` names a module; `from specdec.types import SessionPosition` does not.
            names_modules = base == "specdec" or base in DIVIDED
            modules.update(f"{base}.{alias.name}" if names_modules else base for alias in node.names)
    return modules


def started_modules(source: str) -> set[str]:
    """Return the modules that a file starts by name, as in `[sys.executable, "-m", "specdec.supervision.child"]`.

    Every string that is the dotted name of a module of ours counts, because the list of arguments is often put
    together in another place than the "-m".
    """
    texts = {node.value for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Constant)}
    return {text for text in texts if isinstance(text, str) and text.startswith("specdec.") and text in MODULES}


def rooms_of_modules(names: set[str], module: str) -> set[str]:
    """Return the product rooms of dotted names, but for the room of `module`."""
    return {room_of(name) for name in names if name.split(".")[0] in ("specdec", *SERVICES)} - {room_of(module)}


def rooms_imported(module: str, source: str) -> set[str]:
    """Return the other rooms of the product that a module's source imports."""
    return rooms_of_modules(imported_modules(source, module.rpartition(".")[0]), module)


def forbidden_imports(module: str, source: str) -> set[str]:
    """Return the rooms that a module's source imports, or starts as a process, and may not."""
    room = room_of(module)
    imports, starts = {"specdec", *IMPORTS[room]}, set(STARTS.get(room, ()))
    forbidden = {
        other
        for other in rooms_imported(module, source)
        if other not in imports and other.rpartition(".")[0] not in imports - {"specdec"}
    }
    return forbidden | (rooms_of_modules(started_modules(source), module) - starts)


MODULES = {module_of(path) for path in python_files()}


@pytest.mark.parametrize("path", python_files(), ids=lambda path: str(path.relative_to(ROOT)))
def test_a_file_imports_only_what_its_room_may(path: Path) -> None:
    forbidden = forbidden_imports(module_of(path), path.read_text())
    assert not forbidden, f"{path.relative_to(ROOT)} reaches into {sorted(forbidden)}"


def test_every_room_has_a_list_of_imports_and_every_list_a_room() -> None:
    assert {room_of(module) for module in MODULES} == IMPORTS.keys()


def floors_of(arrows: Mapping[str, set[str]]) -> dict[str, int]:
    """Return the floor of each room: one above the highest room that it imports.

    Args:
        arrows: the rooms that each room imports.

    Raises:
        graphlib.CycleError: rooms import each other in a circle.
    """
    floors: dict[str, int] = {}
    for room in TopologicalSorter(arrows).static_order():
        floors[room] = 1 + max((floors[other] for other in arrows.get(room, ()) if other != room), default=0)
    return floors


def arrows_within(package: str) -> dict[str, set[str]]:
    """Return the arrows between the rooms of one divided package."""
    arrows: dict[str, set[str]] = {}
    for path in python_files():
        module = module_of(path)
        if room_of(module).rpartition(".")[0] == package:
            reached = {room for room in rooms_imported(module, path.read_text()) if room.startswith(f"{package}.")}
            arrows.setdefault(room_of(module), set()).update(reached)
    return arrows


@pytest.mark.parametrize("package", DIVIDED)
def test_the_floors_of_a_divided_package_are_those_in_the_data_file(package: str) -> None:
    documented = {room: floor for room, floor in FLOORS.items() if room.startswith(f"{package}.")}
    assert documented == floors_of(arrows_within(package))


def top_level_arrows() -> dict[str, set[str]]:
    """Return the arrows between top-level rooms: flat modules and packages of specdec, services and bench."""

    def top(module: str) -> str:
        parts = module.split(".")
        return ".".join(parts[:2]) if parts[0] == "specdec" else parts[0]

    arrows: dict[str, set[str]] = {"specdec.v1": set()}
    for path in (*python_files(), *sorted((ROOT / "bench").rglob("*.py"))):
        module = module_of(path)
        names = imported_modules(path.read_text(), module.rpartition(".")[0])
        ours = {name for name in names if name.split(".")[0] in ("specdec", "bench", *SERVICES)} - {"specdec"}
        arrows.setdefault(top(module), set()).update(map(top, ours))
    return {room: others - {room, "specdec.__version__"} for room, others in arrows.items()}


def test_the_house_keeps_its_ceilings_of_rooms_floors_and_arrows() -> None:
    """Circles and arrows that run upward are one thing here: floors exist only where imports run one way."""
    arrows, ceilings = top_level_arrows(), LAYERS["ceilings"]
    assert len(arrows) <= ceilings["rooms"]
    assert max(floors_of(arrows).values()) <= ceilings["floors"]
    assert sum(map(len, arrows.values())) <= ceilings["arrows"]


def test_a_circle_of_rooms_has_no_floors() -> None:
    """Negative control."""
    with pytest.raises(CycleError):
        floors_of({"a": {"b"}, "b": {"a"}})


@pytest.mark.parametrize("path", python_files(), ids=lambda path: str(path.relative_to(ROOT)))
def test_protobuf_types_stop_at_servicers_the_front_rpc_and_client(path: Path) -> None:
    relative = path.relative_to(ROOT)
    if (
        relative.name == "servicer.py"
        or relative.as_posix() == "coordinator/front/wire.py"
        or relative.parts[:2]
        in (
            ("specdec", "rpc"),
            ("specdec", "client"),
        )
    ):
        return
    modules = imported_modules(path.read_text(), "")
    imported = {name for name in modules if name.startswith(("specdec.v1", "google.protobuf"))}
    assert not imported, f"{relative} imports {sorted(imported)}"


def test_one_file_dials_addresses_and_opens_ports() -> None:
    """So that credentials have one place to come to."""
    calls = re.compile(r"(in)?secure_(channel|port)\(")
    assert [module_of(path) for path in python_files() if calls.search(path.read_text())] == ["specdec.rpc.channels"]


def test_a_process_that_is_no_rank_loads_nothing_that_ranks_are_made_of() -> None:
    """Ranks are processes of their own, started by module name; `specdec.service.rank` knows that it is one."""
    reaching = {
        name: {module_of(path) for path in python_files() if name in rooms_reached(path)}
        for name in ("specdec.engine.parallel", "specdec.service.rank")
    }
    assert reaching == {"specdec.engine.parallel": {"specdec.service.rank"}, "specdec.service.rank": set()}


def rooms_reached(path: Path) -> set[str]:
    """What a file imports that is not of its own room, and the rooms of all that."""
    own = room_of(module_of(path))
    modules = imported_modules(path.read_text(), "")
    return {name for module in modules for name in (module, room_of(module)) if name != own}


@pytest.mark.parametrize("name", ["draft", "target", "coordinator"])
def test_a_service_has_only_the_common_messages_besides_its_own(name: str) -> None:
    proto = (ROOT / "protos" / "specdec" / "v1" / f"{name}.proto").read_text()
    assert set(re.findall(r'^import "specdec/v1/(\w+)\.proto";', proto, re.MULTILINE)) <= {"common"}


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


def test_a_front_without_grpc_can_check_its_requests_without_protobuf() -> None:
    assert not loaded_after("import coordinator.front.validation") & {"google", "grpc"}


def test_the_client_and_command_line_load_neither_torch_nor_ray() -> None:
    names = [name for room in ("client", "cli", "cluster") for name in modules_of(f"specdec.{room}")]
    assert not loaded_after("\n".join(f"import {name}" for name in names)) & {"torch", "ray"}


def test_sessions_and_schedules_and_the_engines_simulated_on_them_load_no_torch() -> None:
    rooms = ("specdec.engine.sessions", "specdec.engine.schedule", "specdec.engine.simulated")
    names = [name for room in rooms for name in modules_of(room)]
    assert "specdec.engine.sessions.calls" in names
    assert "torch" not in loaded_after("\n".join(f"import {name}" for name in names))


def test_the_engine_imports_without_grpc_redis_and_triton() -> None:
    hidden = ("grpc", "redis", "fakeredis", "pydantic_settings", "prometheus_client", "triton")
    # Written in Triton.
    kernels = {f"specdec.engine.cuda_graphs.{name}_kernels" for name in ("paged", "fused", "draft")}
    kernels.add("specdec.engine.linear.row_kernels")
    names = set(modules_of("specdec.engine")) - kernels
    loaded = loaded_after("\n".join(f"import {name}" for name in sorted(names)), hidden=hidden)
    assert not loaded & set(hidden)


@pytest.mark.parametrize(
    ("module", "statement"),
    [
        ("specdec.core.random", "from specdec.engine import base"),
        ("specdec.engine.sessions.table", "from specdec.engine.loop.job import Job"),
        ("specdec.engine.model.batch", "from specdec.engine.cuda_graphs import steps"),
        ("specdec.rpc.client", "import coordinator.replicas.pool"),
        ("coordinator.text.prompt", "from coordinator.front.validation import ServingLimits"),
        ("draft_service.proposer", "from target_service import verifier"),
        ("specdec.state.keys", 'COMMAND = ["-m", "specdec.supervision.child"]'),
    ],
)
def test_the_wall_check_sees_a_forbidden_import(module: str, statement: str) -> None:
    """Negative control."""
    source = (ROOT / module.replace(".", "/")).with_suffix(".py").read_text()
    assert not forbidden_imports(module, source)
    assert forbidden_imports(module, f"{source}\n{statement}\n")
