"""What a draft with a tokenizer of its own knows of its sessions: the committed tokens, and the same in own tokens.

Towards the coordinator a session's position is in the target's tokens: start, chain hash, rollback and KV_MISS are
those of `specdec.engine.sessions.table`, kept here over texts instead of KV. The engine behind is always sent all own
tokens, and finds out by itself which have KV.

Not here: how text becomes own tokens (`specdec.cross_vocabulary.draft_vocabulary_text`), drafting. Called by
`translated_proposer` from its event loop.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence as Many
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

import numpy as np

from specdec.cross_vocabulary.draft_vocabulary_text import DraftVocabularyText
from specdec.cross_vocabulary.pair import TokenizerPair
from specdec.engine.sessions.block_manager import BlockManager
from specdec.engine.sessions.sequence import Sequence
from specdec.engine.sessions.table import SessionTable, common_length
from specdec.types import SessionPosition, TokenIds

_NO_TOKENS = np.empty(0, dtype=np.uint32)

#: More new tokens than this become own ones in a thread: it takes milliseconds.
_MAX_TOKENS_HERE = 512

#: The latest tokens that tell how much of what the target says a draft's tokens can say.
_NUM_LATEST, _NUM_LEAST = 64, 16


@dataclass(frozen=True, slots=True)
class CrossVocabularyPosition:
    """Where a session stands, in both vocabularies."""

    committed: TokenIds
    """uint32: all committed tokens."""
    draft_vocab_ids: TokenIds
    """uint32: all own tokens."""
    open_piece: bytes
    """The last bytes of the text: those that what follows may share a token with."""
    unmapped_share: float
    """Of the latest committed tokens, those that no own token stands for, 0..1."""


@dataclass(slots=True)
class _CrossVocabulary:
    text: DraftVocabularyText
    committed: TokenIds = field(default_factory=lambda: _NO_TOKENS)
    """What `text` holds."""
    lock: threading.Lock = field(default_factory=threading.Lock)


class CrossVocabularySessions:
    """Every session that the replica knows; as many as an engine does."""

    def __init__(self, pair: TokenizerPair) -> None:
        self._pair = pair
        self._table = SessionTable(BlockManager(0))
        self._translated: WeakKeyDictionary[Sequence, _CrossVocabulary] = WeakKeyDictionary()

    async def align(self, asked: SessionPosition) -> CrossVocabularyPosition:
        """Takes in the committed tokens of a round.

        Raises:
            StaleEpoch: a newer epoch, or a newer round, has been seen.
            KvMiss: the session's first `start` tokens are not known here.
        """
        sequence = self._table.fence(asked)
        self._table.align(sequence, asked, _NO_TOKENS)
        sequence.kv_len, sequence.in_flight = len(sequence), False  # no KV: what is known is all there is to hold
        translated = self._translated.get(sequence)
        if translated is None:
            translated = self._translated[sequence] = _CrossVocabulary(DraftVocabularyText(self._pair))
        committed = sequence.token_ids.copy()
        if len(committed) - len(translated.committed) > _MAX_TOKENS_HERE:
            return await asyncio.to_thread(_translate, translated, committed)
        return _translate(translated, committed)

    def release(self, session_ids: Many[str]) -> None:
        """Forgets sessions; unknown ids are fine."""
        for session_id in session_ids:
            self._table.release(session_id)


def _translate(translated: _CrossVocabulary, committed: TokenIds) -> CrossVocabularyPosition:
    with translated.lock:  # a call that was cancelled may still be at it
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
