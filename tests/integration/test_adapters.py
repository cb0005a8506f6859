"""Adapters of an engine's server are separate models: text, sessions, fronts, and what is learned about drafts."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from specdec.contract.errors import SpecdecError
from specdec.rpc.status_mapping import from_rpc_error
from specdec.v1 import coordinator_pb2 as pb
from tests.support.backend_rig import BackendSystem, backend_system, start_backend, table_model
from tests.support.coordinator_rig import PROMPT, Coordinator, Rig, request
from tests.support.engine_server import EngineOptions, EngineServer
from tests.support.gateway_rig import RunningGateway, running_gateway
from tests.support.table_services import text_of
from tests.support.table_worker import TableWorker

BACKENDS = ("server", "vllm")
#: Models that the adapters make of the base model.
SALTS = {"sql": 7, "tone": 8}
MODELS = {"": table_model(), **{name: table_model(salt) for name, salt in SALTS.items()}}


def adapters(*names: str) -> dict[str, TableWorker]:
    return {name: MODELS[name] for name in names}


@pytest.fixture(autouse=True)
def lists_are_read_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("target_service.backends.adapters.REFRESH_S", 0.05)


@pytest.fixture(params=BACKENDS)
async def system(request: pytest.FixtureRequest) -> AsyncIterator[BackendSystem]:
    async with backend_system(request.param, EngineOptions(adapters=adapters("sql", "tone"))) as system:
        yield system


async def info_of(coordinator: Coordinator) -> pb.GetInfoResponse:
    return await coordinator.stub.GetInfo(pb.GetInfoRequest())


async def listed(coordinator: Coordinator) -> dict[str, str]:
    """Return the fingerprints of the served adapters by name."""
    return {adapter.name: adapter.fingerprint for adapter in (await info_of(coordinator)).adapters}


async def become(coordinator: Coordinator, expected: set[str]) -> None:
    """Wait until these adapters are listed."""
    while set(await listed(coordinator)) != expected:
        await coordinator.pools.poll()
        await asyncio.sleep(0.02)


async def read_on(stream: Any) -> tuple[list[int], SpecdecError | None]:
    """Return the further tokens of a stream, and the error that ends it."""
    token_ids: list[int] = []
    try:
        while (event := await stream.read()) is not grpc.aio.EOF:
            token_ids += event.tokens.token_ids
    except grpc.aio.AioRpcError as error:
        return token_ids, from_rpc_error(error)
    return token_ids, None


async def next_turn(coordinator: Coordinator, session_id: str) -> pb.Started:
    """Return how the next turn of a session begins, as soon as there is a target for it."""
    while True:
        try:
            output = await coordinator.generate(request([9], session_id=session_id))
        except grpc.aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.UNAVAILABLE:
                raise
            await coordinator.pools.poll()
            await asyncio.sleep(0.05)
        else:
            assert output.started is not None
            return output.started


async def refusal(coordinator: Coordinator, asked: pb.GenerateRequest) -> tuple[str, str]:
    """Return reason and message of a request that is refused."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await coordinator.generate(asked)
    error = from_rpc_error(caught.value)
    return error.reason, error.message


async def test_each_adapter_gives_its_own_text_and_its_sessions_keep_it(system: BackendSystem) -> None:
    coordinator = system.coordinator
    assert set(await listed(coordinator)) == {"sql", "tone"}
    sessions = {}
    for name, model in MODELS.items():
        output = await coordinator.generate(request(adapter=name))
        assert output.token_ids == model.greedy_continuation(PROMPT, 24)
        assert output.started is not None
        assert output.started.adapter == name
        sessions[name] = output.started
    assert len({started.target_fingerprint for started in sessions.values()}) == 3
    (unnamed,) = [(await coordinator.generate(request())).started]
    assert unnamed is not None
    assert unnamed.adapter == ""
    for name, model in MODELS.items():
        before = [*PROMPT, *model.greedy_continuation(PROMPT, 24)]
        turn = await coordinator.generate(request([9], session_id=sessions[name].session_id))
        assert turn.token_ids == model.greedy_continuation([*before, 9], 24)
        assert turn.started is not None
        assert (turn.started.adapter, turn.started.target_changed) == (name, False)


