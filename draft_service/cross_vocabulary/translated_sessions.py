"""Sessions of a draft with another tokenizer: their committed tokens, and the same text in draft-vocabulary tokens.

The coordinator sees a session's position in the target's tokens: start, chain hash, rollback and KV_MISS are those of
`specdec.engine.sessions.table`, kept here over text instead of KV. The engine always receives all draft-vocabulary
tokens and finds out which have KV.

`specdec.checkpoints.cross_vocabulary` converts text to tokens. Called by `translating_proposer` from its event loop.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence as Many
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

import numpy as np

from specdec.checkpoints.cross_vocabulary.draft_vocabulary_text import DraftVocabularyText
from specdec.checkpoints.cross_vocabulary.pair import TokenizerPair
from specdec.contract.types import SessionPosition, TokenIds
from specdec.engine.sessions.block_manager import BlockManager
from specdec.engine.sessions.sequence import Sequence
from specdec.engine.sessions.table import SessionTable, common_length

_NO_TOKENS = np.empty(0, dtype=np.uint32)

#: More new tokens than this are converted in a thread, because it takes milliseconds.
_MAX_TOKENS_HERE = 512

#: Number of latest tokens that estimate the share of the target's text that common tokens can express.
_NUM_LATEST, _NUM_LEAST = 64, 16


@dataclass(frozen=True, slots=True)
class CrossVocabularyPosition:
    """Position of a session in both vocabularies."""

    committed: TokenIds
    """uint32: all committed tokens."""
    draft_vocab_ids: TokenIds
    """uint32: all draft-vocabulary tokens."""
    open_piece: bytes
    """Last bytes of the text that may share a token with the text that follows."""
    unmapped_share: float
    """Share of the latest committed tokens without a counterpart in the draft vocabulary, 0..1."""


@dataclass(slots=True)
class _CrossVocabulary:
    text: DraftVocabularyText
    committed: TokenIds = field(default_factory=lambda: _NO_TOKENS)
    """Committed tokens that `text` holds."""
    lock: threading.Lock = field(default_factory=threading.Lock)


class CrossVocabularySessions:
    """All sessions of the replica, as many as an engine remembers."""

    def __init__(self, pair: TokenizerPair) -> None:
        self._pair = pair
        self._table = SessionTable(BlockManager(0))
        self._translated: WeakKeyDictionary[Sequence, _CrossVocabulary] = WeakKeyDictionary()

    async def align(self, position: SessionPosition) -> CrossVocabularyPosition:
        """Align a session with the committed tokens of a round.

        Raises:
            StaleEpoch: a newer epoch, or a newer round, has been seen.
            KvMiss: the session's first `start` tokens are not known here.
        """
        sequence = self._table.fence(position)
        self._table.align(sequence, position, _NO_TOKENS)
        sequence.kv_len, sequence.in_flight = len(sequence), False  # without KV, the known tokens are all that is held
        translated = self._translated.get(sequence)
        if translated is None:
            translated = self._translated[sequence] = _CrossVocabulary(DraftVocabularyText(self._pair))
        committed = sequence.token_ids.copy()
        if len(committed) - len(translated.committed) > _MAX_TOKENS_HERE:
            return await asyncio.to_thread(_translate, translated, committed)
        return _translate(translated, committed)

    def release(self, session_ids: Many[str]) -> None:
        """Forget sessions; unknown ids are ignored."""
        for session_id in session_ids:
            self._table.release(session_id)


def _translate(translated: _CrossVocabulary, committed: TokenIds) -> CrossVocabularyPosition:
    with translated.lock:  # a cancelled call may still use it
        text = translated.text
        keep = common_length(translated.committed, committed)
        translated.committed = translated.committed[:keep]
        text.truncate(keep)
        text.append(committed[keep:].tolist())
        translated.committed = committed
        return CrossVocabularyPosition(
            committed,
            np.array(text.draft_vocab_ids, dtype=np.uint32),
            text.open_piece,
            text.unmapped_share(_NUM_LATEST, _NUM_LEAST),
        )
