"""The contents of a coordinator's learning log, with real services and real files."""

from __future__ import annotations

import logging
import os
import shutil
import stat
import threading
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from specdec.contract.errors import InvalidRequest
from specdec.contract.types import WEIGHT_TOTAL, SamplingFilters
from specdec.engine.loader import load_worker
from specdec.engine.options import LoadRequest
from tests.support.coordinator_rig import PROMPT, Rig, eventually, request
from tests.support.logged import CountedLog, logged
from tests.support.model_stack import ModelStack
from tests.support.output import read_rest, read_until
from tests.support.target_alone import TargetAlone
from tests.support.tiny_models import build_tiny_pair

MODELS_PROMPT = [5, 9, 17, 23, 40]
NUM_TOKENS = 24
ASKED: dict[str, dict[str, Any]] = {
    "greedy": {"mode": "rejection", "temperature": 0.0},
    "rejection": {"mode": "rejection", "temperature": 1.0, "seed": 3},
    "filtered": {"mode": "rejection", "temperature": 0.7, "top_k": 20, "top_p": 0.9, "seed": 4},
    "block": {"mode": "block", "temperature": 1.0, "seed": 5},
    "coupled": {"mode": "coupled", "temperature": 0.9, "seed": 6},
    "off": {"mode": "off", "temperature": 1.0, "seed": 7},
}


async def test_the_log_holds_the_targets_tokens_and_distributions(tmp_path: Path) -> None:
    target, draft = build_tiny_pair("llama", tmp_path)
    workers = [
        load_worker(LoadRequest(str(path), device="cpu", dtype="float32", num_kv_blocks=64)) for path in (target, draft)
    ]
    log = CountedLog(tmp_path / "log")
    said = {}
    async with ModelStack(target, workers[0], {"default": workers[1]}, learning_log=log) as stack:
        for name, options in ASKED.items():
            completion = await stack.generate(
                MODELS_PROMPT, max_new_tokens=NUM_TOKENS, ignore_eos=True, gamma=3, **options
            )
            said[name] = list(completion.token_ids)
    facts, turns = logged(tmp_path / "log")
    assert {each.target_fingerprint for each in facts} == {workers[0].shape.model_fingerprint}
    assert {each.vocabulary_fingerprint for each in facts} == {workers[0].shape.vocabulary_fingerprint}
    assert [turn.token_ids.tolist() for turn in turns] == [[*MODELS_PROMPT, *tokens] for tokens in said.values()]
    assert log.counts == {"written": NUM_TOKENS * len(ASKED)}

    alone, num_entries = TargetAlone(target), 0
    for turn, options in zip(turns, ASKED.values(), strict=True):
        assert turn.start == len(MODELS_PROMPT)
        assert turn.temperature == pytest.approx(options["temperature"])
        own = {name: value for name, value in options.items() if name in ("temperature", "top_k", "top_p")}
        ends = np.cumsum(turn.num_entries)
        for index, (end, count) in enumerate(zip(ends.tolist(), turn.num_entries.tolist(), strict=True)):
            law = alone.law(turn.token_ids[: turn.start + index].tolist(), SamplingFilters(**own), turn.start)
            ids, weights = turn.entry_ids[end - count : end], turn.entry_weights[end - count : end]
            assert weights / WEIGHT_TOTAL == pytest.approx(law[ids], abs=1e-5)
            num_entries += count
    assert num_entries > 10 * NUM_TOKENS  # of sampled rounds it is more than the token


async def test_without_the_setting_nothing_is_logged() -> None:
    async with Rig() as rig:
        coordinator = await rig.coordinator()
        await coordinator.generate(request())
        assert "learning-log" not in [thread.name for thread in threading.enumerate()]


async def test_logs_of_two_tenants_are_separate_and_private(tmp_path: Path) -> None:
    async with Rig() as rig:
        for tenant, prompt in (("default", (5, 6)), ("..", (7, 8))):
            log = CountedLog(tmp_path / "log", tenant)
            coordinator = await rig.coordinator(tenant=tenant, learning_log=log)
            await coordinator.generate(request(prompt))
    for tenant, prompt in (("default", [5, 6]), ("..", [7, 8])):
        _, turns = logged(tmp_path / "log", tenant)
        assert [turn.token_ids[:2].tolist() for turn in turns] == [prompt]
    assert os.listdir(tmp_path) == ["log"]
    for path in (tmp_path / "log").rglob("*"):
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600)


