"""Collect the names that clients, operators and stored data rely on.

`python -m tests.support.public_names` writes them to tests/contract/public_names.json, which
tests/contract/test_public_names.py compares with the code: a renamed flag, metric, key, script or message shows up as a
difference of that file.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import specdec.client
from specdec.cli.__main__ import build_parser
from specdec.observability.metrics import CoordinatorMetrics, EngineMetrics
from specdec.state import keys
from specdec.v1 import common_pb2, coordinator_pb2, draft_pb2, target_pb2

ROOT = Path(__file__).resolve().parents[2]
SNAPSHOT = ROOT / "tests" / "contract" / "public_names.json"
SERVICES = ("coordinator", "draft_service", "target_service")


def collect() -> dict[str, Any]:
    """Return the public names, sorted, as JSON has them."""
    return {
        "flags": {"specdec": command_flags(), **{service: service_flags(service) for service in SERVICES}},
        "metrics": metric_names(),
        "redis_keys": redis_keys(),
        "lua_scripts": lua_digests(),
        "protos": proto_names(),
        "client": sorted(specdec.client.__all__),
    }


def service_flags(module: str) -> list[str]:
    """Return the flags that a service's `--help` shows."""
    result = subprocess.run([sys.executable, "-m", module, "--help"], capture_output=True, text=True, check=True)
    return sorted(set(re.findall(r"--[a-z][a-z0-9-]*", result.stdout)))


def command_flags() -> dict[str, list[str]]:
    """Return the flags of each `specdec` subcommand that its help shows."""
    parser = build_parser({})
    commands = next(action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    return {name: sorted(_shown_flags(command)) for name, command in sorted(commands.choices.items())}


def _shown_flags(parser: argparse.ArgumentParser) -> Iterator[str]:
    for action in parser._actions:
        if action.help != argparse.SUPPRESS:
            yield from action.option_strings or [action.metavar if isinstance(action.metavar, str) else action.dest]


def metric_names() -> list[str]:
    """Return the metric families of the coordinator and of a replica."""
    registries = (CoordinatorMetrics("model").registry, EngineMetrics("model", role="target").registry)
    return sorted({family.name for registry in registries for family in registry.collect()})


def redis_keys() -> list[str]:
    """Return the keys of one session, role, prefix and promotion."""
    return sorted(
        [
            *keys.session_keys("TENANT", "SESSION"),
            *keys.replica_keys("ROLE"),
            *keys.prefix_keys("TENANT", [b"\x01", b"\x02"]),
            keys.promotion_key("TENANT"),
        ]
    )


def lua_digests() -> dict[str, str]:
    """Return the SHA-1 of each Lua script: Redis knows a script by it."""
    scripts = sorted((ROOT / "specdec" / "state" / "scripts").glob("*.lua"))
    return {script.name: hashlib.sha1(script.read_bytes()).hexdigest() for script in scripts}


def proto_names() -> dict[str, list[str]]:
    """Return messages with their fields' numbers, services with their methods, and enums with their values."""
    names: dict[str, list[str]] = {}
    for module in (common_pb2, coordinator_pb2, draft_pb2, target_pb2):
        file = module.DESCRIPTOR
        for message in file.message_types_by_name.values():
            names[message.full_name] = [f"{field.number} {field.name} {field.type}" for field in message.fields]
        for enum in file.enum_types_by_name.values():
            names[enum.full_name] = [f"{value.number} {value.name}" for value in enum.values]
        for service in file.services_by_name.values():
            names[service.full_name] = [method.name for method in service.methods]
    return dict(sorted(names.items()))


def as_text(names: dict[str, Any]) -> str:
    """Return the snapshot's text: one name a line, so that a difference reads well."""
    return json.dumps(names, indent=1, sort_keys=True) + "\n"


if __name__ == "__main__":
    SNAPSHOT.write_text(as_text(collect()), encoding="utf-8")
    print(f"wrote {SNAPSHOT.relative_to(ROOT)}")
