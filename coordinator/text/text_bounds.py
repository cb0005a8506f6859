"""Bounds the length of text that a number of tokens can stand for, so that oversized text is refused unencoded.

With byte-level BPE, and with BPE that falls back to bytes, every character needs a token, and the longest token gives
the bound; white space that an added token absorbs (`lstrip`, `rstrip`) is found and not counted. Other tokenizers give
no bound: a word of any length or a run of unknown text may be one token, and a normalizer may drop text. For them a
fixed limit holds, far above the length of real text. `tokenizer` applies the bounds.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

#: Fixed limit if a token may stand for any text: characters other than white space per token. Text has four or five
#: per token, and the longest words of vocabularies have tens.
_CHARACTERS_PER_TOKEN = 64
#: The same limit with white space counted. Tables and indented lines have runs of it, but a quarter is not empty.
_CHARACTERS_WITH_SPACE_PER_TOKEN = 256
#: Under the fixed limit, a text of at most this many characters is always encoded, which takes milliseconds.
_READ_ANYWAY = 1 << 16
#: Largest number of characters that composition joins into one: the longest canonical decomposition.
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
    """Bounds on the text of a number of tokens, for one tokenizer."""

    per_token: int
    """Largest number of characters per token; `_counted` defines which characters count."""
    with_space_per_token: int | None = None
    """Largest number of characters per token with white space; set if `per_token` leaves white space out."""
    takes_space_before: tuple[str, ...] = ()
    """Added tokens that absorb the white space before them, which is then not counted."""
    takes_space_after: tuple[str, ...] = ()

    def excess(self, text: str, max_tokens: int) -> tuple[int, int] | None:
        """Return None if `text` may fit `max_tokens` tokens; otherwise its counted characters and their limit."""
        room = max(max_tokens, 0)
        is_ours = self.with_space_per_token is not None
        if len(text) <= max(room * self.per_token, _READ_ANYWAY if is_ours else 0):
            return None
        if self.with_space_per_token is not None and len(text) > room * self.with_space_per_token:
            return len(text), room * self.with_space_per_token
        counted = self._counted(text, room * self.per_token)
        return (counted, room * self.per_token) if counted > room * self.per_token else None

    def _counted(self, text: str, limit: int) -> int:
        """Return the number of characters that tokens must stand for; above `limit` the number need not be exact."""
        if self.with_space_per_token is None and not (self.takes_space_before or self.takes_space_after):
            return len(text)
        visible = _num_visible(text)
        if self.with_space_per_token is not None or visible > limit:
            return visible
        # Few characters are visible, so there are few runs of white space to search.
        return len(text) - sum(map(len, self._taken(text)))

    def _taken(self, text: str) -> Iterator[str]:
        """Yield the runs of white space beside text that may be an added token that absorbs them."""
        for run in _WHITE_SPACE.finditer(text):
            is_before = text.startswith(self.takes_space_before, run.end())
            if is_before or text.endswith(self.takes_space_after, 0, run.start()):
                yield run.group()


def _num_visible(text: str) -> int:
    """Return the number of characters other than white space. Slices bound the memory that the words take."""
    return sum(sum(map(len, text[start : start + _SLICE].split())) for start in range(0, len(text), _SLICE))


def text_bounds(tokenizer: Any, vocabulary: Collection[str]) -> TextBounds:
    """Return the bounds for a tokenizer.

    Args:
        tokenizer: a `PreTrainedTokenizerFast`.
        vocabulary: its tokens, with the added ones.
    """
    backend = tokenizer.backend_tokenizer
    normalizers, splitters = list(_parts(backend.normalizer)), list(_parts(backend.pre_tokenizer))
    taking = [added for added in backend.get_added_tokens_decoder().values() if added.lstrip or added.rstrip]
    counts_all = (
        type(backend.model).__name__ == "BPE"
        # The tokenizer searches these added tokens in the normalized text, which this check does not see.
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
    """Return the parts of a normalizer or pre-tokenizer, with sequences flattened."""
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
    """Return whether every text can be encoded. Unknown text may be dropped, or a run of it may become one token."""
    if any(part["type"] == "ByteLevel" for part in parts):
        from tokenizers.pre_tokenizers import ByteLevel

        return all(symbol in vocabulary for symbol in ByteLevel.alphabet())
    return bool(model.byte_fallback) and all(f"<0x{byte:02X}>" in vocabulary for byte in range(_NUM_BYTES))
