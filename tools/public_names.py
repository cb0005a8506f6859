"""Collect the names that users, dashboards, stored data and other versions of the product rely on.

Flags come from the programs' own parsers, hidden aliases included; metrics from the programs' registries; Redis keys
from the functions that build them, with the varying parts in capitals. `python -m tools.public_names` writes
them to tests/contract/public_names.json.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import pkgutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn
from unittest.mock import patch

from google.protobuf.descriptor import Descriptor, EnumDescriptor, FieldDescriptor, FileDescriptor, MethodDescriptor
from prometheus_client import CollectorRegistry

import specdec.client
import specdec.v1
from gateway.metrics import GatewayMetrics
from specdec.cli.__main__ import build_parser
from specdec.core.restore_rule import RestoreRule
from specdec.observability.audit import AuditMetrics
from specdec.observability.coordinator_metrics import CoordinatorMetrics
from specdec.observability.engine_metrics import EngineMetrics
from specdec.settings.coordinator import CoordinatorSettings
from specdec.settings.draft import DraftSettings
from specdec.settings.gateway import GatewaySettings
from specdec.settings.reading import parse_settings
from specdec.settings.shared import ProcessSettings
from specdec.settings.target import TargetSettings
from specdec.state.key_names import prefix_keys, promotion_key, replica_keys, response_key, session_keys
from specdec.state.kv_values import KvSpace, KvTally

SERVICES: dict[str, type[ProcessSettings]] = {
    "coordinator": CoordinatorSettings,
    "draft_service": DraftSettings,
    "gateway": GatewaySettings,
    "target_service": TargetSettings,
}

ROOT = Path(__file__).resolve().parents[1]
SNAPSHOT = ROOT / "tests" / "contract" / "public_names.json"

FIELD_TYPES = {
    getattr(FieldDescriptor, name): name.removeprefix("TYPE_").lower()
    for name in dir(FieldDescriptor)
    if name.startswith("TYPE_")
}

Names = dict[str, Any]


def collect() -> Names:
    """Return all public names by kind; every value is a string, a list of strings or a mapping of these."""
    return {
        "client": sorted(specdec.client.__all__),
        "flags": {**{name: service_flags(kind) for name, kind in SERVICES.items()}, **command_flags(build_parser({}))},
        "lua_sha1": dict(_script_digests()),
        "metrics": {
            "coordinator": metric_names(_coordinator_registry()),
            "gateway": metric_names(GatewayMetrics().registry),
            "replicas": metric_names(_replica_registry()),
        },
        "proto": proto_names(),
        "redis_keys": sorted(_key_templates()),
    }


def command_flags(parser: argparse.ArgumentParser) -> dict[str, list[str]]:
    """Return the flags of a parser and of all its subcommands, each under the command's full name."""
    flags = {parser.prog: flags_of(parser)}
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for subcommand in action.choices.values():
                flags.update(command_flags(subcommand))
    return flags


def flags_of(parser: argparse.ArgumentParser) -> list[str]:
    return sorted(flag for action in parser._actions for flag in action.option_strings)


def service_flags(settings_type: type[ProcessSettings]) -> list[str]:
    """Return the flags of a service, from the parser that prints its `--help`."""
    parsers: list[argparse.ArgumentParser] = []

    def keep(parser: argparse.ArgumentParser, *_: object) -> NoReturn:
        parsers.append(parser)
        raise SystemExit(0)

    with patch.object(argparse.ArgumentParser, "print_help", keep):
        try:
            parse_settings(settings_type, prog="program", argv=["--help"])
        except SystemExit:
            return flags_of(parsers[0])
    raise AssertionError("--help did not end the program")


def metric_names(registry: CollectorRegistry) -> dict[str, str]:
    return {metric.name: metric.type for metric in sorted(registry.collect(), key=lambda metric: metric.name)}


