"""The compose file and its overrides: their schema, their settings, and that manifests give the same settings."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml
from jsonschema import Draft7Validator
from jsonschema.exceptions import best_match

from .container_settings import Configured
from .documents import Problem
from .schemas import field_of
from .service_settings import SERVICES, Refusal, foreign_names, read_settings

FILE = "docker-compose.yml"
#: Settings that differ because of the platform: each pod has its own address, and is probed at a port of its own.
PLATFORM_SETTINGS = frozenset({"advertise", "health", "num_threads", "replica_id"})
_VARIABLE = re.compile(r"\$\{(\w+)(?::?[-?]([^${}]*))?\}")


@dataclass(frozen=True)
class ComposeService:
    """A service of ours in a compose file, with its settings as read."""

    file: str
    name: str
    settings: Any


def compose_problems(root: Path) -> Iterator[Problem]:
    """Yield what is wrong with the compose files of a folder, each override upon the main file."""
    for path in compose_files(root):
        body = yaml.safe_load(path.read_text())
        if error := best_match(_schema().iter_errors(body)):
            yield Problem(path.name, "", field_of(error), error.message[-300:])
            continue
        for _, problems in _services(root, path):
            yield from problems


def compose_services(root: Path) -> list[ComposeService]:
    """Return our services in the main compose file whose settings can be read."""
    return [service for service, _ in _services(root, root / FILE) if service is not None]


def compose_files(root: Path) -> list[Path]:
    """Return the main compose file and its overrides."""
    return sorted(path for path in root.glob("docker-compose*.y*ml"))


def difference_problems(services: list[ComposeService], configured: list[Configured]) -> Iterator[Problem]:
    """Yield settings that the compose file and the manifests give different values."""
    for service in services:
        for one in configured:
            if one.service.name != service.name:
                continue
            ours, theirs = service.settings.model_dump(), one.settings.model_dump()
            for name in ours.keys() - PLATFORM_SETTINGS:
                if _of_any_family(ours[name]) != _of_any_family(theirs[name]):
                    message = f"{theirs[name]!r} is {ours[name]!r} in {service.file}"
                    yield one.variables.problem(name, f"{name}: {message}")


def _of_any_family(value: Any) -> Any:
    """Return a setting with a wildcard address of IPv4 written as that of both families, which pods listen on."""
    return re.sub(r"^0\.0\.0\.0:", "[::]:", value) if isinstance(value, str) else value


def interpolated(text: str) -> str:
    """Return a value with each ${NAME:-DEFAULT} replaced by its default, as where no variable is set."""
    while (replaced := _VARIABLE.sub(lambda match: match[2] or "", text)) != text:
        text = replaced
    return text.replace("$$", "$")


def _services(root: Path, path: Path) -> Iterator[tuple[ComposeService | None, list[Problem]]]:
    """Yield our services with their problems; a service whose settings cannot be read is None."""
    main = yaml.safe_load((root / FILE).read_text())["services"]
    override = yaml.safe_load(path.read_text()).get("services") or {}
    for name in override:
        where = f"services.{name}.environment"
        variables = _environment(main.get(name) or {}) | _environment(override[name] or {})
        service = SERVICES.get(name) or next(
            (one for one in SERVICES.values() if any(key.startswith(one.prefix) for key in variables)), None
        )
        problems = [
            Problem(path.name, name, f"{where}.{key}", message)
            for key, message in foreign_names(service, list(variables))
        ]
        found = None
        if service is not None:
            try:
                found = ComposeService(path.name, service.name, read_settings(service, variables))
            except Refusal as refusal:
                setting = refusal.setting if "SPECDEC_" in refusal.setting else service.prefix + refusal.setting.upper()
                problems.append(Problem(path.name, name, f"{where}.{setting}", refusal.message))
        yield found, problems


def _environment(service: dict[str, Any]) -> dict[str, str]:
    entries = service.get("environment") or {}
    if isinstance(entries, list):
        entries = dict(entry.partition("=")[::2] for entry in entries)
    return {name: interpolated(str(value)) for name, value in entries.items() if value is not None}


@cache
def _schema() -> Draft7Validator:
    path = files("check_jsonschema") / "builtin_schemas" / "vendor" / "compose-spec.json"
    return Draft7Validator(json.loads(path.read_text()))
