"""A session's committed tokens in a draft's own tokens, kept up as tokens come and go.

    target   | segment | segment | special | open segment |     a closed segment is tokenised once
    own      | own ids | own ids | own id  | own ids      |     the open one again with whatever is added

Own tokens are a function of the committed ones alone, in whatever portions those came: a text is cut where hardly any
tokenizer has a token across, before a blank or a line's end, and every segment is tokenised by itself. What following
text may still change lies within the open segment, and that is bounded.

Not here: which tokens are committed (`draft_service.cross_vocabulary_sessions`). Not safe to share. Loads no torch.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

from specdec.cross_vocabulary.pair import TokenizerPair

#: A segment is closed at the next good place from here on, in bytes...
_MIN_SEGMENT_BYTES = 48
#: ... before any character from here on...
_LONG_SEGMENT_BYTES = 256
#: ... and anywhere from here on: bytes that are no characters are nobody's text.
_MAX_SEGMENT_BYTES = 512

_BLANKS = b" \t\r\n"


@dataclass(slots=True)
class _Segment:
    """Tokens of a session from one cut to the next."""

    first: int
    """Position of its first committed token."""
    own_first: int
    """Position of its first own token."""
    piece: bytearray = field(default_factory=bytearray)
    """Its text; empty for a special token."""


class DraftVocabularyText:
    """One session's."""

    def __init__(self, pair: TokenizerPair) -> None:
        self._pair = pair
        # Four bytes a token: sessions may be long and many.
        self._own = array("I", pair.draft.opening_ids)
        self._committed = array("I")
        self._closed: list[tuple[int, int]] = []  # first committed and first own token of each
        self._open = _Segment(0, len(self._own))

    def __len__(self) -> int:
        return len(self._committed)

    @property
    def draft_vocab_ids(self) -> Sequence[int]:
        """The session in own tokens."""
        return self._own

    def unmapped_share(self, num_latest: int, num_least: int) -> float:
        """Of the latest committed tokens that are text, the share that no own token stands for, 0..1.

        Args:
            num_latest: how many of them are looked at.
            num_least: fewer count as so many.
        """
        latest = [token_id for token_id in self._committed[-num_latest:] if self._pair.target.token_bytes[token_id]]
        return int((self._pair.tokens.draft_vocab_of[latest] < 0).sum()) / max(len(latest), num_least)

    @property
    def open_piece(self) -> bytes:
        """The last bytes of the text: those that what follows may share a token with."""
        return bytes(self._open.piece)

    def append(self, token_ids: Sequence[int]) -> None:
        """Adds committed tokens."""
        for token_id in token_ids:
            self._add(token_id)
        self._tokenise()

    def truncate(self, length: int) -> None:
        """Forgets the committed tokens from `length` on."""
        if length >= len(self._committed):
            return
        first, own_first = self._open.first, self._open.own_first
        # Where a segment begins, its first token has shown that the one before ends.
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
        """Makes the open segment's own tokens anew."""
        if piece := bytes(self._open.piece):
            is_first = self._open.own_first == len(self._pair.draft.opening_ids)
            own_piece = self._pair.opening(piece) if is_first else piece
            draft_vocab_ids = array("I", self._pair.draft.encode(own_piece))
            self._own[self._open.own_first :] = draft_vocab_ids


def _parts(before: bytearray, piece: bytes) -> bool:
    """Whether text is cut between a segment so far and a token's bytes."""
    if len(before) < _MIN_SEGMENT_BYTES:
        return False
    if len(before) >= _LONG_SEGMENT_BYTES:
        return piece[0] & 0xC0 != 0x80 or len(before) >= _MAX_SEGMENT_BYTES
    return (piece[0] == 0x20 and before[-1] not in _BLANKS) or (piece[0] == 0x0A and chr(before[-1]).isalnum())
