"""Gives a chat template the messages of a conversation in the form that it reads.

Clients send one form, and templates read several: content as a text or as a list of parts, the arguments of a tool call
as an object or as JSON, a missing text as none or as an empty one. A template tells its form only by what it renders,
so a conversation is rendered once with marks in place of its texts. The first form under which every message leaves its
marks, and then its own text, is used; if there is none, the message that would be missing is refused. `text_child`
calls this.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any

from coordinator.text.missing_texts import TextPlace, first_missing

Message = Mapping[str, Any]
Render = Callable[[Sequence[Message]], str]


#: Key of a part that no template reads.
_KEY = "zqkeyqz"
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
            marks, marked_prompt = _marked_prompt(render, messages, form)
        except MemoryError:
            raise
        except Exception:  # the template cannot read this form, or not the marks in it
            continue
        lower = marked_prompt.lower()
        left_out = [index for index, mark in enumerate(marks) if not mark.is_in(lower)]
        if not left_out:
            prompt = render(form.of(messages))
            places = [place for mark in marks for place in mark.places]
            missing = first_missing(prompt, marked_prompt, places, partial(_render_with_text, render, messages, form))
            if missing is None:
                return prompt
            left_out = [missing]
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


def _marked_prompt(render: Render, messages: Sequence[Message], form: _Form) -> tuple[list[_Marks], str]:
    """Return the marks of a conversation, and the prompt with the marks.

    Raises:
        _NotRead: the template prints parts or a missing text as Python spells them.
        Exception: what the template raises.
    """
    marks = [_Marks(index) for index in range(len(messages))]
    marked = [mark.put(message) for mark, message in zip(marks, messages, strict=True)]
    rendered = render([_with_marked_key(message) for message in form.of(marked)])
    if _KEY in rendered.lower():
        raise _NotRead
    if form.empty is None:
        with_empty = render([_with_marked_key(message) for message in replace(form, empty="").of(marked)])
        if rendered.lower().count("none") > with_empty.lower().count("none"):
            raise _NotRead
    return marks, rendered


def _with_marked_key(message: Message) -> Message:
    """Return a message whose parts have one more key, which is in the prompt only if the template prints parts."""
    content = message.get("content")
    if not isinstance(content, list):
        return message
    return {**message, "content": [{**part, _KEY: ""} for part in content]}


def _render_with_text(render: Render, messages: Sequence[Message], form: _Form, place: TextPlace, text: str) -> str:
    """Return the prompt of a conversation with another text at one place."""
    content = messages[place.message_index]["content"]
    texts = _texts(content)
    texts[place.part_index] = text
    changed = {**messages[place.message_index], "content": _as_parts(texts) if isinstance(content, list) else text}
    return render(form.of([*messages[: place.message_index], changed, *messages[place.message_index + 1 :]]))


class _Marks:
    """The marks of one message, in place of its texts and the names of its tool calls."""

    def __init__(self, index: int) -> None:
        self._index = index
        self.texts: list[str] = []
        self.places: list[TextPlace] = []
        """Places of the texts that must be in the prompt: none if the tool calls may be there in their place."""
        self.calls: list[str] = []

    def put(self, message: Message) -> Message:
        """Return the message with marks. An empty text stays empty."""
        content = message.get("content")
        if content:
            marked_texts = [self._mark(self.texts) if text else "" for text in _texts(content)]
            if not message.get("tool_calls"):
                self.places = [
                    TextPlace(self._index, part, text, mark, message["role"] == "assistant")
                    for part, (text, mark) in enumerate(zip(_texts(content), marked_texts, strict=True))
                    if text
                ]
            content = _as_parts(marked_texts) if isinstance(content, list) else marked_texts[0]
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
    """Return the first conversation that a template renders.

    Raises the template's own refusal, or else what it raises most often: another error is that of a wrong form.
    """
    errors: list[Exception] = []
    for messages in candidates:
        try:
            return render(messages)
        except Exception as error:
            errors.append(error)
    refusals = [error for error in errors if type(error).__name__ == "TemplateError"]
    kinds = [(type(error), str(error)) for error in errors]
    raise refusals[0] if refusals else errors[kinds.index(max(kinds, key=kinds.count))]


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
