"""HTTP as other people's clients and proxies speak it: HEAD, slashes, forwarded addresses, old versions, line ends."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from tests.support.coordinator_rig import Rig
from tests.support.gateway_rig import RunningGateway, running_gateway
from tests.support.table_services import write_chat_tokenizer

pytestmark = pytest.mark.asyncio(loop_scope="module")  # the tests share services

HELLO = [{"role": "user", "content": "w5 w6"}]
#: Every character at which a reader of Unicode text may end a line.
LINE_ENDS = "a\x0b\x0c\x1c\x1d\x1e\x85\u2028\u2029\r\nb"
NAMES = ("table", "org/name", LINE_ENDS)
STREAMS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": HELLO, "max_tokens": 4},
    "/v1/completions": {"prompt": "w5 w6", "max_tokens": 4},
    "/v1/responses": {"input": "w5 w6", "max_output_tokens": 4, "store": False},
    "/v1/messages": {"messages": HELLO, "max_tokens": 4},
}
POSTS = {
    **STREAMS,
    "/v1/messages/count_tokens": {"messages": HELLO},
    "/tokenize": {"prompt": "w5 w6"},
    "/detokenize": {"tokens": [5, 6]},
}
GETS = (
    "/v1/models", "/v1/models/table", "/v1/models/other", "/v1/sessions/kept", "/v1/sessions/none", "/v1/responses/r",
    "/health", "/ready", "/version", "/metrics", "/openapi.json", "/", "/nothing",
)  # fmt: skip


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running() -> AsyncIterator[RunningGateway]:
    async with Rig(write_checkpoint=write_chat_tokenizer) as rig:
        coordinator = await rig.coordinator()
        async with running_gateway(coordinator.server.address, served_model_name=NAMES) as running:
            body = {"prompt": "w5", "max_tokens": 4, "ignore_eos": True, "session_id": "kept"}
            assert (await running.http.post("/v1/completions", json=body)).status_code == 200
            yield running


async def exchange(running: RunningGateway, head: str, body: bytes = b"") -> tuple[bytes, bytes]:
    """Send one request and return all that comes until the gateway closes the connection: head and body."""
    reader, writer = await running.connect()
    writer.write(f"{head}\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body)
    answer, _, content = (await reader.read()).partition(b"\r\n\r\n")
    writer.close()
    return answer, content


@pytest.mark.parametrize("path", GETS)
async def test_head_is_answered_as_get_without_the_body(running: RunningGateway, path: str) -> None:
    got, asked = await running.http.get(path), await running.http.head(path)
    assert (asked.status_code, asked.content) == (got.status_code, b"")
    assert asked.headers["content-type"] == got.headers["content-type"]
    if path not in ("/metrics", "/v1/sessions/kept"):  # these tell of the time, and of these requests
        assert asked.headers["content-length"] == got.headers["content-length"]


async def test_head_of_a_session_begins_no_stream(running: RunningGateway) -> None:
    asked = await running.http.head("/v1/sessions/kept", headers={"accept": "text/event-stream"})
    assert (asked.status_code, asked.headers["content-type"]) == (200, "application/json")
    assert running.count("specdec:http_resumed_streams_total") == 0


async def test_a_path_without_get_refuses_head_and_one_with_it_tells_of_both(running: RunningGateway) -> None:
    assert (await running.http.head("/v1/chat/completions")).headers["allow"] == "POST"
    assert (await running.http.put("/v1/models")).headers["allow"] == "GET, HEAD"
    assert (await running.http.put("/v1/sessions/kept")).headers["allow"] == "DELETE, GET, HEAD"


@pytest.mark.parametrize("path", [*GETS, *POSTS])
@pytest.mark.parametrize("slashes", ["/", "//"])
async def test_slashes_at_the_end_of_a_path_change_nothing(running: RunningGateway, path: str, slashes: str) -> None:
    body = json.dumps(POSTS[path]).encode() if path in POSTS else b""
    method = "POST" if body else "GET"
    proxied = "host: localhost\r\nx-forwarded-proto: https\r\ncontent-type: application/json\r\nconnection: close"
    plain, _ = await exchange(running, f"{method} {path} HTTP/1.1\r\n{proxied}", body)
    head, content = await exchange(running, f"{method} {path.rstrip('/')}{slashes} HTTP/1.1\r\n{proxied}", body)
    assert head.splitlines()[0] == plain.splitlines()[0]
    assert b"location" not in head.lower()
    assert content
    if path == "/v1/models":
        assert [model["id"] for model in json.loads(content)["data"]] == [*NAMES]


async def test_a_slash_that_is_a_part_of_a_name_stays(running: RunningGateway) -> None:
    assert (await running.http.get("/v1/models/org/name/")).json()["id"] == "org/name"
    for path in ("/v1/sessions/kept%2F", "/v1/sessions/kept%2f/"):  # another session than kept
        assert (await running.http.request("DELETE", path)).status_code == 404
    assert (await running.http.get("/v1/sessions/kept")).status_code == 200


@pytest.mark.parametrize("path", STREAMS)
async def test_a_stream_to_http_1_0_has_no_chunks_and_ends_with_the_connection(
    running: RunningGateway, path: str
) -> None:
    body = json.dumps(STREAMS[path] | {"stream": True}).encode()
    for keep_alive in ("", "\r\nconnection: keep-alive"):
        head, content = await exchange(
            running, f"POST {path} HTTP/1.0\r\ncontent-type: application/json{keep_alive}", body
        )
        assert b" 200 " in head.splitlines()[0]
        assert b"transfer-encoding" not in head.lower()
        assert content.startswith((b"data: {", b"event: "))
        assert content.endswith(b"\n\n")
        assert all(line[:5] in (b"data:", b"event", b"") for line in content.split(b"\n"))


async def test_a_whole_answer_to_http_1_0_has_its_length(running: RunningGateway) -> None:
    for path, body in POSTS.items():
        head, content = await exchange(
            running, f"POST {path} HTTP/1.0\r\ncontent-type: application/json", json.dumps(body).encode()
        )
        assert f"content-length: {len(content)}".encode() in head
        json.loads(content)
    for path in GETS:
        head, content = await exchange(running, f"GET {path} HTTP/1.0")
        assert f"content-length: {len(content)}".encode() in head


@pytest.mark.parametrize("path", STREAMS)
async def test_no_reader_of_lines_divides_an_event(running: RunningGateway, path: str) -> None:
    body = STREAMS[path] | {"model": LINE_ENDS, "stream": True, "stream_options": {"include_usage": True}}
    text = (await running.http.post(path, json=body)).text
    lines = text.split("\n")
    assert text.splitlines() == lines[:-1]
    told = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    models = {each.get("model") or each.get("response", each.get("message", {})).get("model") for each in told}
    assert models - {None} == {LINE_ENDS}


#: Requests that do not fit the context of 512 tokens, with the tokens of input and output; None: not counted.
TOO_LONG: list[tuple[str, dict[str, Any], int | None, int]] = [
    ("/v1/chat/completions", {"messages": HELLO, "max_tokens": 600}, 2, 600),
    ("/v1/chat/completions", {"messages": HELLO, "max_completion_tokens": (1 << 32) - 1}, 2, (1 << 32) - 1),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "w5 " * 600}]}, 600, 1),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "w5 " * 600}], "max_tokens": 7}, 600, 7),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "w5 " * 90_000}], "stream": True}, None, 1),
    ("/v1/completions", {"prompt": "w5 w6", "max_tokens": 511}, 2, 511),
    ("/v1/completions", {"prompt": [5] * 600}, 600, 1),
    ("/v1/completions", {"prompt": [5] * 512, "stream": True}, 512, 1),
    ("/v1/completions", {"prompt": "w5 " * 90_000, "max_tokens": 9}, None, 1),
    ("/v1/responses", {"input": "w5 w6", "max_output_tokens": 600, "store": False}, 2, 600),
    ("/v1/responses", {"input": "w5 " * 600, "store": False, "stream": True}, 600, 1),
    ("/v1/messages", {"messages": HELLO, "max_tokens": 600}, 2, 600),
    ("/v1/messages", {"messages": [{"role": "user", "content": "w5 " * 600}], "max_tokens": 4}, 600, 4),
    ("/v1/messages", {"messages": [{"role": "user", "content": "w5 " * 512}], "max_tokens": 4}, 512, 4),
    ("/v1/messages", {"messages": [{"role": "user", "content": "w5 " * 90_000}], "max_tokens": 4}, None, 4),
    ("/v1/messages/count_tokens", {"messages": [{"role": "user", "content": "w5 " * 90_000}]}, None, 0),
    ("/tokenize", {"prompt": "w5 " * 90_000}, None, 0),
    ("/tokenize", {"messages": [{"role": "user", "content": "w5 " * 90_000}]}, None, 0),
    ("/detokenize", {"tokens": [5] * 600}, 600, 0),
]


@pytest.mark.parametrize(("path", "body", "num_input", "num_output"), TOO_LONG)
async def test_a_context_that_is_too_long_is_told_in_the_words_that_clients_act_on(
    running: RunningGateway, path: str, body: dict[str, Any], num_input: int | None, num_output: int
) -> None:
    answer = await running.http.post(path, json=body)
    error = answer.json()["error"]
    assert (answer.status_code, error["type"]) == (400, "invalid_request_error")
    if path.startswith("/v1/messages"):
        assert error["message"].startswith("prompt is too long: ")
        if num_input == 2:
            assert "exceed context limit: 2 + 600 > 512" in error["message"]
        elif num_input is not None:
            assert f"{num_input} tokens > {min(512, num_input - 1)} maximum" in error["message"]
        return
    assert error["code"] == "context_length_exceeded"
    told = re.match(
        r"This model's maximum context length is 512 tokens\. However, you requested (at least )?(\d+) tokens "
        r"\((\d+) in the \w+(?:, (\d+) in the completion)?\)\. Please reduce the length of the ",
        error["message"],
    )
    assert told is not None, error["message"]
    assert int(told[4] or 0) == num_output
    assert int(told[2]) == int(told[3]) + num_output > 512
    assert (told[1] is None, num_input or int(told[3])) == (num_input is not None, int(told[3]))
