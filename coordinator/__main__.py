"""`python -m coordinator`: reads the settings, builds the coordinator, and serves until SIGTERM or Ctrl-C.

This is the only module of the coordinator that reads the environment and handles signals.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import AsyncExitStack, suppress

from coordinator.audit.audit_queue import AuditQueue
from coordinator.audit.turn_audit import Auditor
from coordinator.learning.log import LearningLog
from specdec.observability.audit import AuditMetrics
from specdec.observability.coordinator_metrics import CoordinatorMetrics
from specdec.observability.series import served_name
from specdec.observability.tracing import Tracing, open_tracing
from specdec.settings.coordinator import CoordinatorSettings

if __name__ == "__main__":  # loading what follows takes a second, and a model longer
    from specdec.settings.early_signals import end_on_sigterm
    from specdec.settings.standard_streams import never_wait_for_readers

    end_on_sigterm()
    never_wait_for_readers()

import logging
import os
import secrets
import sys
from collections.abc import Coroutine, Sequence
from functools import partial
from typing import Any

from coordinator.admission.admission import AdmissionSettings
from coordinator.front.access import CoordinatorAccess, Readiness, open_access, open_admin_port
from coordinator.front.drains import Drains
from coordinator.front.servicer import CoordinatorServicer
from coordinator.front.tenants import CallTenants
from coordinator.generation.expired_turns import record_expired_turns
from coordinator.generation.generation_service import GenerationService, GenerationSettings
from coordinator.lookup.history import TokenHistories
from coordinator.lookup.lookup import LookupKind
from coordinator.replicas.liveness import watch_targets
from coordinator.replicas.pool import ReplicaPools
from coordinator.replicas.replica import DRAFT, TARGET
from coordinator.replicas.target_models import TargetModels
from coordinator.round.draft_source_factory import DraftSourceFactory
from coordinator.routing.promotion import Canary
from coordinator.routing.score_queue import ScoreQueue
from coordinator.text.constraints import prepare_constraints
from coordinator.text.output_forms import ParserNames
from coordinator.text.tokenizer import ServedTokenizer
from specdec.checkpoints.generation_config import recommended_sampling
from specdec.contract.engine_api import EngineInfo
from specdec.contract.errors import Unavailable
from specdec.contract.types import Mode
from specdec.contract.version import __version__
from specdec.observability.logging import configure_logging
from specdec.observability.loop_lag import watch_loop_lag
from specdec.observability.metrics_server import start_metrics_server
from specdec.rpc.channels import MAX_CALLS
from specdec.rpc.client import open_link
from specdec.rpc.health import Health
from specdec.rpc.service_server import COORDINATOR_SERVICE, ServiceServer
from specdec.service import memory
from specdec.service.lifecycle import require_addresses, run_to_exit_code, stop_on_signals
from specdec.settings.addresses import advertised_address, guarded_address, is_loopback
from specdec.settings.reading import opened, parse_settings
from specdec.settings.shared import DAY_S
from specdec.state.live_coordinators import coordinator_info
from specdec.state.redis_store import open_registry, open_store
from specdec.state.registry import Heartbeat
from specdec.state.store import ReplicaRegistry
from specdec.state.store_wait import store_answers

#: Calls at once relative to --max-queue, so that requests beyond it are refused with a reason.
_CALLS_PER_REQUEST = 2
#: Number of tokens of past outputs that suffix drafts search, of all tenants: about 20 MB. More finds little more.
_HISTORY_TOKENS = 200_000
#: Time that streams have after the drain to send what they hold.
_FLUSH_S = 1.0

#: Name of this service in traces.
_OTEL_SERVICE = "specdec-coordinator"

#: Limits on the texts of one tenant's learning log: more than a distillation reads, and as long as logs usually live.
_MAX_LOG_BYTES = 1 << 30
_MAX_LOG_AGE_S = 7 * 86400.0

_log = logging.getLogger("coordinator")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the service; return the exit code."""
    settings = parse_settings(
        CoordinatorSettings, prog="python -m coordinator", argv=sys.argv[1:] if argv is None else argv
    )
    configure_logging(settings.log_format, settings.log_level, service="coordinator")
    return run_to_exit_code(_serve(settings))


