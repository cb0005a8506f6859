"""The router smg as its package ships it, in front of a coordinator that serves the demo pair, beside our gateway."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest
from tokenizers import Tokenizer

from tests.support.gateway_system import joined
from tests.support.scraping import Endpoint, Page
from tests.support.stack import Stack, free_port

pytestmark = pytest.mark.skipif(
    find_spec("smg") is None, reason='the router is not installed (pip install "specdec[router]")'
)

DEMO = Path(__file__).resolve().parents[2] / "models" / "demo"
MODEL = "target"
PROMPTS = ("import os", "def read_lines(path):", "Grüße, 世界 🌍")
_POLL_S = 0.1


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    contract = ["--worker-contract", "smg"]
    with Stack(
        DEMO / "target", DEMO / "draft", coordinator_arguments=contract, gateway_arguments=[], has_metrics=True
    ) as stack:
        yield stack


@pytest.fixture(scope="module")
def router(stack: Stack, tmp_path_factory: pytest.TempPathFactory) -> Iterator[openai.OpenAI]:
    """A client of the router."""
    port, log_path = free_port(), tmp_path_factory.mktemp("smg") / "smg.log"
    command = [sys.executable, "-m", "smg", "launch", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--worker-urls", f"grpc://{stack.endpoint}", "--prometheus-port", str(free_port())]
    command += ["--worker-startup-check-interval", "1", "--disable-retries", "--disable-circuit-breaker"]
    with log_path.open("wb") as log:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT)
    try:
        with client_of(f"127.0.0.1:{port}") as client:
            wait_until_served(client, process, log_path)
            yield client
    finally:
        process.terminate()
        process.wait()


@pytest.fixture(scope="module")
def gateway(stack: Stack, router: openai.OpenAI) -> Iterator[openai.OpenAI]:
    """A client of our gateway."""
    with client_of(stack.parts["gateway"].address) as client:
        yield client


def client_of(address: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"http://{address}/v1", api_key="unused", timeout=240, max_retries=0)


def wait_until_served(client: openai.OpenAI, process: subprocess.Popen[bytes], log_path: Path) -> None:
    """Return when the router has registered its worker and loaded the tokenizer; the test's time limit is the bound."""
    while True:
        try:
            chat(client, PROMPTS[0], max_tokens=1)
            return
        except (openai.APIConnectionError, openai.APIStatusError):
            assert process.poll() is None, log_path.read_text()
            time.sleep(_POLL_S)


def chat(client: openai.OpenAI, prompt: str, **options: Any) -> Any:
    """A chat of 48 greedy tokens, unless said otherwise."""
    messages: list[Any] = [{"role": "user", "content": prompt}]
    return client.chat.completions.create(
        **{"model": MODEL, "messages": messages, "max_tokens": 48, "temperature": 0, **options}
    )


@pytest.mark.parametrize("prompt", PROMPTS)
def test_a_chat_has_the_text_of_our_gateway_whether_it_is_streamed_or_not(
    router: openai.OpenAI, gateway: openai.OpenAI, prompt: str
) -> None:
    expected, whole = chat(gateway, prompt), chat(router, prompt)
    assert expected.choices[0].message.content
    assert whole.choices[0].message.content == expected.choices[0].message.content
    assert whole.choices[0].finish_reason == expected.choices[0].finish_reason
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (
        expected.usage.prompt_tokens,
        expected.usage.completion_tokens,
    )
    chunks = list(chat(router, prompt, stream=True, stream_options={"include_usage": True}))
    assert joined(chunks) == expected.choices[0].message.content
    assert sum(bool(chunk.choices and chunk.choices[0].delta.content) for chunk in chunks) > 1
    assert chunks[-1].usage.completion_tokens == expected.usage.completion_tokens


def test_a_completion_and_a_stop_string_give_the_text_of_our_gateway(
    router: openai.OpenAI, gateway: openai.OpenAI
) -> None:
    """The router encodes the prompt of a completion without the special token that begins a text."""
    text = "def read_lines(path):"
    token_ids = Tokenizer.from_file(str(DEMO / "target" / "tokenizer.json")).encode(text, add_special_tokens=False).ids
    for extra in ({}, {"stop": ["raise"]}):
        fields: Any = {"model": MODEL, "max_tokens": 48, "temperature": 0, **extra}
        expected = gateway.completions.create(prompt=token_ids, **fields).choices[0]
        got = router.completions.create(prompt=text, **fields).choices[0]
        assert (got.text, got.finish_reason) == (expected.text, expected.finish_reason)
    assert got.finish_reason == "stop"


def test_responses_and_messages_of_the_router_have_the_same_text(router: openai.OpenAI, gateway: openai.OpenAI) -> None:
    expected = chat(gateway, PROMPTS[0]).choices[0].message.content
    response = router.responses.create(model=MODEL, input=PROMPTS[0], max_output_tokens=48, temperature=0)
    assert response.output_text == expected
    with anthropic.Anthropic(base_url=str(router.base_url).removesuffix("/v1/"), api_key="unused") as claude:
        message = claude.messages.create(
            model=MODEL,
            messages=[{"role": "user", "content": PROMPTS[0]}],
            max_tokens=48,
            extra_body={"temperature": 0},
        )
    assert message.content[0].text == expected


def test_tools_reach_the_model_without_a_grammar_and_a_forced_call_is_refused(router: openai.OpenAI) -> None:
    tool = {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}}
    assert chat(router, PROMPTS[0], tools=[tool], tool_choice="auto").choices[0].message.content
    with pytest.raises(openai.BadRequestError, match="there are no grammars yet"):
        chat(router, PROMPTS[0], tools=[tool], tool_choice="required")


@pytest.mark.parametrize(
    ("told", "options"),
    [
        (r"sampling_params.n must be 1, got 2", {"n": 2}),
        (r"there are no grammars yet", {"response_format": {"type": "json_object"}}),
        (r"sampling.max_new_tokens must be at most \d+", {"max_tokens": 100_000}),
    ],
)
def test_what_the_coordinator_refuses_is_a_bad_request_in_its_words(
    router: openai.OpenAI, told: str, options: dict[str, Any]
) -> None:
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError, match=told):
            chat(router, PROMPTS[0], stream=stream, **options)


def test_a_client_that_leaves_the_router_frees_its_session(stack: Stack, router: openai.OpenAI) -> None:
    metrics = Endpoint(stack.parts["coordinator"].metrics)
    before = num_cancelled(metrics.scrape_now())
    stream = chat(router, PROMPTS[1], stream=True, max_tokens=1500, extra_body={"ignore_eos": True})
    next(iter(stream))
    stream.close()
    while num_cancelled(metrics.scrape_now()) == before:
        time.sleep(_POLL_S)
    assert num_cancelled(metrics.scrape_now()) == before + 1
    assert metrics.scrape_now().value("num_requests_running") == 0


def num_cancelled(page: Page) -> float:
    return page.value("request_cancellations_total", cause="client_left")
