"""Admission of one coordinator: the limits of the tenant (`quotas`), then the queue for a slot (`slots`).

`generation_service` calls this module for every request that does not join a running one. A resumption was admitted
before, and its caller holds a part of the output: it counts among the tenant's streams, but not as another request.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from coordinator.admission.quotas import TenantQuotas, exceeded, limits_over
from coordinator.admission.slot_request import QueueState, SlotRequest
from coordinator.admission.slots import RunningSlot, RunningSlots
from specdec.access.grants import UNLIMITED, Limits
from specdec.contract.errors import ResourceExhausted, SpecdecError
from specdec.contract.tenant import SessionKey
from specdec.settings.coordinator import CoordinatorSettings
from specdec.state.shared_quotas import QuotaLimits, QuotaOwner, Refusal, SharedQuotas


@dataclass(frozen=True, slots=True)
class AdmissionSettings:
    """Settings of the admission (see `specdec.settings.coordinator`)."""

    max_queue: int
    """Requests that wait or run at once."""
    max_running: int | None = None
    """Requests that run at once; None: chosen from measured speeds."""
    max_wait_s: float = 60.0
    """Predicted wait beyond which a request is refused once one request waits for each slot."""
    session_ttl_s: float = 3600.0
    """Time for which an idle session is kept."""
    tenant_limits: Limits = UNLIMITED
    """Limits of a tenant that has none of its own."""
    limits_of: Callable[[str], Limits] = lambda tenant: UNLIMITED
    """Returns the own limits of a tenant."""

    @classmethod
    def of(cls, settings: CoordinatorSettings, limits_of: Callable[[str], Limits]) -> AdmissionSettings:
        """Return the settings of a coordinator's flags; `limits_of` returns the limits of a tenant's keys."""
        limits = Limits(
            settings.tenant_max_streams,
            settings.tenant_max_requests_per_minute,
            settings.tenant_max_tokens_per_minute,
            settings.tenant_max_sessions,
            settings.tenant_max_prompt_tokens,
            settings.tenant_max_reserved_tokens,
        )
        return cls(
            settings.max_queue, settings.max_running, settings.max_wait_s, settings.session_ttl_s, limits, limits_of
        )


class Admission:
    """Admits the requests of one coordinator. Used from one event loop."""

    def __init__(self, settings: AdmissionSettings, num_targets: Callable[[], int], shared: SharedQuotas) -> None:
        """
        Args:
            settings: settings of the admission.
            num_targets: returns the number of target replicas that take sessions.
            shared: limits that all coordinators count together; closed by `close_quotas`.
        """
        self._shared = shared
        self.quotas = TenantQuotas(
            lambda tenant: limits_over(settings.limits_of(tenant), settings.tenant_limits),
            session_ttl_s=settings.session_ttl_s,
        )
        self._slots = RunningSlots(
            num_targets,
            max_queue=settings.max_queue,
            max_running=settings.max_running,
            max_wait_s=settings.max_wait_s,
            count_tokens=self.count_tokens,
            num_reading=lambda: max(0, self._readers.total()),
        )
        self._readers: Counter[str] = Counter()
        """Readers by tenant, less the generations that they read: a running one counts by its slot."""

    @property
    def queue_state(self) -> QueueState:
        """State of the queue, for metrics; any thread may read it."""
        return self._slots.state

    async def enter(self, request: SlotRequest) -> RunningSlot:
        """Return a slot once the request may run.

        Raises:
            ResourceExhausted: QUOTA_EXCEEDED, or QUEUE_FULL as `RunningSlots.acquire`.
            Unavailable: the tenant has a limit, and the store that counts it cannot be reached.
            SpecdecError: what `close` or `withdraw` was given.
        """
        tenant = request.key.tenant
        limits = _counted(self.quotas.limits_of(tenant))
        if limits.is_unlimited:
            return await self._slots.acquire(request)
        owner = QuotaOwner(tenant)
        num_streams = partial(self._num_streams, tenant)
        refusal = await self._shared.take(owner, limits, num_streams, is_resumption=request.is_resumption)
        if refusal is not None:
            raise _refused(limits, refusal)
        self._shared.entered(owner)  # `acquire` counts it before it waits for anything
        try:
            return await self._slots.acquire(request)
        except BaseException:
            if not request.is_resumption:
                self._shared.give_back(owner)
            raise

    def count_tokens(self, tenant: str, num_tokens: int) -> None:
        """Count tokens of a request's prompt or output among those of the tenant's minute."""
        self._shared.count_tokens(QuotaOwner(tenant), num_tokens)

    def note_readers(self, tenant: str, number: int) -> None:
        """Count readers that came, or left if the number is negative. A generation that begins counts as -1, and as +1
        when it ends, since its slot counts as long as it runs."""
        self._readers[tenant] += number
        if not self._readers[tenant]:
            del self._readers[tenant]
        self._shared.note_end(QuotaOwner(tenant))

    def has_all_streams(self, tenant: str) -> bool:
        """Return whether a tenant may not have a further stream, such as one more reader of a running request."""
        most = self.quotas.limits_of(tenant).max_concurrent
        if most is None:
            return False
        return self._num_streams(tenant) + self._shared.num_others(QuotaOwner(tenant)) >= most

    def _num_streams(self, tenant: str) -> int:
        return self._slots.num_of_tenant(tenant) + max(0, self._readers[tenant])

    def begin_tokens(self, slot: RunningSlot, num_prompt_tokens: int, num_new_tokens: int) -> None:
        """Check the tokens of a new request against its tenant's limits. They count until its slot is released.

        Raises:
            ResourceExhausted: QUOTA_EXCEEDED.
        """
        self.quotas.check_prompt(slot.tenant, num_prompt_tokens)
        self.quotas.check_reserved(slot.tenant, num_prompt_tokens + num_new_tokens)
        self.reserve_tokens(slot, num_prompt_tokens + num_new_tokens)

    def reserve_tokens(self, slot: RunningSlot, num_tokens: int) -> None:
        """Count the tokens that a request may reach until its slot is released, also beyond the tenant's limit."""
        self.quotas.reserve(slot.tenant, num_tokens)
        slot.when_released = lambda: self.quotas.reserve(slot.tenant, -num_tokens)

    def withdraw(self, key: SessionKey, error: Callable[[], SpecdecError]) -> None:
        """Refuse the waiting requests of a session that is being deleted."""
        self._slots.withdraw(key, error)

    async def close_quotas(self) -> None:
        """Give back what this coordinator holds of the limits. Call it when no request runs."""
        await self._shared.close()

    def close(self, error: Callable[[], SpecdecError]) -> None:
        """Refuse all waiting requests, and all later ones."""
        self._slots.close(error)


def _counted(limits: Limits) -> QuotaLimits:
    """Return the limits that all coordinators count together."""
    return QuotaLimits(limits.max_concurrent, limits.max_requests_per_minute, limits.max_tokens_per_minute)


def _refused(limits: QuotaLimits, refusal: Refusal) -> ResourceExhausted:
    """Return the error of a request beyond one of the limits."""
    words = {
        "streams": f"{limits.max_streams} requests at once",
        "requests": f"{limits.max_requests_per_minute} requests per minute",
        "tokens": f"{limits.max_tokens_per_minute} tokens per minute",
    }
    return exceeded(words[refusal.limit], refusal.retry_after_s)
