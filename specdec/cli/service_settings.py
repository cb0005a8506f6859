"""Settings of single services, as `specdec up` takes them: from its own flags and from `--set SERVICE.FIELD=VALUE`.

Names, types, limits and help texts come from the services' settings models. What `specdec up` itself does with a value
(devices, ranks, shares of memory) is in `up_flags` and `launching`.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from specdec.cli import Usage
from specdec.settings.coordinator import CoordinatorSettings
from specdec.settings.draft import DraftSettings
from specdec.settings.gateway import GatewaySettings
from specdec.settings.reading import checked_value, flag_of, is_former
from specdec.settings.shared import ProcessSettings
from specdec.settings.target import TargetSettings

SETTINGS_TYPES: Mapping[str, type[ProcessSettings]] = {
    "target": TargetSettings,
    "draft": DraftSettings,
    "coordinator": CoordinatorSettings,
    "gateway": GatewaySettings,
}

#: Settings that `specdec up` chooses itself, with what to use instead.
_CHOSEN_BY_UP = {
    **dict.fromkeys(("model", "for_tokenizer"), "use --target and --draft"),
    **dict.fromkeys(("pool", "local_draft", "lookup"), "use --draft"),
    "shadow": "use specdec join",
    "metrics": "use --metrics",
    "redis_url": "use --redis-url, which all services share",
    **dict.fromkeys(("tls_cert", "tls_key"), "use --tls-cert and --tls-key"),
    "tls_ca": "use --tls-ca, which holds for coordinator and replicas",
    "tls_server_name": "use --tls-server-name",
    "insecure": "use --insecure",
    "loopback": "it takes a free port",
    "service_key": "set SPECDEC_SERVICE_KEY in the environment",
    "cluster": "use --cluster, which all services share",
    "log_format": "it reads the services' records",
    **dict.fromkeys(
        ("config", "replica_id", "draft_endpoint", "target_endpoint", "coordinator"), "it sets this for every service"
    ),
}
_LISTEN = {
    "coordinator": "use --listen",
    "target": "replicas listen on free ports",
    "draft": "replicas listen on free ports",
    "gateway": "use --http",
}


@dataclass(frozen=True, slots=True)
class GivenSettings:
    """Checked settings of each service. Those of `--set` win over those of other flags."""

    by_flag: Mapping[tuple[str, str], Any] = field(default_factory=dict)
    by_set: Mapping[tuple[str, str], Any] = field(default_factory=dict)

    def with_flag(self, service: str, name: str, text: str) -> GivenSettings:
        """Return these settings and one that a flag of `specdec up` gives; a repeated flag of several texts adds one.

        Raises:
            ValueError: the value is refused; the message continues a sentence that begins with the flag.
        """
        earlier = self.by_flag.get((service, name))
        texts = (*earlier, text) if isinstance(earlier, tuple) else (text,)
        value = checked_value(SETTINGS_TYPES[service], name, ",".join(texts))
        return replace(self, by_flag={**self.by_flag, (service, name): value})

    def with_set(self, assignment: str) -> GivenSettings:
        """Return these settings and that of one `--set`.

        Raises:
            Usage: `assignment` is not SERVICE.FIELD=VALUE, names no setting, or its value is refused.
        """
        target, equals, text = assignment.partition("=")
        service, dot, name = target.partition(".")
        name = name.replace("-", "_")
        if not equals or not dot or service not in SETTINGS_TYPES:
            raise Usage(f"--set takes SERVICE.FIELD=VALUE with {_names(SETTINGS_TYPES)} as SERVICE, not {assignment!r}")
        try:
            if is_former(SETTINGS_TYPES[service], name, f"--set {service}.{name}"):
                return self
        except ValueError as error:
            raise Usage(str(error)) from None
        _require_settable(service, name)
        try:
            value = checked_value(SETTINGS_TYPES[service], name, text)
        except ValueError as error:
            raise Usage(f"--set {service}.{name} {error}") from None
        return replace(self, by_set={**self.by_set, (service, name): value})

    def value(self, service: str, name: str) -> Any:
        """Return the value of a setting: the given one, else the service's default, else ""."""
        key = (service, name)
        info = SETTINGS_TYPES[service].model_fields[name]
        default = "" if info.is_required() else info.default
        return self.by_set.get(key, self.by_flag.get(key, default))

    def is_given(self, service: str, name: str) -> bool:
        """Return whether a flag or `--set` gives this setting."""
        return (service, name) in self.by_set or (service, name) in self.by_flag

    def arguments(self, service: str) -> list[str]:
        """Return the given settings as words of the service's command line."""
        values = {key: value for key, value in {**self.by_flag, **self.by_set}.items() if key[0] == service}
        return [word for (_, name), value in values.items() for word in _words(flag_of(name), value)]


def _words(flag: str, value: Any) -> list[str]:
    if isinstance(value, bool):
        return [flag if value else flag.replace("--", "--no-", 1)]
    if isinstance(value, tuple):
        return [word for each in value for word in (flag, str(each))]
    return [flag, "none" if value is None else str(value)]


def _require_settable(service: str, name: str) -> None:
    """Raises Usage for a field that the service does not have, or that `specdec up` chooses."""
    fields = SETTINGS_TYPES[service].model_fields
    if name not in fields:
        alike = difflib.get_close_matches(name, fields, n=1, cutoff=0.0)[0]
        raise Usage(
            f"--set {service}.{name}: the {service} service has no such setting; did you mean {service}.{alike}?"
        )
    chosen = {"listen": _LISTEN[service], **_CHOSEN_BY_UP}
    if name in chosen:
        raise Usage(f"--set {service}.{name}: specdec up chooses this setting; {chosen[name]}")


def _names(names: Mapping[str, object]) -> str:
    *others, last = names
    return f"{', '.join(others)} or {last}"
