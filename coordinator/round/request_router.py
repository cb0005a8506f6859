"""The routing of one request: its present draft pool, and the spans of its tokens that other pools score.

Between two rounds the request moves to another pool if that one would finish the rest of the output sooner, its prefill
of the whole session included. The rest is assumed to be as long as the output so far, and the rates come from this
session's own scores and from those of its class (docs/protocol.md section 9). `draft_source_factory` makes a router,
`generation/generation` reports the rounds, and `routing_table` holds what is known about pools.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import partial

from coordinator.requests import GRAMMAR_POOL, RequestStats
from coordinator.round.acceptance import Acceptance
from coordinator.round.gamma import SESSION_KEEP
from coordinator.round.outcome import RoundOutcome
from coordinator.round.routing_table import RoutingTable
from coordinator.round.session_tokens import SessionTokens
from coordinator.round.setting import RoundSetting
from coordinator.routing.expected_rounds import ExpectedRounds, expected_rounds, rounds_of
from coordinator.routing.score_queue import MAX_CONTEXT_TOKENS, TokenSpan
from specdec.contract.types import MAX_SCORED_TOKENS, Score, ScoreRequest, SessionPosition, TokenIds

#: Spans shorter than this are not worth a call.
LEAST_SPAN_TOKENS = 8

#: Number of output tokens of a trial. The pool that it interrupts drafts the remaining span, so that both are compared.
TRIAL_TOKENS = MAX_SCORED_TOKENS // 3

#: Largest share of the remaining time that another pool may need to be worth the change.
WORTH_LEAVING = 0.85


class RequestRouter:
    """The routing of one request. Used by one generation."""

    def __init__(self, request_class: str, routes: RoutingTable, setting: RoundSetting, tokens: SessionTokens) -> None:
        """
        Args:
            request_class: class of the request.
            routes: what is known about the pools.
            setting: parameters of the request's rounds.
            tokens: tokens of the session; shared with the generation, which extends them.
        """
        self.request_class = request_class
        self._routes = routes
        self._setting = setting
        self._tokens = tokens
        self._promoted = ""
        """Pool that the request got because it is being promoted; "" for none."""
        self._is_compared = False
        """True if the request's speed counts in the comparison of a promotion."""
        self._outgrown: set[str] = set()
        """Pools whose context is too short for the session, or that its target does not serve."""
        self._interrupted, self._trial = "", ""
        """Pool that a trial interrupts, and pool under trial; both "" outside a trial."""
        self._tried: set[str] = set()
        """Pools that had a trial in this span."""
        self._trial_end = 0
        """Number of session tokens at which the trial ends."""
        self._own: dict[str, Acceptance] = {}
        """Acceptance by pool that this session has shown."""
        self._has_news = False
        self._is_first_span = True
        self._start = len(tokens)
        """Position of the span's first token."""
        self._p: list[float] = []
        self._used: dict[str, list[list[float]]] = {}
        """Draft tokens tested and accepted in the span, by pool and by their index in the round."""

    def begin(self) -> str:
        """Return the first pool of the request; "" if there is none."""
        usual, canary = self._routes.choose(self.request_class), self._routes.canary
        if canary is None or canary.promotion is None or canary.promotion.pool not in self._routes.scored():
            return usual
        self._promoted = canary.pool_of(self._setting.session_id)
        self._is_compared = usual != canary.promotion.pool
        return self._promoted or usual

    def next_pool(self, pool: str, limit: int) -> str:
        """Return the pool of the next round, mostly the present one.

        Args:
            pool: pool of the last round.
            limit: number of tokens that may still follow.
        """
        if self._promoted:
            return pool
        if self._interrupted:
            return self._end_trial() if len(self._tokens) >= self._trial_end else pool
        if limit > 2 * TRIAL_TOKENS and not self._tried:
            tried = self._routes.trial(self.request_class, {pool, *self._outgrown})
            if tried:
                self._interrupted, self._trial, self._trial_end = pool, tried, len(self._tokens) + TRIAL_TOKENS
                self._tried.add(tried)
                self._is_compared = False  # its speed is no longer that of one pool
                return tried
        if not self._has_news:
            return pool
        self._has_news = False
        context = len(self._tokens)
        remaining = min(limit, context - self._setting.output_start)
        candidates = [other for other in self._routes.candidates() if other not in self._outgrown]
        rates = {other: self._rate(other, context) for other in candidates}
        here = rates.pop(pool, None)
        if here is None or here <= 0.0:
            return pool
        best, least_s = pool, WORTH_LEAVING * remaining / here
        for other, rate in rates.items():
            prefill_s = self._routes.prefill_s(other, context)
            if rate and prefill_s is not None and remaining / rate + prefill_s < least_s:
                best, least_s = other, remaining / rate + prefill_s
        return best

    def _end_trial(self) -> str:
        """End the trial; return the pool that it interrupted, "" outside a trial."""
        interrupted, self._interrupted, self._trial = self._interrupted, "", ""
        return interrupted

    def leave(self, pool: str, *, for_good: bool) -> str:
        """Return the next pool if the present one gives no drafts: another one, if there is any.

        Args:
            pool: present pool; "" for none.
            for_good: the session has outgrown the pool's context, or its target does not serve the pool.
        """
        self._is_compared = False
        interrupted = self._end_trial()
        if for_good:
            self._outgrown.add(pool)
        if interrupted and interrupted not in self._outgrown and interrupted in self._routes.candidates():
            return interrupted
        return self._routes.best_of(self.request_class, {*self._outgrown, pool}) or pool

    def note(self, outcome: RoundOutcome, num_committed: int) -> None:
        """Add a round to the span, after the first `num_committed` of its tokens were added to the session."""
        if len(self._p) + num_committed > MAX_SCORED_TOKENS:
            self._end_span(before=num_committed)
        self._p += outcome.provenance.p[:num_committed]
        if outcome.num_forced:
            self._used.setdefault(GRAMMAR_POOL, [[], []])
        if outcome.num_draft_tokens and outcome.draft_pool:
            self._routes.count_round(self.request_class, outcome.draft_pool)
            tested, accepted = self._used.setdefault(outcome.draft_pool, [[], []])
            num_accepted = outcome.num_accepted - outcome.num_forced
            num_tested = min(num_accepted + 1, outcome.num_draft_tokens - outcome.num_forced)
            for index in range(num_tested):
                if index == len(tested):
                    tested.append(0.0)
                    accepted.append(0.0)
                tested[index] += 1.0
                accepted[index] += index < num_accepted

    def end(self, stats: RequestStats | None) -> None:
        """End the last span; `stats` are those of a request that ended well, else None."""
        self._end_span(before=0)
        if stats is not None and self._is_compared and self._routes.canary is not None:
            num_tokens = len(self._tokens) - self._setting.output_start
            self._routes.canary.observe(self._promoted, num_tokens, stats.e2el_s - stats.ttft_s)

    def _end_span(self, before: int) -> None:
        """Have the span scored by the pools that did not draft it; `before`: session tokens after the span."""
        start, p, used = self._start, self._p[:MAX_SCORED_TOKENS], self._used
        self._start, self._p, self._used = len(self._tokens) - before, [], {}
        scored = self._routes.scored()
        # Tokens that were found in text or are forced are the easy ones. A pool that drafted only the others would look
        # worse than it is, so it is scored like pools that drafted nothing. A trial counts as it was, without a
        # comparison.
        was_found = not used.keys() <= set(scored)
        used = {pool: counts for pool, counts in used.items() if pool in scored}
        has_trial = bool(self._tried & used.keys())
        if was_found and not has_trial:
            used = {}
        self._tried = {self._trial} - {""}
        unused = () if was_found and used else tuple(pool for pool in scored if pool not in used)
        if len(p) < LEAST_SPAN_TOKENS or len(scored) < 2:
            return
        rounds = {pool: ExpectedRounds(tuple(tested), tuple(accepted)) for pool, (tested, accepted) in used.items()}
        if not unused or start > MAX_CONTEXT_TOKENS:
            if len(rounds) > 1 or has_trial:  # a pool alone would be compared with others on other tokens
                self._learn(rounds, (), start)
            return
        all_tokens = self._tokens.tail(0)
        request = ScoreRequest(self._position(all_tokens[:start]), all_tokens[start : start + len(p)])
        num_new = start + len(p) if self._is_first_span and self._setting.turn == 0 else None
        self._is_first_span = False
        self._routes.scores.put(
            TokenSpan(
                request,
                tuple(p),
                unused,
                on_scored=partial(self._note_score, rounds, p, num_new),
                on_end=partial(self._learn, rounds, unused, start),
                constraint=self._setting.constraint,
            )
        )

    def _note_score(
        self, rounds: dict[str, ExpectedRounds], p: Sequence[float], num_new: int | None, pool: str, score: Score
    ) -> None:
        self._routes.observe_times(pool, score, num_new)
        rounds[pool] = expected_rounds(rounds_of(score, p))

    def _learn(self, rounds: dict[str, ExpectedRounds], requested: Collection[str], context: int) -> None:
        self._routes.observe_span(self.request_class, rounds, requested, context)
        for pool, expected in rounds.items():
            own = self._own.setdefault(pool, Acceptance(SESSION_KEEP))
            own.add(expected.tested, expected.accepted, SESSION_KEEP)
        self._has_news = True

    def _rate(self, pool: str, context: int) -> float | None:
        return self._routes.rate(self.request_class, pool, context, self._own.get(pool))

    def _position(self, token_ids: TokenIds) -> SessionPosition:
        setting = self._setting
        return SessionPosition(
            session_id=setting.session_id,
            epoch=setting.epoch,
            round_id=0,
            start=0,
            prefix_hash=b"",
            token_ids=token_ids,
            filters=setting.filters,
            seed=setting.seed,
            turn=setting.turn,
            output_start=setting.output_start,
            draw_rule=setting.draw_rule,
            tenant=setting.tenant,
        )
