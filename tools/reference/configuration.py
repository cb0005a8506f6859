"""The configuration page: every setting of the services, from their settings models."""

from __future__ import annotations

import types
import typing
from typing import Any, Literal, Union

from annotated_types import Ge, Gt, Le, Lt
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from specdec.settings.access import AccessSettings
from specdec.settings.coordinator import CoordinatorSettings
from specdec.settings.draft import DraftSettings
from specdec.settings.engine_servers import EngineServerSettings
from specdec.settings.gateway import GatewaySettings
from specdec.settings.shared import ProcessSettings, ServiceSettings
from specdec.settings.target import TargetSettings
from specdec.settings.tracing import TracingSettings
from specdec.settings.transport import DiallingSettings, TransportSettings
from tools.reference.markdown import code, document, item, items, paragraph

_SERVICES: dict[str, type[ProcessSettings]] = {
    "Coordinator": CoordinatorSettings,
    "Draft service": DraftSettings,
    "Target service": TargetSettings,
    "Gateway": GatewaySettings,
}
_MODULES = {
    "Coordinator": "coordinator",
    "Draft service": "draft_service",
    "Target service": "target_service",
    "Gateway": "gateway",
}

_INTRODUCTION = """A value is taken from the flag, else from the environment, else from the TOML file of `--config`,
else from the default. A flag `--log-format` is the variable `SPECDEC_COORDINATOR__LOG_FORMAT` (or `SPECDEC_DRAFT__…`,
`SPECDEC_TARGET__…`, `SPECDEC_GATEWAY__…`) and the key `log_format` of the file. Unknown variables and keys are refused.
`specdec up` passes any of these settings on with `--set ROLE.FIELD=VALUE`, for example `--set draft.predraft=on`."""


def page() -> str:
    """Return the page as it should be."""
    blocks = [paragraph(_INTRODUCTION)]
    for title, settings in _SERVICES.items():
        prefix = settings.model_config.get("env_prefix", "")
        blocks += [f"## {title}", paragraph(settings.__doc__ or ""), paragraph(
            f"Program: {code(f'python -m {_MODULES[title]}')}. Prefix of the environment variables: {code(prefix)}."
        )]  # fmt: skip
        blocks.append(items([_setting(name, field) for name, field in _own_fields(settings).items()]))
    blocks += ["## Settings of draft and target", paragraph("Both replica services have these settings.")]
    blocks.append(items(_settings(EngineServerSettings, ServiceSettings)))
    blocks += ["## Settings of coordinator and gateway", paragraph("Both services of clients have these.")]
    shared = (AccessSettings, DiallingSettings, TracingSettings)
    blocks.append(items([text for each in shared for text in _settings(each, TransportSettings)]))
    blocks += ["## Settings of gRPC services", paragraph("Coordinator, draft and target service have these.")]
    blocks.append(items(_settings(ServiceSettings, ProcessSettings)))
    blocks += ["## Settings of every service", paragraph("All services, the gateway included, have these.")]
    blocks.append(items([_setting(name, field) for name, field in ProcessSettings.model_fields.items()]))
    return document("Configuration", *blocks)


def _own_fields(settings: type[ProcessSettings]) -> dict[str, FieldInfo]:
    own = set(settings.__annotations__)
    return {name: field for name, field in settings.model_fields.items() if name in own}


def _settings(settings: type[BaseModel], base: type[BaseModel]) -> list[str]:
    return [_setting(name, field) for name, field in settings.model_fields.items() if name not in base.model_fields]


def _setting(name: str, field: FieldInfo) -> str:
    notes = [_kind(field), *_bounds(field), _default(field)]
    return item(f"{code('--' + name.replace('_', '-'))} ({', '.join(notes)})", field.description or "")


def _kind(field: FieldInfo) -> str:
    names, is_list = _value_names(field.annotation)
    text = " or ".join(names)
    return f"{text}, repeatable" if is_list else text


def _value_names(annotation: Any) -> tuple[list[str], bool]:
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        return _value_names(arguments[0])
    if origin is Literal:
        return [code(argument) for argument in arguments], False
    if origin in (Union, types.UnionType):
        return [name for part in arguments if part is not type(None) for name in _value_names(part)[0]], False
    if origin is tuple:
        return _value_names(arguments[0])[0], True
    known = {str: "text", int: "integer", float: "number", bool: "switch"}
    return [known.get(annotation, "path")], False


def _bounds(field: FieldInfo) -> list[str]:
    texts = {Ge: "at least", Gt: "above", Le: "at most", Lt: "below"}
    found = []
    for bound in field.metadata:
        for kind, text in texts.items():
            if isinstance(bound, kind):
                found.append(f"{text} {getattr(bound, kind.__name__.lower()):,}")
    return found


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    if field.default in ("", (), None):
        return "unset by default"
    return f"default {code(str(field.default).lower() if isinstance(field.default, bool) else field.default)}"
