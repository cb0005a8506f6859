"""openai-agents against a gateway whose model calls tools: loops with two tools, streams, typed outputs, a refusal."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any, Literal

import openai
import pytest

from tests.support.gateway_system import MODEL
from tests.support.optional_clients import REASON
from tests.support.output_forms import Verdict

agents = pytest.importorskip("agents", reason=REASON)

TASK = "Look at the weather of Paris, then book a room there."


@pytest.fixture(scope="module")
def events() -> Iterator[asyncio.AbstractEventLoop]:
    """The loop of events to which the connections of a client belong."""
    loop = asyncio.new_event_loop()
    yield loop
    loop.close()


@pytest.fixture(scope="module")
def plain(tool_url: str, events: asyncio.AbstractEventLoop) -> Iterator[openai.AsyncOpenAI]:
    client = openai.AsyncOpenAI(base_url=f"{tool_url}/v1", api_key="unused", timeout=300, max_retries=0)
    yield client
    events.run_until_complete(client.close())


@pytest.fixture(params=["OpenAIChatCompletionsModel", "OpenAIResponsesModel"])
def model(request: pytest.FixtureRequest, plain: openai.AsyncOpenAI) -> Any:
    return getattr(agents, request.param)(MODEL, plain)


def settings(**options: Any) -> Any:
    """Greedy outputs of one call each, without reasoning."""
    effort = openai.types.Reasoning(effort="none")
    given = {"temperature": 0, "max_tokens": 200, "parallel_tool_calls": False, "reasoning": effort}
    return agents.ModelSettings(**given | options)


def traveller(model: Any, done: list[tuple[Any, ...]]) -> Any:
    """An agent with two tools, the second of which ends its work. What they do is noted in `done`.

    The model knows nothing of tools, so each of its turns offers one tool alone.
    """

    def get_weather(city: Literal["Paris", "Rome"]) -> str:
        """Return the forecast of a city."""
        done.append(("get_weather", city))
        return f"{city}: rain"

    def book_room(city: Literal["Paris", "Rome"], nights: Literal[1, 2, 3]) -> str:
        """Book a room in a city."""
        done.append(("book_room", city, nights))
        return f"{nights} nights in {city}"

    def offered(when: Callable[[], bool]) -> Any:
        return agents.function_tool(is_enabled=lambda context, agent: when())

    return agents.Agent(
        "Traveller",
        model=model,
        model_settings=settings(tool_choice="required"),
        tools=[offered(lambda: not done)(get_weather), offered(lambda: bool(done))(book_room)],
        tool_use_behavior=agents.StopAtTools(stop_at_tool_names=["book_room"]),
        reset_tool_choice=False,
    )


def test_a_loop_calls_both_tools_and_sends_the_first_result_back(model: Any, events: Any) -> None:
    done: list[tuple[Any, ...]] = []
    result = events.run_until_complete(agents.Runner.run(traveller(model, done), TASK))
    assert [name for name, *_ in done] == ["get_weather", "book_room"]
    _, city, nights = done[1]
    assert result.final_output == f"{nights} nights in {city}"
    kinds = ["tool_call_item", "tool_call_output_item"]
    assert [item.type for item in result.new_items] == kinds * 2
    first, second = result.raw_responses
    assert second.usage.input_tokens > first.usage.total_tokens - first.usage.output_tokens
    assert first.usage.output_tokens_details.reasoning_tokens == 0


def test_a_streamed_loop_does_the_same(model: Any, events: Any) -> None:
    whole: list[tuple[Any, ...]] = []
    streamed: list[tuple[Any, ...]] = []
    events.run_until_complete(agents.Runner.run(traveller(model, whole), TASK))

    async def deltas() -> list[str]:
        result = agents.Runner.run_streamed(traveller(model, streamed), TASK)
        raw = [event.data async for event in result.stream_events() if event.type == "raw_response_event"]
        return [event.delta for event in raw if event.type == "response.function_call_arguments.delta"]

    assert len(events.run_until_complete(deltas())) > 2
    assert streamed == whole


def test_an_output_type_gives_the_pydantic_model(model: Any, events: Any) -> None:
    agent = agents.Agent("Judge", model=model, model_settings=settings(), output_type=Verdict)
    assert isinstance(events.run_until_complete(agents.Runner.run(agent, TASK)).final_output, Verdict)


def test_a_bad_setting_is_refused_in_words(model: Any, events: Any) -> None:
    agent = agents.Agent("Hot", model=model, model_settings=settings(temperature=-1))
    with pytest.raises(openai.BadRequestError, match="temperature"):
        events.run_until_complete(agents.Runner.run(agent, TASK))
