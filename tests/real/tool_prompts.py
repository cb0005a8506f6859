"""Sixty prompts for tools, with the calls that answer them.

Four kinds: one tool is given; one of several tools fits; two calls are asked for; no tool fits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

Kind = Literal["single", "several", "parallel", "none"]
Call = tuple[str, dict[str, Any]]
"""Name of a tool and its arguments."""


@dataclass(frozen=True)
class ToolPrompt:
    """A user's message and the calls that answer it."""

    kind: Kind
    text: str
    calls: tuple[Call, ...]

    @property
    def tools(self) -> list[dict[str, Any]]:
        return [TOOLS[self.calls[0][0]]] if self.kind == "single" else list(TOOLS.values())

    @property
    def choice(self) -> str:
        return "auto" if self.kind == "none" else "required"


def _tool(name: str, description: str, **properties: Any) -> dict[str, Any]:
    schema = {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}
    return {"name": name, "description": description, "parameters": schema}


_TEXT, _INTEGER, _NUMBER, _FLAG = ({"type": kind} for kind in ("string", "integer", "number", "boolean"))

TOOLS = {
    tool["name"]: tool
    for tool in (
        _tool("get_weather", "Weather of a city today", city=_TEXT),
        _tool("get_time", "Current time in a city", city=_TEXT),
        _tool("add", "Add two numbers", a=_NUMBER, b=_NUMBER),
        _tool("set_light", "Turn the light of a room on or off", room=_TEXT, is_on=_FLAG),
        _tool("set_timer", "Start a timer", minutes={"type": "integer", "minimum": 1, "maximum": 600}),
        _tool("play_music", "Play a kind of music", kind={"enum": ["jazz", "rock", "classical", "pop"]}),
        _tool("translate", "Translate a word", word=_TEXT, language={"enum": ["French", "German", "Spanish"]}),
        _tool("book_table", "Book a table in a restaurant", restaurant=_TEXT, guests=_INTEGER),
    )
}

_CALLS: tuple[tuple[str, Call], ...] = (
    ("What is the weather in Paris?", ("get_weather", {"city": "Paris"})),
    ("Tell me today's weather in Oslo.", ("get_weather", {"city": "Oslo"})),
    ("Is it raining in Lima?", ("get_weather", {"city": "Lima"})),
    ("What time is it in Tokyo?", ("get_time", {"city": "Tokyo"})),
    ("Give me the current time in Cairo.", ("get_time", {"city": "Cairo"})),
    ("Add 17 and 25.", ("add", {"a": 17, "b": 25})),
    ("What is 2.5 plus 4?", ("add", {"a": 2.5, "b": 4})),
    ("Compute 1200 + 34.", ("add", {"a": 1200, "b": 34})),
    ("Turn on the light in the kitchen.", ("set_light", {"room": "kitchen", "is_on": True})),
    ("Switch the bedroom light off.", ("set_light", {"room": "bedroom", "is_on": False})),
    ("Lights on in the hall, please.", ("set_light", {"room": "hall", "is_on": True})),
    ("Set a timer for 10 minutes.", ("set_timer", {"minutes": 10})),
    ("Start a 45 minute timer.", ("set_timer", {"minutes": 45})),
    ("Remind me in 3 minutes with a timer.", ("set_timer", {"minutes": 3})),
    ("Play some jazz.", ("play_music", {"kind": "jazz"})),
    ("I want to hear classical music.", ("play_music", {"kind": "classical"})),
    ("Translate 'house' to French.", ("translate", {"word": "house", "language": "French"})),
    ("How do you say 'water' in Spanish?", ("translate", {"word": "water", "language": "Spanish"})),
    ("Book a table for 4 guests at Luigi.", ("book_table", {"restaurant": "Luigi", "guests": 4})),
    ("Reserve a table for two at Nobu.", ("book_table", {"restaurant": "Nobu", "guests": 2})),
)

_PAIRS: tuple[tuple[str, Call, Call], ...] = (
    ("What is the weather in Rome and in Bonn?", ("get_weather", {"city": "Rome"}), ("get_weather", {"city": "Bonn"})),
    ("Tell me the time in Delhi and in Quito.", ("get_time", {"city": "Delhi"}), ("get_time", {"city": "Quito"})),
    ("What are the weather and the time in Bern?", ("get_weather", {"city": "Bern"}), ("get_time", {"city": "Bern"})),
    ("Set a timer for 5 minutes and play rock.", ("set_timer", {"minutes": 5}), ("play_music", {"kind": "rock"})),
    ("Add 1 and 2, and add 30 and 40.", ("add", {"a": 1, "b": 2}), ("add", {"a": 30, "b": 40})),
    (
        "Turn on the lights in the kitchen and in the hall.",
        ("set_light", {"room": "kitchen", "is_on": True}),
        ("set_light", {"room": "hall", "is_on": True}),
    ),
    (
        "Translate 'dog' to German and 'cat' to French.",
        ("translate", {"word": "dog", "language": "German"}),
        ("translate", {"word": "cat", "language": "French"}),
    ),
    (
        "Turn the bedroom light off and play classical music.",
        ("set_light", {"room": "bedroom", "is_on": False}),
        ("play_music", {"kind": "classical"}),
    ),
    (
        "Book a table for 3 at Roma and tell me the weather in Milan.",
        ("book_table", {"restaurant": "Roma", "guests": 3}),
        ("get_weather", {"city": "Milan"}),
    ),
    ("Start timers of 2 minutes and of 7 minutes.", ("set_timer", {"minutes": 2}), ("set_timer", {"minutes": 7})),
)

_NONE_FITS = (
    "Hello!",
    "Who wrote Hamlet?",
    "Write a line of Python that prints hello.",
    "What is the capital of Spain?",
    "Explain recursion in one sentence.",
    "Thank you very much.",
    "What is a prime number?",
    "Name three colours.",
    "Why is the sky blue?",
    "Write a SQL query that counts the rows of a table.",
)

PROMPTS = (
    *(ToolPrompt("single", text, (call,)) for text, call in _CALLS),
    *(ToolPrompt("several", text, (call,)) for text, call in _CALLS),
    *(ToolPrompt("parallel", text, (first, second)) for text, first, second in _PAIRS),
    *(ToolPrompt("none", text, ()) for text in _NONE_FITS),
)
