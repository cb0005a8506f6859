"""Drafted text to the target's tokens, as the target's tokenizer would go on from what is committed.

Not here: what is drafted (`draft_service.cross_vocabulary_drafting`). Loads no torch.
"""

from __future__ import annotations

import codecs
from itertools import accumulate

from specdec.cross_vocabulary.encoder import PieceEncoder
from specdec.errors import Internal


def retokenise(target: PieceEncoder, before: bytes, drafted: bytes) -> list[int]:
    """Target tokens whose bytes are exactly those drafted, but for a character that has only begun.

    Args:
        target: its tokenizer.
        before: the text's last bytes, which the tokenizer should see.
        drafted: what follows them.

    Returns:
        No tokens where the tokenizer fails, changes the text or has a token across the end of `before`, and makes none
        of those bytes alone either.
    """
    drafted = drafted[: len(drafted) - _num_unfinished(drafted)]
    for context in dict.fromkeys((before, b"")):
        try:
            token_ids = target.encode(context + drafted)
        except Internal:
            continue
        pieces = [target.token_bytes[token_id] for token_id in token_ids]
        if b"".join(pieces) != context + drafted:
            continue
        starts = [0, *accumulate(map(len, pieces))]
        if len(context) in starts:
            return token_ids[starts.index(len(context)) :]
    return []


def _num_unfinished(text: bytes) -> int:
    """Bytes at the end that begin a character."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    decoder.decode(text)
    return len(decoder.getstate()[0])
