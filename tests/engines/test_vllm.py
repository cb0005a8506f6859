"""Targets in front of a real vLLM server: `make test-engines`.

The server computes in float32. The oracle of greedy text is the server's own. Sampled tokens are compared with its
own probabilities in `tests/statistical/test_first_tokens.py`.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from bench.suites.peers.figures import first_difference
from bench.systems.real_models import SMOLLM2
from bench.systems.served import write_checkpoint
from specdec import Client
from specdec.client import Budgets
from specdec.contract.errors import SpecdecError
from tests.engines.conftest import DEMO, VllmServer
from tests.engines.rig import (
    NUM_TOKENS,
    PROMPTS,
    generate,
    installed,
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


@pytest.mark.parametrize("prompt", PROMPTS)
def test_greedy_text_is_the_servers_own(client: Client, vllm: VllmServer, prompt: str) -> None:
    require_own_text(client, vllm, token_ids_of(TARGET, prompt))


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmServer]:
    """A server of SmolLM2."""
    checkpoint = tmp_path_factory.mktemp("smollm2") / "float32"
    write_checkpoint(installed(SMOLLM2), checkpoint, "float32")
    server = VllmServer(checkpoint)
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
        first, second = sorted(server.logprobs_after(tokens + own[:at]).values(), reverse=True)[:2]
        print(f"parted at token {at}: the two likeliest differ by {first - second:.1e}")
        assert first - second < TIE


def test_coupled_text_is_the_same_for_every_number_of_draft_tokens(vllm_client: Client) -> None:
    prompt = token_ids_of(TARGET, PROMPTS[0])
    options: dict[str, Any] = {"mode": "coupled", "temperature": 0.8, "top_k": 20, "seed": 5}
    texts = {gamma: generate(vllm_client, prompt, gamma=gamma, **options) for gamma in range(9)}
    assert all(text == texts[0] for text in texts.values())
    assert generate(vllm_client, prompt, **{**options, "seed": 6}) != texts[0]  # the control


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
