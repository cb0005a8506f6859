"""Records of requests that the settings ask for: audit, learning log and traces.

`__main__` calls these functions once at the start.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import AsyncExitStack

from coordinator.audit.audit_queue import AuditQueue
from coordinator.audit.turn_audit import Auditor
from coordinator.learning.log import LearningLog
from specdec.observability.audit import AuditMetrics
from specdec.observability.coordinator_metrics import CoordinatorMetrics
from specdec.observability.series import served_name
from specdec.observability.tracing import Tracing, open_tracing
from specdec.settings.coordinator import CoordinatorSettings

#: Name of this service in traces.
_OTEL_SERVICE = "specdec-coordinator"

#: Limits on the texts of one tenant's learning log: more than a distillation reads, and as long as logs usually live.
_MAX_LOG_BYTES = 1 << 30
_MAX_LOG_AGE_S = 7 * 86400.0


def build_auditor(settings: CoordinatorSettings, metrics: CoordinatorMetrics, ending: AsyncExitStack) -> Auditor | None:
    """Return the audit of rounds; None where no round is audited. Its series exist in any case."""
    audit_metrics = AuditMetrics(metrics.registry, served_name(settings.tokenizer))
    if settings.audit_share == 0.0:
        return None
    queue = AuditQueue(audit_metrics)
    ending.push_async_callback(queue.close)
    return Auditor(queue, settings.audit_share)


def open_learning_log(settings: CoordinatorSettings, metrics: CoordinatorMetrics) -> LearningLog | None:
    """Open the learning log, if one is set. Raises InvalidRequest where its folder cannot be used."""
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


def trace_requests(settings: CoordinatorSettings, ending: AsyncExitStack, environ: Mapping[str, str]) -> Tracing | None:
    """Return the traces, whose queue closes with the coordinator; None where none are asked for."""
    tracing = open_tracing(settings.otlp_endpoint, settings.trace_share, service=_OTEL_SERVICE, environ=environ)
    if tracing is not None:
        ending.push_async_callback(asyncio.to_thread, tracing.close)
    return tracing
