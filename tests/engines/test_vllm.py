"""Targets in front of a real vLLM server: `make test-engines`.

The server computes in float32. The oracle of greedy text is the server's own, and that of laws are its own
probabilities, as `/v1/completions` states them without specdec.
"""

from __future__ import annotations

import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from specdec import Client
from specdec.checkpoints.vocabulary import load_tokenizer
from specdec.client import Budgets
from specdec.core.reference import filtered_distribution
from specdec.types import SamplingFilters
from tests.engines.conftest import DEMO, VllmServer
from tests.support.chi_square import chi_square_p_value
from tests.support.up_rig import start_up

PROMPTS = (
    "Once upon a time", "def add(a, b):", "In 1969 the first", "import os\nimport", "The quick brown fox",
    "class Node:", "for i in range(10):", "To be or not", "A list of colours: red,", "Return the sum of",
    "if x is None:", "The end of", "try:\n    value =", "It was the best of", "Raises:\n    ValueError:",
    "1, 2, 3, 4,", "with open(path) as f:", "Hello, my name", '"""Return the', "while True:",
)  # fmt: skip
NUM_TOKENS = 64
TIE = 1e-4


@pytest.fixture(scope="module", params=["vllm", "server"])
def client(vllm: VllmServer, request: pytest.FixtureRequest) -> Iterator[Client]:
    with system(vllm, request.param) as client:
        yield client


@pytest.fixture(scope="module")
def vllm_client(vllm: VllmServer) -> Iterator[Client]:
    with system(vllm, "vllm") as client:
        yield client


class system:  # noqa: N801 - used as a function
    """Run `specdec up` with the demo draft and a target in front of a server."""

    def __init__(self, server: VllmServer, backend: str) -> None:
        flags = ["--target", str(DEMO / "target"), "--draft", str(DEMO / "draft"), "--backend", backend]
        self._up, endpoint = start_up(*flags, "--backend-url", server.url)
        self._client = Client(endpoint, budgets=Budgets(connect_s=60.0, target_s=300.0, resume_s=300.0))

    def __enter__(self) -> Client:
        return self._client

    def __exit__(self, *_: object) -> None:
        self._client.close()
        self._up.send_signal(signal.SIGINT)
        self._up.communicate()


def token_ids_of(text: str) -> list[int]:
    return list(map(int, load_tokenizer(DEMO / "target")(text)["input_ids"]))


def generate(client: Client, prompt: list[int], **options: Any) -> list[int]:
    sampling = {"max_new_tokens": NUM_TOKENS, "ignore_eos": True, **options}
    return list(client.generate(prompt_token_ids=prompt, **sampling).token_ids)


def logprobs_after(server: VllmServer, token_ids: list[int]) -> dict[int, float]:
    """Return the server's 20 likeliest next tokens with their logarithms of probabilities."""
    params = {"max_tokens": 1, "temperature": 0.0, "logprobs": 20, "detokenize": False}
    answer = server.ask("/inference/v1/generate", {"token_ids": token_ids, "sampling_params": params})
    row = answer["choices"][0]["logprobs"]["content"][0]
    return {entry["token_id"]: entry["logprob"] for entry in [row, *row["top_logprobs"]]}


@pytest.mark.parametrize("prompt", PROMPTS)
def test_greedy_text_is_the_servers_own(client: Client, vllm: VllmServer, prompt: str) -> None:
    """Texts may part where the server's two likeliest tokens are tied; the test says where they do."""
    tokens = token_ids_of(prompt)
    ours, own = generate(client, tokens, temperature=0.0), vllm.greedy_continuation(tokens, NUM_TOKENS)
    if ours != own:
        at = next(place for place, pair in enumerate(zip(ours, own, strict=True)) if pair[0] != pair[1])
        first, second = sorted(logprobs_after(vllm, tokens + own[:at]).values(), reverse=True)[:2]
        print(f"parted at token {at}: the two likeliest differ by {first - second:.1e}")
        assert first - second < TIE


def test_coupled_text_is_the_same_for_every_number_of_draft_tokens(vllm_client: Client) -> None:
    prompt = token_ids_of(PROMPTS[0])
    options: dict[str, Any] = {"mode": "coupled", "temperature": 0.8, "top_k": 20, "seed": 5}
    texts = {gamma: generate(vllm_client, prompt, gamma=gamma, **options) for gamma in range(9)}
    assert all(text == texts[0] for text in texts.values())
    assert generate(vllm_client, prompt, **{**options, "seed": 6}) != texts[0]  # the control


