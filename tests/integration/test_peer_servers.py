"""The servers of the suite `peers` that need no other installation: specdec and Transformers on the demo draft."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.models import DEMO
from bench.process_tree import descendants
from bench.servers.process import PeerServer, ServerFailure
from bench.servers.specdec_server import SpecdecServer
from bench.servers.texts import Match, count_matches
from bench.servers.transformers_server import TransformersServer
from bench.workload import prompt_token_ids

TARGET, DRAFT = DEMO / "target", DEMO / "draft"
NUM_TOKENS = 12
NUM_PROMPTS = 3


def is_running(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


async def stopped(server: PeerServer, prompts: list[list[int]]) -> list[list[int]]:
    """Start a server, return its texts and stop it."""
    await server.start()
    try:
        before_s = server.cpu_s()
        answers = await server.answer(prompts, NUM_TOKENS)
        assert server.cpu_s() > before_s
        assert server.pss_bytes() > 50 << 20
        await server.settle()
    finally:
        pid = server.pid
        members = [pid, *descendants(pid)]
        await server.stop()
    assert not [member for member in members if is_running(member)]
    assert all(sum(answer.chunk_tokens) == len(answer.token_ids) == NUM_TOKENS for answer in answers)
    return [answer.token_ids for answer in answers]


async def test_specdec_and_transformers_give_the_same_texts_with_a_draft_and_without() -> None:
    prompts = prompt_token_ids(TARGET, 24)[:NUM_PROMPTS]
    texts = {
        kind.__name__ + str(draft): await stopped(kind("a server", TARGET, draft, "float32"), prompts)
        for kind in (TransformersServer, SpecdecServer)
        for draft in (None, DRAFT)
    }
    expected = texts.pop("TransformersServerNone")
    checker = TransformersServer("checker", TARGET, None, "float32")
    await checker.start()
    try:
        for prompt, text in zip(prompts, expected, strict=True):
            gap = await checker.logit_gap(prompt, text[0], (text[0] + 1) % 2048)
            assert gap > 0, "a greedy token has the largest logit"
        for found in texts.values():
            assert count_matches(prompts, found, expected, lambda *asked: 1.0) == {Match.EQUAL: NUM_PROMPTS}
    finally:
        await checker.stop()


async def test_a_system_that_cannot_load_its_model_is_reported_with_the_reason(tmp_path: Path) -> None:
    with pytest.raises(ServerFailure, match="specdec"):
        await SpecdecServer("specdec", tmp_path / "absent", None, "float32").start()
