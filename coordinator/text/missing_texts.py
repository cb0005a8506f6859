"""Finds a text of a conversation that a chat template leaves out because of its words.

A prompt with marks in place of the texts tells where the template prints them. If the prompt is that one with the texts
in their places, none is missing, and this is the usual case. Otherwise each text that is not found is replaced by a
mark in a further prompt, and what stands in place of the mark must have a trace of the text, which a template may trim,
escape or write in other letters. `message_forms` calls this.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from html import escape
from typing import NamedTuple

#: Most texts for which a further prompt is rendered, those that are nowhere in the prompt first.
_MAX_RENDERED = 64
#: Most characters of these prompts together, which bounds the time.
_MAX_RENDERED_CHARACTERS = 1 << 23
#: Most characters that are compared in order to count texts.
_MAX_COMPARED = 1 << 28
#: End of an assistant's thoughts, before which templates leave out what it wrote.
_END_OF_THOUGHTS = "</think>"
_WORD = re.compile(r"\w+")
_MARK = re.compile(r"zq\d+t\d+qz", re.IGNORECASE)


class TextPlace(NamedTuple):
    """A text of a conversation, and its place."""

    message_index: int
    part_index: int
    """Index of the text among the message's parts."""
    text: str
    mark: str
    """Word in place of the text in the prompt with marks."""
    is_assistant: bool


def first_missing(
    prompt: str, marked_prompt: str, places: Sequence[TextPlace], render_with: Callable[[TextPlace, str], str]
) -> int | None:
    """Return the index of the first message with a text that is missing from a prompt, or None.

    Args:
        prompt: prompt of the conversation.
        marked_prompt: prompt with the mark of every text in its place.
        places: texts of the conversation.
        render_with: renders the conversation with another text at one place.
    """
    for forms in zip(*(_printed_forms(place.text) for place in places), strict=True):
        texts = {place.mark: form for place, form in zip(places, forms, strict=True)}
        if _MARK.sub(partial(_text_of, texts), marked_prompt) == prompt:
            return None
    doubtful = _doubtful(prompt, _MARK.sub("", marked_prompt), [place for place in places if _own_words(place)])
    doubtful.sort(key=lambda place: place.text.strip() in prompt)
    num_rendered = min(_MAX_RENDERED, _MAX_RENDERED_CHARACTERS // (len(prompt) + 1) + 1)
    missing = [place.message_index for place in doubtful[:num_rendered] if _is_missing(prompt, place, render_with)]
    return min(missing, default=None)


def _text_of(texts: Mapping[str, str], mark: re.Match[str]) -> str:
    return texts.get(mark[0], mark[0])


def _printed_forms(text: str) -> Iterator[str]:
    """Yield the forms in which templates print a text."""
    for each in (text, text.strip()):
        yield from (each, escape(each).replace("&#x27;", "&#39;").replace("&quot;", "&#34;"))
        yield json.dumps(each, ensure_ascii=False)[1:-1]


def _own_words(place: TextPlace) -> str:
    """Return the part of a text that must be in the prompt; "" if nothing must."""
    return (place.text.rpartition(_END_OF_THOUGHTS)[2] if place.is_assistant else place.text).strip()


def _doubtful(prompt: str, literal: str, places: Sequence[TextPlace]) -> list[TextPlace]:
    """Return the texts that are not surely in a prompt: not found in their order, or in the template's own words."""
    start, not_found = 0, []
    for place in places:
        text = place.text.strip()
        found = prompt.find(text, start)
        if found >= 0:
            start = found + len(text)
        else:
            not_found.append(place)
            if len(not_found) >= _MAX_RENDERED:
                break
    if not_found and len(prompt) * len(places) <= _MAX_COMPARED:  # one that is missing may have been found in another
        expected = "\n".join(place.text for place in places)
        not_found = [place for place in places if prompt.count(text := place.text.strip()) < expected.count(text)]
    return not_found + [place for place in places if place.text.strip() in literal]


def _is_missing(prompt: str, place: TextPlace, render_with: Callable[[TextPlace, str], str]) -> bool:
    """Return whether nothing of a text is where a mark in its place would be."""
    own = _own_words(place)
    first, last = (next(letter for letter in "qxz" if letter != own[end].lower()) for end in (0, -1))
    mark = f"{first}{place.mark}{last}"
    try:
        other = render_with(place, mark)
    except MemoryError:
        raise
    except Exception:  # the template demands certain words here, so it reads the text
        return False
    if mark not in other.lower():
        return True
    start = _num_common(prompt, other)
    end = _num_common(prompt[start:][::-1], other[start:][::-1])
    printed = prompt[start : len(prompt) - end].lower()
    words = _WORD.findall(f"{own} {json.dumps(own)}".lower())
    return not (any(word in printed for word in words) if words else printed.strip())


def _num_common(one: str, other: str) -> int:
    """Return the number of characters with which both texts begin."""
    least, most = 0, min(len(one), len(other))
    while least < most:
        middle = (least + most + 1) // 2
        least, most = (middle, most) if one[least:middle] == other[least:middle] else (least, middle - 1)
    return least
