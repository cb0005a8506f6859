"""Read the tokens of a GGUF file from its header: their kinds, their merges, and which of them are special.

Tokens are kept as the checkpoint has them. Left out are placeholders, which converters add for rows of the embedding
that have no token. Called by `specdec.checkpoints.gguf.tokenizer`.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np

from specdec.checkpoints.counts import is_count
from specdec.checkpoints.gguf.file import GgufFile
from specdec.contract.errors import InvalidRequest, Unsupported

_log = logging.getLogger(__name__)

KEY = "tokenizer.ggml."
"""Beginning of the keys of a tokenizer."""

BYTE_LEVEL, SENTENCEPIECE, GEMMA4 = "gpt2", "llama", "gemma4"
"""Models of tokenizers: byte-level BPE, and SentencePiece's BPE without and with stored merges."""

SPACE = "\u2581"
"""A space, as SentencePiece spells it."""

#: Kinds of tokens by their numbers in a file.
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED = 1, 2, 3, 4, 5
#: Special tokens by their names in a checkpoint: the key of the id, and its value in SentencePiece's files without it.
_SPECIAL = {
    "bos_token": ("bos_token_id", 1), "eos_token": ("eos_token_id", 2),
    "unk_token": ("unknown_token_id", 0), "pad_token": ("padding_token_id", None),
}  # fmt: skip
#: Most characters of a token: several times those of the longest token in use today.
_MOST_CHARACTERS = 1 << 12
_PLACEHOLDER = re.compile(r"\[PAD(\d+)\]")

_END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")
#: Tokens that end a turn if the file's chat template contains them, in addition to those that the file names.
_TURN_ENDS = (
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|eom_id|>", "<EOT>", "<|return|>",
    "<|call|>", "<turn|>", "<|tool_response>",
)  # fmt: skip
#: The first of these ends only a part of an answer in vocabularies that have the second.
_PART_END, _ANSWER_END = "<|end|>", "<|return|>"


@dataclass(frozen=True, slots=True)
class Tokens:
    """The tokens of a file."""

    file: GgufFile
    model: str
    """`BYTE_LEVEL`, `SENTENCEPIECE` or `GEMMA4`."""
    by_id: Mapping[int, str]
    """Tokens in the order of their ids, of which some may be missing."""
    ids: Mapping[str, int]
    """Id of each token, in the same order."""
    special: Mapping[str, str]
    """Special tokens by the names that they have in `tokenizer_config.json`."""
    kinds: Sequence[int]
    """Kind of each id."""

    @property
    def is_gemma(self) -> bool:
        """Return whether the vocabulary is of a Gemma model."""
        return self.model == GEMMA4 or self.file.architecture.startswith("gemma")

    def is_control(self, token: str) -> bool:
        """Return whether a token adds no text to an output."""
        return self.kinds[self.ids[token]] in (_CONTROL, _UNKNOWN) or token in self.special.values()

    def whole(self) -> Iterator[tuple[str, bool]]:
        """Yield the tokens that are found in a text before it is split, and whether `is_control` holds for each."""
        special, is_gemma = set(self.special.values()), self.is_gemma
        for token, token_id in self.ids.items():
            kind = self.kinds[token_id]
            is_control = kind in (_CONTROL, _UNKNOWN) or token in special
            # Gemma's tokens of several spaces are marked, too, and the checkpoint makes them by merges.
            if is_control or (kind == _USER_DEFINED and not (is_gemma and not token.strip(SPACE))):
                yield token, is_control

    def flag(self, key: str) -> bool | None:
        """Return the value of a key that is true or false; None without the key."""
        stated = self.file.metadata.get(f"{KEY}{key}")
        if stated is None or isinstance(stated, bool):
            return stated
        return refuse(self.file, f"{KEY}{key} is {stated!r:.64} instead of true or false")

    def numbers(self, key: str) -> list[Any] | None:
        """Return a list with a number for each id; None without the key."""
        return _numbers(self.file, key, len(self.kinds))

    def end_token_ids(self, template: str) -> list[int]:
        """Return the ids that end an answer: those that the file names, and those in the chat template."""
        named = [_token_id(self.file, key, self.by_id) for key in _END_KEYS]
        written = [token for token in _TURN_ENDS if token in template and token in self.ids]
        if _ANSWER_END in self.ids:
            written = [token for token in written if token != _PART_END]
        ids = [*named, *(self.ids[token] for token in written)]
        return list(dict.fromkeys(token_id for token_id in ids if token_id is not None))

    def merges(self) -> list[tuple[str, str]]:
        """Return the pairs of tokens that are merged, the first ones first.

        Raises InvalidRequest: the file has none, and no scores that they follow from; or one of them makes no token.
        """
        if self.model == SENTENCEPIECE and f"{KEY}merges" not in self.file.metadata:
            return self._implied_merges()
        return self._stored_merges()

    def _stored_merges(self) -> list[tuple[str, str]]:
        key, ids = f"{KEY}merges", self.ids
        merges: list[tuple[str, str]] = []
        if key not in self.file.metadata:
            refuse(self.file, f"{key} is missing")
        for merge in self.file.strings(key):
            at = merge.find(" ", 1)  # a token may begin with a space
            left, right = merge[:at], merge[at + 1 :]
            if at < 0 or left not in ids or right not in ids or left + right not in ids:
                refuse(
                    self.file,
                    f"{key}[{len(merges)}] is {merge!r:.64}, which must be two of {KEY}tokens that make a third one",
                )
            merges.append((left, right))
        return merges

    def _implied_merges(self) -> list[tuple[str, str]]:
        """Return every way to make a token of two others, the token with the best score first.

        The scores of Gemma's tokens are not in the order of its merges, and its ids are. As in transformers, merges
        with the same score are in the order of falling lengths of their parts.
        """
        ids = self.ids
        merges = [
            (left, right)
            for token in ids
            for cut in range(len(token) - 1, 0, -1)
            if (left := token[:cut]) in ids and (right := token[cut:]) in ids
        ]
        if self.is_gemma:
            return merges
        scores = self.numbers("scores")
        if scores is None:
            refuse(self.file, f"{KEY}scores is missing, and so is {KEY}merges")
        score = np.array([scores[ids[left + right]] for left, right in merges])
        left_length, right_length = (np.array([len(merge[side]) for merge in merges]) for side in (0, 1))
        return [merges[index] for index in np.lexsort((-right_length, -left_length, -score))]


