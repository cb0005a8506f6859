"""A conversation: perhaps a system message, then turns of a user and the model, oldest first.

Not here: the chat template and the session, which are the server's; reading and showing (`chat`).
"""

from __future__ import annotations

from specdec.client import ChatMessage


class Conversation:
    """What a chat sends whole with every message. A turn is a user's message and the answer to it."""

    def __init__(self, system: str = "") -> None:
        """`system`: what the model is told before everything else; "": nothing."""
        self.system = system
        self._turns: list[ChatMessage] = []
        """Users' and answers by turns; the last one a user's while it has no answer."""

    @property
    def messages(self) -> list[ChatMessage]:
        return self.messages_without(0)

    @property
    def num_turns(self) -> int:
        """Those that have been answered."""
        return len(self._turns) // 2

    def ask(self, text: str) -> None:
        self._turns.append({"role": "user", "content": text})

    def answer(self, text: str) -> None:
        self._turns.append({"role": "assistant", "content": text})

    def kept(self) -> tuple[ChatMessage, ...]:
        """The turns as they are now, for `restore`."""
        return tuple(self._turns)

    def restore(self, kept: tuple[ChatMessage, ...]) -> None:
        """Makes the turns what `kept` returned once."""
        self._turns[:] = kept

    def messages_without(self, num_turns: int) -> list[ChatMessage]:
        """What `messages` would be after `trim(num_turns)`."""
        system: list[ChatMessage] = [{"role": "system", "content": self.system}] if self.system else []
        return system + self._turns[2 * num_turns :]

    def trim(self, num_turns: int) -> int:
        """Forgets the oldest answered turns; returns how many."""
        num_turns = min(num_turns, self.num_turns)
        del self._turns[: 2 * num_turns]
        return num_turns

    def clear(self) -> None:
        """Forgets every turn; the system message stays."""
        self._turns.clear()
