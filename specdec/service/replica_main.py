"""The common main program of `python -m draft_service` and `python -m target_service`.

Cheap checks run first, then the model is loaded, then `lifecycle.run_replica` serves. Each service's `__main__` states
in a `ReplicaKind` how it differs.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import logging
import os
import secrets
import sys
import threading
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import AsyncExitStack
from contextvars import copy_context
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from specdec.access.callers import Callers
from specdec.access.guards import replica_guard
from specdec.access.service_key import read_service_key
from specdec.checkpoints.artifact_cache import cache_directory
from specdec.checkpoints.locate import locate_checkpoint
from specdec.checkpoints.packed_names import packed_folder
from specdec.checkpoints.preflight import require_servable
from specdec.contract.engine_api import Engine
from specdec.contract.errors import InvalidRequest, Unsupported
from specdec.contract.types import SIMULATED_PREFIX
from specdec.engine.kernels.library import load_early
from specdec.engine.schedule.scheduler import Scheduler
from specdec.engine.simulated.engines import SimulatedDraft, SimulatedTarget
from specdec.engine.simulated.simulated_pair import simulated_pair
from specdec.observability.engine_metrics import EngineMetrics
from specdec.observability.logging import bind, configure_logging
from specdec.observability.metrics_server import start_metrics_server
from specdec.observability.series import served_name
from specdec.rpc.health import Health
from specdec.service import memory
from specdec.service.lifecycle import Servicer, require_addresses, run_replica, run_to_exit_code, stop_on_signals
from specdec.service.model_grace import ModelGrace
from specdec.service.rank_group import run_ranks
from specdec.settings.addresses import guarded_address
from specdec.settings.devices import likely_device, require_device
from specdec.settings.draft_specs import LocalDraftSpec
from specdec.settings.processors import num_processors
from specdec.settings.reading import opened, parse_settings
from specdec.settings.shared import ReplicaSettings
from specdec.state.redis_store import open_registry
from specdec.state.registry import Heartbeat
from specdec.state.store_wait import wait_for_store

if TYPE_CHECKING:  # torch takes seconds to import
    from specdec.engine.base import ModelShape, Worker
    from specdec.engine.loop.replica_engine import ReplicaOptions
    from specdec.engine.options import LoadRequest
    from specdec.state.kv_tier import KvTier

SettingsT = TypeVar("SettingsT", bound=ReplicaSettings)

_log = logging.getLogger(__name__)

LoadWorker = Callable[[int, Callable[[float], None]], "Worker"]
"""Loads a model. Takes the result of `ReplicaKind.num_decode_rows`, and what to call with the share of the weights that
are loaded."""


async def no_backend(settings: ReplicaSettings, replica_id: str, metrics: EngineMetrics) -> Engine | None:
    """Return None: the model runs in this process."""
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaKind(Generic[SettingsT]):
    """The differences between a draft and a target replica."""

    role: str
    """draft | target; the service is `python -m ROLE_service`."""
    service_name: str
    """Full protobuf name."""
    settings_type: type[SettingsT]
    num_decode_rows: Callable[[SettingsT], int]
    """Largest number of tokens of a session in a step without prefill; steps up to that size are compiled or
    recorded as CUDA graphs."""
    simulated_engine: Callable[..., SimulatedDraft | SimulatedTarget]
    """Makes the engine of a simulated model from its pair, the settings and the options of `SimulatedReplica`."""
    build_engine: Callable[[Worker, ReplicaOptions, SettingsT, EngineMetrics], Engine]
    """Returns the engine of a worker, which then belongs to the engine. Called after torch is loaded; may import it."""
    build_servicer: Callable[[Any, EngineMetrics], Servicer]
    """Returns the servicer in front of an engine, simulated or not."""
    check: Callable[[SettingsT], None] = lambda settings: None
    """Checks the service's own settings before the model is loaded."""
    local_drafts: Callable[[SettingsT], tuple[LocalDraftSpec, ...]] = lambda settings: ()
    """Returns the drafts inside a target's worker."""
    is_shadow: Callable[[SettingsT], bool] = lambda settings: False
    model_grace_s: Callable[[SettingsT], float] = lambda settings: 0.0
    """Returns the longest time for which a replica that leaves answers the turns of its model."""
    open_backend: Callable[[SettingsT, str, EngineMetrics], Awaitable[Engine | None]] = no_backend
    """Returns the engine of a replica id whose model runs in another engine; None for a model of this process."""


def run_service(kind: ReplicaKind[SettingsT], argv: Sequence[str] | None = None) -> int:
    """Read the settings, load the model and serve until SIGTERM or Ctrl-C; return the exit code.

    Args:
        kind: the kind of replica.
        argv: the flags; None for those of this process.
    """
    settings = parse_settings(
        kind.settings_type, prog=f"python -m {kind.role}_service", argv=sys.argv[1:] if argv is None else argv
    )
    opened(lambda: read_service_key(settings.service_key, os.environ))
    configure_logging(settings.log_format, settings.log_level, service=kind.role)
    if settings.tensor_parallel > 1:
        return run_ranks(kind.role, sys.argv[1:] if argv is None else argv, settings)
    return run_to_exit_code(serve_replica(kind, settings, partial(_load_worker, settings, kind.local_drafts(settings))))


