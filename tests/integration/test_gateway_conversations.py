"""Stored responses, resumed streams and failed streams of a gateway in front of a real or a scripted coordinator."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis

from gateway.auth import ApiKeys
from specdec.contract.errors import Unavailable, Unsupported
from specdec.state.key_names import response_key
from specdec.state.redis_store import DEFAULT_SESSION_TTL_S
from specdec.v1 import coordinator_pb2 as pb
from tests.support.coordinator_rig import Rig, eventually
from tests.support.gateway_rig import RunningGateway, running_gateway
from tests.support.key_files import lines_of, write_private
from tests.support.redis_fixture import RedisServer, redis_server, redis_url
from tests.support.scripted_coordinator import ScriptedCoordinator, finished, serve, started, tokens
from tests.support.table_services import text_of, write_chat_tokenizer

__all__ = ["redis_server", "redis_url"]

TEXT = "w5 w6 w7 w8"
PROMPT = [5, 6, 7, 8]
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
EVENTS = {"accept": "text/event-stream"}


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    async with Rig(write_checkpoint=write_chat_tokenizer) as rig:
        yield rig


async def respond(running: RunningGateway, *, key: str = "", **body: Any) -> Any:
    """The answer to a greedy request of 12 tokens for a response."""
    fields = {"input": TEXT, "max_output_tokens": 12, "temperature": 0, "ignore_eos": True, **body}
    return await running.http.post(RESPONSES, json=fields, headers=bearer(key))


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"} if key else {}


def data_of(text: str) -> list[dict[str, Any]]:
    """The objects of a stream."""
    return [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]


def one_failing_stream(request: pb.GenerateRequest) -> list[Any]:
    return [started(request), tokens(0, [1]), Unsupported("no second token")]


async def test_a_response_is_read_and_continued_by_its_own_tenant_alone(
    rig: Rig, redis_url: str, tmp_path: Path
) -> None:
    coordinator = await rig.coordinator(tenant_header=True)
    path = write_private(tmp_path / "keys", lines_of("acme", "umbrella"))
    async with running_gateway(coordinator.server.address, keys=ApiKeys(path), redis_url=redis_url) as running:
        response = (await respond(running, key="acme")).json()
        assert response["output"][0]["content"][0]["text"] == text_of(rig.greedy(PROMPT, 12))
        place = f"{RESPONSES}/{response['id']}"
        assert (await running.http.get(place, headers=bearer("acme"))).json() == response
        for answer in (
            await running.http.get(place, headers=bearer("umbrella")),
            await running.http.delete(place, headers=bearer("umbrella")),
            await respond(running, key="umbrella", previous_response_id=response["id"]),
        ):
            assert (answer.status_code, answer.json()["error"]["code"]) == (404, "response_not_found")
        assert (await running.http.get(place, headers=bearer("acme"))).status_code == 200


async def test_another_gateway_continues_a_response_that_expires_with_its_session(rig: Rig, redis_url: str) -> None:
    coordinator = await rig.coordinator()
    async with running_gateway(coordinator.server.address, redis_url=redis_url) as running:
        first = (await respond(running)).json()
        async with Redis.from_url(redis_url) as store:
            ttl_ms = await store.pttl(response_key("default", first["id"]))
        assert 0 < ttl_ms <= DEFAULT_SESSION_TTL_S * 1000
    async with running_gateway(coordinator.server.address, redis_url=redis_url) as running:
        second = (await respond(running, input="w9", previous_response_id=first["id"])).json()
        assert second["session_id"] == first["session_id"]
        conversation = [*PROMPT, *await tokens_of(running, first["output"][0]["content"][0]["text"]), 9]
        assert second["output"][0]["content"][0]["text"] == text_of(rig.greedy(conversation, 12))


async def tokens_of(running: RunningGateway, text: str) -> list[int]:
    return (await running.http.post("/tokenize", json={"prompt": text})).json()["tokens"]


async def test_follow_ups_of_one_response_at_once_are_branches_and_one_of_them_goes_on_in_its_session(
    rig: Rig, redis_url: str
) -> None:
    coordinator = await rig.coordinator()
    async with running_gateway(coordinator.server.address, redis_url=redis_url) as running:
        first = (await respond(running)).json()
        answers = await asyncio.gather(
            *(
                respond(
                    running, input=f"w{word}", previous_response_id=first["id"], stream=bool(word % 2), ignore_eos=False
                )
                for word in range(9, 13)
            )
        )
        assert [answer.status_code for answer in answers] == [200] * 4
        follow_ups = [
            data_of(answer.text)[-1]["response"] if answer.text.startswith("event") else answer.json()
            for answer in answers
        ]
        assert len({follow_up["session_id"] for follow_up in follow_ups}) == 4
        whole = [*PROMPT, *await tokens_of(running, first["output"][0]["content"][0]["text"])]
        for word, follow_up in enumerate(follow_ups, start=9):
            assert follow_up["output"][0]["content"][0]["text"] == text_of(rig.greedy([*whole, word], 12))
            session = (await running.http.get(f"/v1/sessions/{follow_up['session_id']}")).json()
            assert session["num_tokens"] == follow_up["usage"]["total_tokens"]


async def test_a_client_that_leaves_a_response_or_a_message_leaves_no_record_and_no_key_for_ever(
    rig: Rig, redis_url: str
) -> None:
    coordinator = await rig.coordinator()
    async with running_gateway(coordinator.server.address, redis_url=redis_url) as running:
        async with Redis.from_url(redis_url) as store:
            before = set(await store.keys("*"))
            for path, body in (
                (RESPONSES, {"input": TEXT, "max_output_tokens": 400}),
                (MESSAGES, {"messages": [{"role": "user", "content": TEXT}], "max_tokens": 400}),
            ):
                body |= {"stream": True, "ignore_eos": True}
                async with running.http.stream("POST", path, json=body) as answer:
                    await anext(answer.aiter_bytes())
                await eventually(lambda: not coordinator.generations.num_running)
                await eventually(lambda: running.count("specdec:http_requests_in_flight") == 0)
            assert set(await store.keys("*")) == before  # the rig's sessions are in a store of its own
        assert running.count("specdec:http_disconnects_total") == 2


async def test_a_store_that_is_killed_is_told_and_answers_go_on_without_it(rig: Rig, tmp_path: Path) -> None:
    coordinator = await rig.coordinator()
    redis = RedisServer(tmp_path)
    redis.start()
    async with running_gateway(coordinator.server.address, redis_url=redis.url) as running:
        first = (await respond(running)).json()
        redis.stop()
        for answer in (
            await running.http.get(f"{RESPONSES}/{first['id']}"),
            await running.http.delete(f"{RESPONSES}/{first['id']}"),
            await respond(running, previous_response_id=first["id"]),
            await respond(running, previous_response_id=first["id"], stream=True),
        ):
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "store_unavailable")
            assert int(answer.headers["retry-after"]) >= 1
        last = data_of((await respond(running, stream=True)).text)[-1]
        assert (last["type"], last["response"]["store"]) == ("response.incomplete", False)
        redis.start()
        assert (await respond(running)).json()["store"] is True
    redis.stop()


async def test_an_id_that_no_response_has_is_404_and_names_its_field(rig: Rig, redis_url: str) -> None:
    coordinator = await rig.coordinator()
    async with running_gateway(coordinator.server.address, redis_url=redis_url) as running:
        for response_id in ("", "resp_", "resp_" + "0" * 32, "resp_" + "\u0660" * 32, "x" * 100_000):
            answer = await respond(running, previous_response_id=response_id)
            error = answer.json()["error"]
            assert (answer.status_code, error["code"]) == (404, "response_not_found")
            assert error["param"] == "previous_response_id"
            assert len(answer.content) < 1000


async def test_tokens_are_counted_as_the_request_itself_counts_them(rig: Rig) -> None:
    coordinator = await rig.coordinator()
    body = {
        "system": [{"type": "text", "text": "w9"}, {"type": "text", "text": "w10"}],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "w5 w6"}, {"type": "text", "text": "w7"}]},
            {"role": "assistant", "content": "w8"},
            {"role": "user", "content": TEXT},
        ],
    }
    async with running_gateway(coordinator.server.address) as running:
        count = (await running.http.post(f"{MESSAGES}/count_tokens", json=body)).json()["input_tokens"]
        request = body | {"max_tokens": 4, "ignore_eos": True}
        usages = [
            (await running.http.post(MESSAGES, json=request)).json()["usage"],
            data_of((await running.http.post(MESSAGES, json=request | {"stream": True})).text)[-2]["usage"],
        ]
        assert count == 10
        for usage in usages:
            assert usage["input_tokens"] + usage["cache_read_input_tokens"] == count
            assert usage["output_tokens"] == 4


async def test_without_a_store_a_response_is_given_and_says_that_it_was_not_stored(rig: Rig) -> None:
    coordinator = await rig.coordinator()
    async with running_gateway(coordinator.server.address, redis_url="redis://127.0.0.1:1") as running:
        response = (await respond(running)).json()
        assert response["store"] is False
        assert response["output"][0]["content"][0]["text"] == text_of(rig.greedy(PROMPT, 12))
        answer = await running.http.get(f"{RESPONSES}/{response['id']}")
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "store_unavailable")


async def test_a_replayed_stream_has_null_sources_and_is_not_counted_twice(rig: Rig) -> None:
    coordinator = await rig.coordinator()
    async with running_gateway(coordinator.server.address) as running:
        body = {"prompt": PROMPT, "max_tokens": 12, "temperature": 0, "ignore_eos": True, "session_id": "s"}
        text = (await running.http.post("/v1/completions", json=body)).json()["choices"][0]["text"]
        drafted = running.count("vllm:spec_decode_num_draft_tokens_total")
        assert drafted > 0
        place = "/v1/sessions/s?object=text_completion&return_provenance=true"
        chunks = data_of((await running.http.get(place, headers=EVENTS)).text)
        replayed = [chunk["specdec"] for chunk in chunks if "specdec" in chunk]
        assert "".join(token["text"] for each in replayed for token in each["tokens"]) == text
        assert {token["source"] for each in replayed for token in each["tokens"]} == {None}
        assert {token["p"] for each in replayed for token in each["tokens"]} == {None}
        assert [each["round"] for each in replayed] == [None] * len(replayed)
        assert running.count("specdec:http_resumed_streams_total") == 1
        assert running.count("vllm:spec_decode_num_draft_tokens_total") == drafted


@pytest.mark.parametrize("form", ["text_completion", "chat.completion"])
async def test_a_stream_that_is_resumed_after_its_last_token_keeps_its_position(rig: Rig, form: str) -> None:
    """A client that resumes once more, from the id of the last event, must not receive its tokens again."""
    coordinator = await rig.coordinator()
    async with running_gateway(coordinator.server.address) as running:
        body = {"prompt": PROMPT, "max_tokens": 12, "ignore_eos": True, "session_id": "s"}
        await running.http.post("/v1/completions", json=body)
        headers = EVENTS | {"last-event-id": "s:12"}
        text = (await running.http.get(f"/v1/sessions/s?object={form}", headers=headers)).text
        ids = [line.removeprefix("id: ") for line in text.splitlines() if line.startswith("id: ")]
        assert ids
        assert set(ids) == {"s:12"}


async def test_a_stream_that_is_continued_after_it_was_left_is_counted_once(rig: Rig) -> None:
    coordinator = await rig.coordinator()
    async with running_gateway(coordinator.server.address) as running:
        body = {"prompt": PROMPT, "max_tokens": 400, "ignore_eos": True, "stream": True, "session_id": "s"}
        async with running.http.stream("POST", "/v1/completions", json=body) as answer:
            await anext(answer.aiter_bytes())
        await eventually(lambda: not coordinator.generations.num_running)
        assert running.count("vllm:spec_decode_num_draft_tokens_total") == 0
        chunks = data_of((await running.http.get("/v1/sessions/s", headers=EVENTS)).text)
        assert chunks[-1]["choices"][0]["finish_reason"] == "length"
        stats = (await running.http.get("/v1/sessions/s")).json()["stats"]
        assert running.count("vllm:spec_decode_num_draft_tokens_total") == stats["num_draft_tokens"] > 0


async def test_an_error_after_the_first_token_is_the_last_event_of_each_api() -> None:
    server, endpoint = serve(ScriptedCoordinator([one_failing_stream]))
    async with running_gateway(endpoint) as running:
        answer = await respond(running, stream=True)
        failed = data_of(answer.text)[-1]
        assert (answer.status_code, failed["type"], failed["response"]["status"]) == (200, "response.failed", "failed")
        assert failed["response"]["error"] == {"code": "unsupported", "message": "no second token"}
        assert failed["response"]["store"] is False
        assert [event["sequence_number"] for event in data_of(answer.text)] == list(range(6))
        body = {"messages": [{"role": "user", "content": TEXT}], "max_tokens": 12, "stream": True}
        events = (await running.http.post(MESSAGES, json=body)).text
        assert events.count("event: message_stop") == 0
        assert data_of(events)[-1] == {
            "type": "error",
            "error": {"type": "invalid_request_error", "message": "no second token"},
        }
    server.stop(None)


def without_text(request: pb.GenerateRequest) -> list[Any]:
    """Two tokens, the text of the first of which is held back."""
    chunks = [tokens(index, [index + 1], "a") for index in range(2)]
    chunks[0].tokens.text = ""
    return [started(request), *chunks, finished(2)]


async def test_a_token_before_the_text_has_its_logprobs_in_the_first_delta() -> None:
    server, endpoint = serve(ScriptedCoordinator([without_text]))
    async with running_gateway(endpoint) as running:
        for has_logprobs in (True, False):
            events = data_of((await respond(running, stream=True, top_logprobs=1 if has_logprobs else None)).text)
            deltas = [event for event in events if event["type"] == "response.output_text.delta"]
            (done,) = [event for event in events if event["type"] == "response.output_text.done"]
            assert [delta["delta"] for delta in deltas] == ["<2>"]
            assert [entry for delta in deltas for entry in delta["logprobs"]] == done["logprobs"]
            assert len(done["logprobs"]) == (2 if has_logprobs else 0)
    server.stop(None)


async def test_an_error_before_the_first_token_of_a_message_has_its_status_and_anthropic_s_form() -> None:
    server, endpoint = serve(ScriptedCoordinator([lambda request: [Unavailable("no target")]]))
    async with running_gateway(endpoint) as running:
        body = {"messages": [{"role": "user", "content": TEXT}], "max_tokens": 12, "stream": True}
        answer = await running.http.post(MESSAGES, json=body)
        assert (answer.status_code, answer.json()["error"]["type"]) == (503, "overloaded_error")
        assert int(answer.headers["retry-after"]) >= 1
    server.stop(None)
