"""A running system with a gateway, whose pair has markers and a template of the Hermes family, with reasoning."""

from __future__ import annotations

from collections.abc import Iterator

import anthropic
import openai
import pytest

from tests.support.redis_fixture import RedisServer
from tests.support.stack import Stack
from tests.support.tool_models import FAMILIES, HERMES_THINKING, THINK_MARKERS, write_family

NO_THINKING = {"enable_thinking": False}


@pytest.fixture(scope="session")
def tool_url(tmp_path_factory: pytest.TempPathFactory, redis_server: RedisServer) -> Iterator[str]:
    """Address of the gateway."""
    directory = tmp_path_factory.mktemp("family")
    markers = (*FAMILIES["hermes"][1], *THINK_MARKERS)
    target, draft = (write_family(directory / role, role, HERMES_THINKING, markers) for role in ("target", "draft"))
    with Stack(target, draft, redis_url=redis_server.url, gateway_arguments=[]) as running:
        yield f"http://{running.parts['gateway'].address}"


@pytest.fixture(scope="session")
def tool_client(tool_url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{tool_url}/v1", api_key="unused", timeout=300, max_retries=0) as opened:
        yield opened


@pytest.fixture(scope="session")
def tool_claude(tool_url: str) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=tool_url, api_key="unused", timeout=300, max_retries=0) as opened:
        yield opened
