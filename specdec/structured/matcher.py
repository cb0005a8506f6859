"""The tokens that a constraint allows after the tokens of a turn.

A matcher has one owner at a time, because llguidance raises if two threads use one. Its state depends only on the
turn's tokens, so it follows a rollback of the session and is rebuilt from the tokens anywhere.

The mask decides what is legal. llguidance's `consume_token` accepts more, so a token is looked up in the mask first.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from specdec.contract.constraint import Constraint
from specdec.contract.errors import InvalidRequest
from specdec.contract.types import TokenIds
from specdec.structured.grammar import field_of, grammar_of, invalid
from specdec.structured.token_table import TokenTable

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLParserLimits

#: Bits of the tokens that may follow, the lowest bit of each byte first: uint8 [ceil(V / 8)].
Mask = NDArray[np.uint8]

#: The library's message if no token can follow an output that may not end.
_NO_TOKEN = ("NoExtension", "NoExtensionBias")

#: Ends the library's messages, which without it would contain the grammar.
_NOT_VERBOSE = "<non-verbose/>"

#: Longest part of the library's message that an error quotes.
_MAX_MESSAGE_CHARACTERS = 500


class LegalTokens(NamedTuple):
    """The tokens that may follow an output at some positions one after another."""

    masks: list[Mask]
    """One mask a position."""
    forced: list[int]
    """Tokens that must follow at the last position and after it, up to an end token; [] if there is a choice."""


def compile_constraint(table: TokenTable, constraint: Constraint) -> LLMatcher:
    """Return a matcher of llguidance at the beginning of an output.

    Raises:
        InvalidRequest: the constraint cannot be used (CONSTRAINT_INVALID), with the library's sentence.
        Unsupported: llguidance cannot read the tokenizer.
    """
    from llguidance import LLMatcher

    matcher = LLMatcher(table.library_table(), grammar_of(constraint), log_level=0, limits=_limits())
    _raise_error(matcher, constraint)
    return matcher


class Matcher:
    """The state of a constraint after some tokens. Not safe to share between threads."""

    def __init__(self, table: TokenTable, constraint: Constraint) -> None:
        """Compile the constraint; raises as `compile_constraint`."""
        self._constraint = constraint
        self._num_tokens = table.vocabulary_size
        self._matcher = compile_constraint(table, constraint)
        self._taken: TokenIds = np.empty(0, dtype=np.uint32)
        """Tokens of the output that the library's matcher has consumed."""

    @property
    def warnings(self) -> list[str]:
        """Demands of a lenient constraint that are not followed, in the library's words, each once."""
        return list(dict.fromkeys(self._matcher.get_grammar_warnings()))

    def align(self, token_ids: TokenIds) -> None:
        """Go to the state after these tokens of the output.

        Raises:
            InvalidRequest: a limit of the library is reached, or the tokens are none of the constraint
                (CONSTRAINT_INVALID).
        """
        length = min(len(self._taken), len(token_ids))
        parted = np.flatnonzero(self._taken[:length] != token_ids[:length])
        common = int(parted[0]) if len(parted) else length
        self._roll_back(len(self._taken) - common)
        missing = token_ids[common:].tolist()
        if missing and self._matcher.try_consume_tokens(missing) != len(missing):
            self._raise_error()
            problem = "does not allow the tokens that the output has, or exceeds a limit; simplify it"
            raise invalid(self._constraint, problem)
        self._taken = token_ids
        self._raise_error()

    @property
    def is_complete(self) -> bool:
        """True if the output may end here."""
        return bool(self._matcher.is_accepting())

    def mask(self, end_token_ids: Sequence[int]) -> Mask:
        """Return the legal next tokens. End tokens, the model's and the request's, are legal if the output may end.

        Raises:
            InvalidRequest: a limit of the library is reached (CONSTRAINT_INVALID), or no token is legal
                (NO_LEGAL_TOKEN).
        """
        mask = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8).copy()
        self._raise_error()
        for token_id in end_token_ids:
            bit = np.uint8(1 << token_id % 8)
            if self.is_complete:
                mask[token_id // 8] |= bit
            else:
                mask[token_id // 8] &= ~bit
        mask = mask[: (self._num_tokens + 7) // 8]
        if not mask.any():
            raise no_legal_token(self._constraint)
        return mask

    def legal_along(
        self, draft_token_ids: Sequence[int], end_token_ids: Sequence[int], check: Callable[[], None] = lambda: None
    ) -> LegalTokens:
        """Return the masks before each draft token and after the last; the state does not change.

        The list ends with the first illegal token, or with an end token: the tokens after it are never emitted. Forced
        tokens come from the library several at once, so their masks need no call each.

        Args:
            draft_token_ids: tokens that may follow the output.
            end_token_ids: as for `mask`.
            check: called after each mask; what it raises ends the work.

        Raises: as `mask`.
        """
        masks: list[Mask] = []
        forced: list[int] = []
        num_taken = 0
        try:
            for token_id in (*draft_token_ids, None):
                forced = forced[1:] or self._forced_before_an_end(end_token_ids)
                masks.append(self._mask_of(forced[0]) if forced else self.mask(end_token_ids))
                check()
                if token_id is None or not is_legal(masks[-1], token_id) or token_id in end_token_ids:
                    break
                if self._matcher.try_consume_tokens([token_id]) != 1:
                    self._raise_error()
                    break
                num_taken += 1
        finally:
            if num_taken:
                self._matcher.rollback(num_taken)
        return LegalTokens(masks, forced)

    def _forced_before_an_end(self, end_token_ids: Sequence[int]) -> list[int]:
        return list(itertools.takewhile(lambda token_id: token_id not in end_token_ids, self.forced_tokens()))

    def _mask_of(self, token_id: int) -> Mask:
        """Return the mask that allows one token."""
        mask = np.zeros((self._num_tokens + 7) // 8, dtype=np.uint8)
        mask[token_id // 8] = 1 << token_id % 8
        return mask

    def forced_tokens(self) -> list[int]:
        """Return the tokens that must come next, as the tokenizer would write them; [] if there is a choice."""
        forced = list(self._matcher.compute_ff_tokens())
        self._raise_error()
        return forced

    def _roll_back(self, num_tokens: int) -> None:
        if num_tokens:
            self._matcher.rollback(num_tokens)
            self._taken = self._taken[:-num_tokens]

    def _raise_error(self) -> None:
        _raise_error(self._matcher, self._constraint)


def is_legal(mask: Mask, token_id: int) -> bool:
    """Return whether a mask allows a token."""
    return bool(mask[token_id // 8] >> token_id % 8 & 1)


def no_legal_token(constraint: Constraint) -> InvalidRequest:
    """Return the error for a position at which no token is legal."""
    field = field_of(constraint)
    return InvalidRequest(
        f"{field} and the model together allow no next token; loosen the constraint",
        reason="NO_LEGAL_TOKEN",
        field=field,
    )


def _limits() -> LLParserLimits:
    from llguidance import LLParserLimits

    # Verbose errors contain the grammar and the state.
    return LLParserLimits(verbose_errors=False)


def _raise_error(matcher: LLMatcher, constraint: Constraint) -> None:
    """Raise InvalidRequest if the library has failed: after any error its masks allow only the end."""
    if matcher.is_error():
        message = " ".join(matcher.get_error().removesuffix(_NOT_VERBOSE).split())[:_MAX_MESSAGE_CHARACTERS]
        if message in _NO_TOKEN:
            raise no_legal_token(constraint)
        raise invalid(constraint, f"cannot be followed: {message}")
