"""vLLM's and llama.cpp's streams as the suite `peers` reads them, from a program that serves like them."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from bench.harness.http_stream import HttpFailure, get_status
from bench.systems.http_servers import LlamaServer, VllmServer
from bench.systems.process import ServerFailure
from bench.systems.served import own_draft_model
from tests.support import canned_server

PROMPT = [1, 300, 301]

VLLM_EVENTS = [
    {"choices": [{"index": 0, "text": "a", "token_ids": [7], "prompt_token_ids": PROMPT}]},
    {"choices": [{"index": 0, "text": "é", "token_ids": [8, 9]}]},
    {"choices": [{"index": 0, "text": "", "token_ids": None, "finish_reason": "length"}]},
    {"choices": [], "usage": {"completion_tokens": 3}},
]
LLAMA_EVENTS = [
    {"content": "a", "tokens": [7], "stop": False},
    {"content": "é", "tokens": [8], "stop": False},
    {"content": "b", "tokens": [9], "stop": False},
    {"content": "", "tokens": [], "stop": True, "tokens_predicted": 3, "prompt": "x" * 100_000},
]


@pytest.fixture
def program(tmp_path: Path) -> Callable[[list[str]], Path]:
    """Return a maker of programs that serve given events, whatever flags they are started with."""

    def make(events: list[str]) -> Path:
        file = tmp_path / "events.json"
        file.write_text(json.dumps(events))
        path = tmp_path / "server"
        path.write_text(f'#!/bin/sh\nexec {sys.executable} {canned_server.__file__} {file} "$@"\n')
        path.chmod(0o755)
        return path

    return make


async def test_vllms_stream_gives_the_tokens_of_each_round_in_one_chunk(program: Callable[[list[str]], Path]) -> None:
    events = [*map(json.dumps, VLLM_EVENTS), "[DONE]"]
    server = VllmServer("vllm", program(events), Path("target"), "float32", speculation=own_draft_model(Path("draft")))
    await server.start()
    try:
        first, second = await server.answer([PROMPT, PROMPT], 3)
    finally:
        await server.stop()
    assert first.token_ids == second.token_ids == [7, 8, 9]
    assert first.chunk_tokens == [1, 2]
    assert 0 < first.ttft_s <= first.chunk_s[-1]
    assert server.start_s > 0


async def test_llama_cpps_stream_gives_every_token_and_its_long_last_event_none(
    program: Callable[[list[str]], Path],
) -> None:
    server = LlamaServer("llama.cpp", program([*map(json.dumps, LLAMA_EVENTS)]), Path("t.gguf"), None, "f32")
    await server.start()
    try:
        (answer,) = await server.answer([PROMPT], 3)
        with pytest.raises(RuntimeError, match="ended after 3 of 4 tokens"):
            await server.answer([PROMPT], 4)
        with pytest.raises(HttpFailure, match=r"answered 400: .*the prompt is empty"):
            await server.answer([[]], 3)
    finally:
        await server.stop()
    assert answer.token_ids == [7, 8, 9]
    assert answer.chunk_tokens == [1, 1, 1]


async def test_a_server_that_is_stopped_no_longer_listens(program: Callable[[list[str]], Path]) -> None:
    server = LlamaServer("llama.cpp", program([]), Path("t.gguf"), None, "f32")
    await server.start()
    assert await get_status(server.port, "/health") == 200
    await server.stop()
    with pytest.raises(OSError, match=r"[Cc]onnect"):
        await get_status(server.port, "/health")


async def test_a_server_that_ends_instead_of_serving_is_reported_with_its_last_words(tmp_path: Path) -> None:
    path = tmp_path / "server"
    path.write_text("#!/bin/sh\necho 'operator torchvision::nms does not exist' >&2\nexit 3\n")
    path.chmod(0o755)
    with pytest.raises(ServerFailure, match="exit code 3: operator torchvision::nms does not exist"):
        await VllmServer("vllm", path, Path("target"), "float32").start()


async def test_a_program_that_cannot_be_run_is_reported_by_its_path(tmp_path: Path) -> None:
    with pytest.raises(ServerFailure, match="absent cannot be run: No such file or directory"):
        await LlamaServer("llama.cpp", tmp_path / "absent", Path("t.gguf"), None, "f32").start()