async def _serve(settings: CoordinatorSettings) -> None:
    """Serve until SIGTERM or SIGINT, then drain.

    Raises:
        SpecdecError: the service cannot start (address, tokenizer, store), or a static endpoint has another vocabulary
            before the first request could be served.
    """
    access = opened(lambda: open_access(settings, os.environ, is_loopback=is_loopback(settings.listen)))
    require_addresses(settings)
    health = Health((COORDINATOR_SERVICE,))
    if settings.health:
        health.open_port(settings.health)
    parser_names = ParserNames(settings.tool_parser, settings.reasoning_parser)
    parser_names.check()
    tokenizer = ServedTokenizer(settings.tokenizer)
    stop = stop_on_signals()  # until here SIGTERM ends the process at once
    metrics = CoordinatorMetrics(served_name(settings.tokenizer), max_tenants=settings.tenant_metrics)
    server = ServiceServer(
        settings.listen,
        health=health,
        max_message_bytes=settings.max_message_bytes,
        max_connection_age_s=settings.max_connection_age_s,
        max_calls=max(MAX_CALLS, _CALLS_PER_REQUEST * settings.max_queue),
        tls=settings.server_tls,
        loopback_address=settings.loopback,
        check_caller=access.public.check,
    )
    async with AsyncExitStack() as ending:
        ending.callback(health.close_port)
        if not await store_answers(settings.redis_url, settings.store_wait_s, stop):
            return
        store = open_store(
            settings.redis_url,
            tenant=settings.tenant,
            cluster=settings.cluster,
            session_ttl_s=settings.session_ttl_s,
            usage_kept_s=settings.usage_days * DAY_S,
        )
        ending.push_async_callback(store.close)
        await store.ping()
        if settings.usage_days:
            await store.usage().check_rights()
        metrics.watch_store(lambda: store.num_failures)
        readiness = Readiness(lambda is_ready: server.set_serving() if is_ready else server.set_not_serving())
        registry = _open_registry(settings, access, ending)
        pools = _build_pools(settings, access, tokenizer, readiness, registry)
        ending.push_async_callback(pools.close)
        target_models = TargetModels(pools, store.target_shares())
        target_models.start()
        ending.push_async_callback(target_models.close)
        histories = TokenHistories(_HISTORY_TOKENS) if LookupKind.SUFFIX in settings.lookup else None
        tracing = _trace_requests(settings, ending, os.environ)
        scores, canary = None, None
        if settings.route == "auto":
            scores, canary = ScoreQueue(pools), Canary(store.promotions())
            canary.start(pools.activity)
            ending.push_async_callback(canary.close)
        draft_sources = DraftSourceFactory(pools, histories, scores, canary, tokenizer.decode)
        generation_settings = _generation_settings(settings, access)
        generations = GenerationService(
            generation_settings,
            store=store,
            pools=pools,
            target_models=target_models,
            tokenizer=tokenizer,
            draft_sources=draft_sources,
            metrics=metrics,
            quotas=store.quotas(generation_settings.coordinator_id, lease_ttl_s=settings.lease_ttl_s),
            directory=store.prefixes(),
            learning_log=_open_learning_log(settings, metrics),
            auditor=_build_auditor(settings, metrics, ending),
        )
        servicer = CoordinatorServicer(
            generations=generations,
            store=store,
            pools=pools,
            target_models=target_models,
            draft_sources=draft_sources,
            tokenizer=tokenizer,
            default_mode=Mode[settings.default_mode.upper()],
            tenants=CallTenants(settings.tenant, reads_header=settings.tenant_header == "on"),
            allows_grammars=settings.allow_grammars,
            default_sampling=recommended_sampling(settings.tokenizer),
            canary=canary,
            tracing=tracing,
            parser_names=parser_names,
            drains=Drains(pools, generations, registry),
        )
        servicer.add_to(server.grpc_server)
        if settings.metrics:
            ending.callback(start_metrics_server(metrics.registry, *guarded_address(settings.metrics)))
        await server.start()
        if settings.admin:
            servicer.admin_address = await open_admin_port(
                settings.admin, servicer, access.admin, ending, tls=settings.server_tls
            )
        memory.settle()
        ending.push_async_callback(server.stop, _FLUSH_S)
        ending.push_async_callback(generations.drain, 0.0)
        address = advertised_address(settings.advertise, settings.listen, server.port)
        _log.info(
            "listening", extra={"address": server.address, "advertised": address, "admin": servicer.admin_address}
        )
        registration = _register(settings, registry, address, tokenizer.fingerprint, generations)
        servicer.drains.address = address
        servicer.drains.on_leaving = partial(_show_leaving, readiness, registration)
        if registration is not None:
            servicer.is_registered = True
            await registration.start()
            ending.push_async_callback(registration.close)
        await _watch_until(
            stop,
            pools.watch(),
            watch_targets(pools),
            readiness.watch_store(store),
            record_expired_turns(store.usage(), settings.usage_days * DAY_S, settings.session_ttl_s),
            watch_loop_lag(metrics.observe_loop_lag),
            health.watch_loop(),
        )
        servicer.drains.end()  # so that no call registers this coordinator again
        _log.info("draining", extra={"grace_s": settings.drain_grace_s, "num_running": generations.num_running})
        await server.set_not_serving()
        if registration is not None:
            await registration.close()  # first, so that gateways open no further stream here
        await generations.drain(settings.drain_grace_s)
    _log.info("stopped")


