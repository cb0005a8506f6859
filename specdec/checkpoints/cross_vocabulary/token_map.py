"""Map a draft's tokens to a target's: tokens with the same bytes, and special tokens with the same role.

    draft token ── bytes ──▶ target token        " the": `Ġthe` 273 ──▶ `▁the` 506

Several draft tokens with the same bytes map to one target token, whose probability is their sum. Of several target
tokens with the same bytes, only the one that the target's tokenizer produces is drafted. `retokenizer` translates text
whose tokens have no counterpart. Used by `draft_service.cross_vocabulary.translating_program`. Loads no torch.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerFast

from specdec.checkpoints.cross_vocabulary.encoder import PieceEncoder
from specdec.checkpoints.vocabulary import vocabulary_fingerprint
from specdec.contract.errors import VocabularyMismatch


@dataclass(frozen=True, slots=True)
class TokenMap:
    """Map between a draft's tokens and a target's, in both directions. -1 stands for "no counterpart"."""

    target_of: NDArray[np.int64]
    """int64 [draft vocabulary]: target token of each draft token."""
    draft_vocab_of: NDArray[np.int64]
    """int64 [target vocabulary]: draft token of each target token."""

    def of_model(self, num_tokens: int, own_end_ids: Collection[int], target_end_id: int | None) -> TokenMap:
        """Return the map restricted to a draft model's vocabulary, with the model's end tokens added.

        Args:
            num_tokens: vocabulary size of the draft model, which may be smaller than its tokenizer's.
            own_end_ids: end tokens of the draft model. Those without a counterpart are mapped to `target_end_id`.
            target_end_id: end token of the target; None if it has none.
        """
        target_of = self.target_of[:num_tokens].copy()
        draft_vocab_of = np.where(self.draft_vocab_of < num_tokens, self.draft_vocab_of, -1)
        ends = [
            draft_vocab_id
            for draft_vocab_id in own_end_ids
            if draft_vocab_id < len(target_of) and target_of[draft_vocab_id] < 0
        ]
        if target_end_id is not None and ends:
            target_of[ends] = target_end_id
            if draft_vocab_of[target_end_id] < 0:
                draft_vocab_of[target_end_id] = ends[0]
        target_of[(target_of >= 0) & (draft_vocab_of[target_of] < 0)] = -1  # a drafted token must be readable as input
        return TokenMap(target_of, draft_vocab_of)

    @property
    def num_shared(self) -> int:
        """Number of draft tokens that have a counterpart."""
        return int(np.count_nonzero(self.target_of >= 0))


def map_tokens(
    draft: PreTrainedTokenizerFast,
    draft_pieces: PieceEncoder,
    target: PreTrainedTokenizerFast,
    target_pieces: PieceEncoder,
) -> TokenMap:
    """Return the map from a draft's tokens to a target's.

    Args:
        draft: the draft's tokenizer.
        draft_pieces: its encoder.
        target: the target's tokenizer.
        target_pieces: its encoder.

    Raises:
        VocabularyMismatch: no token has the same bytes in both vocabularies.
    """
    target_of = np.full(len(draft_pieces.token_bytes), -1, dtype=np.int64)
    draft_vocab_of = np.full(len(target_pieces.token_bytes), -1, dtype=np.int64)
    theirs = _by_bytes(target_pieces)
    for piece, draft_vocab_ids in _by_bytes(draft_pieces).items():
        if piece in theirs:
            target_id = _preferred(theirs[piece], piece, target_pieces)
            target_of[draft_vocab_ids] = target_id
            draft_vocab_of[theirs[piece]] = _preferred(draft_vocab_ids, piece, draft_pieces)
    if not (target_of >= 0).any():
        fingerprints = " and ".join(
            f"{role} has fingerprint {vocabulary_fingerprint(tokenizer.get_vocab())}"
            for role, tokenizer in (("the draft", draft), ("the target", target))
        )
        raise VocabularyMismatch(f"draft and target have no token in common: {fingerprints}")
    _map_roles(draft, target, target_of, draft_vocab_of)
    return TokenMap(target_of, draft_vocab_of)


def _by_bytes(pieces: PieceEncoder) -> dict[bytes, list[int]]:
    """Return the token ids of each byte string, in ascending order."""
    by_bytes: dict[bytes, list[int]] = defaultdict(list)
    for token_id, piece in enumerate(pieces.token_bytes):
        if piece:
            by_bytes[piece].append(token_id)
    return by_bytes


def _preferred(token_ids: list[int], piece: bytes, pieces: PieceEncoder) -> int:
    """Return which of several tokens with the same bytes the tokenizer produces for them; the first if none."""
    if len(token_ids) == 1:
        return token_ids[0]
    encoded = pieces.encode(piece)
    return encoded[0] if len(encoded) == 1 and encoded[0] in token_ids else token_ids[0]


def _map_roles(
    draft: PreTrainedTokenizerFast,
    target: PreTrainedTokenizerFast,
    target_of: NDArray[np.int64],
    draft_vocab_of: NDArray[np.int64],
) -> None:
    """Map special tokens with equal names, and the end-of-sequence tokens to each other.

    Begin-of-sequence and padding tokens are mapped from target to draft only, so that they are never drafted.
    """
    never = {token for tokenizer in (draft, target) for token in (tokenizer.bos_token, tokenizer.pad_token)}
    named = _special_tokens(draft)
    for token, target_id in _special_tokens(target).items():
        if token in named:
            draft_vocab_of[target_id] = named[token]
            if token not in never:
                target_of[named[token]] = target_id
    if draft.eos_token_id is not None and target.eos_token_id is not None:
        target_of[draft.eos_token_id] = target.eos_token_id
        if draft_vocab_of[target.eos_token_id] < 0:
            draft_vocab_of[target.eos_token_id] = draft.eos_token_id


def _special_tokens(tokenizer: PreTrainedTokenizerFast) -> dict[str, int]:
    added = tokenizer.backend_tokenizer.get_added_tokens_decoder()
    return {token.content: token_id for token_id, token in added.items() if token.special}
