"""The key of an engine's server, from a file or an environment variable."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from specdec.access.watched_files import read_credentials
from specdec.errors import InvalidSetting

_ENVIRONMENT = "env:"


def read_key(source: str, environ: Mapping[str, str]) -> str:
    """Return the key that a setting names: the first line of a file, or an environment variable for `env:NAME`.

    Raises:
        InvalidRequest: the file or the variable is missing; the message omits the key.
    """
    if not source:
        return ""
    if source.startswith(_ENVIRONMENT):
        name = source.removeprefix(_ENVIRONMENT)
        if not environ.get(name):
            raise InvalidSetting(f"backend_key: the environment variable {name} is not set", field="backend_key")
        return environ[name]
    text, _ = read_credentials(Path(source), field="backend_key")
    return text.split("\n", 1)[0].strip()
