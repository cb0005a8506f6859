"""Decodes an output token by token; the joined text equals decoding the whole output at once.

After n tokens the delivered text is a function of those n tokens alone, and a prefix of the text of every output that
begins with them. Text that later tokens may still change is held back: bytes of an unfinished character, spaces that
the clean-up may remove, and the start of a possible stop string. An output ends at the first token after which its
decoded text contains a stop string. The text goes to `output`, which handles end tokens and length limits.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Protocol

from coordinator.text.tokenizer import ServedTokenizer
from specdec.checkpoints.token_bytes import BYTE_TOKEN, byte_level_bytes

_REPLACEMENT = "\ufffd"

#: Rules of `clean_up_tokenization` of transformers in their order: each rule runs over the result of the previous one.
_CLEAN_UP_RULES = (
    *((f" {mark}", mark) for mark in ".?!,"),
    (" ' ", "'"),
    *((f" {clitic}", clitic) for clitic in ("n't", "'m", "'s", "'ve", "'re")),
)


class IncrementalDetokenizer:
    """Delivers the text of one output, cut before the first stop string. Not safe to share between outputs."""

    def __init__(self, tokenizer: ServedTokenizer, stop: Sequence[str] = ()) -> None:
        """`stop`: strings that end the output; empty strings are ignored."""
        rules = tokenizer.rules
        self._decoder: _Decoder = _ByteLevelDecoder(tokenizer) if rules.is_byte_level else _WindowDecoder(tokenizer)
        self._clean_up = _CleanUp() if rules.cleans_up_spaces else None
        self._special_token_ids = rules.special_token_ids
        self._stop = tuple(text for text in stop if text)
        self._held = ""
        self.has_ended = False
        """True after a complete stop string or `finish`: no further token is taken, no further text is delivered."""

    def push_token(self, token_id: int) -> str:
        """Take the next token of an output that has not ended; return the text that is final now."""
        return "" if token_id in self._special_token_ids else self._push_one(token_id)

    def finish(self) -> str:
        """End the output; return the text that was held back. Empty after a stop string, and when called again."""
        if self.has_ended:
            return ""
        self.has_ended = True
        return self._held + self._tail()

    def _push_one(self, token_id: int) -> str:
        text = self._decoder.push(token_id)
        if self._clean_up is not None:
            text = self._clean_up.push(text)
        if not self._stop and not self._held:
            return text
        self._held += text
        if not self._stop:
            text, self._held = self._held, ""
            return text
        # The output may end here, so a stop string in the text that is still held back counts too.
        whole = self._held + self._tail()
        starts = [start for start in map(whole.find, self._stop) if start >= 0]
        if starts:
            self.has_ended = True
            return whole[: min(starts)]
        cut = len(self._held) - max(_overlap(self._held, stop) for stop in self._stop)
        text, self._held = self._held[:cut], self._held[cut:]
        return text

    def _tail(self) -> str:
        """Return the text that would follow the final text if the output ended here."""
        tail = self._decoder.tail()
        return self._clean_up.tail(tail) if self._clean_up else tail


class _Decoder(Protocol):
    def push(self, token_id: int) -> str:
        """Take one token that is not special; return the text that is final now."""
        ...

    def tail(self) -> str:
        """Return the text that would follow if no further token came. Changes nothing."""
        ...


class _ByteLevelDecoder:
    """Decodes tokens as bytes with an incremental UTF-8 decoder. Exact also where tokens end within a character."""

    def __init__(self, tokenizer: ServedTokenizer) -> None:
        self._tokenizer = tokenizer
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        return self._utf8.decode(byte_level_bytes(self._tokenizer.token(token_id) or ""))

    def tail(self) -> str:
        unfinished, _ = self._utf8.getstate()
        return unfinished.decode("utf-8", "replace")


class _WindowDecoder:
    """Decodes with any other decoder, over a window of tokens: context tokens with final text, and the tokens after.

    Correct for decoders that treat a token by itself, by its neighbours or by being the first (Metaspace, WordPiece,
    BPEDecoder, Replace, Strip, none), and for byte fallback, which decodes a run of byte tokens as a whole. The context
    is the shortest one that has text, so that the decoder does not treat the token after it as the first.
    """

    def __init__(self, tokenizer: ServedTokenizer) -> None:
        self._tokenizer = tokenizer
        self._rules = tokenizer.rules
        self._window: list[int] = []
        self._num_context = 0
        self._context_text = ""

    def push(self, token_id: int) -> str:
        token = self._tokenizer.token(token_id)
        if token is None:
            return ""
        self._window.append(token_id)
        if self._rules.has_byte_tokens and BYTE_TOKEN.fullmatch(token):
            return ""
        text = self._tokenizer.decode_uncleaned(self._window)
        if self._rules.may_end_in_half_character and text.endswith(_REPLACEMENT):
            return ""
        new_text = text[len(self._context_text) :]
        self._shrink(text)
        return new_text

    def tail(self) -> str:
        if self._num_context == len(self._window):
            return ""
        return self._tokenizer.decode_uncleaned(self._window)[len(self._context_text) :]

    def _shrink(self, text: str) -> None:
        """Make the last tokens of the window the next context."""
        latest = self._window[self._num_context :]
        latest_text = self._tokenizer.decode_uncleaned(latest)
        if latest_text:
            self._window, self._context_text = latest, latest_text
        else:
            self._context_text = text
        self._num_context = len(self._window)


class _CleanUp:
    """Cleans up spaces in a growing text as transformers does. Each rule of the chain holds back its partial match."""

    def __init__(self) -> None:
        self._held = [""] * len(_CLEAN_UP_RULES)

    def push(self, text: str) -> str:
        self._held, text = self._run(text, is_last=False)
        return text

    def tail(self, text: str) -> str:
        return self._run(text, is_last=True)[1]

    def _run(self, text: str, *, is_last: bool) -> tuple[list[str], str]:
        still_held = []
        for held, (pattern, replacement) in zip(self._held, _CLEAN_UP_RULES, strict=True):
            # The last part contains no match, so only its longest end that starts the pattern is held back.
            *parts, rest = (held + text).split(pattern)
            num_held = 0 if is_last else _overlap(rest, pattern)
            cut = len(rest) - num_held
            text = "".join(part + replacement for part in parts) + rest[:cut]
            still_held.append(rest[cut:])
        return still_held, text


def _overlap(text: str, pattern: str) -> int:
    """Return the length of the longest end of `text` that is a proper prefix of `pattern`."""
    for length in range(min(len(text), len(pattern) - 1), 0, -1):
        if text.endswith(pattern[:length]):
            return length
    return 0
