"""Targets with llama.cpp in their process, on GGUF files of real models: `make test-engines`.

The oracle of greedy text is llama.cpp's own, one token at a time, and that of the law are its own logits. Left out,
with the reason, where llama-cpp-python or a model is not installed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench.gguf_writing import write_gguf
from bench.real_models import QWEN_DRAFT, QWEN_TARGET, SMOLLM2
from bench.servers.texts import first_difference
from specdec import Client
from specdec.checkpoints.locate import locate_checkpoint
from specdec.contract.types import SamplingFilters
from specdec.core.reference import filtered_distribution
from tests.engines.conftest import DEMO
from tests.engines.rig import NUM_TOKENS, PROMPTS, generate, installed, p_value, system, token_ids_of

pytest.importorskip("llama_cpp", reason="needs llama-cpp-python: pip install 'specdec[llama-cpp]'")


class Llama:
    """llama.cpp without specdec, with the attention that it chooses by itself where it may.

    The logits of SmolLM2 then have the same bits for a token alone and in a batch. The package's default is another
    attention, with which they differ by up to 1.2, and by up to 0.8 between a token alone and a token in a batch.
    """

    def __init__(self, path: Path) -> None:
        import llama_cpp

        self._model = llama_cpp.Llama(
            str(path), n_ctx=512, n_threads=2, n_threads_batch=2, flash_attn=True, verbose=False
        )

    def greedy_continuation(self, prompt: list[int], num_tokens: int) -> list[int]:
        tokens = self._model.generate(prompt, top_k=1, temp=0.0, repeat_penalty=1.0)
        return [int(token_id) for token_id in islice(tokens, num_tokens)]

    def logits_after(self, token_ids: list[int]) -> np.ndarray:
        """float32 [vocabulary]."""
        return self._logits_after(token_ids, len(token_ids))

    def gaps(self, token_ids: list[int], first: int, second: int) -> list[float]:
        """Return the logit of one token above that of another, once for each number of last tokens run together.

        For some quantised models, llama.cpp's logits of a token depend on the number of tokens that it runs with it.
        """
        together = [*range(1, min(10, len(token_ids))), len(token_ids)]
        rows = [self._logits_after(token_ids, number) for number in together]
        return [float(row[first] - row[second]) for row in rows]

    def _logits_after(self, token_ids: list[int], num_together: int) -> np.ndarray:
        self._model.reset()
        if num_together < len(token_ids):
            self._model.eval(token_ids[:-num_together])
        self._model.eval(token_ids[-num_together:])
        row = self._model._ctx.get_logits_ith(-1)
        return np.array(np.ctypeslib.as_array(row, shape=(self._model.n_vocab(),)))


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


@pytest.mark.parametrize(
    "filters",
    [SamplingFilters(temperature=0.8, top_k=20), SamplingFilters(temperature=1.0, top_p=0.9)],
    ids=["top-k 20", "top-p 0.9"],
)
def test_three_tokens_follow_the_joint_law(tiny: tuple[Client, Llama], filters: SamplingFilters) -> None:
    """Rare outcomes are pooled. A false alarm comes in 1 of 10,000 runs; the law at another temperature is rejected."""
    client, llama = tiny
    prompt, num_outputs = token_ids_of(DEMO / "target", "def add(a, b):\n    return a"), 1000

    def draw(seed: int) -> tuple[int, ...]:
        options = {"temperature": filters.temperature, "top_k": filters.top_k, "top_p": filters.top_p}
        return tuple(generate(client, prompt, max_new_tokens=3, gamma=2, seed=seed, **options))

    @cache
    def law_after(prefix: tuple[int, ...]) -> np.ndarray:
        tokens = [*prompt, *prefix]
        return filtered_distribution(llama.logits_after(tokens), filters, tokens, len(tokens))

    with ThreadPoolExecutor(8) as pool:
        counts = Counter(pool.map(draw, range(num_outputs)))
    laws = {
        outcome: float(np.prod([law_after(outcome[:place])[outcome[place]] for place in range(3)]))
        for outcome in counts
    }
    assert p_value(counts, laws) > 1e-4
    flattened = {outcome: law**0.5 for outcome, law in laws.items()}
    total = sum(flattened.values()) / sum(laws.values())
    assert p_value(counts, {outcome: law / total for outcome, law in flattened.items()}) < 1e-4  # the control
