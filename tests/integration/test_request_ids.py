"""The id of an HTTP request: sent back, in the records and traces of every service, and never a way into the log."""

from __future__ import annotations

import asyncio
import io
import re
from collections.abc import AsyncIterator
from typing import Any

import pytest

from gateway.context import Gateway
from specdec.client import AsyncClient
from specdec.contract.errors import InvalidRequest
from specdec.observability.logging import configure_logging
from specdec.observability.tracing import Tracing
from tests.support.coordinator_rig import Rig
from tests.support.gateway_rig import RunningGateway, running_gateway
from tests.support.log_stream import lines, stream
from tests.support.table_services import write_chat_tokenizer
from tests.support.trace_collector import TraceCollector

__all__ = ["stream"]

HELLO = [{"role": "user", "content": "w5 w6"}]
ID = "client-7/a:b@c+d=e_f.g"
REQUESTS: list[tuple[str, str, dict[str, Any] | None]] = [
    ("POST", "/v1/chat/completions", {"messages": HELLO, "max_tokens": 4}),
    ("POST", "/v1/completions", {"prompt": "w5 w6", "max_tokens": 4, "n": 2}),
    ("POST", "/v1/responses", {"input": "w5 w6", "max_output_tokens": 4, "store": False}),
    ("POST", "/v1/messages", {"messages": HELLO, "max_tokens": 4}),
    ("POST", "/v1/messages/count_tokens", {"messages": HELLO}),
    ("POST", "/tokenize", {"prompt": "w5 w6"}),
    ("POST", "/detokenize", {"tokens": [5, 6]}),
    ("GET", "/v1/models", None),
    ("GET", "/v1/sessions/none", None),
    ("DELETE", "/v1/sessions/none", None),
    ("GET", "/v1/responses/none", None),
    ("GET", "/nothing", None),
    ("PUT", "/v1/models", None),
    ("POST", "/v1/completions", {"prompt": 5}),
    ("POST", "/v1/completions", {"prompt": "w5", "max_tokens": 9999}),
]
GENERATING = REQUESTS[:4]


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    async with Rig(write_checkpoint=write_chat_tokenizer) as rig:
        yield rig


async def send(running: RunningGateway, method: str, path: str, body: Any, request_id: str | bytes = ID) -> Any:
    return await running.http.request(method, path, json=body, headers=[(b"x-request-id", _bytes(request_id))])


def _bytes(text: str | bytes) -> bytes:
    return text.encode() if isinstance(text, str) else text


def of_request(stream: io.StringIO, request_id: str = ID) -> list[dict[str, Any]]:
    return [line for line in lines(stream) if line.get("x_request_id") == request_id]


async def test_every_answer_has_the_id_of_its_request(rig: Rig) -> None:
    coordinator = await rig.coordinator()
    async with running_gateway(coordinator.server.address) as running:
        for method, path, body in REQUESTS:
            for is_stream in (False, True) if (method, path, body) in GENERATING else (False,):
                given = body | {"stream": is_stream} if body else None
                assert (await send(running, method, path, given)).headers["x-request-id"] == ID
        made = {(await running.http.get(path)).headers["x-request-id"] for path in ("/health", "/", "/v1/models")}
        assert len(made) == 3
        assert all(re.fullmatch(r"[0-9a-f]{32}", each) for each in made)


@pytest.mark.parametrize(("method", "path", "body"), GENERATING)
async def test_records_of_all_services_about_a_request_have_its_id(
    rig: Rig, stream: io.StringIO, method: str, path: str, body: dict[str, Any]
) -> None:
    configure_logging("json", "debug", service="all", stream=stream)
    coordinator = await rig.coordinator()
    async with running_gateway(coordinator.server.address) as running:
        assert (await send(running, method, path, body, "another")).status_code == 200
        drafted = body | {"speculation": {"gamma": 2}}
        assert (await send(running, method, path, drafted)).status_code == 200
        await coordinator.stop()
    found = of_request(stream)
    num_outputs = body.get("n", 1)
    assert [line["path"] for line in found if line["message"] == "http request"] == [path]
    finished = [line for line in found if line["message"] == "request finished"]
    assert len(finished) == num_outputs
    sessions = {line["session_id"] for line in finished}
    calls = [line for line in lines(stream) if line["message"] == "call received"]
    own = [line for line in calls if line["session_id"] in sessions]
    assert len(own) >= 2 * num_outputs  # the draft and the target were both called
    assert {line["x_request_id"] for line in own} == {ID}
    assert {line["x_request_id"] for line in calls if line not in own} == {"another"}


async def test_the_records_of_refusals_have_the_id(rig: Rig, stream: io.StringIO) -> None:
    configure_logging("json", "info", service="all", stream=stream)
    coordinator = await rig.coordinator()
    async with running_gateway(coordinator.server.address) as running:
        for number, (method, path, body) in enumerate(REQUESTS):
            answer = await send(running, method, path, body, f"r{number}")
            (line,) = [each for each in of_request(stream, f"r{number}") if each["message"] == "http request"]
            assert (line["method"], line["path"], line["status"]) == (method, path, answer.status_code)
            assert line["num_bytes"] == len(answer.content)


