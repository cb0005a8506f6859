"""Drafts that a constraint forces: the tokens that must come next, without a call to a model.

If a constraint leaves one continuation, the target's distribution has one token at each of its positions, so the draft
is accepted for certain (docs/protocol.md section 11). Such tokens count for no pool's acceptance. Another source drafts
behind them in the same round, as if they were committed. The search for forced tokens runs in a thread, because a
grammar may be slow; after a round that waited in vain, it is not repeated. The draft goes back to the `runner`, like
those of `lookup_drafts`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from coordinator.requests import GRAMMAR_POOL
from coordinator.round.draft_calls import Draft
from coordinator.round.draft_sources import DraftSource
from coordinator.round.lookup_drafts import point_masses
from coordinator.round.pool_stats import RoundTimes, RunStepTimes
from coordinator.round.session_tokens import SessionTokens
from coordinator.round.target_calls import TargetAnswer
from specdec.contract.errors import SpecdecError
from specdec.contract.types import Proposal, TokenIds
from specdec.structured.matcher import Matcher
from specdec.structured.paced_threads import Pace, PacedThreads

#: Longest time that a round waits to know which tokens are forced, which usually takes 0.1 ms. A round that did not
#: wait would change the lengths of drafts, and with them the text of a seed in the modes rejection and block.
_PATIENCE_S = 2.0

#: Number of tokens without a draft after which forced tokens are looked for again; it doubles each time that none is
#: forced, as in free text.
_FIRST_RUN_PORTION = 4

_log = logging.getLogger(__name__)


class ForcedTokens:
    """The tokens that a constraint forces after those of a session. One request's; used from one event loop."""

    def __init__(
        self,
        open_matcher: Callable[[], Matcher],
        tokens: SessionTokens,
        output_start: int,
        threads: PacedThreads,
    ) -> None:
        """
        Args:
            open_matcher: compiles the constraint; called in a thread.
            tokens: tokens of the session.
            output_start: position of the turn's first output token.
            threads: threads of all requests' searches.
        """
        self._threads, self._pace = threads, Pace()
        self._open_matcher = open_matcher
        self._tokens = tokens
        self._output_start = output_start
        self._matcher: Matcher | None = None
        self._has_failed = False

    async def find(self) -> list[int]:
        """Return the forced tokens; [] if there is a choice, or if they are not known in time."""
        if self._has_failed:
            return []
        output_ids = self._tokens.tail(self._output_start).copy()
        try:
            async with asyncio.timeout(_PATIENCE_S):
                return await asyncio.wrap_future(self._threads.submit(self._pace, self._search, output_ids))
        except (SpecdecError, TimeoutError) as error:
            # The target decides what is legal, and ends the request if its matcher fails, too.
            _log.warning("forced tokens are not drafted: %s", error or "the search takes too long")
            self._has_failed = True
            return []

    def _search(self, output_ids: TokenIds) -> list[int]:
        if self._matcher is None:
            self._matcher = self._open_matcher()
        self._matcher.align(output_ids)
        return self._matcher.forced_tokens()


class GrammarDraftSource:
    """Forced tokens before another source's drafts. Implements `DraftSource`."""

    def __init__(self, forced: ForcedTokens, otherwise: DraftSource, *, max_gamma: int, with_supports: bool) -> None:
        """
        Args:
            forced: finds the forced tokens.
            otherwise: source to use if no token is forced.
            max_gamma: limit of the targets on the tokens of a draft.
            with_supports: whether the request's rounds carry distributions.
        """
        self._forced = forced
        self._otherwise = otherwise
        self._max_gamma = max_gamma
        self._with_supports = with_supports
        self._run_portion = _FIRST_RUN_PORTION
        self._looks_at = 0
        """Length of the session from which on forced tokens are looked for. A run may end before it, at a place that
        depends on times; a look there would change the text of a seed in the modes rejection and block."""

    async def propose(self, round_id: int, limit: int, committed_len: int, forced: Sequence[int] = ()) -> Draft:
        """See `DraftSource.propose`."""
        if committed_len < self._looks_at:
            draft = await self._otherwise.propose(round_id, limit, committed_len)
            self._looks_at = self._looks_at if draft.run_portion else 0
            return draft._replace(run_portion=min(draft.run_portion, max(0, self._looks_at - committed_len)))
        most = min(limit, self._max_gamma)
        token_ids = (await self._forced.find())[:most]
        if token_ids:
            self._run_portion = _FIRST_RUN_PORTION
            return await self._followed(token_ids, round_id, most - len(token_ids), committed_len)
        draft = await self._otherwise.propose(round_id, limit, committed_len)
        portion, self._run_portion = min(draft.run_portion, self._run_portion), 2 * self._run_portion
        self._looks_at = committed_len + portion
        return draft._replace(run_portion=portion)

    async def _followed(self, token_ids: list[int], round_id: int, limit: int, committed_len: int) -> Draft:
        """Return the forced tokens with the other source's draft behind them, as far as it has one."""
        forced, num_forced = point_masses(token_ids, self._with_supports), len(token_ids)
        behind = await self._otherwise.propose(round_id, limit, committed_len, token_ids) if limit > 0 else Draft()
        if not len(behind.proposal.draft_token_ids):
            return Draft(
                forced,
                num_requested=num_forced,
                pool=GRAMMAR_POOL,
                wait_s=behind.wait_s,
                wire_bytes=behind.wire_bytes,
                num_forced=num_forced,
            )
        return behind._replace(proposal=_joined(forced, behind.proposal), num_forced=num_forced)

    def complete(self, draft: Draft, target: TargetAnswer) -> Draft:
        """See `DraftSource.complete`; a draft with forced tokens is complete already."""
        return draft if draft.num_forced else self._otherwise.complete(draft, target)

    def observe(self, draft: Draft, times: RoundTimes) -> None:
        """See `DraftSource.observe`; forced tokens say nothing about a draft."""
        if draft.pool == GRAMMAR_POOL:
            return
        times = times._replace(
            num_draft_tokens=times.num_draft_tokens - draft.num_forced,
            num_accepted=times.num_accepted - draft.num_forced,
            step_tokens=times.step_tokens - draft.num_forced,
            committed_len=times.committed_len + draft.num_forced,
        )
        self._otherwise.observe(draft, times)

    def wants_draft(self, limit: int) -> bool:
        """See `DraftSource.wants_draft`; a run ends after its portion, so that forced tokens are looked for."""
        return True

    def observe_run_step(self, times: RunStepTimes) -> None:
        """See `DraftSource.observe_run_step`."""
        self._otherwise.observe_run_step(times)


def _joined(forced: Proposal, drafted: Proposal) -> Proposal:
    """Return a draft that begins with forced tokens; its counts and times are those of the drafted part."""
    return replace(
        drafted,
        draft_token_ids=np.append(forced.draft_token_ids, drafted.draft_token_ids),
        supports=(*forced.supports, *drafted.supports),
        lost_mass=(*forced.lost_mass, *drafted.lost_mass),
    )
