"""A gateway in front of a real coordinator: conflicts, full queues, tenants, cancellation, defaults and discovery."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from gateway.auth import ApiKeys
from specdec.state.live_coordinators import coordinator_info
from specdec.state.redis_store import open_registry
from specdec.state.registry import Heartbeat
from tests.support.coordinator_rig import Rig
from tests.support.gateway_rig import RunningGateway, eventually, running_gateway
from tests.support.key_files import key_line, lines_of, write_private
from tests.support.redis_fixture import redis_server, redis_url
from tests.support.table_services import text_of, write_chat_tokenizer
from tests.support.table_worker import held_steps_are_no_hangs

__all__ = ["held_steps_are_no_hangs", "redis_server", "redis_url"]

PROMPT = [5, 6, 7, 8]
COMPLETIONS = "/v1/completions"


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    async with Rig(write_checkpoint=write_chat_tokenizer) as rig:
        yield rig


async def post(running: RunningGateway, path: str = COMPLETIONS, *, key: str = "", **body: Any) -> Any:
    """The answer to a greedy completion of 12 tokens, unless said otherwise."""
    fields = {"prompt": PROMPT, "max_tokens": 12, "temperature": 0, "ignore_eos": True} if path == COMPLETIONS else {}
    headers = {"authorization": f"Bearer {key}"} if key else {}
    return await running.http.post(path, json={**fields, **body}, headers=headers)


async def test_a_busy_session_is_a_conflict_that_says_when_to_try_again(rig: Rig) -> None:
    coordinator = await rig.coordinator()
    await rig.store.acquire("busy", owner="another-coordinator", ttl_s=60, create=True)
    async with running_gateway(coordinator.server.address) as running:
        for stream in (False, True):
            answer = await post(running, session_id="busy", stream=stream)
            assert (answer.status_code, answer.json()["error"]["code"]) == (409, "session_busy")
            assert int(answer.headers["retry-after"]) >= 1


async def test_a_full_queue_is_429_with_a_time_to_wait(rig: Rig) -> None:
    coordinator = await rig.coordinator(max_queue=0)
    async with running_gateway(coordinator.server.address) as running:
        answer = await post(running)
        error = answer.json()["error"]
        assert (answer.status_code, error["type"], error["code"]) == (429, "rate_limit_error", "queue_full")
        assert int(answer.headers["retry-after"]) >= 1


async def test_the_time_that_a_client_waits_is_the_deadline_of_its_generation(rig: Rig) -> None:
    coordinator = await rig.coordinator()
    async with running_gateway(coordinator.server.address) as running:
        body = {"prompt": PROMPT, "max_tokens": 12}
        refused = await running.http.post(COMPLETIONS, json=body, headers={"specdec-timeout": "soon"})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "specdec-timeout")
        rig.target.worker.gate.clear()
        try:
            for headers in ({"specdec-timeout": "0.5"}, {"x-envoy-expected-rq-timeout-ms": "500"}):
                assert (await running.http.post(COMPLETIONS, json=body, headers=headers)).status_code == 504
                await eventually(lambda: not coordinator.generations.num_running)
        finally:
            rig.target.worker.gate.set()


async def test_each_key_reaches_the_sessions_of_its_own_tenant_alone(rig: Rig, tmp_path: Path) -> None:
    coordinator = await rig.coordinator(tenant_header=True)
    path = write_private(tmp_path / "keys", lines_of("acme", "umbrella"))
    keys, place = ApiKeys(path, allow_anonymous=False), "/v1/sessions/shared-name"
    async with running_gateway(coordinator.server.address, keys=keys) as running:
        owner, other = ({"authorization": f"Bearer {name}"} for name in ("acme", "umbrella"))
        assert await total_tokens(running, "acme") == 16
        for headers in (other, other | {"specdec-tenant": "acme"}, other | {"accept": "text/event-stream"}):
            answer = await running.http.get(place, headers=headers)
            assert (answer.status_code, answer.json()["error"]["code"]) == (404, "session_not_found")
        await running.http.delete(place, headers=other)
        assert (await running.http.get(place, headers=owner)).json()["num_tokens"] == 16
        assert [await total_tokens(running, name) for name in ("umbrella", "acme")] == [16, 32]

        assert (await post(running)).status_code == 401
        assert (await post(running, key="wrong")).json()["error"]["type"] == "authentication_error"
        for path in ("/v1/models", f"{place}?api_key=acme"):
            assert (await running.http.get(path)).status_code == 401
        assert (await running.http.get("/health")).status_code == 200
        assert (await running.http.get("/v1/models", headers={"x-api-key": "acme"})).status_code == 200


async def total_tokens(running: RunningGateway, key: str) -> int:
    """Return the tokens of the session `shared-name` of a key after another turn."""
    return (await post(running, key=key, session_id="shared-name")).json()["usage"]["total_tokens"]


async def test_a_key_for_a_tenant_is_forbidden_unless_the_coordinator_trusts_gateways(rig: Rig, tmp_path: Path) -> None:
    coordinator = await rig.coordinator()
    path = write_private(tmp_path / "keys", key_line("k", "acme generate"))
    async with running_gateway(coordinator.server.address, keys=ApiKeys(path)) as running:
        answer = await post(running, key="k")
        assert (answer.status_code, answer.json()["error"]["type"]) == (403, "permission_error")


async def test_defaults_are_those_the_model_recommends_unless_turned_off() -> None:
    def write(directory: Path) -> None:
        write_chat_tokenizer(directory)
        (directory / "generation_config.json").write_text(json.dumps({"temperature": 0.0, "max_new_tokens": 7}))

    async with Rig(write_checkpoint=write) as rig:
        coordinator = await rig.coordinator()
        chat = {"messages": [{"role": "user", "content": "w5 w6 w7 w8"}], "ignore_eos": True, "temperature": None}
        async with running_gateway(coordinator.server.address) as running:
            answer = (await post(running, "/v1/chat/completions", **chat)).json()
            assert answer["choices"][0]["message"]["content"] == text_of(rig.greedy(PROMPT, 7))
            assert answer["usage"]["completion_tokens"] == 7
        async with running_gateway(coordinator.server.address, generation_config="off") as running:
            answer = (await post(running, "/v1/chat/completions", **chat)).json()
            assert answer["usage"]["total_tokens"] == 512


async def test_the_model_has_the_names_that_the_gateway_was_given(rig: Rig) -> None:
    coordinator = await rig.coordinator()
    async with running_gateway(coordinator.server.address, served_model_name=("small", "alias")) as running:
        assert (await post(running)).json()["model"] == "small"
        assert (await post(running, model="alias")).json()["model"] == "alias"
        assert (await post(running, model="table")).status_code == 404


async def test_coordinators_are_found_in_the_registry(rig: Rig, redis_url: str) -> None:
    coordinator = await rig.coordinator()
    info = coordinator_info("c", version="0", model="m", vocabulary_fingerprint="v", num_running=0)
    registry = open_registry(redis_url)
    heartbeat = Heartbeat(registry, address=coordinator.server.address, describe=lambda: info)
    async with running_gateway("", redis_url=redis_url) as running:
        await heartbeat.start()
        while (await running.http.get("/ready")).status_code != 200:
            pass
        assert (await post(running)).json()["choices"][0]["text"] == text_of(rig.greedy(PROMPT, 12))
    await heartbeat.close()
    await registry.close()


async def test_pages_of_other_origins_may_not_call_unless_allowed(rig: Rig) -> None:
    coordinator = await rig.coordinator()
    asked = {"origin": "https://example.com", "access-control-request-method": "POST"}
    async with running_gateway(coordinator.server.address) as running:
        answer = await running.http.options(COMPLETIONS, headers=asked)
        assert "access-control-allow-origin" not in answer.headers
    async with running_gateway(coordinator.server.address, cors_origin=("https://example.com",)) as running:
        answer = await running.http.options(COMPLETIONS, headers=asked)
        assert answer.headers["access-control-allow-origin"] == "https://example.com"


async def test_event_ids_come_only_to_clients_that_name_event_streams(rig: Rig) -> None:
    coordinator = await rig.coordinator()
    body = {"prompt": PROMPT, "max_tokens": 12, "temperature": 0, "stream": True, "session_id": "s"}
    async with running_gateway(coordinator.server.address) as running:
        plain = (await running.http.post(COMPLETIONS, json=body)).text
        assert "id:" not in plain.replace('"id":', "").replace("session_id", "")
        named = await running.http.post(COMPLETIONS, json=body, headers={"accept": "text/event-stream"})
        assert "id: s:12\n" in named.text