@pytest.mark.parametrize(
    "filters",
    [SamplingFilters(temperature=0.8, top_k=20), SamplingFilters(temperature=1.0, top_p=0.9)],
    ids=["top-k 20", "top-p 0.9"],
)
def test_three_tokens_follow_the_servers_joint_law(client: Client, vllm: VllmServer, filters: SamplingFilters) -> None:
    """Rare outcomes are pooled. A false alarm comes in 1 of 10,000 runs; the law at another temperature is rejected."""
    prompt, num_outputs = token_ids_of("def add(a, b):\n    return a"), 1000

    def draw(seed: int) -> tuple[int, ...]:
        options = {"temperature": filters.temperature, "top_k": filters.top_k, "top_p": filters.top_p}
        return tuple(generate(client, prompt, max_new_tokens=3, gamma=2, seed=seed, **options))

    with ThreadPoolExecutor(8) as pool:
        counts = Counter(pool.map(draw, range(num_outputs)))
    laws = {}
    for outcome in counts:
        mass = [probability_of(vllm, [*prompt, *outcome[:place]], outcome[place], filters) for place in range(3)]
        laws[outcome] = float(np.prod(mass))
    assert p_value(counts, laws) > 1e-4
    flattened = {outcome: law**0.5 for outcome, law in laws.items()}
    total = sum(flattened.values()) / sum(laws.values())
    assert p_value(counts, {outcome: law / total for outcome, law in flattened.items()}) < 1e-4  # the control


def probability_of(server: VllmServer, prefix: list[int], token_id: int, filters: SamplingFilters) -> float:
    """Return the probability of a token after the filters, from the server's own top 20; 0 for other tokens."""
    row = logprobs_after(server, prefix)
    logits = np.full(2048, -np.inf)
    logits[list(row)] = list(row.values())
    law = filtered_distribution(logits, filters, prefix, len(prefix))
    if not filters.top_k:  # top-p is a share of the whole mass, not of the top 20's
        probabilities = np.exp(logits)
        order = np.argsort(-probabilities)
        before = np.cumsum(probabilities[order]) - probabilities[order]
        law = np.where(np.isin(np.arange(2048), order[before < filters.top_p]), probabilities, 0.0)
        law /= law.sum()
    return float(law[token_id])


def p_value(counts: Counter[tuple[int, ...]], laws: dict[tuple[int, ...], float]) -> float:
    """Return the chi-square test's p over the frequent outcomes and one pool of all others."""
    num_outputs = sum(counts.values())
    frequent = [outcome for outcome, law in laws.items() if law * num_outputs >= 8]
    observed = [counts[outcome] for outcome in frequent]
    expected = [laws[outcome] * num_outputs for outcome in frequent]
    return chi_square_p_value(
        [*observed, num_outputs - sum(observed)], [*expected, max(num_outputs - sum(expected), 1e-9)]
    )


@pytest.mark.parametrize("fault", ["killed", "stopped", "cache reset"])
def test_streams_go_on_with_the_same_tokens_after_a_fault_of_the_server(
    vllm_client: Client, vllm: VllmServer, fault: str
) -> None:
    prompts = [token_ids_of(prompt) for prompt in PROMPTS[:8]]
    expected = [vllm.greedy_continuation(prompt, 200) for prompt in prompts]
    outputs: list[list[int]] = [[] for _ in prompts]

    def read(place: int) -> None:
        stream = vllm_client.generate(
            prompt_token_ids=prompts[place], temperature=0.0, max_new_tokens=200, ignore_eos=True, stream=True
        )
        for chunk in stream:
            outputs[place] += chunk.token_ids

    readers = [threading.Thread(target=read, args=(place,)) for place in range(8)]
    for reader in readers:
        reader.start()
    while not all(len(output) > 5 for output in outputs):
        time.sleep(0.05)
    if fault == "killed":
        vllm.kill()
        vllm.start()
    elif fault == "stopped":
        vllm.signal(signal.SIGSTOP)
        time.sleep(5.0)
        vllm.signal(signal.SIGCONT)
    else:
        vllm.reset_cache()
    for reader in readers:
        reader.join()
    assert outputs == expected
