"""Clients of the wrong kind, or with bad intent, get words and a status, and leave nothing behind."""

from __future__ import annotations

import asyncio
import contextlib

import grpc
import pytest

from specdec.v1 import coordinator_pb2 as pb
from specdec.v1.coordinator_pb2_grpc import CoordinatorServiceStub
from tests.support.gateway_rig import running_gateway

CHAT = "/v1/chat/completions"


async def test_a_body_that_stops_half_way_is_refused_with_408() -> None:
    async with running_gateway(body_timeout_s=0.3) as running:
        reader, writer = await running.connect()
        writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 100\r\n\r\n{")
        answer = await reader.read()
        assert answer.startswith(b"HTTP/1.1 408 ")
        assert b"did not arrive within 0.3 s" in answer
        writer.close()


@pytest.mark.parametrize("is_announced", [True, False])
async def test_a_body_over_the_limit_is_refused_with_413(is_announced: bool) -> None:
    async def parts():
        for _ in range(5):
            yield b"x" * 1000

    async with running_gateway(max_body_bytes=2000) as running:
        answer = await running.http.post(CHAT, content=b"x" * 5000 if is_announced else parts())
        assert answer.status_code == 413
        assert answer.json()["error"]["message"] == "the request body must have at most 2000 bytes"
        assert (await running.http.get("/health")).status_code == 200


async def test_a_grpc_client_is_told_that_this_is_the_http_port() -> None:
    async with running_gateway() as running:
        reader, writer = await running.connect()
        writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\4\0\0\0\0\0")
        answer = await reader.read()
        assert answer.startswith(b"HTTP/1.1 505 ")
        assert b"gRPC is served by the coordinator" in answer
        writer.close()
        async with grpc.aio.insecure_channel(f"127.0.0.1:{running.port}") as channel:
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await CoordinatorServiceStub(channel).GetInfo(pb.GetInfoRequest())
        assert refused.value.code() is grpc.StatusCode.UNAVAILABLE


@pytest.mark.parametrize(
    ("content", "content_type", "words"),
    [
        (b'{"messages": []}', "text/plain", "send the header content-type: application/json"),
        (b'{"messages": 3}', "application/json", "messages: must be a valid list"),
        (b'{"messages": [{"content": "hi"}]}', "application/json", "messages[0].role: is required"),
    ],
)
async def test_a_malformed_body_is_refused_with_400(content: bytes, content_type: str, words: str) -> None:
    async with running_gateway() as running:
        answer = await running.http.post(CHAT, content=content, headers={"content-type": content_type})
        assert answer.status_code == 400
        error = answer.json()["error"]
        assert words in error["message"]
        assert error["type"] == "invalid_request_error"


async def test_without_a_coordinator_requests_are_refused_with_503_and_the_gateway_stays_healthy() -> None:
    async with running_gateway() as running:
        answer = await running.http.post(CHAT, json={"messages": [{"role": "user", "content": "hi"}]})
        assert answer.status_code == 503
        assert answer.json()["error"]["code"] == "coordinator_unavailable"
        assert int(answer.headers["retry-after"]) >= 1
        assert (await running.http.get("/ready")).status_code == 503
        assert (await running.http.get("/health")).status_code == 200


async def test_unknown_paths_and_methods_get_the_api_s_error_object() -> None:
    async with running_gateway() as running:
        absent = await running.http.get("/v2/nothing")
        assert (absent.status_code, absent.json()["error"]["code"]) == (404, "not_found")
        wrong = await running.http.get(CHAT)
        assert (wrong.status_code, wrong.json()["error"]["code"]) == (405, "method_not_allowed")
        assert wrong.headers["allow"] == "POST"


async def test_many_clients_whose_headers_come_too_slowly_or_not_at_all_are_told_and_leave_nothing_behind() -> None:
    begun = (b"", b"GET / HT", b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nx-slow: ")
    async with running_gateway(header_timeout_s=0.3) as running:
        connections = [await running.connect() for _ in range(51)]
        for place, (_, writer) in enumerate(connections):
            writer.write(begun[place % 3])
        answers = await asyncio.gather(*(reader.read() for reader, _ in connections))
        assert all(answer.startswith(b"HTTP/1.1 408 ") for answer in answers)
        assert running.count("specdec:http_requests_in_flight") == 0


@pytest.mark.parametrize(
    "begin", [b"GET /health HTTP/1.1\r\nhost: localhost\r\nx: ", b"GET /health HTTP/1.1\r\n", b"GET /"]
)
async def test_headers_without_end_are_refused_before_they_fill_the_memory(begin: bytes) -> None:
    async with running_gateway() as running:
        reader, writer = await running.connect()
        writer.write(begin)
        with contextlib.suppress(ConnectionError):
            for _ in range(100):  # 26 MB, if the gateway took it all
                writer.write((b"a: b\r\n" if begin.endswith(b"\n") else b"yyyyyy") * 43_690)
                await writer.drain()
        answer = await _rest(reader)
        assert answer == b"" or answer.startswith(b"HTTP/1.1 431 ")
        writer.close()
        assert (await running.http.get("/health")).status_code == 200


async def test_headers_of_the_usual_size_are_read_however_they_are_divided() -> None:
    async with running_gateway() as running:
        reader, writer = await running.connect()
        for part in (b"GET /hea", b"lth HTTP/1.1\r\nx: ", b"y" * 30_000, b"\r\nconnection: close\r\n", b"\r\n"):
            writer.write(part)
            await writer.drain()
        assert (await reader.read()).startswith(b"HTTP/1.1 200 ")
        writer.close()


async def test_half_a_request_behind_another_waits_for_its_answer_and_is_then_refused() -> None:
    async with running_gateway(header_timeout_s=0.2, retry_s=1.0) as running:
        reader, writer = await running.connect()
        body = b'{"prompt": "x"}'
        head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        writer.write(head + b"content-length: %d\r\n\r\n" % len(body) + body + b"GET /hea")
        answers = await reader.read()
        writer.close()
        assert answers.startswith(b"HTTP/1.1 503 ")
        assert b"HTTP/1.1 408 " in answers


async def test_a_body_beside_a_wish_for_another_protocol_is_refused_in_words() -> None:
    async with running_gateway() as running:
        headers = {"connection": "Upgrade, HTTP2-Settings", "upgrade": "h2c", "http2-settings": "AAMAAABkAAQCAAAA"}
        answer = await running.http.post(CHAT, json={}, headers=headers)
        assert answer.status_code == 400
        assert "must be set to HTTP/1.1" in answer.json()["error"]["message"]
        assert (await running.http.get("/health", headers=headers)).status_code == 200


async def test_blank_lines_between_requests_do_not_keep_a_connection() -> None:
    async with running_gateway(header_timeout_s=0.3) as running:
        reader, writer = await running.connect()
        writer.write(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")
        assert await reader.readuntil(b"}")
        writer.write(b"\r\n")
        assert (await reader.read()).startswith(b"HTTP/1.1 408 ")
        writer.close()


async def _rest(reader: asyncio.StreamReader) -> bytes:
    try:
        return await reader.read()
    except ConnectionError:
        return b""
