"""What is known of every draft pool for every class of requests, and which pool a class gets.

Of each class and pool: acceptance, of the rounds that it drafted and of scores where it did not; of each class: the
weights of its pools, moved by what each would have made of the same tokens. A rate is what gamma is chosen by, with the
class's acceptance and the pool's own times, or those that its replicas tell while nobody uses it. No request is spent
on trying a draft model. What a target drafts with by itself costs no prefill, and a target that is always needed never
scores it: such a pool gets a few rounds of a request.

Not here: one request's course (`request_route`), the calls (`coordinator.routing.scoring`). One for a coordinator, used
from one event loop.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence

from coordinator.replicas.pool import ReplicaPools
from coordinator.requests import RouteStats
from coordinator.round.acceptance import Acceptance
from coordinator.round.gamma import DraftPoolStats, best_gamma
from coordinator.routing.classes import MAX_CLASSES, OTHER, class_of, kind_of
from coordinator.routing.expected_rounds import ExpectedRounds
from coordinator.routing.hedge import Hedge
from coordinator.routing.promotion import Canary
from coordinator.routing.scoring import ScoreQueue
from specdec.core.forward_time import RunningMean
from specdec.types import Mode, SamplingFilters, Score, TokenIds

#: Share of a class's record of a pool that is left one span later, and of its rounds one round later.
_SPAN_KEEP = 0.97
_ROUND_KEEP = 0.995

#: How often a class tries a pool that could not be scored.
MAX_TRIALS = 3

#: Of a position of which nothing is known.
_MIDDLING_ALPHA = 0.7


class _PoolInClass:
    """What a class has shown of one pool."""

    def __init__(self) -> None:
        self.acceptance = Acceptance(_SPAN_KEEP)
        self.num_rounds = 0.0
        self.was_unheard = False
        """Whether it was to score the newest span and could not."""
        self.num_trials = 0


class _Class:
    def __init__(self) -> None:
        self.hedge = Hedge()
        self.pools: defaultdict[str, _PoolInClass] = defaultdict(_PoolInClass)


class RoutingTable:
    """The routes of one coordinator's requests."""

    def __init__(
        self,
        pools: ReplicaPools,
        records: Mapping[str, DraftPoolStats],
        scores: ScoreQueue,
        canary: Canary | None,
        text_of: Callable[[Sequence[int]], str],
    ) -> None:
        """
        Args:
            pools: the draft pools there are.
            records: what all requests have shown of each.
            scores: where spans are scored.
            canary: says which requests get a pool that is being promoted; None: there is no such thing.
            text_of: tokens as text.
        """
        self.scores = scores
        self.canary = canary
        self._pools = pools
        self._records = records
        self._text_of = text_of
        self._classes: dict[str, _Class] = {}
        self._step_s: defaultdict[str, RunningMean] = defaultdict(RunningMean)
        self._prefill_s: defaultdict[str, RunningMean] = defaultdict(RunningMean)
        """Of a token, by pool."""

    async def close(self) -> None:
        """Idempotent."""
        await self.scores.close()

    def class_of(self, task: str, mode: Mode, filters: SamplingFilters, end_of_prompt: TokenIds) -> str:
        """The class of a request; `end_of_prompt`: the last of what its session holds before the output."""
        kind = "" if task else kind_of(end_of_prompt, self._text_of(end_of_prompt.tolist()))
        name = class_of(task, kind, mode, filters)
        if task and name not in self._classes and len(self._classes) >= MAX_CLASSES:
            name = class_of(OTHER, "", mode, filters)
        return name

    def candidates(self) -> list[str]:
        """Pools of draft models, and what targets draft with by themselves, that a request may be routed to now."""
        return [*self._pools.open_model_pools(), *self._pools.local_pools]

    def scored(self) -> list[str]:
        """Those, and the shadows beside them: pools that are heard of every span."""
        return [*self._pools.live_model_pools(), *self._pools.local_pools]

    def choose(self, request_class: str) -> str:
        """The pool of a request that begins now; "" where none lives."""
        candidates = self.candidates()
        return self._of(request_class).hedge.choose(candidates) if candidates else ""

    def best_of(self, request_class: str, excluded: Collection[str]) -> str:
        """The pool with the most weight beside those; "" where none lives. The class keeps its own."""
        hedge = self._of(request_class).hedge
        return max((pool for pool in self.candidates() if pool not in excluded), key=hedge.weight, default="")

    def trial(self, request_class: str, excluded: Collection[str]) -> str:
        """A pool to try for a few rounds, beside those: one that targets draft in by themselves and could not score the
        class's newest span; "" where there is none. Each answer counts as a trial."""
        of_pools = self._of(request_class).pools
        for pool in self._pools.local_pools:
            record = of_pools[pool]
            if pool not in excluded and record.was_unheard and record.num_trials < MAX_TRIALS:
                record.was_unheard = False
                record.num_trials += 1
                return pool
        return ""

    def rate(self, request_class: str, pool: str, context: float, own: Acceptance | None = None) -> float | None:
        """Tokens a second that a stream makes with a pool, as predicted; None while that cannot be told.

        Args:
            request_class: of the stream.
            pool: that drafts.
            context: committed tokens.
            own: what the stream itself has shown of the pool.
        """
        of_class = self._of(request_class).pools[pool].acceptance
        if of_class.measured is None and (own is None or own.measured is None):
            return None
        alpha = of_class.overall(self._alpha_of(pool))
        return self._rate(pool, of_class if own is None else own, alpha if own is None else own.overall(alpha), context)

    def prefill_s(self, pool: str, num_tokens: int) -> float | None:
        """Seconds that a pool's replica takes to run so many tokens; None while that is not known. A target has run
        them that drafts by itself."""
        if pool in self._pools.local_pools:
            return 0.0
        mean = self._prefill_s.get(pool)
        return None if mean is None else mean.value * num_tokens

    def count_round(self, request_class: str, pool: str) -> None:
        """A round of the class was drafted by a pool."""
        of_class = self._of(request_class)
        for record in of_class.pools.values():
            record.num_rounds *= _ROUND_KEEP
        of_class.pools[pool].num_rounds += 1.0

    def observe_span(
        self, request_class: str, rounds: Mapping[str, ExpectedRounds], asked: Collection[str], context: float
    ) -> None:
        """Learns from a span of tokens what each pool's rounds over it were, or would have been.

        Args:
            request_class: of its request.
            rounds: of the pools that drafted some of it, and of those that scored it.
            asked: the pools that were to score it.
            context: tokens before it.
        """
        of_class = self._of(request_class)
        for pool in asked:
            of_class.pools[pool].was_unheard = pool not in rounds
        goodputs = {}
        for pool, expected in rounds.items():
            of_class.pools[pool].acceptance.add(expected.tested, expected.accepted, _SPAN_KEEP)
            rate = None if expected.alpha is None else self._rate(pool, Acceptance(1.0), expected.alpha, context)
            if rate is not None:
                goodputs[pool] = rate
        of_class.hedge.observe(goodputs)

    def observe_times(self, pool: str, score: Score, num_new_tokens: int | None) -> None:
        """Learns from a score what a pool's replicas take.

        Args:
            pool: whose replica answered.
            score: its answer.
            num_new_tokens: that it had to run, all of them new to it; None: unknown.
        """
        if score.step_s:
            self._step_s[pool].observe(score.step_s)
        if num_new_tokens and score.forward_s:
            self._prefill_s[pool].observe(score.forward_s / num_new_tokens)

    def alpha(self, pool: str) -> float | None:
        """What all classes together have shown of a pool; None before the first span."""
        records = [of_class.pools[pool].acceptance for of_class in self._classes.values() if pool in of_class.pools]
        num_tested = sum(record.num_tested for record in records)
        return sum(record.num_accepted for record in records) / num_tested if num_tested else None

    def stats(self, pool: str) -> list[RouteStats]:
        """How a pool does for each class, for people."""
        stats = []
        for name, of_class in sorted(self._classes.items()):
            is_chosen = self.choose(name) == pool
            if pool in of_class.pools or is_chosen or of_class.hedge.weight(pool):
                num_rounds = sum(record.num_rounds for record in of_class.pools.values())
                record = of_class.pools[pool]
                goodput, weight = self.rate(name, pool, 0.0), of_class.hedge.weight(pool)
                share = record.num_rounds / num_rounds if num_rounds else 0.0
                acceptance = record.acceptance
                stats.append(
                    RouteStats(name, acceptance.measured, goodput, weight, share, is_chosen, acceptance.num_tested)
                )
        return stats

    def _of(self, request_class: str) -> _Class:
        if request_class not in self._classes:
            self._classes[request_class] = _Class()
        return self._classes[request_class]

    def _alpha_of(self, pool: str) -> float:
        record = self._records.get(pool)
        return record.alpha if record is not None else _MIDDLING_ALPHA

    def _rate(self, pool: str, acceptance: Acceptance, alpha: float, context: float) -> float | None:
        measured = [record for record in self._records.values() if record.verify_time.is_measured]
        draft_s = self._draft_s(pool)
        if not measured or draft_s is None:
            return None
        times = max(measured, key=lambda record: record.num_rounds)
        return best_gamma(times, acceptance, alpha, context, self._pools.max_gamma, draft_s).rate

    def _draft_s(self, pool: str) -> Callable[[float, float], float] | None:
        """What a pool's drafts take, as they were, or as its replicas tell; None while neither is known."""
        record = self._records.get(pool)
        if record is not None and record.draft_wait.is_measured:
            return record.draft_wait.predict
        step = self._step_s.get(pool)
        return None if step is None else lambda num_tokens, _: step.value * num_tokens
