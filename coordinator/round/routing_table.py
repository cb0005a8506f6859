"""The statistics of every draft pool for every class of requests, and the choice of the pool that a class gets.

For each class and pool the table holds acceptance: of rounds that the pool drafted, and of scores where it did not
draft. For each class it holds the weights of its pools, which follow the goodput that each pool would have had on the
same tokens. A rate is computed as for the choice of gamma, from the class's acceptance and the pool's own times; for an
unused pool the times come from its replicas' scores. No request is spent on trying a draft model. Local drafts of a
target are the exception: they cost no prefill, and a busy target never scores them, so they get a trial of few rounds.

A coordinator has one table, used from one event loop. `request_router` follows one request, and
`coordinator.routing.score_queue` makes the calls.

The weights follow the Hedge rule: a pool's weight falls with the distance between its predicted goodput and the best
pool's on the same tokens. Every pool is scored on every span, so no request is spent on a trial. A pool that was not
scored keeps its weight (sleeping experts). A small part of the total weight is shared evenly, so that the weights
follow a class that changes. Sources: Freund and Schapire 1997; Freund, Schapire, Singer, Warmuth 1997 (sleeping);
Herbster and Warmuth 1998 (share).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from math import exp

from coordinator.replicas.pool import ReplicaPools
from coordinator.requests import RouteStats
from coordinator.round.acceptance import Acceptance
from coordinator.round.gamma import best_gamma
from coordinator.round.pool_stats import DraftPoolStats, PoolStatsTable
from coordinator.round.setting import RoundSetting
from coordinator.routing.classes import MAX_CLASSES, OTHER, class_of, kind_of
from coordinator.routing.expected_rounds import ExpectedRounds
from coordinator.routing.promotion import Canary
from coordinator.routing.score_queue import ScoreQueue
from specdec.contract.types import Score, TokenIds
from specdec.core.forward_time import RunningMean

#: Learning rate: a goodput of 0 multiplies a weight by exp(-RATE). About ten spans separate pools that differ by 20 %.
RATE = 2.0

#: Part of the total weight that is shared evenly at every span.
SHARED = 0.01

#: Factor by which another pool's weight must exceed that of the chosen one, so that equal pools do not alternate.
MARGIN = 1.25


class Hedge:
    """The weights of one class."""

    def __init__(self) -> None:
        self._weights: dict[str, float] = {}
        self._chosen = ""

    def weight(self, pool: str) -> float:
        """Return the weight of a pool, 0..1; the weights of all pools sum to 1."""
        return self._weights.get(pool, 0.0)

    def choose(self, pools: Sequence[str]) -> str:
        """Return the pool with the largest weight among `pools`; the first one while their weights are equal."""
        for pool in pools:
            self._add(pool)
        if self._chosen not in pools:
            self._chosen = pools[0]
        best = max(pools, key=lambda pool: self._weights[pool])
        if self._weights[best] > MARGIN * self._weights[self._chosen]:
            self._chosen = best
        return self._chosen

    def observe(self, goodputs: Mapping[str, float]) -> None:
        """Update the weights after a span.

        Args:
            goodputs: tokens per second by pool; pools that were not scored are left out.
        """
        for pool in goodputs:
            self._add(pool)
        best = max(goodputs.values(), default=0.0)
        if len(goodputs) < 2 or best <= 0.0:
            return
        awake = sum(self._weights[pool] for pool in goodputs)
        moved = {pool: self._weights[pool] * exp(RATE * (value / best - 1.0)) for pool, value in goodputs.items()}
        scale = awake / sum(moved.values())
        for pool, weight in moved.items():
            self._weights[pool] = (1.0 - SHARED) * scale * weight + SHARED * awake / len(moved)

    def _add(self, pool: str) -> None:
        """Give a new pool an equal share of the weight."""
        if pool not in self._weights:
            share = 1.0 / (len(self._weights) + 1)
            self._weights = {other: weight * (1.0 - share) for other, weight in self._weights.items()}
            self._weights[pool] = share


#: Weight of a class's counts for a pool that is left one span later, and of its rounds one round later.
_SPAN_KEEP = 0.97
_ROUND_KEEP = 0.995

#: Largest number of trials of a pool that could not be scored, per class.
MAX_TRIALS = 3

#: Characters of a fingerprint that tell two adapters of one name apart in the name of a class.
_SHOWN_CHARACTERS = 8

#: Acceptance assumed if nothing is known.
_PRIOR_ALPHA = 0.7


class _PoolInClass:
    """The statistics of one pool for one class."""

    def __init__(self) -> None:
        self.acceptance = Acceptance(_SPAN_KEEP)
        self.num_rounds = 0.0
        self.was_unscored = False
        """True if the pool was to score the newest span and could not."""
        self.num_trials = 0


class _Class:
    def __init__(self, adapter: str) -> None:
        self.adapter = adapter
        """Fingerprint of the adapter of its requests; "" for none."""
        self.hedge = Hedge()
        self.pools: defaultdict[str, _PoolInClass] = defaultdict(_PoolInClass)


class RoutingTable:
    """The routing statistics of one coordinator."""

    def __init__(
        self,
        pools: ReplicaPools,
        pool_stats: PoolStatsTable,
        scores: ScoreQueue,
        canary: Canary | None,
        text_of: Callable[[Sequence[int]], str],
    ) -> None:
        """
        Args:
            pools: the draft pools.
            pool_stats: statistics of each pool over all requests.
            scores: queue of spans to score.
            canary: names the requests that get a pool under promotion; None for none.
            text_of: decodes tokens.
        """
        self.scores = scores
        self.canary = canary
        self._pools = pools
        self._pool_stats = pool_stats
        self._text_of = text_of
        self._classes: dict[str, _Class] = {}
        self._step_s: defaultdict[str, RunningMean] = defaultdict(RunningMean)
        """Seconds per draft step, by pool."""
        self._prefill_s: defaultdict[str, RunningMean] = defaultdict(RunningMean)
        """Seconds per prefilled token, by pool."""

    async def close(self) -> None:
        """Close the queue of spans. Idempotent."""
        await self.scores.close()

    def class_of(self, task: str, setting: RoundSetting, end_of_prompt: TokenIds) -> str:
        """Return the class of a request; `end_of_prompt`: the last tokens of the session before the output."""
        mode, filters, adapter = setting.mode, setting.filters, setting.adapter_fingerprint
        label = f"{setting.adapter}@{adapter[:_SHOWN_CHARACTERS]}" if adapter else ""
        kind = "" if task else kind_of(end_of_prompt, self._text_of(end_of_prompt.tolist()))
        name = class_of(task, kind, mode, filters, label)
        if task and name not in self._classes and self._num_classes(adapter) >= MAX_CLASSES:
            name = class_of(OTHER, "", mode, filters, label)
        if name not in self._classes:
            self._add(name, adapter)
        return name

    def candidates(self) -> list[str]:
        """Return the pools of draft models and of local drafts that a request may be routed to now."""
        return [*self._pools.open_model_pools(), *self._pools.local_pools]

    def scored(self) -> list[str]:
        """Return the pools that score every span: the candidates, and shadows."""
        return [*self._pools.live_model_pools(), *self._pools.local_pools]

    def choose(self, request_class: str) -> str:
        """Return the pool of a request that begins now; "" if none lives."""
        candidates = self.candidates()
        return self._of(request_class).hedge.choose(candidates) if candidates else ""

    def best_of(self, request_class: str, excluded: Collection[str]) -> str:
        """Return the live pool with the largest weight outside `excluded`; "" for none. The class keeps its pool."""
        hedge = self._of(request_class).hedge
        return max((pool for pool in self.candidates() if pool not in excluded), key=hedge.weight, default="")

    def trial(self, request_class: str, excluded: Collection[str]) -> str:
        """Return a pool to try for a few rounds, and count the trial; "" for none.

        It is one of local drafts outside `excluded` that could not score the class's newest span.
        """
        of_pools = self._of(request_class).pools
        for pool in self._pools.local_pools:
            stats = of_pools[pool]
            if pool not in excluded and stats.was_unscored and stats.num_trials < MAX_TRIALS:
                stats.was_unscored = False
                stats.num_trials += 1
                return pool
        return ""

    def rate(self, request_class: str, pool: str, context: float, own: Acceptance | None = None) -> float | None:
        """Return the predicted tokens per second of a stream with a pool; None while that is unknown.

        Args:
            request_class: class of the stream.
            pool: pool that drafts.
            context: number of committed tokens.
            own: acceptance of the pool in this stream.
        """
        of_class = self._of(request_class).pools[pool].acceptance
        if of_class.measured is None and (own is None or own.measured is None):
            return None
        adapter = self._of(request_class).adapter
        stats = self._pool_stats.get(pool, adapter)
        alpha = of_class.overall(_PRIOR_ALPHA if stats is None else stats.alpha)
        acceptance, alpha = (of_class, alpha) if own is None else (own, own.overall(alpha))
        return self._rate(pool, adapter, acceptance, alpha, context)

    def prefill_s(self, pool: str, num_tokens: int) -> float | None:
        """Return the seconds that a pool's replica takes to prefill `num_tokens`; None while that is unknown. Local
        drafts need no prefill, because the target has run the tokens."""
        if pool in self._pools.local_pools:
            return 0.0
        mean = self._prefill_s.get(pool)
        return None if mean is None else mean.value * num_tokens

    def count_round(self, request_class: str, pool: str) -> None:
        """Count a round of the class that a pool drafted."""
        of_class = self._of(request_class)
        for stats in of_class.pools.values():
            stats.num_rounds *= _ROUND_KEEP
        of_class.pools[pool].num_rounds += 1.0

    def observe_span(
        self, request_class: str, rounds: Mapping[str, ExpectedRounds], requested: Collection[str], context: float
    ) -> None:
        """Learn from the rounds that each pool had, or would have had, over a span of tokens.

        Args:
            request_class: class of the request.
            rounds: rounds of the pools that drafted part of the span, and of those that scored it.
            requested: pools that were to score the span.
            context: number of tokens before the span.
        """
        of_class = self._of(request_class)
        for pool in requested:
            of_class.pools[pool].was_unscored = pool not in rounds
        goodputs = {}
        for pool, expected in rounds.items():
            of_class.pools[pool].acceptance.add(expected.tested, expected.accepted, _SPAN_KEEP)
            alpha = expected.alpha
            rate = None if alpha is None else self._rate(pool, of_class.adapter, Acceptance(1.0), alpha, context)
            if rate is not None:
                goodputs[pool] = rate
        of_class.hedge.observe(goodputs)

    def observe_times(self, pool: str, score: Score, num_new_tokens: int | None) -> None:
        """Learn the times of a pool's replicas from a score.

        Args:
            pool: pool of the replica that answered.
            score: its answer.
            num_new_tokens: number of tokens that the replica had to run; None if unknown.
        """
        if score.step_s:
            self._step_s[pool].observe(score.step_s)
        if num_new_tokens and score.forward_s:
            self._prefill_s[pool].observe(score.forward_s / num_new_tokens)

    def alpha(self, pool: str, adapter: str = "") -> float | None:
        """Return a pool's acceptance over all classes of an adapter, "" for the base model; None before the first
        span."""
        classes = [of_class for of_class in self._classes.values() if of_class.adapter == adapter]
        shown = [of_class.pools[pool].acceptance for of_class in classes if pool in of_class.pools]
        num_tested = sum(acceptance.num_tested for acceptance in shown)
        return sum(acceptance.num_accepted for acceptance in shown) / num_tested if num_tested else None

    def stats(self, pool: str) -> list[RouteStats]:
        """Return a pool's statistics for each class, for display."""
        rows = []
        for name, of_class in sorted(self._classes.items()):
            is_chosen = self.choose(name) == pool
            if pool in of_class.pools or is_chosen or of_class.hedge.weight(pool):
                num_rounds = sum(stats.num_rounds for stats in of_class.pools.values())
                stats = of_class.pools[pool]
                goodput, weight = self.rate(name, pool, 0.0), of_class.hedge.weight(pool)
                share = stats.num_rounds / num_rounds if num_rounds else 0.0
                acceptance = stats.acceptance
                rows.append(
                    RouteStats(name, acceptance.measured, goodput, weight, share, is_chosen, acceptance.num_tested)
                )
        return rows

    def _of(self, request_class: str) -> _Class:
        if request_class not in self._classes:
            self._add(request_class, "")
        return self._classes[request_class]

    def _add(self, request_class: str, adapter: str) -> None:
        """Add a class. The first class of an adapter removes the classes of adapters that are no longer served."""
        if not self._num_classes(adapter):
            kept = {name: each for name, each in self._classes.items() if self._pools.serves(each.adapter)}
            self._classes = {name: each for name, each in self._classes.items() if not each.adapter} | kept
        self._classes[request_class] = _Class(adapter)

    def _num_classes(self, adapter: str) -> int:
        return sum(of_class.adapter == adapter for of_class in self._classes.values())

    def _rate(self, pool: str, adapter: str, acceptance: Acceptance, alpha: float, context: float) -> float | None:
        draft_s, times = self._draft_s(pool, adapter), self._times(adapter) or self._times("")
        if times is None or draft_s is None:
            return None
        return best_gamma(times, acceptance, alpha, context, self._pools.max_gamma, draft_s).rate

    def _times(self, adapter: str) -> DraftPoolStats | None:
        """Return the statistics that know the times of rounds best; None while none knows them."""
        all_stats = self._pool_stats.of_adapter(adapter).values()
        measured = [stats for stats in all_stats if stats.verify_time.is_measured]
        return max(measured, key=lambda stats: stats.num_rounds, default=None)

    def _draft_s(self, pool: str, adapter: str) -> Callable[[float, float], float] | None:
        """Return the seconds that a pool's drafts take, measured or as its replicas report; None while unknown."""
        for stats in (self._pool_stats.get(pool, adapter), self._pool_stats.get(pool)):
            if stats is not None and stats.draft_wait.is_measured:
                return stats.draft_wait.predict
        step = self._step_s.get(pool)
        return None if step is None else lambda num_tokens, _: step.value * num_tokens
