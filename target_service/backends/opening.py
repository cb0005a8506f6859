"""Open the backend that the settings name, and make a target replica of it. Called by the target service's main."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path

from specdec.access.watched_files import read_credentials
from specdec.errors import InvalidSetting
from specdec.observability.engine_metrics import EngineMetrics
from specdec.settings.target import TargetSettings
from target_service.backends.connection import Connection
from target_service.backends.contract import Backend
from target_service.backends.engine import BackendTarget
from target_service.backends.server import open_server
from target_service.backends.vllm import open_vllm

#: Backends that reach their engine over HTTP.
_OPEN: Mapping[str, Callable[..., Awaitable[Backend]]] = {"server": open_server, "vllm": open_vllm}
_ENVIRONMENT = "env:"


async def open_backend_target(
    settings: TargetSettings, replica_id: str, metrics: EngineMetrics, environ: Mapping[str, str]
) -> BackendTarget:
    """Connect to the engine that the settings name, check it, and return a target replica in front of it.

    Raises:
        InvalidRequest: a setting does not fit the engine; the message names the flag to change.
        Unavailable: the engine's server cannot be reached.
    """
    backend = _open_llama(settings) if settings.backend == "llama-cpp" else await _open_remote(settings, environ)
    return BackendTarget(
        backend,
        replica_id=replica_id,
        model=settings.model,
        pool=settings.pool,
        max_gamma=settings.max_gamma,
        observer=metrics,
    )


def _open_llama(settings: TargetSettings) -> Backend:
    from target_service.backends.llama_cpp import open_llama

    return open_llama(
        model=settings.model, max_context_tokens=settings.max_context_tokens, num_threads=settings.num_threads
    )


async def _open_remote(settings: TargetSettings, environ: Mapping[str, str]) -> Backend:
    connection = Connection(
        settings.backend_url,
        key=_read_key(settings.backend_key, environ),
        ca=settings.backend_ca,
        timeout_s=settings.backend_timeout_s,
    )
    try:
        return await _OPEN[settings.backend](
            connection,
            model=settings.model,
            served_name=settings.backend_model,
            max_context_tokens=settings.max_context_tokens,
        )
    except BaseException:
        await connection.close()
        raise


def _read_key(source: str, environ: Mapping[str, str]) -> str:
    """Return the key that a setting names: the first line of a file, or an environment variable for `env:NAME`."""
    if not source:
        return ""
    if source.startswith(_ENVIRONMENT):
        name = source.removeprefix(_ENVIRONMENT)
        if not environ.get(name):
            raise InvalidSetting(f"backend_key: the environment variable {name} is not set", field="backend_key")
        return environ[name]
    text, _ = read_credentials(Path(source), field="backend_key")
    return text.split("\n", 1)[0].strip()
