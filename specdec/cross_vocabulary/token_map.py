"""Which tokens a draft and a target have in common: those of the same bytes, and special tokens of the same role.

    draft token ── bytes ──▶ target token        " the": `Ġthe` 273 ──▶ `▁the` 506

Several draft tokens of the same bytes are one target token, whose probability is their sum. Of several target tokens of
the same bytes the target's own tokenizer takes one; it alone is drafted. Not here: distributions
(`draft_service.cross_vocabulary_drafting`), text whose tokens are not in common (`retokenizer`). Loads no torch.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerFast

from specdec.checkpoints.vocabulary import vocabulary_fingerprint
from specdec.cross_vocabulary.encoder import PieceEncoder
from specdec.errors import VocabularyMismatch


@dataclass(frozen=True, slots=True)
class TokenMap:
    """From a draft's tokens to a target's. Ids without a counterpart are -1."""

    target_of: NDArray[np.int64]
    """int64 [draft vocabulary]."""
    draft_vocab_of: NDArray[np.int64]
    """int64 [target vocabulary]: the draft token that stands for a target token."""

    def of_model(self, num_tokens: int, own_end_ids: Collection[int], target_end_id: int | None) -> TokenMap:
        """The map for a model that its tokenizer does not tell everything of.

        Args:
            num_tokens: that the model has.
            own_end_ids: with which it ends a text; without a counterpart of their own they are the target's end.
            target_end_id: that one; None where there is none.
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
        target_of[(target_of >= 0) & (draft_vocab_of[target_of] < 0)] = -1  # what is drafted must be read next
        return TokenMap(target_of, draft_vocab_of)

    @property
    def num_shared(self) -> int:
        """Draft tokens with a counterpart."""
        return int(np.count_nonzero(self.target_of >= 0))


def map_tokens(
    draft: PreTrainedTokenizerFast,
    draft_pieces: PieceEncoder,
    target: PreTrainedTokenizerFast,
    target_pieces: PieceEncoder,
) -> TokenMap:
    """Maps a draft's tokens to a target's.

    Args:
        draft: its tokenizer.
        draft_pieces: of that.
        target: its tokenizer.
        target_pieces: of that.

    Raises:
        VocabularyMismatch: not one token is in common.
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
        told = " and ".join(
            f"{role} has fingerprint {vocabulary_fingerprint(tokenizer.get_vocab())}"
            for role, tokenizer in (("the draft", draft), ("the target", target))
        )
        raise VocabularyMismatch(f"draft and target have no token in common: {told}")
    _map_roles(draft, target, target_of, draft_vocab_of)
    return TokenMap(target_of, draft_vocab_of)


def _by_bytes(pieces: PieceEncoder) -> dict[bytes, list[int]]:
    """Ids of each string of bytes, ascending."""
    by_bytes: dict[bytes, list[int]] = defaultdict(list)
    for token_id, piece in enumerate(pieces.token_bytes):
        if piece:
            by_bytes[piece].append(token_id)
    return by_bytes


def _preferred(token_ids: list[int], piece: bytes, pieces: PieceEncoder) -> int:
    """Of tokens of the same bytes, the one that the tokenizer makes of these; else the first."""
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
    """Maps special tokens that both have by name, and what ends a text; what begins or fills one is never drafted."""
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
