"""The tokens of a session that a conversation keeps: those with which its text begins.

A model may spell a text by other tokens than the tokenizer does. If the conversation sends that text back, the
session's own tokens stay, so that their KV is used again. Special tokens must be equal, because their name in other
tokens means text. `prompt` calls this.
"""

from __future__ import annotations

import numpy as np

from coordinator.text.tokenizer import ServedTokenizer
from specdec.contract.types import TokenIds


def common_text(held: TokenIds, whole: TokenIds, tokenizer: ServedTokenizer) -> tuple[int, int]:
    """Return with how many tokens both sequences spell the longest text with which both begin.

    Args:
        held: uint32 [n]: tokens of the session.
        whole: uint32 [m]: tokens of the conversation.
        tokenizer: tokenizer of both. Without fixed bytes of tokens, only equal tokens count.
    """
    kept = used = 0
    while True:
        num_equal = _num_equal(held[kept:], whole[used:])
        kept, used = kept + num_equal, used + num_equal
        if not tokenizer.has_fixed_bytes or (next_pair := _next_meeting(held, whole, kept, used, tokenizer)) is None:
            return kept, used
        kept, used = next_pair


def _next_meeting(
    held: TokenIds, whole: TokenIds, kept: int, used: int, tokenizer: ServedTokenizer
) -> tuple[int, int] | None:
    """Return where two spellings of the same text meet again after they have parted; None if the texts differ."""
    left = right = b""
    while True:
        # The shorter text gets the next token.
        if len(left) <= len(right):
            if kept == len(held) or not (piece := _spelled(int(held[kept]), tokenizer)):
                return None
            left, kept = left + piece, kept + 1
        else:
            if used == len(whole) or not (piece := _spelled(int(whole[used]), tokenizer)):
                return None
            right, used = right + piece, used + 1
        length = min(len(left), len(right))
        if left[:length] != right[:length]:
            return None
        left, right = left[length:], right[length:]
        if not left and not right:
            return kept, used


def _spelled(token_id: int, tokenizer: ServedTokenizer) -> bytes:
    """Return the bytes of a token of plain text; b"" for any other."""
    return b"" if token_id in tokenizer.whole_token_ids else tokenizer.token_bytes(token_id)


def _num_equal(one: TokenIds, other: TokenIds) -> int:
    shorter = min(len(one), len(other))
    differences = np.flatnonzero(one[:shorter] != other[:shorter])
    return int(differences[0]) if len(differences) else shorter
