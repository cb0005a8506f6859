"""Usage records of a coordinator's turns: the key that pays, the model, and the counts that the client got."""

from __future__ import annotations

import grpc
import pytest

from specdec.contract.payer import KEY_ID_KEY, key_id_of
from specdec.rpc.status_mapping import from_rpc_error
from specdec.state.usage_records import UsageRecord
from specdec.v1 import coordinator_pb2 as pb
from tests.support.coordinator_rig import PROMPT, Coordinator, Rig, eventually, request
from tests.support.output import Output, read_until

KEY_ID = key_id_of("0123456789abcdef" * 4)


async def run(coordinator: Coordinator, asked: pb.GenerateRequest, *key_ids: str) -> Output:
    output = Output()
    async for response in coordinator.stub.Generate(asked, metadata=[(KEY_ID_KEY, key_id) for key_id in key_ids]):
        output.add(response)
    return output


async def usage_of(rig: Rig) -> list[UsageRecord]:
    return [record async for record in rig.store.usage().read(0, 1 << 45)]


async def test_a_turn_is_recorded_with_its_key_its_model_and_the_counts_of_its_answer() -> None:
    async with Rig() as rig:
        coordinator = await rig.coordinator()
        first = await run(coordinator, request(session_id="s", request_id="r1"), KEY_ID)
        await run(coordinator, request([9, 10], session_id="s", request_id="r2"))
        again = await run(coordinator, request([9, 10], session_id="s", request_id="r2"))  # a replay
        records = await usage_of(rig)
    assert [(record.request, record.key, record.outcome) for record in records] == [
        ("r1", KEY_ID, "length"),
        ("r2", "", "length"),
    ]
    assert records[0].model
    for record, output in zip(records, (first, again), strict=True):
        finished = output.finished
        assert finished is not None
        assert record.prompt_tokens == finished.usage.num_prompt_tokens
        assert record.cached_tokens == finished.usage.num_cached_prompt_tokens
        assert record.output_tokens == finished.usage.num_output_tokens == 24
        assert record.draft_tokens == finished.stats.num_draft_tokens > 0
        assert record.accepted_tokens == finished.stats.num_accepted_tokens


async def test_a_turn_whose_client_left_is_recorded_by_the_next_turn_with_its_first_key() -> None:
    async with Rig(drafts=0) as rig:
        coordinator = await rig.coordinator()
        stream = coordinator.stub.Generate(
            request(session_id="s", request_id="r1", max_new_tokens=200), metadata=[(KEY_ID_KEY, KEY_ID)]
        )
        await read_until(stream, 3)
        stream.cancel()
        await eventually(lambda: not coordinator.generations.num_running)
        assert not await usage_of(rig)
        record = await rig.store.load("s")
        assert record is not None
        num_output = record.num_tokens - len(PROMPT)
        next_turn = request([9], session_id="s", request_id="r2", max_new_tokens=2)
        await run(coordinator, next_turn, "f" * 16)
        records = await usage_of(rig)
    assert [(each.request, each.key, each.output_tokens, each.outcome) for each in records] == [
        ("r1", KEY_ID, num_output, "broken"),
        ("r2", "f" * 16, 2, "length"),
    ]


async def test_a_key_id_of_another_form_is_refused_by_name() -> None:
    async with Rig(drafts=0) as rig:
        coordinator = await rig.coordinator()
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await run(coordinator, request(), "not a key")
        error = from_rpc_error(refused.value)
        assert (error.reason, error.field) == ("INVALID_REQUEST", KEY_ID_KEY)
        assert not await usage_of(rig)