async def test_the_committed_part_of_a_cancelled_stream_is_logged(tmp_path: Path) -> None:
    async with Rig() as rig:
        coordinator = await rig.coordinator(learning_log=CountedLog(tmp_path / "log"))
        stream = coordinator.stub.Generate(request(session_id="s", max_new_tokens=400))
        await read_until(stream, 20)
        stream.cancel()
        await eventually(lambda: not coordinator.generations.num_running)
        held = await rig.store.read_tokens("s")
    _, (turn,) = logged(tmp_path / "log")
    assert turn.token_ids.tolist() == held.tolist()
    assert 20 <= len(turn.num_entries) == len(held) - len(PROMPT)


async def test_tokens_that_were_decided_but_never_committed_are_not_logged(tmp_path: Path) -> None:
    async with Rig() as rig:
        coordinator = await rig.coordinator(learning_log=CountedLog(tmp_path / "log"))
        stream = coordinator.stub.Generate(request(session_id="s", max_new_tokens=400))
        output = await read_until(stream, 20)
        for key in await rig.store._connection.run_command("KEYS", "specdec:default:*"):
            await rig.store._connection.run_command("DEL", key)
        with pytest.raises(grpc.aio.AioRpcError):
            await read_rest(stream, output)
        await eventually(lambda: not coordinator.generations.num_running)
    _, (turn,) = logged(tmp_path / "log")
    assert turn.token_ids.tolist() == [*PROMPT, *output.token_ids]


async def test_distributions_with_penalties_or_biases_are_not_logged(tmp_path: Path) -> None:
    async with Rig() as rig:
        log = CountedLog(tmp_path / "log")
        coordinator = await rig.coordinator(learning_log=log)
        for sampling in ({"repetition_penalty": 1.2}, {"logit_bias": {3: 1.0}}, {"presence_penalty": 0.5}):
            await coordinator.generate(request(**sampling))
    assert logged(tmp_path / "log") == (set(), [])


async def test_a_log_that_cannot_be_written_costs_no_token_and_is_reported_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("coordinator.learning.log.SEGMENT_BYTES", 1)
    async with Rig() as rig:
        log = CountedLog(tmp_path / "log")
        coordinator = await rig.coordinator(learning_log=log)
        shutil.rmtree(tmp_path / "log")
        with caplog.at_level(logging.WARNING, "coordinator.learning"):
            outputs = [await coordinator.generate(request()) for _ in range(3)]
            await eventually(lambda: log.counts["failed"] == 72)
        assert [output.token_ids for output in outputs] == [rig.target.worker.greedy_continuation(PROMPT, 24)] * 3
        assert len([record for record in caplog.records if "learning log" in record.message]) == 1
    assert log.counts == {"failed": 72}


async def test_turns_that_exceed_the_queue_are_dropped_and_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with Rig() as rig:
        log = CountedLog(tmp_path / "log")
        coordinator = await rig.coordinator(learning_log=log)
        monkeypatch.setattr("coordinator.learning.log.MAX_WAITING", 0)
        output = await coordinator.generate(request(max_new_tokens=100))
        assert output.token_ids == rig.target.worker.greedy_continuation(PROMPT, 100)
        monkeypatch.setattr("coordinator.learning.log.MAX_WAITING", 1000)
        monkeypatch.setattr("coordinator.learning.log.MAX_HELD_BYTES", 1000)
        await coordinator.generate(request(max_new_tokens=100))
    assert log.counts == {"dropped": 200}
    assert logged(tmp_path / "log") == (set(), [])


@pytest.mark.parametrize("kind", ["file", "open"])
def test_a_folder_that_is_not_private_is_refused_in_one_line(tmp_path: Path, kind: str) -> None:
    folder = tmp_path / "log"
    if kind == "file":
        folder.write_text("")
    else:
        (folder / "tenant-default").mkdir(parents=True, mode=0o755)
    with pytest.raises(InvalidRequest, match=r"^--learning-log: .*tenant-default cannot be used: [^\n]+$"):
        CountedLog(folder)
