"""A byte-level tokenizer of 24 tokens, as many as the table models have, so that constraints can be enumerated.

Most of its longer tokens begin as others do, one ends within a character, and two are special. It can spell JSON of the
names and texts of a, b, c and é, and of the digits 1 and 2. Called by tests of constraints.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from specdec.checkpoints.token_bytes import byte_level_spelling
from specdec.checkpoints.vocabulary import load_tokenizer
from specdec.structured.matcher import Mask
from specdec.structured.token_table import TokenTable
from tests.support.other_tokenizers import save_byte_level_vocabulary

EOS = 1
#: A special token that does not end an output.
MARK = 0

#: Bytes of each token; b"" of the special ones, which no constraint allows.
TOKENS = (
    b"", b"", b"a", b"b", b"c", b"ab", b"abc", b"bc", b"\xc3", b"\xa9", b"\xc3\xa9", b"{", b"}", b"[", b"]", b'"', b":",
    b",", b"1", b"2", b"12", b'{"', b'":', b" ",
)  # fmt: skip
VOCABULARY = len(TOKENS)


def write_byte_tokenizer(directory: Path) -> None:
    """Write the tokenizer of `TOKENS`."""
    spelled = ["<|mark|>", "<|end|>", *(byte_level_spelling(token) for token in TOKENS[2:])]
    merges = [_merge_of(token) for token in TOKENS if len(token) > 1]
    save_byte_level_vocabulary(directory, spelled, merges, pad_token="<|mark|>")


def _merge_of(token: bytes) -> tuple[str, str]:
    """Return the two tokens that a longer one is made of."""
    first = max((start for start in TOKENS if start and token.startswith(start) and start != token), key=len)
    return byte_level_spelling(first), byte_level_spelling(token[len(first) :])


def byte_table(directory: Path, eos_token_ids: Sequence[int] = (EOS,)) -> TokenTable:
    """Return the table of the tokenizer that was written into a directory."""
    return TokenTable(load_tokenizer(directory), eos_token_ids, VOCABULARY)


def bytes_of(token_ids: Iterable[int]) -> bytes:
    return b"".join(TOKENS[token_id] for token_id in token_ids)


def ids_of(text: str | bytes) -> list[int]:
    """Return the longest tokens that spell a text from its beginning, which need not be those of the tokenizer."""
    rest, token_ids = text if isinstance(text, bytes) else text.encode(), list[int]()
    while rest:
        token = max((token for token in TOKENS if token and rest.startswith(token)), key=len)
        token_ids.append(TOKENS.index(token))
        rest = rest[len(token) :]
    return token_ids


def legal_ids(mask: Mask) -> set[int]:
    """Return the tokens that a mask allows."""
    return set(np.flatnonzero(np.unpackbits(mask, count=VOCABULARY, bitorder="little")).tolist())
