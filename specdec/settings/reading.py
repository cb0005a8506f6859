"""Reads a service's settings: command line > environment > TOML file (`--config`) > default.

`parse_settings` is called by a service's `__main__` and by nothing else, because it looks at the environment and may
end the process. `specdec up` takes single settings of its services with `checked_value`.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import tomllib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, NoReturn, TypeVar, get_args

from pydantic import TypeAdapter, ValidationError
from pydantic_settings import BaseSettings, CliSettingsSource, EnvSettingsSource, SettingsError

from specdec.contract.errors import InvalidRequest, error_line

#: Name of a flag's value in `--help`, by the end of the flag, else by its type.
_VALUE_NAMES = {
    "otlp-endpoint": "URL",
    **dict.fromkeys(("listen", "advertise", "health", "metrics", "endpoint", "--coordinator", "admin"), "HOST:PORT"),
    **dict.fromkeys(("lookup", "local-draft"), "KIND"),
    **dict.fromkeys(("model", "tokenizer"), "PATH_OR_HUB_ID"),
    **dict.fromkeys(("redis-url", "tier-url"), "URL"),
    **dict.fromkeys(("config", "api-keys", "service-key", "tls-cert", "tls-key", "tls-ca"), "FILE"),
    "jwks": "FILE_OR_URL",
    "issuer": "URL",
    "learning-log": "DIR",
    "api-key": "KEY",
    "cors-origin": "ORIGIN",
    "adapter": "NAME=PATH_OR_ID",
    **dict.fromkeys(("served-model-name", "allowed-host"), "NAME"),
    **dict.fromkeys(("utilization", "share"), "SHARE"),
    "-s": "SECONDS",
    "-ms": "MILLISECONDS",
    "-bytes": "BYTES",
}
_TYPE_NAMES = {"str": "NAME", "int": "N", "float": "NUMBER"}

#: Settings that had another name before, with the name of today. Flags, variables and file keys keep the old name for
#: one release; `--help` shows today's alone.
_RENAMED = {"lane": "unix_socket"}

#: Settings that were removed, with what replaces them. For one release they are refused with that.
_REMOVED = {
    "otlp_metrics": "scrape --metrics; a collector reads it with its Prometheus receiver",
    "timeline": "traces have the times of each round: --otlp-endpoint URL",
    "worker_contract": "the router smg is not served any more; the gateway serves the HTTP interfaces of OpenAI",
}
#: Settings whose value is a constant of the code now. For one release they are ignored with a warning.
_FIXED = frozenset(
    (
        *("prefix_directory", "lookup_history_tokens", "learning_log_max_bytes", "learning_log_max_age_s"),
        *("poll_interval_s", "support_coverage", "max_support"),
    )
)

#: Text of a value that unsets a setting.
_NONE = "none"

SettingsT = TypeVar("SettingsT", bound=BaseSettings)
OpenedT = TypeVar("OpenedT")


def parse_settings(settings_type: type[SettingsT], *, prog: str, argv: Sequence[str]) -> SettingsT:
    """Read a service's settings from the command line, the environment and the `--config` file.

    Ends the process with exit code 0 for `--help`, and with one line on stderr and exit code 2 for a usage error.
    """
    try:
        flags = _flags(settings_type, prog, argv)
        environment = _environment(settings_type)
        path = flags.get("config") or environment.get("config")
        file_values = _file(settings_type, str(path)) if path else {}
        return settings_type(**{**file_values, **environment, **flags})
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        message = first["msg"].removeprefix("Value error, ")
        _refuse(f"{flag_of(str(first['loc'][0]))}: {message}" if first["loc"] else message)
    except (SettingsError, ValueError) as error:
        _refuse(str(error).removeprefix("error parsing CLI: "))


def opened(open_files: Callable[[], OpenedT]) -> OpenedT:
    """Return what `open_files` makes of files that the settings name.

    Ends the process with one line on stderr and exit code 2 if one of them is not usable: that is a usage error too.
    """
    try:
        return open_files()
    except InvalidRequest as error:
        _refuse(error.message)


def flag_of(field: str) -> str:
    """Return the flag of a setting: `--log-format` for `log_format`."""
    return f"--{field.replace('_', '-')}"


def value_name(flag: str, type_name: str = "str") -> str:
    """Return the name of a flag's value in `--help`, such as HOST:PORT."""
    ending = next((end for end in _VALUE_NAMES if flag.endswith(end)), "")
    return _VALUE_NAMES.get(ending) or _TYPE_NAMES.get(type_name, type_name)


def checked_value(settings_type: type[BaseSettings], field: str, text: str) -> Any:
    """Return the value that `text` gives a setting, as the service would read it from its command line.

    Raises:
        ValueError: the value is of the wrong type or out of range. The message continues a sentence that begins with
            the name of the setting: "must be greater than 0".
    """
    info = settings_type.model_fields[field]
    if not text and info.is_required():
        raise ValueError("must not be empty")
    if text == _NONE and NoneType in get_args(info.annotation):
        return None
    constrained: Any = Annotated[(info.annotation, *info.metadata)] if info.metadata else info.annotation
    try:
        return TypeAdapter(constrained).validate_python(text)
    except ValidationError as error:
        message = error.errors(include_url=False)[0]["msg"].removeprefix("Value error, ")
        raise ValueError(message.replace("Input should", "must")) from None


