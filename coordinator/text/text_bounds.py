"""How much text a number of tokens can stand for, so that one far beyond the context is refused unread.

Where every character counts (byte-level BPE, and BPE that falls back to bytes), the longest token says it, and white
space that an added token takes along (`lstrip`, `rstrip`) is found and left out. Elsewhere nothing does: a word of any
length, or a run of what is unknown, may be one token, a normalizer may leave text out. There a limit of our own holds,
far above what text has. Called by `tokenizer`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

#: Of our own, where a token may stand for any text. Characters other than white space for each token: text has four or
#: five, and a language model's longest words have tens.
_CHARACTERS_PER_TOKEN = 64
#: And with white space, of which tables and indented lines have runs: a quarter of the text at least is not empty.
_CHARACTERS_WITH_SPACE_PER_TOKEN = 256
#: And a text of no more than this is read in any case: it takes milliseconds, and what it is of is then known.
_READ_ANYWAY = 1 << 16
#: The most characters that composition makes one of: the longest canonical decomposition.
_COMPOSED_CHARACTERS = 4
_COMPOSING = frozenset(("NFC", "NFKC"))
_KEEPING_NORMALIZERS = frozenset(("NFD", "NFKD", "Lowercase", "Prepend", "ByteLevel")) | _COMPOSING
_KEEPING_PRE_TOKENIZERS = frozenset(("ByteLevel", "Digits", "Metaspace"))
_SPLITTING = frozenset(("Split", "Punctuation"))
_NUM_BYTES = 256
_SLICE = 1 << 16
_WHITE_SPACE = re.compile(r"\s+")


@dataclass(frozen=True, slots=True)
class TextBounds:
    """The longest text of a number of tokens, for one tokenizer."""

    per_token: int
    """Characters that a token stands for at most; `_counted` says which."""
    with_space_per_token: int | None = None
    """Where only characters other than white space are counted: of them and white space together."""
    takes_space_before: tuple[str, ...] = ()
    """Where all are counted: added tokens that take along the white space before them, which is not."""
    takes_space_after: tuple[str, ...] = ()

    def excess(self, text: str, max_tokens: int) -> tuple[int, int] | None:
        """None where `text` may be of `max_tokens` tokens; else how many characters count, and how many might."""
        room = max(max_tokens, 0)
        is_ours = self.with_space_per_token is not None
        if len(text) <= max(room * self.per_token, _READ_ANYWAY if is_ours else 0):
            return None
        if self.with_space_per_token is not None and len(text) > room * self.with_space_per_token:
            return len(text), room * self.with_space_per_token
        counted = self._counted(text, room * self.per_token)
        return (counted, room * self.per_token) if counted > room * self.per_token else None

    def _counted(self, text: str, limit: int) -> int:
        """Characters of `text` that tokens have to stand for; any number above `limit` will do for one that is."""
        if self.with_space_per_token is None and not (self.takes_space_before or self.takes_space_after):
            return len(text)
        visible = _num_visible(text)
        if self.with_space_per_token is not None or visible > limit:
            return visible
        # Few are visible, so there are few runs of white space to look at.
        return len(text) - sum(map(len, self._taken(text)))

    def _taken(self, text: str) -> Iterator[str]:
        """The runs of white space beside what may be an added token that takes them along."""
        for run in _WHITE_SPACE.finditer(text):
            is_before = text.startswith(self.takes_space_before, run.end())
            if is_before or text.endswith(self.takes_space_after, 0, run.start()):
                yield run.group()


def _num_visible(text: str) -> int:
    """Characters that are no white space; by slices, so that not every word of a long text is there at once."""
    return sum(sum(map(len, text[start : start + _SLICE].split())) for start in range(0, len(text), _SLICE))


def text_bounds(tokenizer: Any, vocabulary: Collection[str]) -> TextBounds:
    """What a tokenizer's tokens can stand for.

    Args:
        tokenizer: a `PreTrainedTokenizerFast`.
        vocabulary: its tokens, added ones included.
    """
    backend = tokenizer.backend_tokenizer
    normalizers, splitters = list(_parts(backend.normalizer)), list(_parts(backend.pre_tokenizer))
    taking = [added for added in backend.get_added_tokens_decoder().values() if added.lstrip or added.rstrip]
    counts_all = (
        type(backend.model).__name__ == "BPE"
        # What is looked for in the normalized text is not seen in this one.
        and not any(added.content.isspace() or (added.normalized and normalizers) for added in taking)
        and all(map(_keeps_text, normalizers))
        and all(map(_keeps_words, splitters))
        and _knows_every_byte(backend.model, [*normalizers, *splitters], vocabulary)
    )
    longest = max(map(len, vocabulary), default=1)
    if not counts_all:
        per_token = max(_CHARACTERS_PER_TOKEN, longest * _COMPOSED_CHARACTERS)
        return TextBounds(per_token, max(_CHARACTERS_WITH_SPACE_PER_TOKEN, per_token))
    composed = _COMPOSED_CHARACTERS if any(part["type"] in _COMPOSING for part in normalizers) else 1
    return TextBounds(
        longest * composed,
        takes_space_before=tuple(added.content.lstrip() for added in taking if added.lstrip),
        takes_space_after=tuple(added.content.rstrip() for added in taking if added.rstrip),
    )


def _parts(component: Any) -> Iterator[Mapping[str, Any]]:
    """A normalizer or pre-tokenizer, taken apart."""
    return _flat(json.loads(component.__getstate__())) if component is not None else iter(())


def _flat(part: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    if part["type"] != "Sequence":
        yield part
        return
    for inner in part.get("normalizers") or part.get("pretokenizers") or ():
        yield from _flat(inner)


def _keeps_text(part: Mapping[str, Any]) -> bool:
    if part["type"] == "Replace":
        pattern = part["pattern"].get("String")
        return pattern is not None and len(part["content"]) >= len(pattern)
    return part["type"] in _KEEPING_NORMALIZERS


def _keeps_words(part: Mapping[str, Any]) -> bool:
    if part["type"] in _SPLITTING:
        return bool(part["behavior"] != "Removed")
    return part["type"] in _KEEPING_PRE_TOKENIZERS


def _knows_every_byte(model: Any, parts: list[Mapping[str, Any]], vocabulary: Collection[str]) -> bool:
    """Whether no text is unknown: unknown text may be left out, or a run of it be one token."""
    if any(part["type"] == "ByteLevel" for part in parts):
        from tokenizers.pre_tokenizers import ByteLevel

        return all(symbol in vocabulary for symbol in ByteLevel.alphabet())
    return bool(model.byte_fallback) and all(f"<0x{byte:02X}>" in vocabulary for byte in range(_NUM_BYTES))
