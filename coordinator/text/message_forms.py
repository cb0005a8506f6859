"""Gives a chat template the messages of a conversation in the form that it reads.

Clients send one form, and templates read several: content as a text or as a list of parts, the arguments of a tool call
as an object or as JSON, a missing text as none or as an empty one. A template tells its form only by what it renders,
so a conversation is rendered once with marks in place of its texts. The first form under which every message leaves its
marks is used; if there is none, the message that would be missing is refused. `text_child` calls this.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

Message = Mapping[str, Any]
Render = Callable[[Sequence[Message]], str]


#: Content of a message without a text, as `apply_chat_template` passes it on.
_ABSENT = object()


class _NotRead(Exception):
    """A template prints a form instead of reading it."""


class LeftOut(Exception):
    """A message would be missing from the prompt."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.index = index


def render_as_read(render: Render, messages: Sequence[Message]) -> str:
    """Return a conversation as a template renders it in the form that the template reads.

    Args:
        render: renders messages in the form that they are given.
        messages: messages in the form of the wire. `content` is a text, none, or a list of several parts of type text;
            the arguments of tool calls are JSON.

    Raises:
        LeftOut: the template ignores a message in every form.
        Exception: what the template raises in every form.
    """
    fewest: list[int] | None = None
    for form in _forms(messages):
        try:
            left_out = _left_out(render, messages, form)
        except MemoryError:
            raise
        except Exception:  # the template cannot read this form, or not the marks in it
            continue
        if not left_out:
            return render(form.of(messages))
        if fewest is None or len(left_out) < len(fewest):
            fewest = left_out
    if fewest is not None:
        raise LeftOut(fewest[0])
    return _first_rendered(render, [form.of(messages) for form in _forms(messages)])


def knows_role(template: str, role: str) -> bool:
    """Return whether a template has the name of a role among its text constants."""
    import jinja2

    tokens = jinja2.Environment().lex(template)
    return any(kind == "string" and token[1:-1] == role for _, kind, token in tokens)


def _as_sent(content: Any) -> Any:
    return content


def _as_text(content: Any) -> Any:
    return "\n".join(_texts(content))


def _as_parts(content: Any) -> Any:
    return [{"type": "text", "text": text} for text in _texts(content)]


def _as_one_part(content: Any) -> Any:
    return _as_parts(_as_text(content))


@dataclass(frozen=True, slots=True)
class _Form:
    shape: Callable[[Any], Any]
    """Gives content its shape."""
    empty: Any
    """Content of a message without a text; `_ABSENT` for a message without the field."""
    has_objects: bool
    """The arguments of tool calls are objects."""

    def of(self, messages: Sequence[Message]) -> list[Message]:
        return [self._message(message) for message in messages]

    def _message(self, message: Message) -> Message:
        content = message.get("content")
        changed = {**message, "content": self.empty if content is None else self.shape(content)}
        if changed["content"] is _ABSENT:
            del changed["content"]
        if self.has_objects and message.get("tool_calls"):
            changed["tool_calls"] = [_map_function(call, _with_object) for call in message["tool_calls"]]
        return changed


def _forms(messages: Sequence[Message]) -> Iterator[_Form]:
    """Yield the forms of a conversation, from the one that transformers would get to the one farthest from it."""
    has_parts = any(isinstance(message.get("content"), list) for message in messages)
    lacks_content = any(message.get("content") is None for message in messages)
    has_calls = any(message.get("tool_calls") for message in messages)
    shapes = (_as_sent, _as_parts, _as_text, _as_one_part) if has_parts else (_as_sent, _as_parts)
    for has_objects, empty, shape in product(
        (True, False) if has_calls else (True,), (_ABSENT, None, "") if lacks_content else (_ABSENT,), shapes
    ):
        yield _Form(shape, empty, has_objects)


def _left_out(render: Render, messages: Sequence[Message], form: _Form) -> list[int]:
    """Return the indices of the messages that leave no marks in the prompt.

    Raises:
        _NotRead: the template prints parts or a missing text as Python spells them.
        Exception: what the template raises.
    """
    marks = [_Marks(index) for index in range(len(messages))]
    marked = [mark.put(message) for mark, message in zip(marks, messages, strict=True)]
    rendered = render(form.of(marked)).lower()
    if any(f"{q}text{q}: {q}{text}" in rendered for mark in marks for text in mark.texts for q in "'\""):
        raise _NotRead
    if form.empty is None:
        with_empty = render(replace(form, empty="").of(marked)).lower()
        if rendered.count("none") > with_empty.count("none"):
            raise _NotRead
    return [index for index, mark in enumerate(marks) if not mark.is_in(rendered)]


class _Marks:
    """The marks of one message, in place of its texts and the names of its tool calls."""

    def __init__(self, index: int) -> None:
        self._index = index
        self.texts: list[str] = []
        self.calls: list[str] = []

    def put(self, message: Message) -> Message:
        """Return the message with marks. An empty text stays empty."""
        content = message.get("content")
        if isinstance(content, str) and content:
            content = self._mark(self.texts)
        elif isinstance(content, list):
            content = _as_parts([self._mark(self.texts) if text else "" for text in _texts(content)])
        marked = {**message, "content": content}
        if message.get("tool_calls"):
            marked["tool_calls"] = [_map_function(call, self._named) for call in message["tool_calls"]]
        return marked

    def is_in(self, rendered: str) -> bool:
        """Return whether each text of the message is there, or one of its tool calls; true if it has neither."""
        has_texts = bool(self.texts) and all(text in rendered for text in self.texts)
        return has_texts or any(call in rendered for call in self.calls) or not (self.texts or self.calls)

    def _named(self, function: Message) -> Message:
        return {**function, "name": self._mark(self.calls)}

    def _mark(self, marks: list[str]) -> str:
        kind = "c" if marks is self.calls else "t"
        marks.append(f"zq{self._index}{kind}{len(marks)}qz")
        return marks[-1]


def _first_rendered(render: Render, candidates: Iterable[Sequence[Message]]) -> str:
    """Return the first conversation that a template renders. Raises what the template raises for the first one."""
    errors: list[Exception] = []
    for messages in candidates:
        try:
            return render(messages)
        except Exception as error:
            errors.append(error)
    raise errors[0]


def _texts(content: Any) -> list[str]:
    if isinstance(content, list):
        return [part if isinstance(part, str) else part["text"] for part in content]
    return [content]


def _map_function(call: Message, change: Callable[[Message], Message]) -> Message:
    """Return a tool call with its function changed; a call without `function` is itself one."""
    return {**call, "function": change(call["function"])} if "function" in call else change(call)


def _with_object(function: Message) -> Message:
    arguments = function.get("arguments") or "{}"
    return {**function, "arguments": json.loads(arguments) if isinstance(arguments, str) else arguments}
