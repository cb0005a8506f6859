"""A running `specdec up --http` on a tiny model with its clients, which all tests of the gateway in a process share."""

from __future__ import annotations

import re
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import anthropic
import openai
import pytest

from specdec.client import Client
from tests.support.tiny_models import build_tiny_pair
from tests.support.up_rig import ENVIRON, SPECDEC, children_of, complaints, wait_until_gone

TEMPLATE = "{% for message in messages %}{{ message.content }} {% endfor %}"
PROMPT = "w5 w17 w99 w42"
#: PROMPT as the tokenizer of the tiny models encodes it.
PROMPT_IDS = [5, 17, 99, 42]
MESSAGES: list[Any] = [{"role": "user", "content": PROMPT}]
MODEL = "target"
#: A mode in which a seed decides the text, whatever the lengths of drafts.
COUPLED = {"speculation": {"mode": "coupled"}}


@dataclass
class System:
    """A running system."""

    process: subprocess.Popen[str]
    grpc: str
    http: str

    @property
    def base_url(self) -> str:
        return f"http://{self.http}/v1"


def start_system(*flags: str) -> System:
    """A running `specdec up` with a gateway; both listen on free ports."""
    up = subprocess.Popen(
        [*SPECDEC, "up", "--listen", "127.0.0.1:0", "--http", "127.0.0.1:0", *flags],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=ENVIRON,
    )  # fmt: skip
    assert up.stdout is not None
    line = up.stdout.readline()
    found = re.fullmatch(r"ready grpc=(127\.0\.0\.1:\d+) http=(127\.0\.0\.1:\d+)\n", line)
    if found is None:
        up.kill()
        pytest.fail(f"up printed {line!r}; stderr: {up.communicate()[1]}")
    return System(up, found[1], found[2])


@pytest.fixture(scope="session")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    target, draft = build_tiny_pair("llama", tmp_path_factory.mktemp("pair"), chat_template=TEMPLATE)
    system = start_system("--target", str(target), "--draft", str(draft))
    children = children_of(system.process)
    yield system
    system.process.send_signal(signal.SIGTERM)
    _, stderr = system.process.communicate()
    assert system.process.returncode == 0
    assert complaints(stderr) == ""
    wait_until_gone(children)


@pytest.fixture(scope="session")
def demo() -> Iterator[System]:
    """A running system of the demo pair, whose settings a test leaves as they are."""
    demo = start_system()
    yield demo
    demo.process.send_signal(signal.SIGTERM)
    demo.process.communicate()


@pytest.fixture(scope="session")
def client(system: System) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=system.base_url, api_key="unused", timeout=240, max_retries=0) as client:
        yield client


@pytest.fixture(scope="session")
def claude(system: System) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=f"http://{system.http}", api_key="unused", timeout=240, max_retries=0) as client:
        yield client


@pytest.fixture(scope="session")
def sdk(system: System) -> Iterator[Client]:
    with Client(system.grpc) as client:
        yield client


@pytest.fixture(scope="session")
def greedy(sdk: Client) -> str:
    """The text of PROMPT's greedy continuation, by the SDK."""
    return sdk.generate(PROMPT, temperature=0, max_new_tokens=12).text


def chat(client: openai.OpenAI, **options: Any) -> Any:
    """A chat of 12 greedy tokens unless said otherwise."""
    return client.chat.completions.create(
        **{"model": MODEL, "messages": MESSAGES, "max_tokens": 12, "temperature": 0, **options}
    )


def complete(client: openai.OpenAI, **options: Any) -> Any:
    """A completion of 12 greedy tokens unless said otherwise."""
    return client.completions.create(
        **{"model": MODEL, "prompt": PROMPT, "max_tokens": 12, "temperature": 0, **options}
    )


def joined(chunks: Any, index: int = 0) -> str:
    """The text of one choice of a stream, of chat or of completions."""
    texts = []
    for chunk in chunks:
        for choice in chunk.choices:
            if choice.index == index:
                texts.append(choice.delta.content if hasattr(choice, "delta") else choice.text)
    return "".join(text or "" for text in texts)
