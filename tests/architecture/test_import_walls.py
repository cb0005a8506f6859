"""Who may import whom (docs/architecture.md), read from the code's own import statements and from real imports."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SERVICES = ("draft_service", "target_service", "coordinator")
FOUNDATIONS = {
    "specdec", "specdec.__version__", "specdec.types", "specdec.errors", "specdec.settings.base", "specdec.settings.addresses",
    "specdec.checkpoints.locate", "specdec.checkpoints.gguf", "specdec.checkpoints.vocabulary", "specdec.checkpoints.preflight", "specdec.supervision.backoff",
    "specdec.checkpoints.rank_checks", "specdec.engine_api", "specdec.tenant", "specdec.checkpoints.token_bytes", "specdec.settings.draft_specs",
    "specdec.settings.pool_names", "specdec.learning.log_files", "specdec.settings.devices", "specdec.checkpoints.weight_files", "specdec.v1",
}  # fmt: skip

#: Rooms that are divided: a module of theirs lives in its package, one level further down.
DIVIDED = ("specdec.engine", "coordinator")

ENGINE = "specdec.engine."
LIBRARY = {"specdec.core", "specdec.state", "specdec.rpc", "specdec.observability", "specdec.service"}

#: What each room may import besides itself and the foundations. "specdec.engine" stands for all rooms of the engine.
ALLOWED = {
    "specdec.types": set(),
    "specdec.errors": set(),
    "specdec.engine_api": set(),
    "specdec.tenant": set(),
    "specdec.settings.devices": set(),
    "specdec.checkpoints.weight_files": set(),
    "specdec.settings.draft_specs": set(),
    "specdec.settings.pool_names": set(),
    "specdec.checkpoints.locate": set(),
    "specdec.checkpoints.gguf": {"specdec.artifact_cache"},
    "specdec.checkpoints.vocabulary": set(),
    "specdec.checkpoints.preflight": {"specdec.cross_vocabulary"},
    "specdec.checkpoints.token_bytes": set(),
    "specdec.learning.log_files": set(),
    "specdec.learning": {"specdec.engine"},
    "specdec.cross_vocabulary": set(),
    "specdec.supervision.backoff": set(),
    "specdec.checkpoints.rank_checks": set(),
    "specdec.settings.base": set(),
    "specdec.settings.addresses": set(),
    "specdec.core": set(),
    "specdec.state": {"specdec.core"},
    "specdec.observability": {"specdec.core"},
    "specdec.rpc": {"specdec.core", "specdec.observability"},
    "specdec.service": {"specdec.engine", "specdec.observability", "specdec.rpc", "specdec.state"},
    "specdec.client": {"specdec.rpc"},
    "specdec.cluster": {"specdec.rpc"},
    "specdec.cli": {"specdec.client", "specdec.cluster", "specdec.learning", "specdec.rpc", "specdec.state"},
    # The engine, ground floor first.
    ENGINE + "base": {ENGINE + "cold_tier"},
    ENGINE + "cold_tier": set(),
    ENGINE + "artifact_cache": set(),
    ENGINE + "large_pages": set(),
    ENGINE + "gguf_positions": set(),
    ENGINE + "gguf_conversion": {ENGINE + "gguf_positions"},
    ENGINE + "sessions": {"specdec.core"},
    ENGINE + "schedule": {"specdec.core"},
    ENGINE + "kernels": {ENGINE + "artifact_cache"},
    ENGINE + "logits": {"specdec.core", ENGINE + "kernels"},
    ENGINE + "model": {ENGINE + room for room in ("base", "large_pages")},
    ENGINE + "heads": {ENGINE + "base", ENGINE + "model"},
    ENGINE + "loop": {"specdec.core",
                      *(ENGINE + room for room in ("base", "cold_tier", "logits", "schedule", "sessions"))},
    ENGINE + "drafting": {"specdec.core", *(ENGINE + room for room in ("base", "logits", "loop"))},
    ENGINE + "simulated": {"specdec.core", *(ENGINE + room for room in ("base", "schedule", "sessions"))},
    ENGINE + "compiled": {ENGINE + "artifact_cache", ENGINE + "model"},
    ENGINE + "captured": {ENGINE + "base", ENGINE + "model"},
    ENGINE + "native": {ENGINE + room for room in ("base", "large_pages", "model")},
    ENGINE + "local_drafting": {ENGINE + room for room in ("heads", "model")},
    ENGINE + "parallel": {"specdec.core", *(ENGINE + room for room in ("base", "captured", "cold_tier", "model"))},
    ENGINE + "loader": {
        ENGINE + room
        for room in ("base", "kernels", "local_drafting", "model", "compiled", "captured", "native")
    },
    # The coordinator, from the front door inwards.
    "coordinator.__main__": {"coordinator", *LIBRARY},
    "coordinator.config": set(),
    "coordinator.requests": set(),
    "coordinator.front": {"coordinator.generation", "coordinator.replicas", "coordinator.requests", "coordinator.text",
                          *LIBRARY},
    "coordinator.generation": {"coordinator.lookup", "coordinator.replicas", "coordinator.requests",
                               "coordinator.learning", "coordinator.round", "coordinator.routing", "coordinator.text",
                               *LIBRARY},
    "coordinator.round": {"coordinator.lookup", "coordinator.replicas", "coordinator.requests", "coordinator.routing",
                          *LIBRARY},
    "coordinator.routing": {"coordinator.replicas", *LIBRARY},
    "coordinator.learning": {"coordinator.replicas", "coordinator.round"},
    "coordinator.lookup": set(),
    "coordinator.text": {"coordinator.requests"},
    "coordinator.replicas": {"coordinator.requests", *LIBRARY},
    "draft_service": {"specdec.engine", "specdec.cross_vocabulary", *LIBRARY},
    "target_service": {"specdec.engine", *LIBRARY},
}  # fmt: skip


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


def forbidden_imports(module: str, source: str) -> set[str]:
    """The rooms that a module's source reaches into and may not."""
    room = room_of(module)
    ours = {
        room_of(name)
        for name in imported_modules(source, module.rpartition(".")[0])
        if name.split(".")[0] in ("specdec", *SERVICES)
    }
    allowed = FOUNDATIONS | ALLOWED[room] | {room}
    return {other for other in ours if other not in allowed and other.rpartition(".")[0] not in allowed - {"specdec"}}