def read_tokens(file: GgufFile) -> Tokens:
    """Return the tokens of a file.

    Raises:
        InvalidRequest: a key is missing, or its value contradicts the tokens; the message has the key.
        Unsupported: the model of tokenizers is not supported.
    """
    model = file.metadata.get(f"{KEY}model")
    if model not in (BYTE_LEVEL, SENTENCEPIECE, GEMMA4):
        raise Unsupported(
            f"model {str(file.path)!r} has {KEY}model {model!r:.64}; {BYTE_LEVEL}, {SENTENCEPIECE} and {GEMMA4} are "
            "supported: use the original checkpoint",
            field="model",
        )
    tokens = file.strings(f"{KEY}tokens")
    if not tokens:
        refuse(file, f"{KEY}tokens is missing")
    longest = max(range(len(tokens)), key=lambda token_id: len(tokens[token_id]))
    if len(tokens[longest]) > _MOST_CHARACTERS:
        has = f"{len(tokens[longest])} characters, and a token has at most {_MOST_CHARACTERS}"
        refuse(file, f"{KEY}tokens[{longest}] has {has}")
    embedding = file.tensors.get("token_embd.weight")
    if embedding is not None and len(tokens) > embedding.shape[0]:
        refuse(file, f"{KEY}tokens has {len(tokens)} tokens, and token_embd.weight has {embedding.shape[0]} rows")
    kinds = _numbers(file, "token_type", len(tokens)) or [_NORMAL] * len(tokens)
    by_id = {
        token_id: token
        for token_id, (token, kind) in enumerate(zip(tokens, kinds, strict=True))
        if token and not _is_placeholder(token, token_id, kind)
    }
    special = _special_tokens(file, model, by_id)
    if model == SENTENCEPIECE and file.architecture.startswith("gemma"):  # its runs of spaces are stored as they are
        by_id |= {token_id: SPACE * len(token) for token_id, token in by_id.items() if not token.strip(" ")}
    ids = {token: token_id for token_id, token in by_id.items()}
    if len(ids) < len(by_id):
        first, token = next((i, token) for i, token in by_id.items() if ids[token] != i)
        refuse(file, f"{KEY}tokens has {token!r:.64} twice: as {first} and as {ids[token]}")
    return Tokens(file, model, by_id, ids, special, kinds)


def refuse(file: GgufFile, message: str) -> NoReturn:
    """Raise InvalidRequest with the name of the file."""
    raise InvalidRequest(f"model {str(file.path)!r}: {message}", field="model")


def _numbers(file: GgufFile, key: str, num_tokens: int) -> list[Any] | None:
    numbers = file.metadata.get(f"{KEY}{key}")
    if numbers is None:
        return None
    if not isinstance(numbers, list) or len(numbers) != num_tokens:
        has = f"{len(numbers)} numbers" if isinstance(numbers, list) else "no list of numbers"
        refuse(file, f"{KEY}{key} has {has}, and {KEY}tokens has {num_tokens} tokens")
    return numbers


def _is_placeholder(token: str, token_id: int, kind: int) -> bool:
    if kind == _NORMAL or not token.startswith("[PAD"):
        return False
    found = _PLACEHOLDER.fullmatch(token)
    return found is not None and (kind == _UNUSED or int(found[1]) == token_id)


def _special_tokens(file: GgufFile, model: str, by_id: Mapping[int, str]) -> dict[str, str]:
    found = {}
    for name, (key, default) in _SPECIAL.items():
        token_id = _token_id(file, key, by_id, default if model == SENTENCEPIECE else None)
        if token_id is not None:
            found[name] = by_id[token_id]
    return found


def _token_id(file: GgufFile, key: str, by_id: Mapping[int, str], default: int | None = None) -> int | None:
    """Return the id of a special token; None if the vocabulary has none."""
    token_id: int | None = file.metadata.get(f"{KEY}{key}", default if default in by_id else None)
    if token_id is None or (is_count(token_id, 0, max(by_id)) and token_id in by_id):
        return token_id
    wrong = f"{KEY}{key} is {token_id!r:.64}, which is the id of no token"
    if key != "padding_token_id":
        refuse(file, wrong)
    _log.warning("%s: %s; it is ignored, because no text is padded", file.path, wrong)
    return None
