"""`specdec drain`: one replica or one coordinator takes no new sessions, and what runs there ends there."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import grpc
import pytest

from specdec.cli import drain
from specdec.cli.__main__ import run
from specdec.rpc.status_mapping import from_rpc_error
from tests.support.coordinator_rig import PROMPT, Coordinator, Rig, request
from tests.support.output import Output
from tests.support.table_services import Service


class Held:
    """A target engine whose answers wait while `is_open` is cleared."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self.is_open = asyncio.Event()
        self.is_open.set()
        self.was_asked = asyncio.Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    async def verify(self, *arguments: Any) -> Any:
        self.was_asked.set()
        await self.is_open.wait()
        return await self._engine.verify(*arguments)


@pytest.fixture(autouse=True)
def _known_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every coordinator of these tests learns of a drain when it polls."""
    monkeypatch.setattr(drain, "_KNOWN_AFTER_S", 0.0)
    monkeypatch.setattr(drain, "_POLL_S", 0.01)


async def specdec(capsys: pytest.CaptureFixture[str], coordinator: Coordinator, *words: str) -> tuple[int, Any, str]:
    """Run `specdec drain`; return its exit code, its JSON and what it says on stderr."""
    flags = ["--endpoint", coordinator.server.address, "--json"]
    code = await asyncio.to_thread(run, ["drain", *words, *flags], {})
    printed = capsys.readouterr()
    return code, json.loads(printed.out or "null"), printed.err


def expected(rig: Rig) -> list[int]:
    return rig.target.worker.greedy_continuation(PROMPT, 24)


async def held_target(rig: Rig) -> tuple[Service, Held]:
    engines: list[Held] = []

    def between(engine: Any) -> Held:
        engines.append(Held(engine))
        return engines[0]

    service = await rig.start("target", salt=0, between=between)
    rig.services.append(service)
    return service, engines[0]


async def test_a_drained_target_ends_its_stream_takes_no_new_session_and_can_be_taken_back(
    capsys: pytest.CaptureFixture[str],
) -> None:
    async with Rig(targets=0) as rig:
        first, engine = await held_target(rig)
        coordinator = await rig.coordinator()
        engine.is_open.clear()
        stream = asyncio.create_task(coordinator.generate(request(session_id="old")))
        await engine.was_asked.wait()
        second = await rig.start("target", salt=0)
        rig.services.append(second)
        other = await rig.coordinator()  # knows both

        code, left, words = await specdec(capsys, other, first.address, "--timeout", "0.05")
        assert (code, left) == (1, None)
        assert "target target-0 still has 1 stream left" in words
        assert "takes no new sessions" in words

        await other.pools.poll()
        new = await other.generate(request(session_id="new"))
        assert second.engine.info().num_sessions == 1
        engine.is_open.set()
        old = await stream
        assert old.token_ids == new.token_ids == expected(rig)

        code, left, words = await specdec(capsys, other, first.address)
        assert (code, left["num_streams"], left["draining"], left["is_last"]) == (0, 0, True, False)
        assert first.servicer.info().draining
        code, left, _ = await specdec(capsys, other, first.address, "--undo")
        assert (code, left["draining"], first.servicer.info().draining) == (0, False, False)


async def test_a_draft_that_was_the_last_one_is_drained_with_a_warning_and_streams_go_on_without_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    async with Rig() as rig:
        coordinator = await rig.coordinator()
        code, left, words = await specdec(capsys, coordinator, "draft-1")
        assert (code, left["role"], left["is_last"]) == (0, "draft", True)
        assert words == "warning: draft draft-1 is the last one of its kind: new sessions run without drafts of it\n"
        await coordinator.pools.poll()
        output = await coordinator.generate(request())
        assert output.token_ids == expected(rig)
        assert not rig.draft.engine.info().num_sessions


async def test_a_drained_coordinator_refuses_new_requests_and_ends_those_that_run(
    capsys: pytest.CaptureFixture[str],
) -> None:
    async with Rig(targets=0) as rig:
        _, engine = await held_target(rig)
        coordinator = await rig.coordinator()
        engine.is_open.clear()
        stream = asyncio.create_task(coordinator.generate(request(session_id="old")))
        await engine.was_asked.wait()

        own_id = coordinator.generations.coordinator_id
        code, left, _ = await specdec(capsys, coordinator, own_id, "--timeout", "0")
        assert (code, left["role"], left["num_streams"]) == (0, "coordinator", 1)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await coordinator.generate(request(session_id="new"))
        assert from_rpc_error(caught.value).reason == "DRAINING"
        engine.is_open.set()
        assert (await stream).token_ids == expected(rig)
        assert (await specdec(capsys, coordinator, own_id))[0] == 0
        assert (await specdec(capsys, coordinator, own_id, "--undo"))[0] == 0
        output: Output = await coordinator.generate(request(session_id="new"))
        assert output.token_ids == expected(rig)


async def test_the_drain_of_a_coordinator_that_shuts_down_is_not_undone(capsys: pytest.CaptureFixture[str]) -> None:
    async with Rig() as rig:
        coordinator = await rig.coordinator()
        own_id = coordinator.generations.coordinator_id
        assert (await specdec(capsys, coordinator, own_id))[0] == 0
        assert coordinator.servicer is not None
        coordinator.servicer.drains.end()
        code, _, words = await specdec(capsys, coordinator, own_id, "--undo")
        assert code == 1
        assert "is shutting down" in words
        assert coordinator.generations.is_leaving


async def test_an_unknown_name_is_refused_with_the_names_that_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    async with Rig() as rig:
        coordinator = await rig.coordinator()
        code, _, words = await specdec(capsys, coordinator, "target-9")
    assert code == 1
    assert json.loads(words)["reason"] == "REPLICA_NOT_FOUND"
    assert "draft-1, target-0, this coordinator" in words
