"""A session store that runs a function at one moment, coordinators on it, and checks of the stored keys."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import pytest

from specdec.rpc.status_mapping import from_rpc_error
from specdec.v1 import coordinator_pb2 as pb
from tests.support.coordinator_rig import Coordinator, Rig


class InterruptedStore:
    """A session store that runs a function before or after the first call of one method."""

    def __init__(
        self,
        store: Any,
        method: str,
        *,
        before: Callable[..., Awaitable[None]] | None = None,
        after: Callable[..., Awaitable[None]] | None = None,
    ) -> None:
        self._store = store
        self._method = method
        self._before = before
        self._after = after

    def interrupt_next(
        self,
        method: str,
        before: Callable[..., Awaitable[None]] | None = None,
        after: Callable[..., Awaitable[None]] | None = None,
    ) -> None:
        self._method, self._before, self._after = method, before, after

    def of_tenant(self, tenant: str) -> InterruptedStore:
        """Return this store: its tests have one tenant."""
        return self

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._store, name)
        if name != self._method:
            return method

        async def call(*args: Any, **kwargs: Any) -> Any:
            before, self._before = self._before, None
            if before is not None:
                await before(*args)
            answer = await method(*args, **kwargs)
            after, self._after = self._after, None
            if after is not None:
                await after()
            return answer

        return call


async def coordinator_on(rig: Rig, store: InterruptedStore, **settings: Any) -> Coordinator:
    whole, rig.store = rig.store, store  # type: ignore[assignment]
    try:
        return await rig.coordinator(**settings)
    finally:
        rig.store = whole


async def reason_of(coordinator: Coordinator, asked: pb.GenerateRequest) -> str:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await coordinator.generate(asked)
    return from_rpc_error(caught.value).reason


async def keys_of(rig: Rig) -> list[bytes]:
    """Return the stored keys without deletion marks."""
    keys: list[bytes] = await rig.store._connection.run_command("KEYS", "specdec:default:*")
    return [key for key in keys if not key.endswith(b":deleted")]