def _open_registry(
    settings: CoordinatorSettings, access: CoordinatorAccess, ending: AsyncExitStack
) -> ReplicaRegistry | None:
    """Return the registry that replicas are found in; None if static endpoints replace it."""
    if settings.draft_endpoint or settings.target_endpoint:
        return None
    registry = open_registry(settings.redis_url, cluster=settings.cluster, signer=access.service_key)
    ending.push_async_callback(registry.close)
    return registry


def _register(
    settings: CoordinatorSettings,
    registry: ReplicaRegistry | None,
    address: str,
    vocabulary_fingerprint: str,
    generations: GenerationService,
) -> Heartbeat | None:
    """Return the registration by which gateways find this coordinator, not started yet; None without a registry."""
    if registry is None:
        return None

    def describe() -> EngineInfo:
        return coordinator_info(
            generations.coordinator_id,
            version=__version__,
            model=settings.tokenizer,
            vocabulary_fingerprint=vocabulary_fingerprint,
            num_running=generations.num_running,
            draining=generations.is_leaving,
        )

    return Heartbeat(registry, address=address, describe=describe)


async def _show_leaving(readiness: Readiness, registration: Heartbeat | None, is_leaving: bool) -> None:
    """Show in health and registry that this coordinator takes no new requests, or takes them again."""
    _log.info("taking no new requests" if is_leaving else "taking new requests again")
    await readiness.note_leaving(is_leaving)
    if registration is not None:
        with suppress(Unavailable):  # the next beat shows it
            await registration.beat()


def _build_pools(
    settings: CoordinatorSettings,
    access: CoordinatorAccess,
    tokenizer: ServedTokenizer,
    readiness: Readiness,
    registry: ReplicaRegistry | None,
) -> ReplicaPools:
    static = [(DRAFT, address) for address in settings.draft_endpoint]
    static += [(TARGET, address) for address in settings.target_endpoint]

    return ReplicaPools(
        tokenizer.fingerprint,
        partial(open_link, metadata=access.link_metadata, tls=settings.channel_tls),
        static_endpoints=static,
        registry=registry,
        lookup_pools=settings.lookup,
        first_model_pool=settings.default_draft_pool,
        target_wait_s=settings.target_wait_s,
        on_readiness=readiness.note_targets,
        prepare_for=partial(prepare_constraints, tokenizer),
    )


def _generation_settings(settings: CoordinatorSettings, access: CoordinatorAccess) -> GenerationSettings:
    return GenerationSettings(
        coordinator_id=f"c-{secrets.token_hex(6)}",
        lease_ttl_s=settings.lease_ttl_s,
        draft_timeout_s=settings.draft_timeout_s,
        admission=AdmissionSettings.of(settings, access.limits_of),
    )


async def _watch_until(stop: asyncio.Event, *watching: Coroutine[Any, Any, None]) -> None:
    """Run watchers until `stop`. Raises VocabularyMismatch when a static endpoint has another vocabulary at start."""
    watchers = {asyncio.create_task(one) for one in watching}
    tasks = {*watchers, asyncio.create_task(stop.wait())}
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for watcher in watchers & done:
            watcher.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


def _build_auditor(
    settings: CoordinatorSettings, metrics: CoordinatorMetrics, ending: AsyncExitStack
) -> Auditor | None:
    """Return the audit of rounds; None if no round is audited. Its series exist in any case."""
    audit_metrics = AuditMetrics(metrics.registry, served_name(settings.tokenizer))
    if settings.audit_share == 0.0:
        return None
    queue = AuditQueue(audit_metrics)
    ending.push_async_callback(queue.close)
    return Auditor(queue, settings.audit_share)


def _open_learning_log(settings: CoordinatorSettings, metrics: CoordinatorMetrics) -> LearningLog | None:
    """Open the learning log, if one is set. Raises InvalidRequest if its folder cannot be used."""
    if settings.learning_log is None:
        return None
    return LearningLog(
        settings.learning_log,
        tenant=settings.tenant,
        max_bytes=_MAX_LOG_BYTES,
        max_age_s=_MAX_LOG_AGE_S,
        serves_all_tenants=settings.tenant_header == "on",
        count=metrics.observe_logged,
    )


def _trace_requests(
    settings: CoordinatorSettings, ending: AsyncExitStack, environ: Mapping[str, str]
) -> Tracing | None:
    """Return the traces, whose queue closes with the coordinator; None if none are asked for."""
    tracing = open_tracing(settings.otlp_endpoint, settings.trace_share, service=_OTEL_SERVICE, environ=environ)
    if tracing is not None:
        ending.push_async_callback(asyncio.to_thread, tracing.close)
    return tracing


if __name__ == "__main__":
    sys.exit(main())