async def test_a_session_refuses_another_adapter_and_an_unknown_name_is_refused_with_those_there_are(
    system: BackendSystem,
) -> None:
    coordinator = system.coordinator
    await coordinator.generate(request(session_id="s", adapter="sql"))
    for name, words in (("tone", "adapter 'tone'"), ("", "no adapter")):
        told = f"adapter: session s runs with adapter 'sql', the request asks for {words}; begin another session"
        assert await refusal(coordinator, request([9], session_id="s", adapter=name)) == ("INVALID_REQUEST", told)
    unknown = "adapter 'law' is not served; there are sql, tone"
    assert await refusal(coordinator, request(adapter="law")) == ("MODEL_NOT_FOUND", unknown)
    asked = pb.GetSessionRequest(session_id="s")
    assert (await coordinator.stub.GetSession(asked)).turn == 0


async def test_a_coupled_text_with_an_adapter_is_that_of_our_own_engine_with_its_model() -> None:
    asked = {"mode": pb.SPECULATION_MODE_COUPLED, "temperature": 0.9, "seed": 7, "max_new_tokens": 12, "top_k": 5}
    async with backend_system("vllm", EngineOptions(adapters=adapters("sql"))) as system:
        requests = [request(gamma=gamma, adapter="sql", **asked) for gamma in (0, 3)]
        outputs = [(await system.coordinator.generate(each)).token_ids for each in requests]
        salts = {each.get("cache_salt") for each in system.server.asked.generations if each["model"] == "sql"}
        (fingerprint,) = (await listed(system.coordinator)).values()
    async with Rig(targets=0) as rig:
        rig.services.append(await rig.start("target", salt=SALTS["sql"]))
        expected = (await (await rig.coordinator()).generate(request(gamma=0, **asked))).token_ids
    assert outputs == [expected, expected]
    assert f"specdec adapter {fingerprint}" in salts


async def test_what_an_adapter_accepts_of_drafts_counts_for_it_alone() -> None:
    """The draft has the weights of the base model, so all of its tokens are accepted there."""
    async with backend_system("server", EngineOptions(adapters=adapters("sql")), draft_salt=0) as system:
        coordinator = system.coordinator
        for number in range(4):
            for name in ("", "sql"):
                await coordinator.generate(request([5 + number, 6, 7], adapter=name))
        info = await info_of(coordinator)
        (pool,) = [pool for pool in info.pools if pool.role == "draft"]
        (sql,) = info.adapters
        assert pool.alpha == 1.0
        assert 0.0 < sql.alpha < 0.9


async def test_classes_and_scores_of_routed_requests_are_apart_for_each_adapter() -> None:
    async with backend_system("server", EngineOptions(adapters=adapters("sql")), draft_salt=0, routes=True) as system:
        coordinator = system.coordinator
        for name in ("", "sql"):
            await coordinator.generate(request(list(range(2, 22)), adapter=name, gamma=None, max_new_tokens=64))
        await coordinator.scores_settled()
        info = await info_of(coordinator)
        (sql,) = info.adapters
        (exact,) = [pool for pool in info.pools if pool.name == "default" and pool.role == "draft"]
        alphas = {route.request_class: route.alpha for route in exact.routes}
        base = next(name for name in alphas if not name.endswith(sql.fingerprint[:8]))
        assert alphas[base] == 1.0
        assert 0.0 <= alphas[f"{base}/sql@{sql.fingerprint[:8]}"] < 0.9
        assert exact.alpha == 1.0