async def serve_replica(
    kind: ReplicaKind[SettingsT],
    settings: SettingsT,
    load: LoadWorker,
    note_serving: Callable[[], None] | None = None,
) -> None:
    """Serve until SIGTERM or Ctrl-C.

    Args:
        kind: the kind of replica.
        settings: its settings.
        load: loads the model, in a thread of its own. Not called for simulated models.
        note_serving: called once the replica accepts calls.

    Raises:
        SpecdecError: the replica cannot start, or its engine failed.
    """
    replica_id = settings.replica_id or f"{kind.role}-{secrets.token_hex(6)}"
    metrics = EngineMetrics(served_name(settings.model), role=kind.role, pool=settings.pool)
    async with AsyncExitStack() as ending:
        ending.enter_context(bind(replica_id=replica_id))
        # Cheap checks come before the model is loaded.
        require_addresses(settings)
        health = Health((kind.service_name,))
        if settings.health:  # from now on, so that the process is known to live while it loads
            health.open_port(settings.health)
            ending.callback(health.close_port)
        if settings.metrics:  # from now on, so that the load can be watched
            ending.callback(start_metrics_server(metrics.registry, *guarded_address(settings.metrics)))
        service_key = read_service_key(settings.service_key, os.environ)
        registry = None
        if not settings.redis_url.startswith("memory:"):
            registry = open_registry(settings.redis_url, cluster=settings.cluster, signer=service_key)
            ending.push_async_callback(registry.close)
            await wait_for_store(settings.redis_url, settings.store_wait_s)
            await registry.replicas(kind.role)
        engine = await kind.open_backend(settings, replica_id, metrics)
        if engine is None:
            engine = _load_engine(kind, settings, replica_id, metrics, load, ending)
        memory.settle()
        servicer = kind.build_servicer(engine, metrics)
        register, grace = None, None
        if registry is not None:
            if grace_s := kind.model_grace_s(settings):
                grace = ModelGrace(registry, servicer.info, servicer.open_turns, grace_s)
            register = partial(Heartbeat, registry, describe=servicer.info, ttl_s=settings.registry_ttl_s)
        await run_replica(
            settings,
            service_name=kind.service_name,
            engine=engine,
            servicer=servicer,
            metrics=metrics,
            register=register,
            take_signals=stop_on_signals,
            health=health,
            note_serving=note_serving,
            check_caller=replica_guard(Callers(service_key=service_key)).check if service_key else None,
            grace=grace,
        )


def _load_engine(
    kind: ReplicaKind[SettingsT],
    settings: SettingsT,
    replica_id: str,
    metrics: EngineMetrics,
    load: LoadWorker,
    ending: AsyncExitStack,
) -> Engine:
    prefill_budget_s = settings.prefill_budget_ms / 1e3
    if settings.model.startswith(SIMULATED_PREFIX):
        if settings.max_context_tokens is not None:
            raise InvalidRequest(
                "a simulated replica has a fixed context; remove --max-context-tokens", field="max_context_tokens"
            )
        if settings.kv_tier_url:
            raise InvalidRequest("a simulated replica has no KV; remove --kv-tier-url", field="kv_tier_url")
        if kind.local_drafts(settings):
            raise InvalidRequest("a simulated replica has no local drafts; remove --local-draft", field="local_draft")
        return kind.simulated_engine(
            simulated_pair(settings.model),
            settings,
            replica_id=replica_id,
            model=settings.model,
            pool=settings.pool,
            max_gamma=settings.max_gamma,
            scheduler=Scheduler(settings.max_step_tokens, prefill_budget_s),
            observer=metrics,
        )
    require_device(settings.device)
    require_servable(settings.model, flag="--model")
    locate_checkpoint(settings.model)
    kind.check(settings)
    _log.info("loading %s", settings.model)
    metrics.note_phase("loading")
    with memory.collector_at_rest():  # torch takes seconds to import, so settings are checked before
        from specdec.engine.loop.replica_engine import ReplicaOptions

    worker = on_its_own_thread(partial(load, kind.num_decode_rows(settings), metrics.note_loaded), Future())
    tier = open_kv_tier(settings, worker.shape)
    if tier is not None:
        ending.push_async_callback(asyncio.to_thread, tier.close)
        metrics.watch_kv_tier(tier)
    options = ReplicaOptions(
        replica_id=replica_id,
        model=settings.model,
        pool=settings.pool,
        max_gamma=settings.max_gamma,
        max_step_tokens=settings.max_step_tokens,
        prefill_budget_s=prefill_budget_s,
        shadow=kind.is_shadow(settings),
        kv_tier=tier,
        kv_reserve_tokens=settings.kv_reserve_tokens,
    )
    return kind.build_engine(worker, options, settings, metrics)


