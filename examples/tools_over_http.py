"""Let a model call tools over HTTP: a loop that runs the calls of OpenAI's client, and one turn of Anthropic's.

Start a system with its gateway first: `specdec up --http 127.0.0.1:8000 --detach --target MODEL`, of a model that has
learned to call tools. `OPENAI_BASE_URL` names another one. Needs `pip install openai anthropic`.
"""

import json
import os

from anthropic import Anthropic
from openai import OpenAI

BASE_URL = os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:8000/v1")
QUESTION = {"role": "user", "content": "Will it rain in Paris?"}
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": ["Paris", "Rome"]}, "days": {"type": "integer", "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOLS = [{"type": "function", "function": {"name": "get_weather", "description": "Forecast.", "parameters": SCHEMA}}]
MAX_TURNS = 3


def get_weather(city: str, days: int) -> str:
    """Return the forecast of a city."""
    return f"{city}: rain for {abs(days)} days"


FUNCTIONS = {"get_weather": get_weather}


def main() -> None:
    with OpenAI(base_url=BASE_URL, api_key="none") as client:
        run_agent(client)
        show_stream(client)
    with Anthropic(base_url=BASE_URL.removesuffix("/v1"), api_key="none") as claude:
        show_message(claude)


def run_agent(client: OpenAI) -> None:
    """Send the results of calls back until the model answers. The first turn must call a tool."""
    messages, choice = [QUESTION], "required"
    for _ in range(MAX_TURNS):
        answer = client.chat.completions.create(
            model="target", messages=messages, tools=TOOLS, tool_choice=choice, parallel_tool_calls=False,
            temperature=0, max_tokens=100, reasoning_effort="none",
        ).choices[0]  # fmt: skip
        messages.append(answer.message)
        print(answer.finish_reason)
        for call in answer.message.tool_calls or ():
            result = FUNCTIONS[call.function.name](**json.loads(call.function.arguments))
            print(call.function.name, call.function.arguments, "->", result)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
        if not answer.message.tool_calls:
            return
        choice = "none"


def show_stream(client: OpenAI) -> None:
    """Print a call as it comes: its name once, and then the parts of its arguments."""
    named = {"type": "function", "function": {"name": "get_weather"}}
    stream = client.chat.completions.create(
        model="target", messages=[QUESTION], tools=TOOLS, tool_choice=named, temperature=0, max_tokens=100,
        reasoning_effort="none", stream=True,
    )  # fmt: skip
    for chunk in stream:
        for delta in chunk.choices[0].delta.tool_calls or ():
            print(delta.function.name or delta.function.arguments, end="")
    print()


def show_message(claude: Anthropic) -> None:
    """Read the call of a message."""
    message = claude.messages.create(
        model="target", messages=[QUESTION], max_tokens=100, tools=[{"name": "get_weather", "input_schema": SCHEMA}],
        tool_choice={"type": "tool", "name": "get_weather"}, thinking={"type": "disabled"},
        extra_body={"temperature": 0},
    )  # fmt: skip
    print(message.stop_reason, message.content[0].name, message.content[0].input)


if __name__ == "__main__":
    main()