@pytest.mark.parametrize("path", python_files(), ids=lambda path: str(path.relative_to(ROOT)))
def test_a_file_imports_only_what_its_room_may(path: Path) -> None:
    forbidden = forbidden_imports(module_of(path), path.read_text())
    assert not forbidden, f"{path.relative_to(ROOT)} reaches into {sorted(forbidden)}"


def documented_floors() -> dict[str, int]:
    """Of each room of the engine and the coordinator, as docs/adr/0008-rooms.md has them."""
    rows = re.findall(r"^\| (\d) \| (.*) \| (.*) \|$", (ROOT / "docs/adr/0008-rooms.md").read_text(), re.MULTILINE)
    return {
        prefix + room: int(floor)
        for floor, *columns in rows
        for prefix, column in zip((ENGINE, "coordinator."), columns, strict=True)
        for room in re.findall(r"`(\w+)`", column)
    }


def real_floors() -> dict[str, int]:
    """One above the highest room that a room's files import, of its own half of the house."""
    reached: dict[str, set[str]] = {}
    for path in python_files():
        room = room_of(module_of(path))
        reached.setdefault(room, set()).update(map(room_of, imported_modules(path.read_text(), "")))

    def floor(room: str) -> int:
        half = room.rpartition(".")[0]
        return 1 + max((floor(other) for other in reached[room] & reached.keys()
                        if other != room and other.rpartition(".")[0] == half), default=0)  # fmt: skip

    return {room: floor(room) for room in reached if room.startswith((ENGINE, "coordinator."))}


def test_the_floors_are_those_that_the_record_of_the_cut_has() -> None:
    assert documented_floors() == real_floors()


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
    kernels = {f"specdec.engine.cuda_graphs.{name}_kernels" for name in ("paged", "row", "fused", "draft")}
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
    ],
)
def test_the_wall_check_sees_a_forbidden_import(module: str, statement: str) -> None:
    """Negative control."""
    source = (ROOT / module.replace(".", "/")).with_suffix(".py").read_text()
    assert not forbidden_imports(module, source)
    assert forbidden_imports(module, f"{source}\n{statement}\n")