def open_kv_tier(settings: ReplicaSettings, shape: ModelShape) -> KvTier | None:
    """Return the cold tier of the KV of a worker or rank, or None if the settings name none.

    Raises:
        Unsupported: they name one, and the model has recurrent layers.
    """
    layout = shape.kv_layout
    if settings.kv_tier_url and shape.num_states:
        raise Unsupported(
            "a KV tier does not hold the states of recurrent layers, without which this model's KV is of no use; "
            "remove --kv-tier-url",
            field="kv_tier_url",
        )
    if not settings.kv_tier_url or layout is None:
        return None
    from specdec.engine.cold_tier import run_blocks
    from specdec.state.kv_tier import KvTier
    from specdec.state.kv_values import KvSpace

    space = KvSpace(
        model_fingerprint=shape.model_fingerprint,
        dtype=layout.dtype,
        rank=layout.rank,
        layer_bytes=layout.layer_bytes,
        run_blocks=run_blocks(layout.block_bytes),
        cluster=settings.cluster,
    )
    return KvTier(settings.kv_tier_url, space)


def on_its_own_thread(load: Callable[[], Worker], outcome: Future[Worker]) -> Worker:
    """Run `load` in a thread that ends afterwards and return its result, or raise as soon as `outcome` has an error.

    OpenMP keeps the helper threads of a thread while it lives. If there are more helpers than cores, all of them spin
    less, including those of the engine's thread. The thread is a daemon, so an interrupt ends the process at once.
    """

    def run() -> None:
        with contextlib.suppress(InvalidStateError):  # another thread has set an error
            try:
                outcome.set_result(load())
            except BaseException as error:
                outcome.set_exception(error)

    threading.Thread(target=copy_context().run, args=(run,), name="load", daemon=True).start()
    return outcome.result()


def load_request(
    settings: ReplicaSettings,
    num_decode_rows: int,
    note_loaded: Callable[[float], None],
    local_drafts: tuple[LocalDraftSpec, ...] = (),
) -> LoadRequest:
    """Return what a replica, or one of its ranks, loads. Imports torch.

    Args:
        settings: settings of the replica.
        num_decode_rows: see `ReplicaKind.num_decode_rows`.
        note_loaded: takes the share of the weights that are loaded.
        local_drafts: drafts that the worker computes itself.
    """
    from specdec.engine.model.start_progress import logging_shares
    from specdec.engine.options import CompileOptions, LoadRequest, row_counts

    compiling = CompileOptions(
        settings.compile_backend,
        row_counts(num_decode_rows),
        cache_directory(os.environ) / "compiled",
        is_deterministic=settings.deterministic,
    )
    return LoadRequest(
        settings.model,
        device=settings.device,
        dtype=settings.dtype,
        kv_cache_bytes=settings.kv_cache_bytes,
        gpu_memory_utilization=settings.gpu_memory_utilization,
        max_context_tokens=settings.max_context_tokens,
        num_threads=settings.num_threads,
        compiling=compiling,
        self_check=settings.self_check == "on",
        local_drafts=local_drafts,
        kept_in=packed_folder(os.environ),
        note_loaded=logging_shares(note_loaded),
    )


def _load_worker(
    settings: ReplicaSettings,
    local_drafts: tuple[LocalDraftSpec, ...],
    num_decode_rows: int,
    note_loaded: Callable[[float], None],
) -> Worker:
    if likely_device(settings.device) == "cpu" and settings.compile_backend in ("auto", "native"):
        load_early(cache_directory(os.environ) / "compiled")
    with memory.collector_at_rest():
        import torch

        from specdec.engine.kept_worker import load_kept_worker
        from specdec.engine.model.thread_tuning import settle_threads
        from specdec.engine.options import AUTO, EAGER, NATIVE

    is_given = settings.num_threads is not None or "OMP_NUM_THREADS" in os.environ
    # Steps of `torch.compile` are compiled for a fixed number of threads, and a number that the user gave is kept.
    measures_threads = not is_given and settings.compile_backend in (AUTO, NATIVE, EAGER)
    if not is_given:
        # Torch counts the cores of the machine. More threads than a container has processors' time only wait.
        torch.set_num_threads(min(torch.get_num_threads(), num_processors()))
    request = load_request(settings, num_decode_rows, note_loaded, local_drafts)
    # The tokenizer needs transformers later. Its import takes a second, and this load seldom needs Python itself.
    # Nothing else may import it meanwhile: `transformers` replaces its own module at the end of the import.
    importing = threading.Thread(target=importlib.import_module, args=("transformers",), name="import", daemon=True)
    importing.start()
    worker = load_kept_worker(request)
    importing.join()
    if worker is None:
        with memory.collector_at_rest():  # with it come the modules of transformers
            from specdec.engine.loader import load_worker

        worker = _read_back(request, load_worker(request))
    if measures_threads:
        settle_threads(worker)
    return worker


def _read_back(request: LoadRequest, loaded: Worker) -> Worker:
    """Return a worker of what has just been kept, or `loaded` itself.

    Tables of a worker that was packed here lie in the checkpoint's weights and hold all of them. It is a parameter, and
    no variable of the caller, because transformers keeps an error of its imports and with it the caller's variables.
    """
    from specdec.engine.kept_worker import load_kept_worker

    again = replace(request, self_check=False, note_loaded=lambda share: None)
    return load_kept_worker(again, with_weights=True) or loaded
