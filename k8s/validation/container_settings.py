"""Settings of the containers of our services: names, values, and what they must agree with in the pod."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from .documents import Container, PodTemplate, Problem, at, of_kind
from .environment import Environment, environment_of
from .mounts import mounted
from .references import Objects
from .selectors import draft_pool_problems
from .service_settings import PREFIX, Refusal, Service, foreign_names, read_settings, service_of

#: Settings whose value is HOST:PORT of a port of the container.
_PORTS = ("listen", "health", "metrics", "admin")


@dataclass(frozen=True)
class Variables:
    """The variables and flags of a container of one of our services."""

    container: Container
    service: Service
    environment: Environment
    flags: list[str]

    def field(self, setting: str) -> str:
        """Return the path of the variable that gives a setting, or would give it."""
        name = setting if setting.startswith(PREFIX) else self.service.prefix + setting.upper()
        variable = self.environment.variables.get(name)
        return f"{self.container.path}.env[{name}]" if variable is None else variable.field

    def problem(self, setting: str, message: str) -> Problem:
        return self.container.template.document.problem(self.field(setting), message)


@dataclass(frozen=True)
class Configured:
    """A container of one of our services with its settings as read."""

    variables: Variables
    settings: Any

    @property
    def service(self) -> Service:
        return self.variables.service


def configured_containers(objects: Objects) -> tuple[list[Configured], list[Problem]]:
    """Return the containers of our services with their settings, and the variables that a service refuses."""
    found, problems = [], []
    for document in objects.documents:
        for template in document.templates:
            for container in template.containers:
                variables, foreign = _variables(container, objects)
                problems += foreign
                if variables is None:
                    continue
                settings = _read(_Question(_key(variables, objects), variables, objects))
                if isinstance(settings, Refusal):
                    problems.append(variables.problem(settings.setting, settings.message))
                else:
                    found.append(Configured(variables, settings))
    return found, problems


def agreement_problems(configured: list[Configured]) -> Iterator[Problem]:
    """Yield what settings say otherwise than the pods that they are in, and draft pools that two workloads have."""
    pools: list[tuple[PodTemplate, str, str]] = []
    for one in configured:
        yield from _ports(one)
        yield from _grace(one)
        if one.service.name == "draft":
            pools.append((one.variables.container.template, one.variables.field("pool"), one.settings.pool))
    yield from draft_pool_problems(pools)


def _variables(container: Container, objects: Objects) -> tuple[Variables | None, list[Problem]]:
    environment = environment_of(container, objects.documents)
    names = list(environment.variables)
    command = [*(container.body.get("command") or ()), *(container.body.get("args") or ())]
    # A command of the container replaces the one of its image.
    image = "" if container.body.get("command") else str(container.body.get("image", ""))
    service = service_of(names, image, command)
    document = container.template.document
    problems = [
        document.problem(environment.variables[name].field, message) for name, message in foreign_names(service, names)
    ]
    if service is None:
        return None, problems
    flags = command[command.index(service.module) + 1 :] if service.module in command else []
    return Variables(container, service, environment, flags), environment.problems + problems


@dataclass(frozen=True)
class _Question:
    """What a container's settings are read from. Overlays share most containers, so each is read once."""

    key: str
    variables: Variables = field(compare=False)
    objects: Objects = field(compare=False)


def _key(variables: Variables, objects: Objects) -> str:
    """Return a text that differs where settings may differ: variables, flags, and what is mounted."""
    container = variables.container
    mounts = (container.body.get("volumeMounts"), container.template.spec.get("volumes"))
    given = {name: (one.value, one.is_known) for name, one in variables.environment.variables.items()}
    data = [document.body for document in of_kind(objects.documents, "ConfigMap", "Secret")] if any(mounts) else []
    return repr((variables.service.name, given, variables.flags, mounts, data))


@cache
def _read(question: _Question) -> Any:
    """Return the settings, or the Refusal of the service."""
    try:
        return _settings(question.variables, question.objects)
    except Refusal as refusal:
        return refusal


def _settings(variables: Variables, objects: Objects) -> Any:
    """Return the settings. Raises Refusal."""
    service, environment = variables.service, variables.environment
    for name, variable in environment.variables.items():
        setting = name.removeprefix(service.prefix).lower()
        if (
            name.startswith(service.prefix)
            and not variable.is_known
            and setting not in service.settings_type.model_fields
        ):
            raise Refusal(f"environment variable {name} is not a setting", name)
    with mounted(variables.container, objects) as mounts:
        values = {name: mounts.here(value) for name, value in environment.known().items()}
        try:
            return read_settings(service, values, [mounts.here(flag) for flag in variables.flags])
        except Refusal as refusal:
            raise Refusal(mounts.there(refusal.message), refusal.setting) from None


def _ports(configured: Configured) -> Iterator[Problem]:
    container, settings = configured.variables.container, configured.settings
    numbers = {str(entry["containerPort"]) for entry in container.body.get("ports") or ()}
    for name in _PORTS:
        host, _, port = str(getattr(settings, name, "")).rpartition(":")
        if port not in ("", "0") and not host.startswith("127.") and port not in numbers:
            yield configured.variables.problem(name, f"the container has no port {port}")


def _grace(configured: Configured) -> Iterator[Problem]:
    container = configured.variables.container
    grace_s = container.template.spec.get("terminationGracePeriodSeconds", 30)
    sleep_s = at(container.body, "lifecycle", "preStop", "sleep", "seconds") or 0
    needed_s = configured.settings.end_grace_s + sleep_s
    if grace_s <= needed_s:
        yield container.template.problem(
            "terminationGracePeriodSeconds",
            f"{grace_s} must exceed the {needed_s:g} s of the preStop hook and --drain-grace-s together",
        )
