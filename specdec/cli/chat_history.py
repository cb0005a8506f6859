"""The conversation of `specdec chat`, turn by turn, and the tools that the model may call in it."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from specdec.client import ChatMessage, Completion, ToolCall
from specdec.contract.errors import InvalidRequest


class ChatHistory:
    """Messages of a chat, all of which are sent with every request. A turn is a user's message and what follows it."""

    def __init__(self, system: str = "") -> None:
        """Start an empty conversation with a system message, or without one for ""."""
        self.system = system
        self._turns: list[list[ChatMessage]] = []
        self.open_calls: list[ToolCall] = []
        """Calls of the last answer that have no result yet."""

    @property
    def messages(self) -> list[ChatMessage]:
        return self.messages_without(0)

    @property
    def num_turns(self) -> int:
        """Number of answered turns."""
        return sum(turn[-1]["role"] == "assistant" for turn in self._turns)

    def ask(self, text: str) -> None:
        """Add what the user typed: the result of the oldest call without one, or else a message."""
        if self.open_calls:
            call = self.open_calls.pop(0)
            self._turns[-1].append({"role": "tool", "tool_call_id": call.id, "content": text})
        else:
            self._turns.append([{"role": "user", "content": text}])

    def answer(self, completion: Completion) -> None:
        """Add the answer to the last message. The next texts are the results of its calls."""
        message: ChatMessage = {"role": "assistant", "content": completion.text}
        calls = completion.tool_calls if completion.finish_reason == "tool_calls" else ()
        if calls:
            message["content"] = completion.text or None
            message["tool_calls"] = [call.for_message() for call in calls]
        self._turns[-1].append(message)
        self.open_calls = list(calls)

    def snapshot(self) -> tuple[tuple[tuple[ChatMessage, ...], ...], tuple[ToolCall, ...]]:
        """Return the current turns, for `restore`."""
        return tuple(tuple(turn) for turn in self._turns), tuple(self.open_calls)

    def restore(self, snapshot: tuple[Iterable[Iterable[ChatMessage]], Iterable[ToolCall]]) -> None:
        """Set the turns to those of an earlier `snapshot`."""
        turns, open_calls = snapshot
        self._turns = [list(turn) for turn in turns]
        self.open_calls = list(open_calls)

    def messages_without(self, num_turns: int) -> list[ChatMessage]:
        """Return what `messages` would be after `trim(num_turns)`."""
        system: list[ChatMessage] = [{"role": "system", "content": self.system}] if self.system else []
        return system + [message for turn in self._turns[num_turns:] for message in turn]

    def trim(self, num_turns: int) -> int:
        """Drop the oldest answered turns, at most `num_turns`, and return their number."""
        num_turns = min(num_turns, self.num_turns)
        del self._turns[:num_turns]
        if not self._turns:
            self.open_calls = []
        return num_turns

    def clear(self) -> None:
        """Drop every turn and keep the system message."""
        self._turns.clear()
        self.open_calls = []


def read_tools(path: str) -> list[dict[str, Any]]:
    """Return the tools of a JSON file: a list in OpenAI's form, or of function objects alone.

    Raises:
        InvalidRequest: the file cannot be read, or holds something else.
    """
    try:
        tools = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InvalidRequest(f"--tools {path} cannot be read: {error}", field="tools") from error
    if not isinstance(tools, list) or not tools or not all(isinstance(tool, dict) for tool in tools):
        raise InvalidRequest(f"--tools {path} must hold a JSON list of tools", field="tools")
    return tools


def shown_call(call: ToolCall) -> str:
    """Return the line that shows a call."""
    return f"{call.name}({call.arguments})"
