"""`python -m draft_service`: reads settings, loads the draft model, serves until SIGTERM or Ctrl-C.

The only module of the service that reads the environment and installs signal handlers.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import signal
import sys
from collections.abc import Sequence
from contextlib import AsyncExitStack
from functools import partial
from typing import TYPE_CHECKING

from draft_service.config import DraftSettings
from specdec.checkpoint import locate_checkpoint
from specdec.config import cache_directory, parse_settings
from specdec.engine.schedule.scheduler import Scheduler
from specdec.engine.simulated.engines import SimulatedDraft
from specdec.engine.simulated.pair import MODEL_PREFIX, simulated_pair
from specdec.observability.logging import bind, configure_logging
from specdec.observability.metrics import EngineMetrics
from specdec.rpc.server import DRAFT_SERVICE
from specdec.service.lifecycle import end_process, require_addresses, run_replica, run_to_exit_code, spare_the_collector
from specdec.state.redis_store import open_registry
from specdec.state.registry import Heartbeat

if TYPE_CHECKING:
    from draft_service.proposer import Proposer

_log = logging.getLogger("draft_service")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the service; returns the exit code."""
    settings = parse_settings(
        DraftSettings, prog="python -m draft_service", argv=sys.argv[1:] if argv is None else argv
    )
    configure_logging(settings.log_format, settings.log_level, service="draft")
    return run_to_exit_code(_serve(settings))


async def _serve(settings: DraftSettings) -> None:
    replica_id = settings.replica_id or f"draft-{secrets.token_hex(6)}"
    metrics = EngineMetrics(settings.model, role="draft")
    async with AsyncExitStack() as ending:
        ending.enter_context(bind(replica_id=replica_id))
        # What can be wrong and is cheap to find out comes before the model is loaded.
        require_addresses(settings)
        registry = None if settings.redis_url.startswith("memory:") else open_registry(settings.redis_url)
        if registry is not None:
            ending.push_async_callback(registry.close)
            await registry.replicas("draft")
        engine = _load_engine(settings, replica_id, metrics)
        spare_the_collector()

        from draft_service.servicer import DraftServicer

        servicer = DraftServicer(engine, metrics)
        register = None
        if registry is not None:
            register = partial(Heartbeat, registry, describe=servicer.info, ttl_s=settings.registry_ttl_s)
        stop = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):  # until here the default, which ends the process at once
            asyncio.get_running_loop().add_signal_handler(number, stop.set)
        await run_replica(
            settings,
            service_name=DRAFT_SERVICE,
            engine=engine,
            servicer=servicer,
            metrics=metrics,
            register=register,
            stop=stop,
        )


def _load_engine(settings: DraftSettings, replica_id: str, metrics: EngineMetrics) -> Proposer | SimulatedDraft:
    if settings.model.startswith(MODEL_PREFIX):
        return SimulatedDraft(
            simulated_pair(settings.model),
            replica_id=replica_id,
            model=settings.model,
            pool=settings.pool,
            max_gamma=settings.max_gamma,
            scheduler=Scheduler(settings.max_step_tokens, settings.prefill_budget_ms / 1e3),
            observer=metrics,
        )
    _log.info("loading %s", settings.model)
    locate_checkpoint(settings.model)
    # torch takes seconds to import: not before the settings are known to be right.
    from draft_service.pace import Predraft
    from draft_service.proposer import Proposer
    from specdec.engine.loader import load_worker
    from specdec.engine.model.options import CompileOptions, row_counts

    worker = load_worker(
        settings.model,
        device=settings.device,
        dtype=settings.dtype,
        kv_cache_bytes=settings.kv_cache_bytes,
        gpu_memory_utilization=settings.gpu_memory_utilization,
        num_threads=settings.num_threads,
        compiling=CompileOptions(
            settings.compile_backend,
            # After a round whose tokens were all accepted: the last of them, and the bonus token.
            row_counts(2),
            cache_directory(os.environ) / "compiled",
        ),
        self_check=settings.self_check == "on",
    )
    return Proposer(
        worker,
        replica_id=replica_id,
        model=settings.model,
        pool=settings.pool,
        max_gamma=settings.max_gamma,
        max_step_tokens=settings.max_step_tokens,
        prefill_budget_s=settings.prefill_budget_ms / 1e3,
        max_support=settings.max_support,
        support_coverage=settings.support_coverage,
        predraft=Predraft(settings.predraft),
        observer=metrics,
    )


if __name__ == "__main__":
    end_process(main())