async def test_a_session_whose_adapter_the_server_loses_ends_with_its_name_and_goes_on_once_it_is_back(
    system: BackendSystem,
) -> None:
    coordinator, server = system.coordinator, system.server
    streams, num_tokens = {}, 100
    for name in ("sql", "tone"):
        asked = request(session_id=name, adapter=name, gamma=0, max_new_tokens=num_tokens)
        streams[name] = coordinator.stub.Generate(asked)
        assert (await streams[name].read()).started.adapter == name
        await streams[name].read()
    server.gate.clear()
    lost = server.options.adapters.pop("sql")
    server.gate.set()
    got, error = await read_on(streams["tone"])
    assert error is None
    assert got == MODELS["tone"].greedy_continuation(PROMPT, num_tokens)[num_tokens - len(got) :]
    _, error = await read_on(streams["sql"])
    assert error is not None
    assert error.reason == "REPLICA_UNAVAILABLE"
    assert "adapter" in error.message
    await become(coordinator, {"tone"})
    assert (await refusal(coordinator, request(adapter="sql")))[0] == "MODEL_NOT_FOUND"
    server.options.adapters["sql"] = lost
    await become(coordinator, {"sql", "tone"})
    resumed = await coordinator.generate(request(None, session_id="sql", resume_from=0))
    assert resumed.token_ids == MODELS["sql"].greedy_continuation(PROMPT, num_tokens)


async def test_after_a_restart_of_the_server_no_token_of_an_exchanged_adapter_is_taken(system: BackendSystem) -> None:
    coordinator, port = system.coordinator, system.server.port
    for name in ("sql", "tone"):
        await coordinator.generate(request(session_id=name, adapter=name))
    before = await listed(coordinator)
    stream = coordinator.stub.Generate(request(session_id="cut", adapter="sql", gamma=0, max_new_tokens=200))
    held = [token_id for _ in range(2) for token_id in (await stream.read()).tokens.token_ids]
    await system.server.stop()
    exchanged = EngineOptions(adapters={"sql": table_model(salt=9), **adapters("tone")})
    async with EngineServer(table_model(), exchanged, port=port):
        further, error = await read_on(stream)
        held += further
        assert error is not None
        assert held == MODELS["sql"].greedy_continuation(PROMPT, 200)[: len(held)]
        turns = {name: await next_turn(coordinator, name) for name in ("sql", "tone")}
        assert [turn.target_changed for turn in turns.values()] == [True, False]
        assert (await listed(coordinator))["tone"] == before["tone"]
        assert turns["sql"].target_fingerprint not in ("", before["sql"])
        base = await coordinator.generate(request())
        assert base.token_ids == MODELS[""].greedy_continuation(PROMPT, 24)


async def test_adapters_move_to_the_new_base_model_in_a_rollout_and_only_named_ones_are_served() -> None:
    """The old target serves all adapters of its server, the new one a single one under another name."""
    async with backend_system("server", EngineOptions(adapters=adapters("sql", "tone"))) as system:
        rig = system.rig
        new_models = {"sql-v2": table_model(salt=11), "tone": table_model(salt=12)}
        options = EngineOptions(adapters=new_models, roots={"sql-v2": "/adapters/2/sql"})
        async with EngineServer(table_model(salt=10), options) as server:
            old = await listed(system.coordinator)
            await system.coordinator.generate(request(session_id="s", adapter="sql"))
            rig.services.append(
                await start_backend(server.url, rig.directory, "server", adapter=("sql=/adapters/2/sql",))
            )
            both = await rig.coordinator()
            of_sql = [each for each in (await info_of(both)).adapters if each.name == "sql"]
            assert [each.share for each in of_sql] == [0.5, 0.5]
            assert len({each.fingerprint for each in of_sql}) == 2
            assert {each.name for each in (await info_of(both)).adapters} == {"sql", "tone"}
            kept = await both.generate(request([9], session_id="s"))
            assert kept.started is not None
            assert kept.started.target_fingerprint == old["sql"]
            new = next(each.fingerprint for each in of_sql if each.fingerprint != old["sql"])
            await both.stub.Promote(pb.PromoteRequest(target_fingerprint=new, share=1.0))
            begun = await both.generate(request(session_id="n", adapter="sql"))
            assert begun.token_ids == new_models["sql-v2"].greedy_continuation(PROMPT, 24)
            system.target.servicer.drain()
            await both.pools.poll()
            moved = await both.generate(request([9], session_id="s"))
            assert moved.started is not None
            assert (moved.started.target_fingerprint, moved.started.target_changed) == (new, True)
            assert (moved.started.adapter, begun.started.adapter) == ("sql", "sql")


