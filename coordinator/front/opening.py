"""Opens the generation of a call: finds its tenant, checks its request against the target's limits, counts a refusal.

Each servicer decodes its own messages and calls this module, so every contract starts requests in the same way. The
checked request goes to `generation/generation_service`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from coordinator.front.raw_params import RawGenerationParams
from coordinator.front.tenants import CallTenants
from coordinator.front.validation import ServingLimits, validate_request
from coordinator.generation.generation_service import GenerationService
from coordinator.generation.stream import Subscription
from coordinator.replicas.pool import ReplicaPools
from specdec.contract.errors import SpecdecError
from specdec.contract.types import Mode


class RequestOpener:
    """Opens requests for the servicers of one coordinator."""

    def __init__(
        self, generations: GenerationService, pools: ReplicaPools, tenants: CallTenants, default_mode: Mode
    ) -> None:
        """
        Args:
            generations: runs the requests.
            pools: replicas, for the limits that requests are checked against.
            tenants: decides which tenant a call is served for.
            default_mode: speculation mode of requests that name none.
        """
        self._generations = generations
        self._pools = pools
        self._tenants = tenants
        self._default_mode = default_mode

    async def open(self, context: Any, decode: Callable[[ServingLimits], RawGenerationParams]) -> Subscription:
        """Return a reader of the generation that a call asks for. Raises what `GenerationService.open` raises.

        Args:
            context: gRPC context of the call.
            decode: returns the call's request; it may raise InvalidRequest.
        """
        try:
            tenant = self._tenants.of(context)
            limits = self._limits()
            checked = validate_request(decode(limits), limits)
            reader = await self._generations.open(replace(checked, tenant=tenant, deadline_s=_deadline_s(context)))
        except SpecdecError as error:
            self._generations.count_refusal(error)
            raise
        # gRPC holds the last events until the client reads them, so the call may last longer than the reading.
        reader.hold()
        context.add_done_callback(lambda _: reader.let_go())
        return reader

    def tenant_of(self, context: Any) -> str:
        """Return the tenant of a call. Raises as `CallTenants.of`."""
        return self._tenants.of(context)

    def _limits(self) -> ServingLimits:
        """Return the limits for requests. Raises Unavailable before the first target replica is connected."""
        target = self._pools.target_info
        return ServingLimits(
            vocabulary_size=target.vocabulary_size,
            max_context_tokens=self._pools.max_context_tokens,
            max_gamma=self._pools.max_gamma,
            eos_token_ids=target.eos_token_ids,
            default_mode=self._default_mode,
            backend=target.backend,
            unsupported_fields=target.unsupported_fields,
        )


def _deadline_s(context: Any) -> float | None:
    """Return the time at which the call ends, by `time.monotonic`; None where its caller set none."""
    left_s = context.time_remaining()
    return None if left_s is None else time.monotonic() + left_s