def _refuse(message: str) -> NoReturn:
    print(error_line(InvalidRequest(message)), file=sys.stderr)
    raise SystemExit(2)


def _flags(settings_type: type[BaseSettings], prog: str, argv: Sequence[str]) -> dict[str, Any]:
    parser = _Parser(
        prog=prog,
        description=settings_type.__doc__,
        epilog=f"Every flag is also an environment variable: --log-format is {_prefix(settings_type)}LOG_FORMAT.",
        allow_abbrev=False,
    )
    for name in (_FIXED | _REMOVED.keys()) - settings_type.model_fields.keys():
        parser.add_argument(
            flag_of(name),
            action=_FormerFlag,
            settings_type=settings_type,
            dest=argparse.SUPPRESS,
            help=argparse.SUPPRESS,
        )
    source: CliSettingsSource[Any] = CliSettingsSource(
        settings_type,
        root_parser=parser,
        cli_parse_args=[_renamed_flag(word) for word in argv],
        cli_kebab_case=True,
        cli_implicit_flags=True,
        cli_hide_none_type=True,
        cli_avoid_json=True,
        cli_parse_none_str=_NONE,
        add_argument_method=_add_argument,
    )
    return source()


def _renamed_flag(word: str) -> str:
    """Return a word of the command line with the name of today, if it is a flag with an old one."""
    flag, equals, value = word.partition("=")
    old = flag.removeprefix("--").replace("-", "_")
    return flag_of(_RENAMED[old]) + equals + value if flag.startswith("--") and old in _RENAMED else word


def is_former(settings_type: type[BaseSettings], name: str, written: str) -> bool:
    """Return whether a name is a setting that is a constant now, after a warning on stderr.

    Args:
        settings_type: settings of the service.
        name: name of the field.
        written: the name as the user wrote it, for the message.

    Raises:
        ValueError: the setting was removed. The message says what replaces it.
    """
    if name in settings_type.model_fields:
        return False
    if name in _REMOVED:
        raise ValueError(f"{written} was removed: {_REMOVED[name]}")
    if name in _FIXED:
        print(f"warning: {written} has no effect any more: its value is fixed", file=sys.stderr)
    return name in _FIXED


def _require_setting(settings_type: type[BaseSettings], name: str, written: str) -> bool:
    """Return whether a name is a setting of today. Raises ValueError if it never was one, or was removed."""
    former = is_former(settings_type, name, written)
    if not former and name not in settings_type.model_fields:
        raise ValueError(f"{written} is not a setting; see --help")
    return not former


def _renamed_keys(values: Mapping[str, Any]) -> dict[str, Any]:
    return {_RENAMED.get(name, name): value for name, value in values.items()}


def _add_argument(parser: Any, *names: str, **options: Any) -> Any:
    """Add an argument with a name for its value instead of its Python type, and without a default of None."""
    if "metavar" in options:
        options["metavar"] = value_name(names[-1], options["metavar"])
    if "help" in options:
        options["help"] = re.sub(r" \(default: (none|\(\))?\)$", "", options["help"])
    return parser.add_argument(*names, **options)


class _Parser(argparse.ArgumentParser):
    """A parser that raises an exception for a usage error instead of printing two lines and exiting."""

    def error(self, message: str) -> NoReturn:
        raise SettingsError(message)


class _FormerFlag(argparse.Action):
    def __init__(self, *words: Any, settings_type: type[BaseSettings], **options: Any) -> None:
        super().__init__(*words, **{**options, "dest": argparse.SUPPRESS})
        self._settings_type = settings_type

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        written = option_string or ""
        is_former(self._settings_type, written.removeprefix("--").replace("-", "_"), written)


def _environment(settings_type: type[BaseSettings]) -> dict[str, Any]:
    prefix = _prefix(settings_type)
    for name in os.environ:
        field = name.upper()[len(prefix) :].lower()
        if name.upper().startswith(prefix):
            _require_setting(settings_type, _RENAMED.get(field, field), f"environment variable {name}")
    renamed = {
        new: os.environ[prefix + old.upper()] for old, new in _RENAMED.items() if prefix + old.upper() in os.environ
    }
    return renamed | EnvSettingsSource(settings_type, env_parse_none_str=_NONE)()


def _prefix(settings_type: type[BaseSettings]) -> str:
    return settings_type.model_config.get("env_prefix", "").upper()


def _file(settings_type: type[BaseSettings], path: str) -> dict[str, Any]:
    try:
        values = _renamed_keys(tomllib.loads(Path(path).read_text(encoding="utf-8")))
    except OSError as error:
        raise ValueError(f"--config: cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise ValueError(f"--config: {path} is not valid TOML: {error}") from error
    return {
        key: value
        for key, value in values.items()
        if _require_setting(settings_type, key, f"--config: {path}: {key!r}")
    }
