"""A draft's tokenizer beside its target's: what is needed to draft for a target that speaks other tokens.

Not here: a session's text (`draft_vocabulary_text`), text back to the target's tokens (`retokenizer`). Loads no torch.
Made where a draft replica starts, and by `specdec.checkpoints.preflight`.
"""

from __future__ import annotations

from dataclasses import dataclass

from transformers import PreTrainedTokenizerFast

from specdec.checkpoints.vocabulary import vocabulary_fingerprint
from specdec.cross_vocabulary.encoder import PieceEncoder
from specdec.cross_vocabulary.token_map import TokenMap, map_tokens
from specdec.errors import SpecdecError


@dataclass(frozen=True, slots=True)
class TokenizerPair:
    """Immutable; safe to share between threads."""

    draft: PieceEncoder
    target: PieceEncoder
    tokens: TokenMap
    target_fingerprint: str
    """Of the target's vocabulary."""
    target_begin_id: int | None
    """Which of the target's tokens begins a sequence; None where none does."""
    target_end_id: int | None
    """Which one ends a text, by its tokenizer."""
    special_names: dict[int, bytes]
    """The target's special tokens that a draft without them reads as text; all others it does not see."""

    @property
    def target_size(self) -> int:
        """Rows of the target's id-to-token map."""
        return len(self.target.token_bytes)

    @property
    def told(self) -> str:
        """How much is in common, in words."""
        num_own = len(self.tokens.target_of)
        return f"{self.tokens.num_shared:,} of its {num_own:,} tokens ({self.tokens.num_shared / num_own:.0%})"

    def special_ids(self, token_id: int, *, is_first: bool) -> list[int]:
        """Own tokens that a special token of the target is read as; a sequence begins once."""
        if is_first and token_id == self.target_begin_id and self.draft.opening_ids:
            return []
        draft_vocab_id = int(self.tokens.draft_vocab_of[token_id])
        return [draft_vocab_id] if draft_vocab_id >= 0 else self.draft.encode(self.special_names.get(token_id, b""))

    def opening(self, piece: bytes) -> bytes:
        """The first bytes of a session's text as the draft's tokenizer would have opened it."""
        text = piece.removeprefix(b" ") if self.target.opens_with_blank else piece
        return b" " + text if self.draft.opens_with_blank else text


def make_pair(draft: tuple[str, PreTrainedTokenizerFast], target: tuple[str, PreTrainedTokenizerFast]) -> TokenizerPair:
    """Maps a draft's tokens to its target's.

    Args:
        draft: what it is called, and its tokenizer, which is of no other use any more.
        target: the same.

    Raises:
        InvalidRequest: a tokenizer cannot be used.
        Unsupported: the tokens of one have no bytes of their own.
        VocabularyMismatch: not one token is in common.
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
