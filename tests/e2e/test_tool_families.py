"""One call through the services in the format of each family, without a draft and with a session's next turn."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema
import pytest

from specdec import Client
from tests.support.stack import Stack
from tests.support.tool_models import FAMILIES, write_family

WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "enum": ["Paris", 'São "Paulo"']},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
        "is_daily": {"type": "boolean"},
    },
    "required": ["city", "days", "is_daily"],
    "additionalProperties": False,
}
#: A family whose form is far from JSON; `test_tool_calls` has another.
QUICK = ("qwen_xml",)
USER = {"role": "user", "content": "def weather(city):"}


@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=[] if name in QUICK else pytest.mark.full) for name in FAMILIES]
)
def test_a_model_of_each_family_calls_a_tool_and_gets_its_result(family: str, tmp_path: Path) -> None:
    template, markers = FAMILIES[family]
    target = write_family(tmp_path / "target", "target", template, markers)
    tools = [{"name": "get_weather", "description": "Forecast", "parameters": WEATHER}]
    choice = {"type": "function", "function": {"name": "get_weather"}}
    with Stack(target) as stack, Client(stack.endpoint, insecure=True) as client:
        for seed in range(3):
            first = client.generate([USER], tools=tools, tool_choice=choice, seed=seed, max_new_tokens=200)
            (call,) = first.tool_calls
            assert first.finish_reason == "tool_calls"
            assert call.name == "get_weather"
            assert len(call.id) == 9 if family.startswith("mistral") else call.id.startswith("call_")
            jsonschema.validate(json.loads(call.arguments), WEATHER)
            result = {"role": "tool", "tool_call_id": call.id, "content": "21 degrees"}
            messages = [USER, {"role": "assistant", "content": None, "tool_calls": [call.for_message()]}, result]
            second = client.generate(messages, tools=tools, session_id=first.session_id, max_new_tokens=4)
            held = client.get_session(first.session_id, include_token_ids=True).token_ids
            num_kept = first.usage.num_prompt_tokens + len(first.token_ids)
            assert second.usage.num_output_tokens
            if family != "mistral":  # its template adds the ids of calls, which no model writes
                assert held[first.usage.num_prompt_tokens : num_kept] == first.token_ids
