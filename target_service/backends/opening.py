"""Open the backend that the settings name, and make a target replica of it. Called by the target service's main."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping

from specdec.engine.remote.opening import open_remote
from specdec.observability.engine_metrics import EngineMetrics
from specdec.settings.target import TargetSettings
from target_service.backends.contract import Backend
from target_service.backends.engine import BackendTarget
from target_service.backends.server import open_server
from target_service.backends.vllm_backend import open_vllm

#: Backends that reach their engine over HTTP.
_OPEN: Mapping[str, Callable[..., Awaitable[Backend]]] = {"server": open_server, "vllm": open_vllm}


async def open_backend_target(
    settings: TargetSettings, replica_id: str, metrics: EngineMetrics, environ: Mapping[str, str]
) -> BackendTarget:
    """Connect to the engine that the settings name, check it, and return a target replica in front of it.

    Raises:
        InvalidRequest: a setting does not fit the engine; the message names the flag to change.
        Unavailable: the engine's server cannot be reached.
    """
    if settings.backend == "llama-cpp":
        backend = _open_llama(settings)
    else:
        backend = await open_remote(settings, environ, _OPEN[settings.backend])
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
