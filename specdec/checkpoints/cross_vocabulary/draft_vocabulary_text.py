"""Keep a session's committed target tokens as draft-vocabulary tokens, updated as tokens are appended and removed.

    target            | segment | segment | special | open segment |     a closed segment is tokenised once
    draft vocabulary  | ids     | ids     | id      | ids          |     the open segment after every append

The text is cut into segments before a space or a newline, where few tokenizers have a token that spans the cut, and
each segment is tokenised separately. Draft-vocabulary tokens therefore depend on the committed tokens only, not on the
portions in which these were appended. Further text can change only the open segment, whose length is bounded.

Not thread-safe. Loads no torch. Used by `draft_service.cross_vocabulary.translated_sessions`.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

from specdec.checkpoints.cross_vocabulary.pair import TokenizerPair

#: From this length on, a segment is closed before the next space or newline.
_MIN_SEGMENT_BYTES = 48
#: From this length on, it is closed before the next character.
_LONG_SEGMENT_BYTES = 256
#: From this length on, it is closed before the next token, even within a character: such bytes are not valid text.
_MAX_SEGMENT_BYTES = 512

_BLANKS = b" \t\r\n"


@dataclass(slots=True)
class _Segment:
    """Tokens of a session between two cuts."""

    first: int
    """Position of the first committed token."""
    own_first: int
    """Position of the first draft-vocabulary token."""
    piece: bytearray = field(default_factory=bytearray)
    """Text of the segment as bytes; empty for a special token."""


class DraftVocabularyText:
    """The committed tokens of one session and the draft-vocabulary tokens of the same text."""

    def __init__(self, pair: TokenizerPair) -> None:
        self._pair = pair
        # Arrays of four bytes per token, because there may be many long sessions.
        self._own = array("I", pair.draft.opening_ids)
        self._committed = array("I")
        self._closed: list[tuple[int, int]] = []  # (first, own_first) of each
        self._open = _Segment(0, len(self._own))

    def __len__(self) -> int:
        return len(self._committed)

    @property
    def draft_vocab_ids(self) -> Sequence[int]:
        """The session's text as draft-vocabulary token ids."""
        return self._own

    def unmapped_share(self, num_latest: int, num_least: int) -> float:
        """Return the share (0..1) of recent committed text tokens that have no draft-vocabulary counterpart.

        Args:
            num_latest: number of most recent committed tokens to consider. Special tokens among them are skipped.
            num_least: least divisor, so that a few tokens cannot give a high share.
        """
        latest = [token_id for token_id in self._committed[-num_latest:] if self._pair.target.token_bytes[token_id]]
        return int((self._pair.tokens.draft_vocab_of[latest] < 0).sum()) / max(len(latest), num_least)

    @property
    def open_piece(self) -> bytes:
        """Bytes of the open segment: the end of the text, which may share a token with the text that follows."""
        return bytes(self._open.piece)

    def append(self, token_ids: Sequence[int]) -> None:
        """Append committed target tokens."""
        for token_id in token_ids:
            self._add(token_id)
        self._tokenise()

    def truncate(self, length: int) -> None:
        """Remove the committed target tokens from position `length` on."""
        if length >= len(self._committed):
            return
        first, own_first = self._open.first, self._open.own_first
        # The first token of a segment closed the segment before it. If that token goes, the earlier one is open again.
        while first >= length and self._closed:
            first, own_first = self._closed.pop()
        kept = self._committed[first:length]
        del self._committed[first:], self._own[own_first:]
        self._open = _Segment(first, own_first)
        self.append(kept)

    def _add(self, token_id: int) -> None:
        piece = self._pair.target.token_bytes[token_id]
        last = self._open
        if last.first < len(self._committed) and (not piece or not last.piece or _parts(last.piece, piece)):
            self._tokenise()
            self._closed.append((last.first, last.own_first))
            self._open = _Segment(len(self._committed), len(self._own))
        if not piece:
            self._own.extend(self._pair.special_ids(token_id, is_first=not self._committed))
        self._open.piece += piece
        self._committed.append(token_id)

    def _tokenise(self) -> None:
        """Tokenise the open segment again."""
        if piece := bytes(self._open.piece):
            is_first = self._open.own_first == len(self._pair.draft.opening_ids)
            own_piece = self._pair.opening(piece) if is_first else piece
            draft_vocab_ids = array("I", self._pair.draft.encode(own_piece))
            self._own[self._open.own_first :] = draft_vocab_ids


def _parts(before: bytearray, piece: bytes) -> bool:
    """Return whether to cut the text between the open segment and the bytes of the next token."""
    if len(before) < _MIN_SEGMENT_BYTES:
        return False
    if len(before) >= _LONG_SEGMENT_BYTES:
        return piece[0] & 0xC0 != 0x80 or len(before) >= _MAX_SEGMENT_BYTES
    return (piece[0] == 0x20 and before[-1] not in _BLANKS) or (piece[0] == 0x0A and chr(before[-1]).isalnum())
