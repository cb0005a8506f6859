"""Requests and tokens by tenant. The number of tenants with series of their own is bounded; the others share one."""

from __future__ import annotations

from specdec.observability.series import ServiceSeries

#: Label of the tenants that came after the limit was reached.
OTHER = "other tenants"


class TenantMetrics:
    """The series of the first tenants that send requests, for one thread."""

    def __init__(self, series: ServiceSeries, max_tenants: int) -> None:
        """`max_tenants`: number of tenants with series of their own; 0: no tenant is counted."""
        self._max_tenants = max_tenants
        self._known: set[str] = set()
        self._requests = series.counters(
            "tenant_requests", "Requests that ended, by tenant and outcome: finished, cancelled or failed.",
            "tenant", "outcome",
        )  # fmt: skip
        self._prompt_tokens = series.counters("tenant_prompt_tokens", "Prompt tokens of those requests.", "tenant")
        self._output_tokens = series.counters("tenant_generation_tokens", "Output tokens of those requests.", "tenant")

    def observe_end(self, tenant: str, outcome: str, num_prompt_tokens: int, num_output_tokens: int) -> None:
        """Count a request that ended."""
        if not self._max_tenants:
            return
        if tenant not in self._known:
            if len(self._known) < self._max_tenants:
                self._known.add(tenant)
            else:
                tenant = OTHER  # no tenant has a space in its name
        self._requests(tenant, outcome).inc()
        self._prompt_tokens(tenant).inc(num_prompt_tokens)
        self._output_tokens(tenant).inc(num_output_tokens)
