"""The reports of a coordinator about its requests: a log line for each, and the statistics of draft pools."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from specdec.v1 import coordinator_pb2 as pb
from tests.support.coordinator_rig import Coordinator, eventually, request, started_coordinator
from tests.support.output import read_until

ACCOUNT = "coordinator.generation.accounting"


def lines(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    """Return the fields of the log records of ended requests."""
    return [vars(record) | {"message": record.getMessage()} for record in caplog.records if record.name == ACCOUNT]


async def draft_pool(coordinator: Coordinator) -> pb.PoolInfo:
    (pool,) = [pool for pool in (await coordinator.stub.GetInfo(pb.GetInfoRequest())).pools if pool.role == "draft"]
    return pool


async def test_a_finished_request_logs_one_line_of_ids_counts_and_times(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger=ACCOUNT)
    async with started_coordinator() as (_, coordinator):
        output = await coordinator.generate(request(session_id="s", request_id="r", max_new_tokens=6))
    assert output.finished is not None
    (line,) = lines(caplog)
    stats = output.finished.stats
    assert (line["message"], line["levelname"], line["reason"]) == ("request finished", "INFO", "length")
    assert (line["session_id"], line["request_id"], line["turn"], line["mode"]) == ("s", "r", 0, "rejection")
    assert (line["num_prompt_tokens"], line["num_output_tokens"]) == (output.finished.usage.num_prompt_tokens, 6)
    for name in ("num_rounds", "num_draft_tokens", "num_accepted_tokens", "num_target_only_steps", "wire_bytes"):
        assert line[name] == getattr(stats, name)
    assert line["e2el_s"] == pytest.approx(stats.e2el_s, abs=1e-3)
    assert 0 < line["ttft_s"] <= line["e2el_s"]


async def test_the_log_line_of_a_request_holds_no_text_and_no_token(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    async with started_coordinator() as (_, coordinator):
        asked = request(None, session_id="s", max_new_tokens=6, stop=["w499"])
        asked.prompt = "w473 w474"
        output = await coordinator.generate(asked)
    told = " ".join(str(fields) for fields in lines(caplog))
    assert lines(caplog)
    assert not [text for text in ("w473", "w499", output.text, str(output.token_ids)) if text in told]


async def test_a_cancelled_request_logs_one_line_with_its_cause(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger=ACCOUNT)
    async with started_coordinator() as (_, coordinator):
        stream = coordinator.stub.Generate(request(session_id="s", max_new_tokens=300))
        await read_until(stream, 1)
        stream.cancel()
        await eventually(lambda: bool(lines(caplog)))
    (line,) = lines(caplog)
    assert (line["message"], line["reason"], line["session_id"]) == ("request cancelled", "client_left", "s")
    assert line["num_output_tokens"] >= 1


async def test_a_pool_reports_alpha_after_a_tested_token_and_gamma_after_a_choice() -> None:
    async with started_coordinator(draft_salt=0) as (_, coordinator):
        await coordinator.generate(request(mode=pb.SPECULATION_MODE_OFF, gamma=None))
        pool = await draft_pool(coordinator)
        assert not pool.HasField("alpha")
        assert not pool.HasField("gamma")  # a request without drafts gives no statistics
        await coordinator.generate(request(gamma=3))
        pool = await draft_pool(coordinator)
        assert pool.alpha == 1.0
        assert not pool.HasField("gamma")  # the caller set gamma
        await coordinator.generate(request(gamma=None))
        pool = await draft_pool(coordinator)
        assert pool.HasField("gamma")
        assert 0 <= pool.gamma <= 8  # 0 where drafting did not pay in the first rounds of a busy machine
