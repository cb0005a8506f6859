"""Answers of real models to the schemas of MaskBench: each is valid, unless the limit of tokens has cut it.

MaskBench (guidance-ai/jsonschemabench) is not part of this repository. SPECDEC_MASKBENCH names a file with one object
a line: `name`, `schema` and `tests`, a list of objects with `valid` and `data`.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jsonschema_rs
import numpy as np
import pytest

from bench.systems.ours import RunningSystem
from bench.systems.real_models import QWEN_DRAFT, SMOLLM2
from specdec.checkpoints.vocabulary import load_tokenizer
from specdec.client import AsyncClient, Constraint, InvalidRequest
from specdec.structured.admission import check_constraint
from specdec.structured.matcher import Matcher, is_legal
from specdec.structured.token_table import TokenTable

NUM_SCHEMAS, NUM_STREAMS, NUM_TOKENS = 150, 16, 256
MOST_REFUSED = 0.15


@pytest.fixture(scope="module")
def cases() -> list[dict[str, Any]]:
    name = os.environ.get("SPECDEC_MASKBENCH")
    if not name:
        pytest.skip("needs MaskBench: set SPECDEC_MASKBENCH to its file")
    return [json.loads(line) for line in Path(name).read_text(encoding="utf-8").splitlines()]


@contextmanager
def target_of(path: Path) -> Iterator[str]:
    with RunningSystem(path, None) as system:
        yield system.endpoint


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("model", [SMOLLM2, QWEN_DRAFT], ids=["smollm2", "qwen"])
def test_every_answer_is_valid_unless_it_was_cut(model: Any, temperature: float, cases: list[dict[str, Any]]) -> None:
    with target_of(model.path()) as endpoint:
        answers = asyncio.run(_answers(endpoint, cases, temperature))
    assert len(answers) == NUM_SCHEMAS
    wrong = [(name, text) for name, schema, text in answers if text is not None and not _is_valid(schema, text)]
    num_whole = sum(text is not None for _, _, text in answers)
    print(f"{model.name}, temperature {temperature:g}: {num_whole} of {len(answers)} answers ended")
    assert not wrong
    assert num_whole > NUM_SCHEMAS / 10, "nearly all answers were cut, so the test shows nothing"


async def _answers(endpoint: str, cases: list[dict[str, Any]], temperature: float) -> list[tuple[str, Any, str | None]]:
    """Return name, schema and text of the answers to the first schemas that are not refused; None for a cut text."""
    waiting, free = iter(cases), asyncio.Semaphore(NUM_STREAMS)
    async with AsyncClient(endpoint) as client:

        async def answer(case: dict[str, Any]) -> tuple[str, Any, str | None] | None:
            async with free:
                try:
                    completion = await client.generate(
                        f"A JSON object of the type {case['name']}:\n",
                        constraint=Constraint.json_schema(case["schema"]),
                        temperature=temperature,
                        max_new_tokens=NUM_TOKENS,
                        seed=1,
                    )
                except InvalidRequest as refusal:
                    if refusal.reason != "CONSTRAINT_INVALID":
                        raise
                    return None
            text = completion.text if completion.finish_reason == "stop" else None
            return case["name"], case["schema"], text

        found: list[tuple[str, Any, str | None]] = []
        while len(found) < NUM_SCHEMAS:
            batch = [case for _, case in zip(range(NUM_SCHEMAS - len(found)), waiting, strict=False)]
            if not batch:
                break
            found += [each for each in await asyncio.gather(*map(answer, batch)) if each is not None]
        return found


def _is_valid(schema: Any, text: str) -> bool:
    try:
        return bool(jsonschema_rs.is_valid(schema, json.loads(text, parse_float=_finite)))
    except ValueError:  # no JSON
        return False


def _finite(number: str) -> float:
    """Return a number that jsonschema-rs can read: JSON allows more digits than a float has."""
    return max(-sys.float_info.max, min(sys.float_info.max, float(number)))


def test_masks_judge_no_instance_wrong(cases: list[dict[str, Any]]) -> None:
    tokenizer = load_tokenizer(SMOLLM2.path())
    end_ids = (int(tokenizer.eos_token_id),)  # type: ignore[arg-type]
    table = TokenTable(tokenizer, end_ids, len(tokenizer.get_vocab()))
    num_refused, wrong = 0, []
    for case in cases:
        try:
            constraint = Constraint.json_schema(case["schema"])
            check_constraint(table, constraint, end_ids)
            matcher = Matcher(table, constraint)
        except InvalidRequest:
            num_refused += 1
            continue
        for test in case["tests"]:
            allowed = _allows(matcher, table, end_ids, json.dumps(test["data"], ensure_ascii=False))
            # Objects are written in the schema's order of properties, so a valid instance may be in another one.
            if allowed and not test["valid"]:
                wrong.append((case["name"], test["data"]))
    assert not wrong
    assert num_refused <= MOST_REFUSED * len(cases)


def _allows(matcher: Matcher, table: TokenTable, end_ids: tuple[int, ...], text: str) -> bool:
    """Return whether the masks allow a whole text."""
    token_ids = np.array(table.library_table().tokenize_str(text), dtype=np.uint32)
    for index, token_id in enumerate(token_ids.tolist()):
        matcher.align(token_ids[:index])
        if not is_legal(matcher.mask(end_ids), token_id):
            return False
    matcher.align(token_ids)
    return is_legal(matcher.mask(end_ids), end_ids[0])
