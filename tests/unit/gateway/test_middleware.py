"""The layers around the routes count failures as failures, and resumed streams as requests of their key."""

from __future__ import annotations

from pathlib import Path

import pytest
from starlette.types import Message, Receive, Scope, Send

from gateway.auth import ApiKeys
from gateway.metrics import GatewayMetrics
from gateway.middleware import Measured
from tests.support.gateway_rig import running_gateway
from tests.support.key_files import key_line, write_private


async def test_a_request_that_fails_inside_the_gateway_counts_as_500_and_not_as_a_client_that_left() -> None:
    async def failing(scope: Scope, receive: Receive, send: Send) -> None:
        raise RuntimeError("a fault of the gateway")

    async def receive() -> Message:
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        raise AssertionError("there is no answer")

    metrics = GatewayMetrics()
    with pytest.raises(RuntimeError, match="a fault of the gateway"):
        await Measured(failing, metrics)({"type": "http"}, receive, send)
    counted = metrics.registry.get_sample_value("specdec:http_requests_total", {"route": "other", "status": "500"})
    assert counted == 1
    assert metrics.registry.get_sample_value("specdec:http_requests_in_flight") == 0


async def test_requests_and_resumed_streams_count_against_the_limit_of_their_key_and_reading_a_record_does_not(
    tmp_path: Path,
) -> None:
    write_private(tmp_path / "keys", key_line("key", "acme generate rpm=1"))
    async with running_gateway(keys=ApiKeys(tmp_path / "keys", allow_anonymous=False)) as running:
        headers = {"authorization": "Bearer key"}
        for _ in range(2):
            assert (await running.http.get("/v1/sessions/a", headers=headers)).status_code == 503
        request = {"headers": headers, "json": {"prompt": "x"}}
        headers_of_a_stream = headers | {"accept": "text/event-stream"}
        answers = [
            await running.http.post("/v1/completions", **request),
            await running.http.get("/v1/sessions/a", headers=headers_of_a_stream),
        ]
        assert [answer.status_code for answer in answers] == [503, 429]
        assert answers[1].json()["error"]["code"] == "quota_exceeded"
