"""Stages of a call: stated on request, ascending for any clocks, and equal on both sides of a link."""

from __future__ import annotations

import asyncio

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from coordinator.replicas.replica import TARGET
from specdec.contract.types import DrawRule, Stages, VerifyRequest
from specdec.engine.loop.replica_engine import LOCAL_REPLICA
from specdec.rpc.stages import decode_stages, encode_stages
from specdec.v1 import common_pb2
from target_service.verifier import Verifier
from tests.support.arithmetic_engines import GREEDY, make_round
from tests.support.table_services import linked
from tests.support.table_worker import TableWorker

SECONDS = st.floats(-1e6, 1e6)


@given(*[SECONDS] * 7)
def test_stages_ascend_on_the_wire_also_for_a_repeated_call(
    received_s: float, decoded_s: float, admitted_s: float, began_s: float, ended_s: float, answered_s: float,
    encoded_s: float,
) -> None:  # fmt: skip
    message = common_pb2.Stages()
    encode_stages(Stages(admitted_s, began_s, ended_s, received_s, decoded_s, answered_s, encoded_s), message)
    read = decode_stages(common_pb2.Stages.FromString(message.SerializeToString()))
    times = [read.received_s, read.decoded_s, read.admitted_s, read.step_began_s, read.step_ended_s, read.answered_s,
             read.encoded_s]  # fmt: skip
    assert times == sorted(times)
    assert times[0] == 0.0


async def test_a_replica_states_its_stages_only_in_answers_to_timed_requests() -> None:
    verifier = Verifier(TableWorker(), LOCAL_REPLICA)
    asked = make_round(filters=GREEDY, num_tokens=3)
    asked.token_ids = np.array([1, 2, 3], dtype=np.uint32)
    asked.draw_rule = DrawRule.COUPLED
    timed = make_round("t", filters=GREEDY, num_tokens=3)
    timed.token_ids, timed.draw_rule, timed.is_timed = asked.token_ids, asked.draw_rule, True
    no_draft = np.empty(0, np.uint32)
    async with linked(TARGET, verifier) as link:
        plain, told = await asyncio.gather(
            *(link.verify(VerifyRequest(position, no_draft, ())) for position in (asked, timed))
        )
    await verifier.close()
    assert plain.stages is None
    assert told.stages is not None
    assert 0 < told.stages.decoded_s <= told.stages.admitted_s <= told.stages.step_began_s < told.stages.step_ended_s
    assert told.stages.step_ended_s <= told.stages.answered_s <= told.stages.encoded_s <= told.stages.sent_s