async def test_a_target_whose_model_is_an_adapter_serves_no_others() -> None:
    async with backend_system("server", EngineOptions(adapters=adapters("sql", "tone"))) as system:
        alone = await start_backend(system.server.url, system.rig.directory, "server", backend_model="sql")
        assert alone.engine.info().adapter_names == ()
        await alone.kill()


async def test_a_server_that_selects_adapters_after_the_name_of_the_model_gets_them_so() -> None:
    options = EngineOptions(adapters=adapters("sql"), names_join=True)
    async with backend_system("server", options) as system:
        output = await system.coordinator.generate(request(adapter="sql"))
        assert output.token_ids == MODELS["sql"].greedy_continuation(PROMPT, 24)
        assert system.server.asked.completions[-1]["model"] == "served:sql"


@pytest.fixture
async def gateway(caplog: pytest.LogCaptureFixture) -> AsyncIterator[RunningGateway]:
    """A gateway of which one name for the model is that of an adapter too."""
    async with (
        backend_system("server", EngineOptions(adapters=adapters("sql", "tone"))) as system,
        running_gateway(
            system.coordinator.server.address, served_model_name=("chat", "tone"), redis_url="memory://adapters"
        ) as running,
    ):
        yield running


async def test_the_gateway_lists_adapters_as_models_and_answers_under_their_names(
    gateway: RunningGateway, caplog: pytest.LogCaptureFixture
) -> None:
    listed = (await gateway.http.get("/v1/models")).json()["data"]
    assert [(model["id"], model["parent"]) for model in listed] == [("chat", None), ("tone", None), ("sql", "chat")]
    assert "tone names the model and one of its adapters, and requests get the model" in caplog.text
    assert (await gateway.http.get("/v1/models/sql")).json()["root"] == "sql"
    body = {"prompt": PROMPT, "max_tokens": 12, "temperature": 0, "ignore_eos": True}
    for name, adapter in (("chat", ""), ("tone", ""), ("sql", "sql")):
        answer = (await gateway.http.post("/v1/completions", json={**body, "model": name})).json()
        expected = text_of(MODELS[adapter].greedy_continuation(PROMPT, 12))
        assert (answer["model"], answer["choices"][0]["text"]) == (name, expected)
    refused = await gateway.http.post("/v1/completions", json={**body, "model": "law"})
    assert refused.status_code == 404
    assert refused.json()["error"]["message"] == "the model 'law' does not exist; this server has chat, tone, sql"
    sql = {**body, "model": "sql", "session_id": "s"}
    assert (await gateway.http.post("/v1/completions", json=sql)).status_code == 200
    unnamed = {**body, "session_id": "s", "stream": True}
    lines = (await gateway.http.post("/v1/completions", json=unnamed)).text.split("\n\n")
    assert json.loads(lines[0].split("data: ")[1])["model"] == "sql"
    other = await gateway.http.post("/v1/completions", json={**sql, "model": "chat"})
    assert other.status_code == 400
    assert other.json()["error"]["param"] == "model"
    messages = [{"role": "user", "content": "w5 w6"}]
    for path in ("/v1/chat/completions", "/v1/messages"):
        answer = await gateway.http.post(path, json={"model": "sql", "messages": messages, "max_tokens": 4})
        assert answer.json()["model"] == "sql"


async def test_a_response_goes_on_with_its_adapter_and_another_one_gets_the_whole_conversation(
    gateway: RunningGateway,
) -> None:
    body = {"input": "w5 w6", "max_output_tokens": 4, "temperature": 0}

    async def respond(**fields: object) -> Any:
        return (await gateway.http.post("/v1/responses", json={**body, **fields})).json()

    first = await respond(model="sql")
    second = await respond(previous_response_id=first["id"])
    assert (second["model"], second["session_id"]) == ("sql", first["session_id"])
    third = await respond(previous_response_id=second["id"], model="chat")
    assert third["model"] == "chat"
    assert third["session_id"] != first["session_id"]
