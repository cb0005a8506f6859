"""Decodes an output token by token; the joined text equals decoding all tokens at once.

An output either begins a text, as an answer in a conversation does, or continues the text of a prompt. Decoders treat
the first token of a text differently: SentencePiece's removes its space. An output that continues a text is therefore
decoded after the last tokens of that text, and prompt and output join to what their tokens decode to together.

After n tokens the delivered text is a function of those n tokens and the text before them, and a prefix of the text of
every output that begins with them. Text that later tokens may still change is held back: bytes of an unfinished
character, spaces that the clean-up may remove, and the start of a possible stop string. An output ends at the first
token after which its decoded text contains a stop string. The text goes to `output`, which handles end tokens and
length limits.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Protocol

from coordinator.text.tokenizer import ServedTokenizer
from specdec.checkpoints.token_bytes import BYTE_TOKEN, byte_level_bytes

_REPLACEMENT = "\ufffd"

#: Number of tokens before an output that are enough to decode it: each has a byte, and a character has four at most.
_CONTEXT_TOKENS = 4
#: Number of tokens among which one with text is searched.
_MAX_CONTEXT_TOKENS = 32

#: Rules of `clean_up_tokenization` of transformers in their order: each rule runs over the result of the previous one.
_CLEAN_UP_RULES = (
    *((f" {mark}", mark) for mark in ".?!,"),
    (" ' ", "'"),
    *((f" {clitic}", clitic) for clitic in ("n't", "'m", "'s", "'ve", "'re")),
)


class IncrementalDetokenizer:
    """Delivers the text of one output, cut before the first stop string. Not safe to share between outputs."""

    def __init__(self, tokenizer: ServedTokenizer, stop: Sequence[str] = (), before: Sequence[int] = ()) -> None:
        """
        Args:
            tokenizer: tokenizer of the output.
            stop: strings that end the output; empty strings are ignored.
            before: tokens of the text that the output continues; empty if the output begins a text.
        """
        rules = tokenizer.rules
        self._decoder: _Decoder = _ByteLevelDecoder(tokenizer) if rules.is_byte_level else _WindowDecoder(tokenizer)
        self._clean_up = _CleanUp() if rules.cleans_up_spaces else None
        self._special_token_ids = rules.special_token_ids
        self._stop = tuple(text for text in stop if text)
        self._held = ""
        self.has_ended = False
        """True after a complete stop string or `finish`: no further token is taken, no further text is delivered."""
        self._text_before = ""
        """Text of `before` that its own end left open; it is not delivered again."""
        if before:
            self._decode_before(before)

    def push_token(self, token_id: int) -> str:
        """Take the next token of an output that has not ended; return the text that is final now."""
        return "" if token_id in self._special_token_ids else self._push_one(token_id)

    def finish(self) -> str:
        """End the output; return the text that was held back. Empty after a stop string, and when called again."""
        if self.has_ended:
            return ""
        self.has_ended = True
        return self._held + self._tail()

    def flush(self) -> str:
        """Return the text that was held back. It shares no character and no stop string with the text that follows."""
        text = self._decoder.flush()
        if self._clean_up is not None:
            text = self._clean_up.flush(text)
        text = text[_num_common(text, self._text_before) :]
        text, self._held, self._text_before = self._held + text, "", ""
        return text

    def _push_one(self, token_id: int) -> str:
        text = self._decoder.push(token_id)
        if self._clean_up is not None:
            text = self._clean_up.push(text)
        if self._text_before:
            text = self._after_text_before(text)
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
        if self._clean_up is not None:
            tail = self._clean_up.tail(tail)
        return tail[_num_common(tail, self._text_before) :]

    def _decode_before(self, before: Sequence[int]) -> None:
        """Bring the decoder to the end of the text before the output."""
        with_text = (token_id for token_id in reversed(before) if token_id not in self._special_token_ids)
        newest_first = (token_id for token_id in with_text if self._decoder.token(token_id) is not None)
        for token_id in self._decoder.context(newest_first):
            text = self._decoder.push(token_id)
            if self._clean_up is not None:
                self._clean_up.push(text)
        self._text_before = self._tail()

    def _after_text_before(self, text: str) -> str:
        """Return what final text adds to the text before the output, which may have changed with the first token."""
        num_common = _num_common(text, self._text_before)
        self._text_before = self._text_before[num_common:] if num_common == len(text) else ""
        return text[num_common:]


class _Decoder(Protocol):
    def token(self, token_id: int) -> str | None:
        """Return a token as the vocabulary spells it; None for an id without a token."""
        ...

    def context(self, newest_first: Iterable[int]) -> list[int]:
        """Return the tokens of a text that decide how the token after it is decoded, oldest first."""
        ...

    def push(self, token_id: int) -> str:
        """Take one token that is not special; return the text that is final now."""
        ...

    def tail(self) -> str:
        """Return the text that would follow if no further token came. Changes nothing."""
        ...

    def flush(self) -> str:
        """Return the text of `tail`, after which the text of the next token stands."""
        ...


class _ByteLevelDecoder:
    """Decodes tokens as bytes with an incremental UTF-8 decoder. Exact also if tokens end within a character."""

    def __init__(self, tokenizer: ServedTokenizer) -> None:
        self.token = tokenizer.token
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def context(self, newest_first: Iterable[int]) -> list[int]:
        return list(islice(newest_first, _CONTEXT_TOKENS))[::-1]

    def push(self, token_id: int) -> str:
        return self._utf8.decode(byte_level_bytes(self.token(token_id) or ""))

    def tail(self) -> str:
        unfinished, _ = self._utf8.getstate()
        return unfinished.decode("utf-8", "replace")

    def flush(self) -> str:
        text = self.tail()
        self._utf8.reset()
        return text


class _WindowDecoder:
    """Decodes with any other decoder, over a window of tokens: context tokens with final text, and the tokens after.

    Correct for decoders that treat a token by itself, by its neighbours or by being the first (Metaspace, WordPiece,
    BPEDecoder, Replace, Strip, none), and for byte fallback, which decodes a run of byte tokens as a whole. The context
    is the shortest one that has text, so that the decoder does not treat the token after it as the first.
    """

    def __init__(self, tokenizer: ServedTokenizer) -> None:
        self.token = tokenizer.token
        self._decode = tokenizer.decode_uncleaned
        self._rules = tokenizer.rules
        self._window: list[int] = []
        self._num_context = 0
        self._context_text = ""

    def context(self, newest_first: Iterable[int]) -> list[int]:
        """Return as the protocol says; of a run of byte tokens at the end, only those of an unfinished character.

        A run is decoded as a whole, so that the output's bytes would change the text of the prompt's.
        """
        run: list[int] = []
        others: list[int] = []
        has_text = False
        for token_id in newest_first:
            if not others and self._is_byte(self.token(token_id)):
                run.append(token_id)
                continue
            others.append(token_id)
            has_text = has_text or bool(self._decode([token_id]))
            if len(others) >= (_CONTEXT_TOKENS if has_text else _MAX_CONTEXT_TOKENS):
                break
        return [*others[::-1], *(self._unfinished(run) if others else run)[::-1]]

    def push(self, token_id: int) -> str:
        token = self.token(token_id)
        if token is None:
            return ""
        self._window.append(token_id)
        if self._is_byte(token):
            return ""
        text = self._decode(self._window)
        if self._rules.may_end_in_half_character and text.endswith(_REPLACEMENT):
            return ""
        new_text = text[len(self._context_text) :]
        self._shrink(text)
        return new_text

    def tail(self) -> str:
        if self._num_context == len(self._window):
            return ""
        return self._decode(self._window)[len(self._context_text) :]

    def flush(self) -> str:
        text = self.tail()
        self._shrink(self._context_text + text)
        return text

    def _is_byte(self, token: str | None) -> bool:
        return self._rules.has_byte_tokens and token is not None and BYTE_TOKEN.fullmatch(token) is not None

    def _unfinished(self, newest_first: Sequence[int]) -> Sequence[int]:
        """Return the byte tokens, newest first, of the character that a run of byte tokens leaves unfinished."""
        spelled = "".join((self.token(token_id) or "")[3:5] for token_id in reversed(newest_first[:_CONTEXT_TOKENS]))
        utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        utf8.decode(bytes.fromhex(spelled))
        return newest_first[: len(utf8.getstate()[0])]

    def _shrink(self, text: str) -> None:
        """Make the last tokens of the window the next context."""
        latest = self._window[self._num_context :]
        latest_text = self._decode(latest)
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

    def flush(self, text: str) -> str:
        self._held, text = self._run(text, is_last=True)
        return text

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


def _num_common(text: str, other: str) -> int:
    """Return the number of characters with which both texts begin."""
    pairs = zip(text, other, strict=False)
    return next((place for place, (one, two) in enumerate(pairs) if one != two), min(len(text), len(other)))


def _overlap(text: str, pattern: str) -> int:
    """Return the length of the longest end of `text` that is a proper prefix of `pattern`."""
    for length in range(min(len(text), len(pattern) - 1), 0, -1):
        if text.endswith(pattern[:length]):
            return length
    return 0
