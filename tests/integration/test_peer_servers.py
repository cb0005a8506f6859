"""The suite `peers` with what needs no other installation: specdec and Transformers on the demo pair."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path

import pytest

from bench.harness.process_tree import descendants
from bench.harness.workload import prompt_token_ids
from bench.systems.models import DEMO
from bench.systems.process import ServerFailure
from bench.systems.specdec_server import SpecdecServer
from bench.systems.transformers_server import TransformersServer

TARGET, DRAFT = DEMO / "target", DEMO / "draft"
NUM_TOKENS = 12


def is_running(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


async def test_a_server_streams_answers_tells_its_costs_and_leaves_no_process_behind() -> None:
    prompts = prompt_token_ids(TARGET, 24)[:3]
    server = SpecdecServer("specdec", TARGET, DRAFT, "float32")
    await server.start()
    try:
        members = [server.pid, *descendants(server.pid)]
        assert len(members) >= 4, "a coordinator, a draft and a target below `specdec up`"
        before_s = server.cpu_s()
        answers = await server.answer(prompts, NUM_TOKENS)
        assert server.cpu_s() > before_s
        assert server.pss_bytes() > 50 << 20
        await server.settle()
    finally:
        await server.stop()
    async with asyncio.timeout(30):  # a store or a tokenizer process ends shortly after its parent
        while any(is_running(member) for member in members):  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    assert all(sum(answer.chunk_tokens) == len(answer.token_ids) == NUM_TOKENS for answer in answers)


@pytest.mark.full
async def test_the_first_token_of_a_greedy_answer_has_the_largest_logit() -> None:
    (prompt,) = prompt_token_ids(TARGET, 24)[:1]
    server = TransformersServer("transformers", TARGET, DRAFT, "float32")
    await server.start()
    try:
        (answer,) = await server.answer([prompt], NUM_TOKENS)
        first = answer.token_ids[0]
        gaps = [await server.logit_gap(prompt, first, other) for other in (first - 1, first + 1)]
    finally:
        await server.stop()
    assert len(answer.token_ids) == NUM_TOKENS
    assert min(gaps) > 0


async def test_a_system_that_cannot_load_its_model_is_reported_with_the_reason(tmp_path: Path) -> None:
    with pytest.raises(ServerFailure, match="absent"):
        await SpecdecServer("specdec", tmp_path / "absent", None, "float32").start()


@pytest.mark.full
@pytest.mark.timeout(1200)  # 30 s on two idle cores; Transformers takes long beside busy processes
def test_all_texts_are_the_same_and_a_peer_that_is_not_prepared_is_left_out_with_its_reason(tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    file = tmp_path / "peers.json"
    command = [sys.executable, "-m", "bench", "peers", "--quick", "--pair", "demo", "--peer", "transformers"]
    command += ["--peer", "llama.cpp", "--peers-folder", str(tmp_path), "--json", str(file)]
    suite = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    try:
        _, said = suite.communicate()
    finally:
        suite.terminate()  # it stops its servers; one that is killed cannot
        suite.wait()
    assert suite.returncode == 0, said[-2000:]
    rows = json.loads(file.read_text())
    same = {row["system"]: row["value"] for row in rows if row["metric"] == "texts_same"}
    assert same == {"specdec_drafted": 1.0, "specdec_alone": 1.0, "transformers_drafted": 1.0}
    ratios = {(row["case"].rpartition(", ")[2], row["system"], row["ratio_to"]) for row in rows if row["unit"] == "x"}
    assert ratios == {
        (streams, f"specdec_{decoding}", other)
        for streams in ("1 stream", "8 streams")
        for decoding, other in (
            ("drafted", "transformers_drafted"), ("alone", "transformers_alone"), ("drafted", "specdec_alone"),
        )
    }  # fmt: skip
    (note,) = {row["note"] for row in rows}
    assert "llama.cpp_drafted left out: " in note
    assert "run make peers" in note
