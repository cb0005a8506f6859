"""Pair a draft's tokenizer with a target's that has a different vocabulary.

`draft_vocabulary_text` and `retokenizer` use the pair to translate text in each direction. A draft replica makes it at
start, and `specdec.checkpoints.cross_vocabulary.pair_preflight` makes it to check a pair of models. Loads no torch.
"""

from __future__ import annotations

from dataclasses import dataclass

from transformers import PreTrainedTokenizerFast

from specdec.checkpoints.cross_vocabulary.encoder import PieceEncoder
from specdec.checkpoints.cross_vocabulary.token_map import TokenMap, map_tokens
from specdec.checkpoints.vocabulary import vocabulary_fingerprint
from specdec.contract.errors import SpecdecError


@dataclass(frozen=True, slots=True)
class TokenizerPair:
    """The two tokenizers and the map between their tokens. Immutable and thread-safe."""

    draft: PieceEncoder
    target: PieceEncoder
    tokens: TokenMap
    target_fingerprint: str
    """Fingerprint of the target's vocabulary."""
    target_begin_id: int | None
    """The target's begin-of-sequence token; None if it has none."""
    target_end_id: int | None
    """The target's end-of-sequence token, by its tokenizer; None if it has none."""
    special_names: dict[int, bytes]
    """Spelling of each added target token that a draft without a counterpart reads as text. It reads the others (begin
    and end of sequence, padding, unknown) as nothing."""

    @property
    def target_size(self) -> int:
        """Largest token id of the target plus one."""
        return len(self.target.token_bytes)

    @property
    def summary(self) -> str:
        """Number and share of the draft's tokens that the target has too, as text for messages."""
        num_own = len(self.tokens.target_of)
        return f"{self.tokens.num_shared:,} of its {num_own:,} tokens ({self.tokens.num_shared / num_own:.0%})"

    def special_ids(self, token_id: int, *, is_first: bool) -> list[int]:
        """Return the draft-vocabulary tokens for a special token of the target.

        Args:
            token_id: the special token.
            is_first: it is the first token of the session. A begin-of-sequence token there gives no tokens if the
                draft's sequence already has its own.
        """
        if is_first and token_id == self.target_begin_id and self.draft.opening_ids:
            return []
        draft_vocab_id = int(self.tokens.draft_vocab_of[token_id])
        return [draft_vocab_id] if draft_vocab_id >= 0 else self.draft.encode(self.special_names.get(token_id, b""))

    def opening(self, piece: bytes) -> bytes:
        """Return the first bytes of a session's text with the leading space that the draft's tokenizer would add."""
        text = piece.removeprefix(b" ") if self.target.opens_with_blank else piece
        return b" " + text if self.draft.opens_with_blank else text


def make_pair(draft: tuple[str, PreTrainedTokenizerFast], target: tuple[str, PreTrainedTokenizerFast]) -> TokenizerPair:
    """Return the pair of a draft's and a target's tokenizer.

    Args:
        draft: name of the model for messages, and its tokenizer. The tokenizer is changed; do not use it afterwards.
        target: the same for the target.

    Raises:
        InvalidRequest: a tokenizer fails on a test text.
        Unsupported: the bytes of a tokenizer's tokens are unknown.
        VocabularyMismatch: the vocabularies share no token.
    """
    encoders = []
    for name, tokenizer in (draft, target):
        try:
            encoders.append(PieceEncoder(tokenizer))
        except SpecdecError as error:
            raise type(error)(f"model {name!r}: {error.message}", field=error.field) from error
    of_draft, of_target = draft[1], target[1]
    tokens = map_tokens(of_draft, encoders[0], of_target, encoders[1])
    unseen = {of_target.bos_token_id, of_target.eos_token_id, of_target.pad_token_id, of_target.unk_token_id}
    added = of_target.backend_tokenizer.get_added_tokens_decoder()
    names = {token_id: token.content.encode() for token_id, token in added.items() if token_id not in unseen}
    return TokenizerPair(
        draft=encoders[0],
        target=encoders[1],
        tokens=tokens,
        target_fingerprint=vocabulary_fingerprint(of_target.get_vocab()),
        target_begin_id=of_target.bos_token_id,
        target_end_id=of_target.eos_token_id,
        special_names=names,
    )
