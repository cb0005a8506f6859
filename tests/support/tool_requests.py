"""Requests with tools, for all APIs of the gateway, by the official clients."""

from __future__ import annotations

from typing import Any

import anthropic
import openai

from tests.support.gateway_system import MODEL
from tests.support.tool_models import TOOLS, WEATHER
from tests.support.tool_system import NO_THINKING

RESPONSE_TOOLS: list[Any] = [{"type": "function", "name": "get_weather", "parameters": WEATHER}]
CLAUDE_TOOLS: list[Any] = [{"name": "get_weather", "description": "Forecast", "input_schema": WEATHER}]
USER: list[Any] = [{"role": "user", "content": "def weather(city):"}]
NAMED: Any = {"type": "function", "function": {"name": "get_weather"}}
BEGUN = {"begun": True}


def chat(client: openai.OpenAI, *, arguments: dict[str, Any] = NO_THINKING, **options: Any) -> Any:
    """A greedy chat with tools."""
    body = {"chat_template_kwargs": arguments, **options.pop("extra_body", {})}
    given: dict[str, Any] = {"model": MODEL, "messages": USER, "tools": TOOLS, "temperature": 0, "max_tokens": 200}
    return client.chat.completions.create(**(given | {"extra_body": body} | options))


def respond(client: openai.OpenAI, *, arguments: dict[str, Any] = NO_THINKING, **options: Any) -> Any:
    """A greedy response with a tool that must be called."""
    given: dict[str, Any] = {
        "model": MODEL,
        "input": USER[0]["content"],
        "tools": RESPONSE_TOOLS,
        "tool_choice": "required",
        "parallel_tool_calls": False,
        "temperature": 0,
        "max_output_tokens": 200,
        "extra_body": {"chat_template_kwargs": arguments},
    }
    return client.responses.create(**(given | options))


def send(claude: anthropic.Anthropic, *, arguments: dict[str, Any] = NO_THINKING, **options: Any) -> Any:
    """A greedy message with a tool that must be called."""
    given: dict[str, Any] = {
        "model": MODEL,
        "messages": USER,
        "tools": CLAUDE_TOOLS,
        "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
        "max_tokens": 200,
        "extra_body": {"temperature": 0, "chat_template_kwargs": arguments},
    }
    return claude.messages.create(**(given | options))
