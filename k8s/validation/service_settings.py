"""Names and values of `SPECDEC_*` variables and flags, read as the services read them at their start."""

from __future__ import annotations

import contextlib
import io
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from pydantic_settings import BaseSettings

from specdec.contract.errors import parse_error_line
from specdec.settings.coordinator import CoordinatorSettings
from specdec.settings.draft import DraftSettings
from specdec.settings.gateway import GatewaySettings
from specdec.settings.reading import parse_settings
from specdec.settings.target import TargetSettings

PREFIX = "SPECDEC_"


@dataclass(frozen=True)
class Service:
    """One of our programs."""

    name: str
    module: str
    settings_type: type[BaseSettings]

    @property
    def prefix(self) -> str:
        """Beginning of the names of its environment variables."""
        return f"{PREFIX}{self.name.upper()}__"


SERVICES = {
    service.name: service
    for service in (
        Service("draft", "draft_service", DraftSettings),
        Service("target", "target_service", TargetSettings),
        Service("coordinator", "coordinator", CoordinatorSettings),
        Service("gateway", "gateway", GatewaySettings),
    )
}


class Refusal(Exception):
    """A service would not start with these settings."""

    def __init__(self, message: str, setting: str) -> None:
        """`setting`: name of the setting or variable that the message is about; empty where it names none."""
        super().__init__(message)
        self.message, self.setting = message, setting


def service_of(names: Sequence[str], image: str, command: Sequence[str]) -> Service | None:
    """Return the service that a container runs, by its command, its image or the names of its variables."""
    for service in SERVICES.values():
        if service.module in command:
            return service
    for service in SERVICES.values():
        if image.partition(":")[0].rpartition("/")[2] in (service.name, f"{service.name}-service"):
            return service
    for service in SERVICES.values():
        if any(name.startswith(service.prefix) for name in names):
            return service
    return None


def foreign_names(service: Service | None, names: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield names of variables that the service does not read, with the reason."""
    for name in names:
        if not name.startswith(PREFIX) or (service is not None and name.startswith(service.prefix)):
            continue
        others = [other.name for other in SERVICES.values() if name.startswith(other.prefix)]
        if others and service is not None:
            yield name, f"is a variable of the {others[0]}, and the {service.name} does not read it"
        elif "__" in name:
            known = ", ".join(other.prefix for other in SERVICES.values())
            yield name, f"is a variable of no service: their names begin with {known}"


def read_settings(service: Service, variables: Mapping[str, str], flags: Sequence[str] = ()) -> BaseSettings:
    """Return the settings of a service with these variables and flags. Raises Refusal."""
    ours = {name: value for name, value in variables.items() if name.startswith(service.prefix)}
    errors = io.StringIO()
    with _environment(ours), contextlib.redirect_stderr(errors):
        try:
            return parse_settings(service.settings_type, prog=service.module, argv=list(flags))
        except SystemExit:
            line = errors.getvalue().strip()
    error = parse_error_line(line)
    message = line if error is None else error.message
    named = re.search(r"--([a-z][a-z-]*)|variable (SPECDEC_\w+)", message)
    setting = "" if named is None else named[1].replace("-", "_") if named[1] else named[2]
    raise Refusal(message, setting)


@contextlib.contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Replace our variables in the environment of this process for a while; the services read it and nothing else."""
    before = dict(os.environ)
    for name in before:
        if name.startswith(PREFIX):
            del os.environ[name]
    os.environ.update(variables)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
