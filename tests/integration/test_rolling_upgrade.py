"""A request that started at a coordinator of an older version can be retried at this version."""

from __future__ import annotations

from dataclasses import replace

import grpc
import pytest

from specdec.contract.types import FinishReason
from specdec.rpc.status_mapping import from_rpc_error
from specdec.state.store import Commit
from tests.support.coordinator_rig import PROMPT, request, started_coordinator
from tests.support.store_sessions import forget_session

#: Digest of the request below as stored by a version whose digests had no version prefix.
FORM_1_DIGEST = "10ebf7b7c33729346995280692fc1c99"


@pytest.mark.parametrize("num_committed", [5, 12])
async def test_a_retry_of_a_request_stored_by_an_older_version_is_recognised(num_committed: int) -> None:
    async with started_coordinator() as (rig, newer):
        asked = request(session_id="s", request_id="r", max_new_tokens=12, gamma=2)
        first = await newer.generate(asked)
        record = await rig.store.load("s")
        assert record is not None
        assert record.request is not None
        assert record.request.request_digest != FORM_1_DIGEST
        token_ids = await rig.store.read_tokens("s")

        # The session as the older version leaves it, finished or unfinished.
        await forget_session(rig.store._connection, "s")
        lease = await rig.store.acquire("s", owner="older", ttl_s=30.0, create=True)
        stored = replace(record.request, request_digest=FORM_1_DIGEST, finish_reason=None)
        await rig.store.begin_request(lease, stored, keep=0, token_ids=token_ids[: len(PROMPT)])
        reason = FinishReason.LENGTH if num_committed == 12 else None
        output = token_ids[len(PROMPT) :][:num_committed]
        await rig.store.commit(lease, Commit(0, len(PROMPT), output, record.request.stats_json, reason, b""))
        await rig.store.release(lease)

        upgraded = await rig.coordinator()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await upgraded.generate(request(session_id="s", request_id="r", max_new_tokens=11, gamma=2))
        assert from_rpc_error(caught.value).field == "request_id"
        again = await upgraded.generate(asked)
        assert (again.token_ids, again.text) == (first.token_ids, first.text)
