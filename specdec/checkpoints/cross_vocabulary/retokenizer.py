"""Tokenise drafted text with the target's tokenizer, as a continuation of the committed text.

Called by `draft_service.cross_vocabulary.translating_program`. Loads no torch.
"""

from __future__ import annotations

import codecs
from itertools import accumulate

from specdec.checkpoints.cross_vocabulary.encoder import PieceEncoder
from specdec.contract.errors import Internal


def retokenise(target: PieceEncoder, before: bytes, drafted: bytes) -> list[int]:
    """Return target tokens whose bytes are exactly `drafted`, without an incomplete character at its end.

    The text is tokenised after `before` first. If that gives no result, it is tokenised by itself.

    Args:
        target: encoder of the target's tokenizer.
        before: last bytes of the committed text, given to the tokenizer as context.
        drafted: bytes that follow `before`.

    Returns:
        [] if both attempts fail: the tokenizer raised an error, changed the text, or made a token that spans the end of
        `before`.
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
    """Return the number of bytes of an incomplete UTF-8 character at the end of `text`."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    decoder.decode(text)
    return len(decoder.getstate()[0])