async def test_a_failure_of_the_gateway_has_the_id_in_answer_and_traceback(
    rig: Rig, stream: io.StringIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    configure_logging("json", "info", service="all", stream=stream)

    def fail(*_: Any) -> Any:
        raise RuntimeError("a fault of the gateway")

    monkeypatch.setattr(Gateway, "client", fail)
    coordinator = await rig.coordinator()
    async with running_gateway(coordinator.server.address) as running:
        answer = await send(running, *REQUESTS[1])
        assert (answer.status_code, answer.headers["x-request-id"]) == (500, ID)
        assert ID in answer.json()["error"]["message"]
    (failed,) = [line for line in of_request(stream) if "traceback" in line]
    assert "a fault of the gateway" in failed["traceback"]


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ("x" * 3000, "x" * 128),
        ('a"},{"level":"error"', "alevel:error"),
        ("a b\tc\x1b[31m", None),
        ("caf\u00e9 \u2028", None),
        ("   ", ""),
        ("<script>%0a{}", "script0a"),
        (b"\xff\xfe", ""),
    ],
)
async def test_an_id_that_could_harm_a_log_is_cut_to_what_cannot(
    rig: Rig, stream: io.StringIO, given: str | bytes, kept: str | None
) -> None:
    configure_logging("text", "info", service="all", stream=stream)
    coordinator = await rig.coordinator()
    async with running_gateway(coordinator.server.address) as running:
        reader, writer = await running.connect()
        writer.write(b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\nx-request-id: ")
        writer.write(_bytes(given) + b"\r\n\r\n")
        answer = await reader.read()
        writer.close()
    found = re.search(rb"\r\nx-request-id: ([^\r]*)\r\n", answer)
    if answer.startswith(b"HTTP/1.1 400"):  # the parser refuses control characters
        assert kept is None
        return
    assert found is not None
    told = found[1].decode()
    assert re.fullmatch(r"[A-Za-z0-9._:@/+=-]{1,128}", told)
    assert kept is None or told == kept or (kept == "" and len(told) == 32)
    (line,) = [line for line in stream.getvalue().splitlines() if "http request" in line]
    assert f" x_request_id={told} " in line


async def test_a_path_cannot_end_a_line_of_the_log(rig: Rig, stream: io.StringIO) -> None:
    configure_logging("text", "info", service="all", stream=stream)
    async with running_gateway() as running:
        for path in ("/a%0aforged%0d%1b[31m%e2%80%a8%c2%85", "/" + "y" * 5000, "/v1/models/%0aforged"):
            await running.http.get(path)
    assert all(re.match(r"\d\d:\d\d:\d\d\.\d{3} [A-Z]+ ", line) for line in stream.getvalue().splitlines())
    assert max(map(len, stream.getvalue().splitlines())) < 1200


async def test_the_access_log_names_the_client_behind_proxies_and_no_query(rig: Rig, stream: io.StringIO) -> None:
    configure_logging("json", "info", service="gateway", stream=stream)
    forwarded = {"x-forwarded-for": "203.0.113.9", "x-forwarded-proto": "https"}
    for trusted, client in ((("127.0.0.0/8",), "203.0.113.9"), (("10.0.0.0/8",), "127.0.0.1"), (("*",), "203.0.113.9")):
        async with running_gateway(forwarded_allow_ips=trusted) as running:
            await running.http.get("/version?key=secret", headers=forwarded)
        line = [line for line in lines(stream) if line["message"] == "http request"][-1]
        assert (line["path"], line["client"]) == ("/version", client)
    assert "secret" not in stream.getvalue()


async def test_probes_are_left_out_of_the_access_log_and_one_setting_turns_it_off(stream: io.StringIO) -> None:
    configure_logging("json", "info", service="gateway", stream=stream)
    for setting, paths in (("on", ["/version"]), ("off", [])):
        stream.truncate(0)
        stream.seek(0)
        async with running_gateway(access_log=setting) as running:
            for path in ("/health", "/version", "/metrics"):
                assert (await running.http.get(path)).headers["x-request-id"]
        assert [line["path"] for line in lines(stream) if line["message"] == "http request"] == paths


async def test_the_id_is_an_attribute_of_the_trace_in_gateway_and_coordinator(rig: Rig) -> None:
    with TraceCollector() as collector:
        gateways = Tracing(collector.endpoint, 1.0, "specdec-gateway")
        coordinators = Tracing(collector.endpoint, 1.0, "specdec-coordinator")
        coordinator = await rig.coordinator(tracing=coordinators)
        async with running_gateway(coordinator.server.address, tracing=gateways) as running:
            assert (await send(running, *REQUESTS[1])).status_code == 200
        await coordinator.stop()  # the call has ended on both sides
        for tracing in (gateways, coordinators):
            await asyncio.to_thread(tracing.close)
        named = [span for span in collector.spans if "http.request.header.x-request-id" in span.attributes]
    assert {span.service for span in named} == {"specdec-gateway", "specdec-coordinator"}
    assert all(ID in str(span.attributes["http.request.header.x-request-id"]) for span in named)


async def test_a_program_may_name_its_requests_through_the_client(rig: Rig, stream: io.StringIO) -> None:
    configure_logging("json", "info", service="coordinator", stream=stream)
    coordinator = await rig.coordinator()
    async with AsyncClient(coordinator.server.address) as client:
        await client.for_request(ID).generate("w5 w6", max_new_tokens=4)
        for bad in ("", "a b", "x" * 129, 7):
            with pytest.raises(InvalidRequest, match="request_id must be 1 to 128"):
                client.for_request(bad)  # type: ignore[arg-type]
    assert [line["message"] for line in of_request(stream)] == ["request finished"]
