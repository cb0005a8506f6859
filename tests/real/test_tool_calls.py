"""Sixty prompts for tools at Qwen2.5-Coder 1.5B, in its own format, with and without drafts of the 0.5B."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from typing import Any

import jsonschema_rs
import pytest

from bench.systems.ours import RunningSystem
from bench.systems.real_models import QWEN_DRAFT, QWEN_TARGET
from specdec.client import AsyncClient, Completion
from tests.real.tool_prompts import PROMPTS, TOOLS, ToolPrompt

NUM_STREAMS, NUM_TOKENS = 12, 160


@pytest.fixture(scope="module")
def answers() -> dict[int, list[Completion]]:
    """Answers to all prompts, by gamma."""
    # Twelve prompts at once wait for minutes where a processor takes 70 ms for a token of a prompt.
    with RunningSystem(QWEN_TARGET.path(), QWEN_DRAFT.path(), flags=("--set", "target.max_wait_s=3600")) as system:
        return {gamma: asyncio.run(_answers(system.endpoint, gamma)) for gamma in (0, 4)}


async def _answers(endpoint: str, gamma: int) -> list[Completion]:
    free = asyncio.Semaphore(NUM_STREAMS)
    async with AsyncClient(endpoint) as client:

        async def answer(prompt: ToolPrompt) -> Completion:
            async with free:
                return await client.generate(
                    [{"role": "user", "content": prompt.text}],
                    tools=prompt.tools,
                    tool_choice=prompt.choice,
                    temperature=0.0,
                    max_new_tokens=NUM_TOKENS,
                    gamma=gamma,
                )

        return await asyncio.gather(*map(answer, PROMPTS))


def test_every_required_call_is_json_of_its_tool(answers: dict[int, list[Completion]]) -> None:
    scores: Counter[str] = Counter()
    for prompt, answer in zip(PROMPTS, answers[0], strict=True):
        calls = _whole_calls(answer)
        for name, arguments in calls:
            assert jsonschema_rs.is_valid(TOOLS[name]["parameters"], arguments), (name, arguments)
        if prompt.choice == "required":
            assert answer.tool_calls
            assert answer.finish_reason in ("tool_calls", "length")
        scores[prompt.kind] += _is_right(prompt, calls)
    kinds = Counter(prompt.kind for prompt in PROMPTS)
    print("right answers:", ", ".join(f"{kind} {scores[kind]} of {num}" for kind, num in kinds.items()))
    print("cut by the limit of tokens:", sum(answer.finish_reason == "length" for answer in answers[0]))
    assert scores["single"] >= kinds["single"] / 2  # random arguments would give none


def _whole_calls(answer: Completion) -> list[tuple[str, Any]]:
    """Return names and arguments of the calls, without the one in which the limit of tokens cut the answer."""
    calls = list(answer.tool_calls)
    if answer.finish_reason == "length" and calls and not _is_json(calls[-1].arguments):
        calls.pop()
    return [(call.name, json.loads(call.arguments)) for call in calls]


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def _is_right(prompt: ToolPrompt, found: list[tuple[str, Any]]) -> bool:
    """Return whether the calls are the expected ones, in any order."""
    left = list(prompt.calls)
    for call in found:
        if call not in left:
            return False
        left.remove(call)
    return not left


def test_drafts_do_not_change_an_answer(answers: dict[int, list[Completion]]) -> None:
    assert [each.token_ids for each in answers[4]] == [each.token_ids for each in answers[0]]
    assert any(answer.stats.num_accepted_tokens for answer in answers[4])
