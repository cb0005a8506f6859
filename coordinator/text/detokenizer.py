"""Text of an output that grows token by token, equal in the end to decoding the whole output at once.

After n tokens the delivered text is a function of those n tokens alone, and a prefix of the text of every output that
begins with them. What later tokens could still change is held back: bytes of an unfinished character, spaces that the
clean-up may remove, and the beginning of what may become a stop string. An output is stopped at the first token after
which its decoded text contains a stop string. The text goes back to `output`, with its token.

Not here: end tokens and length limits (`output`). One object serves one output; it is not safe to share.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Protocol

from coordinator.text.tokenizer import ServedTokenizer
from specdec.checkpoints.token_bytes import BYTE_TOKEN, byte_level_bytes

_REPLACEMENT = "\ufffd"

#: The clean-up of transformers (`clean_up_tokenization`), in its order: each rule runs over what the one before left.
_CLEAN_UP_RULES = (
    *((f" {mark}", mark) for mark in ".?!,"),
    (" ' ", "'"),
    *((f" {clitic}", clitic) for clitic in ("n't", "'m", "'s", "'ve", "'re")),
)


class IncrementalDetokenizer:
    """Delivers the text of one output, cut before the first stop string."""

    def __init__(self, tokenizer: ServedTokenizer, stop: Sequence[str] = ()) -> None:
        """`stop` holds strings that end the output; empty ones are ignored."""
        rules = tokenizer.rules
        self._decoder: _Decoder = _ByteLevelDecoder(tokenizer) if rules.is_byte_level else _WindowDecoder(tokenizer)
        self._clean_up = _CleanUp() if rules.cleans_up_spaces else None
        self._special_token_ids = rules.special_token_ids
        self._stop = tuple(text for text in stop if text)
        self._held = ""
        self.has_ended = False
        """After a complete stop string, or `finish`: no more tokens are taken, no more text is delivered."""

    def push_token(self, token_id: int) -> str:
        """Takes the output's next token, unless it `has_ended`; returns newly final text."""
        return "" if token_id in self._special_token_ids else self._push_one(token_id)

    def finish(self) -> str:
        """Delivers what was held back; the output has ended. Empty after a stop, and when called again."""
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
        # The output would be whole if it ended here, so a stop string in its tail counts as much as any other.
        whole = self._held + self._tail()
        starts = [start for start in map(whole.find, self._stop) if start >= 0]
        if starts:
            self.has_ended = True
            return whole[: min(starts)]
        cut = len(self._held) - max(_overlap(self._held, stop) for stop in self._stop)
        text, self._held = self._held[:cut], self._held[cut:]
        return text

    def _tail(self) -> str:
        """What would follow the final text if the output ended here."""
        tail = self._decoder.tail()
        return self._clean_up.tail(tail) if self._clean_up else tail


class _Decoder(Protocol):
    def push(self, token_id: int) -> str:
        """Takes one token that is not special and returns newly final text."""
        ...

    def tail(self) -> str:
        """What would follow if no token did. Changes nothing."""
        ...


class _ByteLevelDecoder:
    """Tokens as bytes through an incremental UTF-8 decoder: exact even where tokens never end on a character."""

    def __init__(self, tokenizer: ServedTokenizer) -> None:
        self._tokenizer = tokenizer
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        return self._utf8.decode(byte_level_bytes(self._tokenizer.token(token_id) or ""))

    def tail(self) -> str:
        unfinished, _ = self._utf8.getstate()
        return unfinished.decode("utf-8", "replace")


class _WindowDecoder:
    """Any other decoder, asked for a window of tokens: some whose text is final, as context, and those after them.

    Right for decoders that treat a token by itself, by its neighbours or by being first (Metaspace, WordPiece,
    BPEDecoder, Replace, Strip, none), and for byte fallback, which decodes a run of byte tokens as a whole. The context
    is the shortest that has a text of its own, so that no token after it is taken for the first.
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
        """Makes the window's last tokens the next context."""
        latest = self._window[self._num_context :]
        latest_text = self._tokenizer.decode_uncleaned(latest)
        if latest_text:
            self._window, self._context_text = latest, latest_text
        else:
            self._context_text = text
        self._num_context = len(self._window)


class _CleanUp:
    """transformers' clean-up of spaces on a growing text: a chain of replacements, each holding back what may match."""

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
            # Between two matches the text has no match, so what is held is the longest end that begins the pattern.
            *parts, rest = (held + text).split(pattern)
            num_held = 0 if is_last else _overlap(rest, pattern)
            cut = len(rest) - num_held
            text = "".join(part + replacement for part in parts) + rest[:cut]
            still_held.append(rest[cut:])
        return still_held, text


def _overlap(text: str, pattern: str) -> int:
    """Length of the longest end of `text` that is a beginning of `pattern`, but not all of it."""
    for length in range(min(len(text), len(pattern) - 1), 0, -1):
        if text.endswith(pattern[:length]):
            return length
    return 0
