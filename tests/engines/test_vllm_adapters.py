"""LoRA adapters of a real vLLM server, by their names: `make test-engines`."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from specdec import Client
from specdec.client import Budgets, Completion, Stream
from specdec.contract.errors import NotFound, SpecdecError, Unavailable
from tests.engines.conftest import DEMO, VLLM, VllmServer
from tests.engines.rig import NUM_TOKENS, PROMPTS, generate, system, token_ids_of, write_adapter

TARGET = DEMO / "target"


class LoraServer(VllmServer):
    """A server whose adapters are found in a directory, by name."""

    def serve(self, adapters: dict[str, Path]) -> None:
        """Start the server with these adapters."""
        modules = [f"{name}={path}" for name, path in adapters.items()]
        flags = "--enable-scale-out --enable-prompt-tokens-details --enable-lora --max-lora-rank 8 --max-loras 2"
        self.flags = (*flags.split(), "--lora-modules", *modules)
        self.start()


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    directory = tmp_path_factory.mktemp("adapters")
    return {name: write_adapter(directory / name, TARGET, seed) for seed, name in enumerate(("sql", "tone", "other"))}


@pytest.fixture(scope="module")
def lora(adapters: dict[str, Path]) -> Iterator[LoraServer]:
    if not VLLM.exists():
        pytest.skip(f"vLLM is not installed in {VLLM.parent.parent}: run make peers")
    server = LoraServer(TARGET)
    server.serve({name: adapters[name] for name in ("sql", "tone")})
    yield server
    server.kill()


@pytest.mark.parametrize("backend", ["vllm", "server"])
def test_the_text_of_each_adapter_is_the_servers_own(lora: LoraServer, backend: str) -> None:
    with system(TARGET, DEMO / "draft", backend, lora.url) as client:
        assert [adapter.name for adapter in client.info().adapters] == ["sql", "tone"]
        for prompt in (token_ids_of(TARGET, text) for text in PROMPTS[:6]):
            own = {name: lora.greedy_continuation(prompt, NUM_TOKENS, name) for name in ("target", "sql", "tone")}
            assert own["sql"] != own["target"] != own["tone"]
            for name, expected in own.items():
                adapter = "" if name == "target" else name
                assert generate(client, prompt, temperature=0.0, adapter=adapter) == expected, name
        with pytest.raises(NotFound, match="adapter 'law' is not served; there are sql, tone"):
            generate(client, prompt, adapter="law")


def test_no_token_of_an_exchanged_adapter_is_taken_and_the_next_turn_says_so(
    lora: LoraServer, adapters: dict[str, Path]
) -> None:
    prompt = token_ids_of(TARGET, PROMPTS[0])
    expected = lora.greedy_continuation(prompt, 200, "sql")
    with system(TARGET, DEMO / "draft", "vllm", lora.url, budgets=Budgets(target_s=5.0, resume_s=5.0)) as client:
        stream = client.generate(
            prompt_token_ids=prompt, session_id="s", adapter="sql", temperature=0.0, max_new_tokens=200,
            ignore_eos=True, stream=True,
        )  # fmt: skip
        got = list(next(stream).token_ids)
        lora.kill()
        lora.serve({"sql": adapters["other"], "tone": adapters["tone"]})
        got += read_on(stream)
        assert got == expected[: len(got)]
        assert len(got) < 200
        turn = next_turn(client)
        assert (turn.adapter, turn.target_changed) == ("sql", True)
        tone = lora.greedy_continuation(prompt, NUM_TOKENS, "tone")
        assert generate(client, prompt, temperature=0.0, adapter="tone") == tone
    lora.kill()
    lora.serve({name: adapters[name] for name in ("sql", "tone")})


def read_on(stream: Stream) -> list[int]:
    """Return the further tokens of a stream that fails."""
    token_ids: list[int] = []
    try:
        for chunk in stream:
            token_ids += chunk.token_ids
    except SpecdecError:
        return token_ids
    pytest.fail("the stream ended well")


def next_turn(client: Client) -> Completion:
    """Return the next turn of the session, as soon as its adapter is served again."""
    while True:
        try:
            return client.generate(prompt_token_ids=[5], session_id="s", max_new_tokens=4, expected_session_tokens=None)
        except Unavailable:
            time.sleep(0.5)
