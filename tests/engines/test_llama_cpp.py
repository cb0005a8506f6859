"""Targets with llama.cpp in their process, on GGUF files of real models: `make test-engines`.

The oracle of greedy text is llama.cpp's own, one token at a time. Sampled tokens are compared with its logits in
`tests/statistical/test_first_tokens.py`. Left out, with the reason, if llama-cpp-python or a model is not installed.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench.suites.peers.figures import first_difference
from bench.systems.gguf_writing import write_gguf
from bench.systems.real_models import QWEN_DRAFT, QWEN_TARGET, SMOLLM2
from specdec import Client, Constraint
from specdec.checkpoints.locate import locate_checkpoint
from specdec.checkpoints.vocabulary import load_tokenizer
from specdec.structured.matcher import Matcher
from specdec.structured.token_table import TokenTable
from tests.engines.conftest import DEMO
from tests.engines.rig import NUM_TOKENS, PROMPTS, Llama, generate, installed, system, token_ids_of

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "count": {"type": "integer", "maximum": 99}},
    "required": ["name", "count"],
    "additionalProperties": False,
}

pytest.importorskip("llama_cpp", reason="needs llama-cpp-python: pip install 'specdec-serving[llama-cpp]'")


@pytest.fixture(scope="module", params=["SmolLM2", "Qwen2.5-Coder"])
def real(request: pytest.FixtureRequest) -> Iterator[tuple[Client, Llama, Path]]:
    """A system with a target by llama.cpp, llama.cpp alone, and the folder of the tokenizer."""
    target, draft = {"SmolLM2": (SMOLLM2, SMOLLM2), "Qwen2.5-Coder": (QWEN_TARGET, QWEN_DRAFT)}[request.param]
    path = installed(target)
    with system(path, installed(draft), "llama-cpp") as client:
        yield client, Llama(path), locate_checkpoint(path)


@pytest.mark.parametrize("prompt", PROMPTS)
def test_greedy_text_is_llama_cpps_own(real: tuple[Client, Llama, Path], prompt: str) -> None:
    client, llama, tokenizer = real
    tokens = token_ids_of(tokenizer, prompt)
    _assert_greedy(llama, tokens, generate(client, tokens, temperature=0.0))


def test_a_text_that_is_not_the_greedy_one_is_refused_by_this_comparison(real: tuple[Client, Llama, Path]) -> None:
    client, llama, tokenizer = real
    tokens = token_ids_of(tokenizer, PROMPTS[0])
    with pytest.raises(AssertionError, match="not a tie"):
        _assert_greedy(llama, tokens, generate(client, tokens, temperature=1.0, seed=5))


def _assert_greedy(llama: Llama, prompt: list[int], ours: list[int]) -> None:
    """Assert that a text is llama.cpp's own; print the ties, after each of which the rest is compared.

    Two tokens tie where llama.cpp's own gap between their logits varies by more than its smallest value.
    """
    num_compared = 0
    while (own := llama.greedy_continuation(prompt + ours[:num_compared], len(ours) - num_compared)) != (
        rest := ours[num_compared:]
    ):
        difference = first_difference(rest, own)
        assert difference is not None
        place = num_compared + difference
        gaps = llama.gaps(prompt + ours[:place], own[difference], rest[difference])
        told = f"token {place}: gaps of llama.cpp's own logits {min(gaps):.3f} to {max(gaps):.3f}"
        assert min(gaps) <= max(gaps) - min(gaps), f"{told}: not a tie"
        print(f"\ntie at {told}")
        num_compared = place + 1


def test_coupled_text_is_the_same_for_every_number_of_draft_tokens(real: tuple[Client, Llama, Path]) -> None:
    """A model whose logits depend on how many rows llama.cpp computes at once gives one text for each number."""
    client, llama, tokenizer = real
    prompt = token_ids_of(tokenizer, PROMPTS[0])
    options: dict[str, Any] = {"mode": "coupled", "temperature": 0.8, "top_k": 20, "seed": 5}
    texts = {gamma: generate(client, prompt, gamma=gamma, **options) for gamma in range(9)}
    assert generate(client, prompt, gamma=4, **options) == texts[4]
    gaps = llama.gaps(prompt, *texts[0][:2])
    print(f"\n{len(set(map(tuple, texts.values())))} texts; logits vary by {max(gaps) - min(gaps):.3f}")
    assert all(text == texts[0] for text in texts.values()) or min(gaps) < max(gaps)
    assert generate(client, prompt, **{**options, "seed": 6}) != texts[0]  # the control


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Client, Llama]]:
    """The demo pair, the target by llama.cpp in float32."""
    path = write_gguf(DEMO / "target", tmp_path_factory.mktemp("gguf") / "target.gguf", "F32")
    with system(path, DEMO / "draft", "llama-cpp") as client:
        yield client, Llama(path)


@pytest.mark.parametrize("prompt", PROMPTS)
def test_greedy_text_of_a_float32_file_is_llama_cpps_own(tiny: tuple[Client, Llama], prompt: str) -> None:
    client, llama = tiny
    tokens = token_ids_of(DEMO / "target", prompt)
    assert generate(client, tokens, temperature=0.0) == llama.greedy_continuation(tokens, NUM_TOKENS)


def test_a_constrained_greedy_text_is_that_of_llama_cpps_masked_logits_for_every_number_of_draft_tokens(
    tiny: tuple[Client, Llama],
) -> None:
    """The masks of the oracle are those of a matcher that sees whole outputs, one token after another."""
    client, llama = tiny
    tokenizer = load_tokenizer(DEMO / "target")
    end_id = int(tokenizer.eos_token_id)
    prompt = token_ids_of(DEMO / "target", PROMPTS[1])
    for constraint in (Constraint.json_schema(SCHEMA), Constraint.regex("[a-f]{4}(-[a-f]{2}){1,4}")):
        matcher = Matcher(TokenTable(tokenizer, (end_id,), len(tokenizer)), constraint)
        expected: list[int] = []
        while len(expected) < NUM_TOKENS and expected[-1:] != [end_id]:
            matcher.align(np.array(expected, dtype=np.uint32))
            legal = np.unpackbits(matcher.mask((end_id,)), count=len(tokenizer), bitorder="little").astype(bool)
            logits = llama.logits_after(prompt + expected)[: len(tokenizer)]
            expected.append(int(np.argmax(np.where(legal, logits, -np.inf))))
        for options in ({"mode": "off"}, *({"gamma": gamma} for gamma in range(9))):
            asked = {"temperature": 0.0, "constraint": constraint, "max_new_tokens": NUM_TOKENS, **options}
            assert list(client.generate(prompt_token_ids=prompt, **asked).token_ids) == expected, options