def proto_names() -> dict[str, dict[str, dict[str, str]]]:
    """Return services with their methods, messages with their fields and enums with their values, by full name."""
    services: dict[str, dict[str, str]] = {}
    messages: dict[str, dict[str, str]] = {}
    enums: dict[str, dict[str, str]] = {}
    for file in _proto_files():
        for service in file.services_by_name.values():
            services[service.full_name] = {method.name: _method(method) for method in service.methods}
        _note_enums(enums, file.enum_types_by_name.values())
        for message in _with_nested(file.message_types_by_name.values()):
            messages[message.full_name] = {one.name: _field(one) for one in message.fields}
            _note_enums(enums, message.enum_types)
    return {"services": services, "messages": messages, "enums": enums}


def flat_names(names: Any, path: str = "") -> set[str]:
    """Return one line for each name, with where it stands and what it is: "flags / specdec up / --listen"."""
    if isinstance(names, dict):
        return {line for key, value in names.items() for line in flat_names(value, f"{path} / {key}" if path else key)}
    if isinstance(names, list):
        return {f"{path} / {name}" for name in names}
    return {f"{path} = {names}"}


@dataclass(frozen=True)
class _Tier:
    """The part of a KV tier that is measured, without its connections."""

    tally: KvTally = field(default_factory=KvTally)
    rule: RestoreRule = field(default_factory=RestoreRule)


def _coordinator_registry() -> CollectorRegistry:
    """Return the registry of a coordinator, the audit's series included."""
    registry = CoordinatorMetrics("model").registry
    AuditMetrics(registry, "model")
    return registry


def _replica_registry() -> CollectorRegistry:
    metrics = EngineMetrics("model", role="draft")
    metrics.watch_kv_tier(_Tier())
    return metrics.registry


def _key_templates() -> list[str]:
    first, other = b"FIRST HASH", b"HASH"
    prefix = prefix_keys("TENANT", [first, other])[1].replace(first.hex(), "FIRST HASH").replace(other.hex(), "HASH")
    space = KvSpace("FINGERPRINT", "DTYPE", "RANK", layer_bytes=(1,), run_blocks=1)
    run = space.key(b"NAME").replace(b"NAME".hex(), "NAME")
    response = response_key("TENANT", "ID")
    return [*session_keys("TENANT", "SESSION"), *replica_keys("ROLE"), prefix, promotion_key("TENANT"), response, run]


def _script_digests() -> Iterator[tuple[str, str]]:
    for script in sorted((ROOT / "specdec" / "state" / "scripts").glob("*.lua")):
        yield script.name, hashlib.sha1(script.read_bytes(), usedforsecurity=False).hexdigest()


def _proto_files() -> Iterator[FileDescriptor]:
    for module in pkgutil.iter_modules(specdec.v1.__path__):
        if module.name.endswith("_pb2"):
            yield import_module(f"specdec.v1.{module.name}").DESCRIPTOR


def _with_nested(messages: Any) -> Iterator[Descriptor]:
    for message in messages:
        yield message
        yield from _with_nested(message.nested_types)


def _note_enums(enums: dict[str, dict[str, str]], found: Any) -> None:
    enum: EnumDescriptor
    for enum in found:
        enums[enum.full_name] = {value.name: str(value.number) for value in enum.values}


def _method(method: MethodDescriptor) -> str:
    request, reply = (
        ("stream " if streams else "") + message.full_name
        for streams, message in (
            (method.client_streaming, method.input_type), (method.server_streaming, method.output_type),
        )
    )  # fmt: skip
    return f"{request} -> {reply}"


def _field(descriptor: FieldDescriptor) -> str:
    named = descriptor.message_type or descriptor.enum_type
    parts = [str(descriptor.number), "repeated" if descriptor.is_repeated else ""]
    parts.append(named.full_name if named is not None else FIELD_TYPES[descriptor.type])
    oneof = descriptor.containing_oneof
    if oneof is not None:
        parts.append("optional" if oneof.name == f"_{descriptor.name}" else f"oneof {oneof.name}")
    return " ".join(part for part in parts if part)


if __name__ == "__main__":
    SNAPSHOT.write_text(json.dumps(collect(), indent=1, sort_keys=True) + "\n", encoding="utf-8")
    print(f"wrote {SNAPSHOT.relative_to(ROOT)}")
