"""pydantic-ai against gateways: outputs of a type by a call and by a schema, a loop with a tool, streams, a refusal."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any, Literal

import pytest

from tests.support.gateway_system import MODEL, System
from tests.support.optional_clients import REASON
from tests.support.output_forms import ENOUGH_TOKENS, Ticket

pydantic_ai = pytest.importorskip("pydantic_ai", reason=REASON)

from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel  # noqa: E402
from pydantic_ai.providers.openai import OpenAIProvider  # noqa: E402

SETTINGS: dict[str, Any] = {
    "temperature": 0, "max_tokens": ENOUGH_TOKENS, "parallel_tool_calls": False, "openai_reasoning_effort": "none",
    "timeout": 300,
}  # fmt: skip


@pytest.fixture(scope="module")
def events() -> Iterator[asyncio.AbstractEventLoop]:
    """The loop of events to which the connections of a client belong."""
    loop = asyncio.new_event_loop()
    yield loop
    loop.close()


@pytest.fixture(params=[OpenAIChatModel, OpenAIResponsesModel], ids=["chat", "responses"])
def model(request: pytest.FixtureRequest, tool_url: str) -> Any:
    return request.param(MODEL, provider=OpenAIProvider(base_url=f"{tool_url}/v1", api_key="unused"))


def asked(events: asyncio.AbstractEventLoop, agent: Any) -> Any:
    return events.run_until_complete(agent.run("import os"))


@pytest.mark.parametrize("form", [pydantic_ai.ToolOutput, pydantic_ai.NativeOutput])
def test_an_output_type_gives_the_pydantic_model_by_a_call_and_by_a_schema(model: Any, events: Any, form: Any) -> None:
    result = asked(events, pydantic_ai.Agent(model, output_type=form(Ticket), model_settings=SETTINGS))
    assert isinstance(result.output, Ticket)
    assert result.usage.requests == 1


def test_a_loop_calls_a_tool_and_then_gives_its_output(model: Any, events: Any) -> None:
    calls: list[str] = []

    def get_weather(city: Literal["Paris", "Rome"]) -> str:
        """Return the forecast of a city."""
        calls.append(city)
        return f"{city}: rain"

    # The model knows nothing of tools, so its first turn has to call this one, and the second is not offered it.
    async def once(context: Any, tool: Any) -> Any:
        return None if calls else tool

    def settings(context: Any) -> Any:
        return SETTINGS if calls else SETTINGS | {"tool_choice": ["get_weather"]}

    agent = pydantic_ai.Agent(
        model,
        output_type=pydantic_ai.ToolOutput(Ticket),
        tools=[pydantic_ai.Tool(get_weather, prepare=once)],
        model_settings=settings,
    )
    result = asked(events, agent)
    assert len(calls) == 1
    assert isinstance(result.output, Ticket)
    assert result.usage.requests == 2


def test_the_parts_of_a_streamed_output_grow_to_the_whole(model: Any, events: Any) -> None:
    agent = pydantic_ai.Agent(model, output_type=pydantic_ai.NativeOutput(Ticket), model_settings=SETTINGS)

    async def streamed() -> tuple[int, Any]:
        async with agent.run_stream("import os") as result:
            parts = [part async for part in result.stream_output(debounce_by=None)]
            return len(parts), parts[-1]

    num_parts, last = events.run_until_complete(streamed())
    assert num_parts > 1
    assert last == asked(events, agent).output


def test_a_bad_setting_and_tools_of_a_model_without_a_format_are_refused_in_words(
    system: System, model: Any, events: Any
) -> None:
    with pytest.raises(pydantic_ai.ModelHTTPError, match="temperature"):
        asked(events, pydantic_ai.Agent(model, model_settings=SETTINGS | {"temperature": -1}))
    plain = OpenAIChatModel(MODEL, provider=OpenAIProvider(base_url=system.base_url, api_key="unused"))
    with pytest.raises(pydantic_ai.ModelHTTPError, match="tools cannot be used"):
        asked(events, pydantic_ai.Agent(plain, output_type=Ticket, model_settings={"max_tokens": 12}))
