"""Who may import whom (docs/architecture.md), read from the code's own import statements and from real imports."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

from tests.support.import_graph import (
    DIVIDED,
    LAYERS,
    ROOT,
    graph_of_rooms,
    house_room_of,
    imported_modules,
    imports_of,
    is_product,
    module_of,
    python_files,
    room_of,
    started_modules,
)


def forbidden_rooms(module: str, source: str) -> set[str]:
    """Return the rooms that a module's source imports or starts by name and may not."""
    room = room_of(module)
    imported = rooms_of(imported_modules(source, module.rpartition(".")[0]), besides=room)
    started = rooms_of(started_modules(source), besides=room)
    allowed = LAYERS["offered_by_the_root"] if room == "specdec" else LAYERS["imports"].get(room, ())
    return {
        *(other for other in imported if not {other, house_room_of(other)} & set(allowed)),
        *(started - set(LAYERS["starts"].get(room, ()))),
    }


def rooms_of(modules: Iterable[str], *, besides: str) -> set[str]:
    """Return the rooms of the product's modules among these, without one room and the root package."""
    return {room_of(name) for name in modules if is_product(name)} - {besides, "specdec"}


def test_a_file_imports_and_starts_only_what_its_room_may() -> None:
    forbidden = {
        str(path.relative_to(ROOT)): forbidden_rooms(module_of(path), path.read_text()) for path in python_files()
    }
    reaching = [f"{name} reaches into {sorted(rooms)}" for name, rooms in forbidden.items() if rooms]
    assert not reaching, "\n".join(
        [*reaching, "tests/architecture/layers.toml has what each room may import and start"]
    )


def test_every_room_has_a_list_of_imports_and_every_name_in_the_lists_is_a_room() -> None:
    rooms = set(graph_of_rooms(room_of, python_files()))
    assert set(LAYERS["imports"]) == rooms - {*DIVIDED, "specdec.v1"}
    named = {name for table in ("imports", "starts") for names in LAYERS[table].values() for name in names}
    assert {*named, *LAYERS["starts"]} <= rooms | set(DIVIDED)


def test_protobuf_types_stop_at_servicers_the_front_rpc_and_client() -> None:
    importing = {
        str(path.relative_to(ROOT))
        for path in python_files()
        if any(name.startswith(("specdec.v1", "google.protobuf")) for name in imports_of(path))
    }
    servicers = {f"{service}/servicer.py" for service in ("coordinator/front", "draft_service", "target_service")}
    others = {name for name in importing if not name.startswith(("specdec/rpc/", "specdec/client/"))}
    assert others == {"coordinator/front/wire.py", *servicers}


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
    return {name for module in imports_of(path) for name in (module, room_of(module)) if name != own}


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


def test_the_coordinator_loads_neither_torch_nor_ray_nor_what_draws_in_terminals() -> None:
    loaded = loaded_after("\n".join(f"import {name}" for name in modules_of("coordinator")))
    assert not loaded & {"torch", "ray", "rich"}


def test_a_front_without_grpc_can_check_its_requests_without_protobuf() -> None:
    assert not loaded_after("import coordinator.front.validation") & {"google", "grpc"}


def test_the_client_and_command_line_load_neither_torch_nor_ray() -> None:
    names = [name for room in ("client", "cli", "service.ray") for name in modules_of(f"specdec.{room}")]
    assert not loaded_after("\n".join(f"import {name}" for name in names)) & {"torch", "ray"}


def test_sessions_and_schedules_and_the_engines_simulated_on_them_load_no_torch() -> None:
    rooms = ("specdec.engine.sessions", "specdec.engine.schedule", "specdec.engine.simulated")
    names = [name for room in rooms for name in modules_of(room)]
    assert "specdec.engine.sessions.calls" in names
    assert "torch" not in loaded_after("\n".join(f"import {name}" for name in names))


def test_the_engine_imports_without_grpc_redis_and_triton() -> None:
    hidden = ("grpc", "redis", "fakeredis", "pydantic_settings", "prometheus_client", "triton")
    # Written in Triton.
    kernels = {"specdec.engine.cuda_graphs.paged_kernels", "specdec.engine.cuda_graphs.fused_kernels",
               "specdec.engine.cuda_graphs.draft_kernels", "specdec.engine.linear.row_kernels"}  # fmt: skip
    assert kernels <= set(modules_of("specdec.engine"))
    # Replicas in front of other engines read their settings.
    names = set(modules_of("specdec.engine")) - set(modules_of("specdec.engine.remote")) - kernels
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
        ("specdec.settings.shared", "from specdec.core import chain"),
        ("specdec.core.random", 'subprocess.run([sys.executable, "-m", "specdec.service.rank"])'),
        ("specdec.settings.devices", 'subprocess.run([sys.executable, "-m", "draft_service"])'),
        ("specdec.client.recovery", 'start("specdec.supervision.child")'),
        ("specdec.supervision.child", "from specdec.service import rank"),
    ],
)
def test_the_wall_check_sees_a_forbidden_import_or_start(module: str, statement: str) -> None:
    """Negative control."""
    source = (ROOT / module.replace(".", "/")).with_suffix(".py").read_text()
    assert not forbidden_rooms(module, source)
    assert forbidden_rooms(module, f"{source}\n{statement}\n")
