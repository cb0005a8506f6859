"""The messages of a chat: a system message and turns, of which the oldest can be dropped."""

from __future__ import annotations

from specdec.client import ChatMessage


class Conversation:
    """Messages of a chat, all of which are sent with every request. A turn is a user's message and its answer."""

    def __init__(self, system: str = "") -> None:
        """Start an empty conversation with a system message, or without one for ""."""
        self.system = system
        self._turns: list[ChatMessage] = []
        """Alternating messages of user and model. The last one is the user's while it has no answer."""

    @property
    def messages(self) -> list[ChatMessage]:
        return self.messages_without(0)

    @property
    def num_turns(self) -> int:
        """Number of answered turns."""
        return len(self._turns) // 2

    def ask(self, text: str) -> None:
        self._turns.append({"role": "user", "content": text})

    def answer(self, text: str) -> None:
        self._turns.append({"role": "assistant", "content": text})

    def snapshot(self) -> tuple[ChatMessage, ...]:
        """Return the current turns, for `restore`."""
        return tuple(self._turns)

    def restore(self, snapshot: tuple[ChatMessage, ...]) -> None:
        """Set the turns to those of an earlier `snapshot`."""
        self._turns[:] = snapshot

    def messages_without(self, num_turns: int) -> list[ChatMessage]:
        """Return what `messages` would be after `trim(num_turns)`."""
        system: list[ChatMessage] = [{"role": "system", "content": self.system}] if self.system else []
        return system + self._turns[2 * num_turns :]

    def trim(self, num_turns: int) -> int:
        """Drop the oldest answered turns, at most `num_turns`, and return their number."""
        num_turns = min(num_turns, self.num_turns)
        del self._turns[: 2 * num_turns]
        return num_turns

    def clear(self) -> None:
        """Drop every turn and keep the system message."""
        self._turns.clear()
