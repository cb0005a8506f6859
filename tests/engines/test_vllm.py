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

from bench.real_models import SMOLLM2
from bench.servers.texts import first_difference
from specdec import Client
from specdec.checkpoints.locate import locate_checkpoint
from specdec.client import Budgets
from specdec.contract.errors import SpecdecError
from specdec.contract.types import SamplingFilters
from specdec.core.reference import filtered_distribution
from tests.engines.conftest import DEMO, VllmServer
from tests.engines.rig import (
    NUM_TOKENS,
    PROMPTS,
    generate,
    installed,
    p_value,
    system,
    token_ids_of,
)

TARGET = DEMO / "target"
TIE = 1e-4


@pytest.fixture(scope="module", params=["vllm", "server"])
def client(vllm: VllmServer, request: pytest.FixtureRequest) -> Iterator[Client]:
    with system(TARGET, DEMO / "draft", request.param, vllm.url) as client:
        yield client


@pytest.fixture(scope="module")
def vllm_client(vllm: VllmServer) -> Iterator[Client]:
    with system(TARGET, DEMO / "draft", "vllm", vllm.url) as client:
        yield client


def logprobs_after(server: VllmServer, token_ids: list[int]) -> dict[int, float]:
    """Return the server's 20 likeliest next tokens with their logarithms of probabilities."""
    params = {"max_tokens": 1, "temperature": 0.0, "logprobs": 20, "detokenize": False}
    answer = server.ask("/inference/v1/generate", {"token_ids": token_ids, "sampling_params": params})
    row = answer["choices"][0]["logprobs"]["content"][0]
    return {entry["token_id"]: entry["logprob"] for entry in [row, *row["top_logprobs"]]}


@pytest.mark.parametrize("prompt", PROMPTS)
def test_greedy_text_is_the_servers_own(client: Client, vllm: VllmServer, prompt: str) -> None:
    require_own_text(client, vllm, token_ids_of(TARGET, prompt))


@pytest.fixture(scope="module")
def smollm2() -> Iterator[VllmServer]:
    """A server of SmolLM2."""
    server = VllmServer(locate_checkpoint(installed(SMOLLM2)))
    server.start()
    yield server
    server.kill()


@pytest.fixture(scope="module", params=["vllm", "server"])
def smollm2_client(smollm2: VllmServer, request: pytest.FixtureRequest) -> Iterator[Client]:
    """A system in front of it, with the same model as its own draft."""
    with system(smollm2.model, installed(SMOLLM2), request.param, smollm2.url) as client:
        yield client


@pytest.mark.parametrize("prompt", PROMPTS)
def test_greedy_text_of_a_real_model_is_the_servers_own(
    smollm2_client: Client, smollm2: VllmServer, prompt: str
) -> None:
    require_own_text(smollm2_client, smollm2, token_ids_of(smollm2.model, prompt))


def require_own_text(client: Client, server: VllmServer, tokens: list[int]) -> None:
    """Compare greedy texts, which may part where the server's two likeliest tokens are tied; say where they do."""
    ours, own = generate(client, tokens, temperature=0.0), server.greedy_continuation(tokens, NUM_TOKENS)
    if ours != own:
        at = first_difference(ours, own)
        assert at is not None
        first, second = sorted(logprobs_after(server, tokens + own[:at]).values(), reverse=True)[:2]
        print(f"parted at token {at}: the two likeliest differ by {first - second:.1e}")
        assert first - second < TIE


def test_coupled_text_is_the_same_for_every_number_of_draft_tokens(vllm_client: Client) -> None:
    prompt = token_ids_of(TARGET, PROMPTS[0])
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
    prompt, num_outputs = token_ids_of(TARGET, "def add(a, b):\n    return a"), 1000

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


@pytest.mark.parametrize("fault", ["killed", "stopped", "cache reset"])
def test_streams_go_on_with_the_same_tokens_after_a_fault_of_the_server(
    vllm_client: Client, vllm: VllmServer, fault: str
) -> None:
    prompts = [token_ids_of(TARGET, prompt) for prompt in PROMPTS[:8]]
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


def test_streams_end_with_an_error_once_the_server_has_another_model(vllm: VllmServer) -> None:
    """No token of the other model is taken: what arrived is the beginning of the text."""
    prompts = [token_ids_of(TARGET, prompt) for prompt in PROMPTS[:8]]
    expected = [vllm.greedy_continuation(prompt, 200) for prompt in prompts]
    outputs: list[list[int]] = [[] for _ in prompts]
    errors: list[SpecdecError] = []

    def read(client: Client, place: int) -> None:
        stream = client.generate(
            prompt_token_ids=prompts[place], temperature=0.0, max_new_tokens=200, ignore_eos=True, stream=True
        )
        try:
            for chunk in stream:
                outputs[place] += chunk.token_ids
        except SpecdecError as error:
            errors.append(error)

    with system(TARGET, DEMO / "draft", "vllm", vllm.url, budgets=Budgets(target_s=5.0, resume_s=5.0)) as client:
        readers = [threading.Thread(target=read, args=(client, place)) for place in range(8)]
        for reader in readers:
            reader.start()
        while not all(len(output) > 5 for output in outputs):
            time.sleep(0.05)
        vllm.kill()
        vllm.start(DEMO / "draft")
        for reader in readers:
            reader.join()
    assert len(errors) == 8
    assert all(output == own[: len(output)] for output, own in zip(outputs, expected, strict=True))
    assert all(len(output) < 200 for output in outputs)
    vllm.kill()
    vllm.start()
