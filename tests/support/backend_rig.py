"""Target services in front of an engine's server, beside the services of a coordinator rig.

The engine serves the rig's table model, so what a request must give is known from our own engine. Called by tests of
backends.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from coordinator.replicas.replica import DRAFT, TARGET
from specdec.observability.engine_metrics import EngineMetrics
from specdec.settings.target import TargetSettings
from target_service.backends.engine import open_backend_target
from tests.support.coordinator_rig import Coordinator, Rig
from tests.support.engine_server import EngineOptions, EngineServer
from tests.support.table_services import EOS, VOCABULARY, Service, serve_engine, start_service, write_chat_tokenizer
from tests.support.table_worker import TableWorker

CONTEXT_TOKENS = 512


@dataclass
class BackendSystem:
    """A coordinator, one draft, one target with a backend, and the engine's server."""

    rig: Rig
    coordinator: Coordinator
    server: EngineServer
    target: Service


def write_checkpoint(directory: Path) -> None:
    """Write the tokenizer of the table model, with a chat template, and what its configuration says."""
    write_chat_tokenizer(directory)
    (directory / "config.json").write_text(json.dumps({"max_position_embeddings": CONTEXT_TOKENS, "eos_token_id": EOS}))


def table_model(salt: int = 0) -> TableWorker:
    """Return the model that the engine's server serves."""
    return TableWorker(vocabulary_size=VOCABULARY, context=CONTEXT_TOKENS, salt=salt, eos_token_ids=(EOS,))


def settings_of(url: str, model: Path | str, backend: str, **options: object) -> TargetSettings:
    """Return the settings of a target with a backend."""
    return TargetSettings.model_validate(
        {"model": str(model), "backend": backend, "backend_url": url, "max_gamma": 8, "redis_url": "memory://"}
        | options
    )


async def start_backend(url: str, model: Path | str, backend: str, **options: object) -> Service:
    """Start a target service with a backend in front of a server; `options` are settings."""
    metrics = EngineMetrics("table", role=TARGET)
    engine = await open_backend_target(settings_of(url, model, backend, **options), "target-backend", metrics, {})
    return await serve_engine(TARGET, engine, metrics, table_model())


@asynccontextmanager
async def backend_system(
    backend: str, options: EngineOptions | None = None, *, draft_salt: int = 1, routes: bool = False
) -> AsyncIterator[BackendSystem]:
    """Run a system whose target is a backend; `routes`: two draft pools, among which requests are routed."""
    async with (
        EngineServer(table_model(), options) as server,
        Rig(targets=0, drafts=0, write_checkpoint=write_checkpoint, vocabulary="") as rig,
    ):
        vocabulary = rig.tokenizer.fingerprint
        target = await start_backend(server.url, rig.directory, backend)
        rig.services += [target, await start_service(DRAFT, salt=draft_salt, vocabulary=vocabulary)]
        if routes:
            rig.services.append(await start_service(DRAFT, salt=draft_salt + 1, pool="other", vocabulary=vocabulary))
        yield BackendSystem(rig, await rig.coordinator(routes=routes), server, target)
