"""Open the connection to the server that a replica's settings name. Called by the openings of targets and drafts."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import TypeVar

from specdec.access.watched_files import read_credentials
from specdec.contract.errors import InvalidSetting
from specdec.engine.remote.http_connection import Connection
from specdec.settings.engine_servers import EngineServerSettings

OpenedT = TypeVar("OpenedT")

_ENVIRONMENT = "env:"


async def open_remote(
    settings: EngineServerSettings, environ: Mapping[str, str], open_engine: Callable[..., Awaitable[OpenedT]]
) -> OpenedT:
    """Connect to the server that the settings name, and return what `open_engine` makes of the connection.

    Args:
        settings: settings of the replica.
        environ: environment of the process, for a key of `env:NAME`.
        open_engine: checks the server, as `completions.open_completions`, whose arguments it takes. The connection is
            closed if it fails.

    Raises:
        InvalidRequest: a setting does not fit the server; the message names the flag to change.
        Unavailable: the server cannot be reached.
    """
    connection = Connection(
        settings.backend_url,
        key=_read_key(settings.backend_key, environ),
        ca=settings.backend_ca,
        timeout_s=settings.backend_timeout_s,
    )
    try:
        return await open_engine(
            connection,
            model=settings.model,
            served_name=settings.backend_model,
            max_context_tokens=settings.max_context_tokens,
        )
    except BaseException:
        await connection.close()
        raise


def _read_key(source: str, environ: Mapping[str, str]) -> str:
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
