"""The time of an answer does not say whether another tenant has a session of an id.

Times of two kinds of calls, made in random order, are compared by their ranks (Mann-Whitney). A test of equal kinds
fails with probability 1e-6. The control compares kinds that do differ: a session of one's own and an unknown id.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence

import grpc
import numpy as np

from specdec.contract.tenant import TENANT_KEY
from specdec.v1 import coordinator_pb2 as pb
from tests.support.coordinator_rig import Coordinator, Rig, request
from tests.support.redis_fixture import redis_server, redis_url

__all__ = ["redis_server", "redis_url"]

#: Standard deviations of a normal variable that are exceeded on either side with probability 1e-6.
LIMIT = 4.9
NUM_CALLS = 400


async def seconds_of(coordinator: Coordinator, session_id: str) -> float:
    """Return the time of a call of the tenant acme for a session."""
    asked = pb.GetSessionRequest(session_id=session_id, include_token_ids=True)
    began_s = time.perf_counter()
    with contextlib.suppress(grpc.aio.AioRpcError):  # an unknown session
        await coordinator.stub.GetSession(asked, metadata=((TENANT_KEY, "acme"),))
    return time.perf_counter() - began_s


def difference(first: Sequence[float], second: Sequence[float]) -> float:
    """Return how far apart the ranks of two samples are, in standard deviations of equal ones."""
    ranks = np.argsort(np.argsort([*first, *second])) + 1.0
    n, m = len(first), len(second)
    statistic = ranks[:n].sum() - n * (n + 1) / 2
    return float((statistic - n * m / 2) / np.sqrt(n * m * (n + m + 1) / 12))


async def test_a_session_id_of_another_tenant_takes_as_long_as_an_unknown_one(redis_url: str) -> None:
    async with Rig(store_url=redis_url, drafts=0) as rig:
        coordinator = await rig.coordinator(tenant_header=True)
        for tenant, session_id in (("other", "of-another-tenant"), ("acme", "of-this-tenant-xx")):
            asked = request(session_id=session_id, max_new_tokens=400)
            async for _ in coordinator.stub.Generate(asked, metadata=((TENANT_KEY, tenant),)):
                pass
        kinds = ("of-another-tenant", "of-this-tenant-xx", "an-unknown-id-xxx")
        times: dict[str, list[float]] = {kind: [] for kind in kinds}
        order = np.random.default_rng(1).permutation(np.repeat(np.arange(len(kinds)), NUM_CALLS))
        for index in order:
            times[kinds[index]].append(await seconds_of(coordinator, kinds[index]))
    theirs, ours, unknown = (times[kind] for kind in kinds)
    assert abs(difference(theirs, unknown)) < LIMIT
    assert difference(ours, unknown) > LIMIT
