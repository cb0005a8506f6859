"""Hostile and careless clients of a gateway with a real coordinator: words with a status, and nothing left behind."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from gateway.auth import ApiKeys
from tests.support.coordinator_rig import Coordinator, Rig
from tests.support.gateway_rig import RunningGateway, eventually, running_gateway
from tests.support.table_services import write_chat_tokenizer

pytestmark = pytest.mark.asyncio(loop_scope="module")  # the tests share services

CHAT, COMPLETIONS, TOKENIZE, DETOKENIZE = "/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"
RESPONSES, MESSAGES, COUNT = "/v1/responses", "/v1/messages", "/v1/messages/count_tokens"
LONG = {"prompt": [5, 6, 7, 8], "max_tokens": 400, "ignore_eos": True, "temperature": 0}
SURROGATE = r'"\ud800"'
NESTED = "[" * 600 + "]" * 600
HELLO = '"messages": [{"role": "user", "content": "w5"}]'
FUNCTION = '"type": "function", "function"'
TOO_MANY = ", ".join(['{"name": "f"}'] * 129)

#: Bodies without their last brace, which a test adds, and the field at fault.
REFUSED = [
    (COMPLETIONS, '"prompt": ""', "prompt"),
    (COMPLETIONS, '"prompt": []', "prompt"),
    (COMPLETIONS, '"prompt": [[]]', "prompt"),
    (COMPLETIONS, '"prompt": ["w5", [6]]', "prompt"),
    (COMPLETIONS, '"prompt": [5, "w6"]', "prompt"),
    (COMPLETIONS, '"prompt": [true]', "prompt"),
    (COMPLETIONS, '"prompt": [24]', "prompt"),
    (COMPLETIONS, '"prompt": [[5], [24]]', "prompt"),
    (COMPLETIONS, f'"prompt": {SURROGATE}', "prompt"),
    (COMPLETIONS, '"prompt": "w5", "temperature": NaN', "temperature"),
    (COMPLETIONS, '"prompt": "w5", "temperature": 1e400', "temperature"),
    (COMPLETIONS, '"prompt": "w5", "top_p": -Infinity', "top_p"),
    (COMPLETIONS, '"prompt": "w5", "max_tokens": 0', "max_tokens"),
    (COMPLETIONS, f'"prompt": "w5", "max_tokens": {10**30}', "max_tokens"),
    (COMPLETIONS, f'"prompt": "w5", "top_k": {10**30}', "top_k"),
    (COMPLETIONS, f'"prompt": "w5", "min_tokens": {10**30}', "min_tokens"),
    (COMPLETIONS, f'"prompt": "w5", "seed": {10**30}', "seed"),
    (COMPLETIONS, f'"prompt": "w5", "speculation": {{"gamma": {10**30}}}', "speculation.gamma"),
    (COMPLETIONS, '"prompt": "w5", "speculation": []', "speculation"),
    (COMPLETIONS, f'"prompt": "w5", "priority": {1 << 31}', "priority"),
    (CHAT, '"messages": [{"role": "user", "content": "w5"}], "priority": "0"', "priority"),
    (COMPLETIONS, f'"prompt": "w5", "logit_bias": {{"{"1" * 5000}": 1}}', "logit_bias"),
    (COMPLETIONS, '"prompt": "w5", "logit_bias": {"5": 1e39}', "logit_bias"),
    (COMPLETIONS, r'"prompt": "w5", "session_id": "a\r\nset-cookie: b"', "session_id"),
    (COMPLETIONS, f'"prompt": "w5", "session_id": {SURROGATE}', "session_id"),
    (COMPLETIONS, f'"prompt": "w5", "stop": [{SURROGATE}]', "stop"),
    (CHAT, f'"messages": [{{"role": "user", "content": {SURROGATE}}}]', "messages[0].content"),
    (CHAT, '"messages": [{"role": "user", "content": [{"type": "text", "text": 5}]}]', "messages[0].content"),
    (CHAT, f'"messages": [{{"role": "user", "content": "w5", "tool_calls": [{{"x": {NESTED}}}]}}]', "messages"),
    (CHAT, '"messages": [{"role": "user", "content": "w5"}], "chat_template_kwargs": {"messages": []}',
     "chat_template_kwargs"),
    (CHAT, '"messages": [{"role": "user", "content": "w5"}], "chat_template_kwargs": {"x": NaN}',
     "chat_template_kwargs"),
    (CHAT, f'"messages": [{{"role": "user", "content": "w5"}}], "chat_template_kwargs": {{"x": "{"y" * 70_000}"}}',
     "chat_template_kwargs"),
    (COMPLETIONS, f'"prompt": "w5", "guided_regex": {SURROGATE}', "guided_regex"),
    (COMPLETIONS, f'"prompt": "w5", "guided_choice": [{SURROGATE}]', "guided_choice"),
    (COMPLETIONS, '"prompt": "w5", "guided_json": {"const": NaN}', "guided_json"),
    (COMPLETIONS, '"prompt": "w5", "response_format": "json"', "response_format"),
    (COMPLETIONS, '"prompt": "w5", "response_format": {"type": "json_schema", "json_schema": '
     f'{{"schema": {NESTED}}}}}', "response_format.json_schema.schema"),
    (CHAT, '"messages": [{"role": "user", "content": "w5"}], "response_format": {"type": "json_schema", "json_schema": '
     f'{{"schema": {{"const": {SURROGATE}}}}}}}', "response_format.json_schema.schema"),
    (CHAT, '"messages": [{"role": "user", "content": "w5"}], "structured_outputs": {"choice": [5]}',
     "structured_outputs.choice"),
    (RESPONSES, '"input": "w5", "text": {"format": {"type": "json_schema", "name": "x", "schema": {"const": NaN}}}',
     "text.format.schema"),
    (CHAT, f'{HELLO}, "tools": [{{{FUNCTION}: {{}}}}]', "tools[0].function.name"),
    (CHAT, f'{HELLO}, "tools": [{{"type": "function"}}]', "tools[0].function"),
    (CHAT, f'{HELLO}, "tools": [{{"type": "custom", "custom": {{"name": "f"}}}}]', "tools[0].type"),
    (CHAT, f'{HELLO}, "tools": [{{{FUNCTION}: {{"name": "{"x" * 1024}"}}}}]', "tools[0].function.name"),
    (CHAT, f'{HELLO}, "tools": [{{{FUNCTION}: {{"name": {SURROGATE}}}}}]', "tools[0].function.name"),
    (CHAT, f'{HELLO}, "tools": [{{{FUNCTION}: {{"name": "f", "parameters": {{"x": {NESTED}}}}}}}]',
     "messages"),
    (CHAT, f'{HELLO}, "tools": [{{{FUNCTION}: {{"name": "f", "parameters": {{"type": "array"}}}}}}]',
     "tools[0].function.parameters"),
    (CHAT, f'{HELLO}, "tools": [{TOO_MANY}]', "tools"),
    (CHAT, f'{HELLO}, "tools": [{{{FUNCTION}: {{"name": "f"}}}}]', "tools"),
    (CHAT, f'{HELLO}, "tools": [{{{FUNCTION}: {{"name": "f"}}}}], "tool_choice": {{{FUNCTION}: {{"name": "g"}}}}',
     "tool_choice.function.name"),
    (CHAT, f'{HELLO}, "tools": [{{{FUNCTION}: {{"name": "f"}}}}], "tool_choice": {{"type": "allowed_tools"}}',
     "tool_choice.type"),
    (CHAT, f'{HELLO}, "tool_choice": {{{FUNCTION}: {{"name": 5}}}}', "tool_choice.function.name"),
    (CHAT, f'{HELLO}, "tool_choice": "required"', "tool_choice"),
    (CHAT, f'{HELLO}, "tool_choice": [[]]', "tool_choice"),
    (CHAT, f'{HELLO}, "functions": [{{"name": "f"}}]', "functions"),
    (CHAT, f'{HELLO}, "reasoning_effort": "endless"', "reasoning_effort"),
    (COMPLETIONS, '"prompt": "w5", "tools": [{}]', "tools"),
    (COMPLETIONS, '"prompt": "w5", "tool_choice": "auto"', "tool_choice"),
    (RESPONSES, '"input": "w5", "tools": [{"type": "web_search"}]', "tools[0].type"),
    (RESPONSES, '"input": "w5", "tools": [{"type": "function"}]', "tools[0].name"),
    (RESPONSES, '"input": "w5", "tools": [{"type": "function", "name": "a b"}]', "tools[0].name"),
    (RESPONSES, '"input": "w5", "tools": [{"name": "f", "parameters": {"type": 3}}]', "tools[0].parameters"),
    (RESPONSES, f'"input": "w5", "tools": [{TOO_MANY}]', "tools"),
    (RESPONSES, '"input": "w5", "tools": [{"name": "f"}]', "tools"),
    (RESPONSES, '"input": "w5", "tools": [{"name": "f"}], "tool_choice": {"type": "function", "name": "g"}',
     "tool_choice.name"),
    (RESPONSES, '"input": "w5", "reasoning": {"summary": "auto"}', "reasoning.summary"),
    (RESPONSES, '"input": [{"type": "function_call", "name": "f", "arguments": "{}"}]', "input[0].call_id"),
    (RESPONSES, '"input": [{"type": "item_reference", "id": "x"}]', "input[0].type"),
    (RESPONSES, '"input": [{"type": "function_call_output", "call_id": "x", "output": [{"type": "input_image"}]}]',
     "input[0].output[0].type"),
    (TOKENIZE, f'{HELLO}, "tools": [{{"type": "custom"}}]', "tools[0].type"),
    (RESPONSES, f'"input": {SURROGATE}', "input"),
    (RESPONSES, f'"input": "w5", "instructions": {SURROGATE}', "instructions"),
    (RESPONSES, f'"instructions": "w5", "input": [{{"role": "user", "content": {SURROGATE}}}]', "input[0].content"),
    (RESPONSES, f'"input": [{{"role": "user", "content": [{{"type": "text", "text": {SURROGATE}}}]}}]',
     "input[0].content[0].text"),
    (RESPONSES, f'"input": [{{"role": {SURROGATE}, "content": "w5"}}]', "input[0].role"),
    (RESPONSES, '"input": [{"role": "user", "content": [5]}]', "input[0].content[0]"),
    (RESPONSES, '"input": [{"role": "user", "content": [{"type": "text", "text": 5}]}]', "input[0].content[0].text"),
    (RESPONSES, '"input": [5]', "input[0]"),
    (RESPONSES, '"input": "w5", "metadata": {"a": 5}', "metadata.a"),
    (RESPONSES, f'"input": "w5", "metadata": {{"{"a" * 100_000}": 5}}', "metadata"),
    (RESPONSES, '"input": "w5", "text": 5', "text"),
    (RESPONSES, '"input": "w5", "include": [5]', "include[0]"),
    (RESPONSES, '"input": "w5", "previous_response_id": 5', "previous_response_id"),
    (RESPONSES, '"input": "w5", "stop": [""]', "stop"),
    (TOKENIZE, f'"prompt": {SURROGATE}', "prompt"),
    (TOKENIZE, '"messages": []', "messages"),
    (DETOKENIZE, '"tokens": [24]', "tokens"),
    (DETOKENIZE, f'"tokens": [{1 << 32}]', "tokens[0]"),
]  # fmt: skip


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def rig() -> AsyncIterator[Rig]:
    async with Rig(write_checkpoint=write_chat_tokenizer) as rig:
        yield rig


def request_bytes(body: dict[str, Any], accept: str = "*/*") -> bytes:
    content = json.dumps(body).encode()
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\naccept: {accept}\r\n"
    return f"{head}content-length: {len(content)}\r\nconnection: close\r\n\r\n".encode() + content


async def num_open_once_connected(running: RunningGateway) -> int:
    """Return the number of open files of this process once the gateway is connected to its coordinator."""
    assert (await running.http.post(COMPLETIONS, json={"prompt": "w5"})).status_code == 200
    return num_open_files()


def num_open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


async def nothing_runs(running: RunningGateway, coordinator: Coordinator) -> None:
    await eventually(lambda: not coordinator.generations.num_running)
    await eventually(lambda: running.count("specdec:http_requests_in_flight") == 0)


async def test_a_hostile_body_is_a_400_with_the_error_object_that_names_its_field(rig: Rig) -> None:
    coordinator = await rig.coordinator()
    async with running_gateway(coordinator.server.address) as running:
        for path, fields, param in REFUSED:
            content = f"{{{fields}}}"
            answer = await running.http.post(path, content=content, headers={"content-type": "application/json"})
            assert answer.status_code == 400, (path, fields[:80], answer.text)
            error = answer.json()["error"]
            assert error.keys() == {"message", "type", "param", "code"}
            is_whole = path == RESPONSES or param.startswith("tool")
            given = error["param"] if is_whole else error["param"].partition("[")[0]
            assert given == (param if is_whole else param.partition("[")[0]), (fields[:80], error)
            assert error["type"] == "invalid_request_error"
            assert len(error["message"]) < 1000
        await nothing_runs(running, coordinator)


async def test_every_refusal_below_messages_has_anthropic_s_form_and_names_its_field(rig: Rig) -> None:
    coordinator = await rig.coordinator()
    hello = '"messages": [{"role": "user", "content": "w5"}]'
    kinds = {400: "invalid_request_error", 401: "authentication_error", 404: "not_found_error",
             405: "invalid_request_error", 413: "request_too_large"}  # fmt: skip
    refused = [
        ("POST", MESSAGES, "{", 400, "not valid JSON"),
        ("POST", MESSAGES, "[]", 400, "the request body"),
        ("POST", MESSAGES, f"{{{hello}}}", 400, "max_tokens: is required"),
        ("POST", MESSAGES, f'{{{hello}, "max_tokens": 0}}', 400, "max_tokens: "),
        ("POST", MESSAGES, f'{{{hello}, "max_tokens": 3, "stop_sequences": [""]}}', 400, "stop_sequences "),
        ("POST", MESSAGES, f'{{{hello}, "max_tokens": 3, "stop_sequences": [5]}}', 400, "stop_sequences[0]: "),
        ("POST", MESSAGES, f'{{{hello}, "max_tokens": 3, "system": {SURROGATE}}}', 400, "system: "),
        ("POST", MESSAGES, '{"messages": [{"role": "system", "content": "w5"}], "max_tokens": 3}', 400,
         "messages[0].role: "),
        ("POST", MESSAGES, f'{{"messages": [{{"role": "user", "content": {SURROGATE}}}], "system": "w5", '
         '"max_tokens": 3}', 400, "messages[0].content: "),
        ("POST", MESSAGES, f'{{{hello}, "max_tokens": 3, "output_config": {{"format": {{"type": "json_schema", '
         f'"schema": {{"const": {SURROGATE}}}}}}}}}', 400, "output_config.format.schema: "),
        ("POST", COUNT, f'{{{hello}, "tools": [{{"type": "bash_20250124", "name": "bash"}}]}}', 400, "tools[0].type "),
        ("POST", COUNT, f'{{{hello}, "tools": [{{"input_schema": {{}}}}]}}', 400, "tools[0].name: "),
        ("POST", COUNT, f'{{{hello}, "tools": [{{"name": "{"x" * 1024}"}}]}}', 400, "tools[0].name "),
        ("POST", COUNT, f'{{{hello}, "tools": [{{"name": "f", "input_schema": {{"type": "text"}}}}]}}', 400,
         "tools[0].input_schema "),
        ("POST", COUNT, f'{{{hello}, "tools": [{TOO_MANY}]}}', 400, "tools: "),
        ("POST", MESSAGES, f'{{{hello}, "max_tokens": 3, "tools": [{{"name": "f"}}]}}', 400, "tools cannot be used"),
        ("POST", MESSAGES, f'{{{hello}, "max_tokens": 3, "tools": [{{"name": "f"}}], "tool_choice": '
         '{"type": "tool", "name": "g"}}', 400, "tool_choice.name "),
        ("POST", MESSAGES, f'{{{hello}, "max_tokens": 3, "tools": [{{"name": "f"}}], "tool_choice": '
         '{"type": "tool"}}', 400, "tool_choice.name: "),
        ("POST", MESSAGES, f'{{{hello}, "max_tokens": 3, "tool_choice": {{"type": "any"}}}}', 400, "tool_choice: "),
        ("POST", COUNT, f'{{{hello}, "tool_choice": {{"type": "some"}}}}', 400, "tool_choice.type: "),
        ("POST", COUNT, f'{{{hello}, "thinking": {{"type": "long"}}}}', 400, "thinking.type: "),
        ("POST", COUNT, '{"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]}', 400,
         "messages[0].content[0].tool_use_id: "),
        ("POST", COUNT, '{"messages": [{"role": "assistant", "content": [{"type": "tool_use", "input": 3}]}, '
         '{"role": "user", "content": "w5"}]}', 400, "messages[0].content[0].input: "),
        ("POST", COUNT, '{"messages": [{"role": "user", "content": [{"type": "image"}]}]}', 400,
         "messages[0].content[0].type "),
        ("POST", COUNT, f'{{{hello}, "model": "claude"}}', 404, "'claude'"),
        ("POST", f"{MESSAGES}/batches", "{}", 404, "there is nothing at"),
        ("GET", MESSAGES, "", 405, "does not take GET"),
        ("POST", MESSAGES, " " * 5000, 413, "at most 4096 bytes"),
    ]  # fmt: skip
    keys = ApiKeys(key="k", allow_anonymous=False)
    async with running_gateway(coordinator.server.address, keys=keys, max_body_bytes=4096) as running:
        for method, path, content, status, words in refused:
            for key in ("k", "wrong"):
                headers = {"content-type": "application/json", "x-api-key": key}
                answer = await running.http.request(method, path, content=content, headers=headers)
                error = answer.json()["error"]
                expected = status if key == "k" else 401
                assert (answer.json().keys(), answer.json()["type"]) == ({"type", "error"}, "error")
                assert (answer.status_code, error["type"]) == (expected, kinds[expected]), (content, error)
                assert words in error["message"] or key == "wrong", (words, error)
        await nothing_runs(running, coordinator)


@pytest.mark.parametrize("index", ["", "-1", "1e3", "9" * 30, "9" * 5000])
async def test_an_event_id_that_cannot_be_is_a_400_that_names_the_header(rig: Rig, index: str) -> None:
    coordinator = await rig.coordinator()
    async with running_gateway(coordinator.server.address) as running:
        headers = {"accept": "text/event-stream", "last-event-id": f"a:{index}"}
        answer = await running.http.get("/v1/sessions/a", headers=headers)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "Last-Event-ID")


async def test_a_client_may_leave_in_any_phase_of_any_kind_of_request(rig: Rig) -> None:
    coordinator = await rig.coordinator()
    async with running_gateway(coordinator.server.address) as running:
        num_open = await num_open_once_connected(running)
        for num_outputs in (1, 8):
            for stream in (False, True):
                for num_bytes in (0, 1, 2000) if stream else (0,):
                    reader, writer = await running.connect()
                    writer.write(request_bytes({**LONG, "n": num_outputs, "stream": stream}))
                    await writer.drain()
                    if num_bytes:
                        await reader.readexactly(num_bytes)
                    writer.transport.abort()
        await nothing_runs(running, coordinator)
        await eventually(lambda: num_open_files() <= num_open)


async def test_a_client_that_stops_reading_loses_nothing(rig: Rig) -> None:
    coordinator = await rig.coordinator()
    async with running_gateway(coordinator.server.address) as running:
        body = {**LONG, "stream": True, "return_provenance": True, "logprobs": 20, "session_id": "lazy"}
        reader, writer = await running.connect()
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        writer.write(request_bytes(body))
        await eventually(lambda: running.count("specdec:http_time_to_first_token_seconds_count") == 1)
        await running.http.post(COMPLETIONS, json=LONG)  # another generation runs to its end meanwhile
        writer.transport.resume_reading()  # type: ignore[attr-defined]
        answer = await reader.read()
        writer.close()
        chunks = [json.loads(line[6:]) for line in answer.splitlines() if line.startswith(b"data: {")]
        assert sum(len(chunk["specdec"]["tokens"]) for chunk in chunks if "specdec" in chunk) == 400
        assert chunks[-1]["choices"][0]["finish_reason"] == "length"
        await nothing_runs(running, coordinator)


async def test_unknown_routes_methods_and_models_do_not_add_series(rig: Rig) -> None:
    coordinator = await rig.coordinator()
    async with running_gateway(coordinator.server.address) as running:

        async def attack(number: int) -> None:
            await running.http.get(f"/nothing/{number}")
            await running.http.get(f"/v1/models/m{number}")
            await running.http.get(f"/v1/sessions/s{number}")
            await running.http.request(f"M{number}", "/health")
            await running.http.post(COMPLETIONS, json={"prompt": "w5", "model": f"m{number}"})

        await attack(0)
        num_series = len(running.gateway.metrics.exposition().splitlines())
        for number in range(1, 20):
            await attack(number)
        assert len(running.gateway.metrics.exposition().splitlines()) == num_series
        await nothing_runs(running, coordinator)


async def test_64_streams_at_once_all_end_and_leave_no_connection(rig: Rig) -> None:
    coordinator = await rig.coordinator()
    async with running_gateway(coordinator.server.address) as running:
        num_open = await num_open_once_connected(running)

        async def whole() -> bytes:
            reader, writer = await running.connect()
            writer.write(request_bytes({**LONG, "max_tokens": 8, "stream": True}))
            try:
                return await reader.read()
            finally:
                writer.close()

        answers = await asyncio.gather(*(whole() for _ in range(64)))
        assert all(b'"finish_reason":"length"' in answer and b"data: [DONE]" in answer for answer in answers)
        await nothing_runs(running, coordinator)
        await eventually(lambda: num_open_files() <= num_open)
