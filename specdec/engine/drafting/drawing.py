"""Drawing of draft tokens from a step's logit rows, and the distribution q that a draft reports.

q is exactly what was sampled: the distribution is filtered, cut to a support and rounded to integers, and the token is
drawn from these integers. Sessions at different depths of their drafts share a step. Each row draws from its own
counter-based stream, so the other rows do not affect it. The logits may come from a draft model, from the target's
first layers or from its heads. Called by the draft service's `drafting` and the target service's `program`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from specdec.contract.types import Proposal, SamplingFilters, ScoreRequest, Stages, Support
from specdec.core.random import DrawKey, DrawStream, index_at_uniform
from specdec.core.sparse import draw_from_support, probability
from specdec.engine.logits.filters import filtered_distributions, greedy_choices, split_batches
from specdec.engine.logits.penalties import FilterContext, processed_logits
from specdec.engine.logits.rows import coupled_choices, coupled_scores, cut_supports
from specdec.engine.logits.step_logits import StepLogits
from specdec.engine.logits.transfer import to_host
from specdec.engine.loop.job import Job, RowKind, row_kind


@dataclass(slots=True)
class DrawnDraft:
    """The draft of one job so far."""

    token_ids: list[int] = field(default_factory=list)
    supports: list[Support] = field(default_factory=list)
    lost_mass: list[float] = field(default_factory=list)
    top_token_ids: list[list[int]] = field(default_factory=list)
    """Top tokens at each position, best first; the drawn token may be among them."""
    q: list[float] = field(default_factory=list)
    """Probability with which each scored token would have been drawn."""
    is_wide: bool = False
    """True once a distribution needed more candidates than a multi-step draft considers, so further tokens take one
    step each."""

    def cut(self, num_draft_tokens: int) -> None:
        """Keep the first tokens only."""
        for column in (self.token_ids, self.supports, self.lost_mass, self.top_token_ids):
            del column[num_draft_tokens:]

    def is_complete(self, gamma: int, filters: SamplingFilters) -> bool:
        """Return whether the draft has `gamma` tokens or ends with an end token.

        Stopping after an end token is exact because the decision depends only on tokens drawn so far.
        """
        return len(self.token_ids) >= gamma or self.token_ids[-1] in filters.end_token_ids

    def score(self, drawn_id: int, scored_id: int) -> None:
        """Continue with a committed token instead of the drawn one, and note its q."""
        q = probability(scored_id, self.supports[-1]) if self.supports else float(drawn_id == scored_id)
        self.q.append(q)
        self.token_ids.append(scored_id)

    def score_text(self, drawn_ids: Sequence[int], scored_ids: Sequence[int]) -> None:
        """Continue with committed tokens up to the first one that differs from the drafted text.

        Args:
            drawn_ids: drafted tokens, each with q = 1; if empty, the next scored token has q = 0.
            scored_ids: all scored tokens, including those before.
        """
        missing = scored_ids[len(self.token_ids) :]
        for drawn_id, scored_id in zip(drawn_ids or [-1], missing, strict=False):
            self.token_ids.append(scored_id)
            self.q.append(float(drawn_id == scored_id))
            if drawn_id != scored_id:
                break

    def is_scored(self, request: ScoreRequest) -> bool:
        """Return whether all tokens that a round would have tested are scored."""
        return self.q[-1] == 0.0 or self.is_complete(len(request.token_ids), request.position.filters)

    def proposal(
        self, *, kv_len: int, num_cached_tokens: int, forward_s: float, stages: Stages | None = None
    ) -> Proposal:
        """Return the draft as an answer; the arguments are fields of `Proposal`."""
        return Proposal(
            draft_token_ids=np.array(self.token_ids, dtype=np.uint32),
            supports=tuple(self.supports),
            lost_mass=tuple(self.lost_mass),
            kv_len=kv_len,
            num_cached_tokens=num_cached_tokens,
            forward_s=forward_s,
            stages=stages,
        )


class Drawing:
    """Draws draft tokens from logit rows. Device thread only."""

    def __init__(self, *, s_max: int, coverage: float, top_n: int = 0) -> None:
        """
        Args:
            s_max: maximum number of entries of a support.
            coverage: share of the distribution that a support covers.
            top_n: number of top tokens that a draft notes at each position.
        """
        self.s_max = s_max
        self.coverage = coverage
        self._top_n = top_n
        self._draw = {
            RowKind.GREEDY: self._draw_greedy,
            RowKind.COUPLED: self._draw_coupled,
            RowKind.DISTRIBUTION: self._draw_sampled,
        }
        self._guess = {
            RowKind.GREEDY: _greedy_scores,
            RowKind.COUPLED: _coupled_scores,
            RowKind.DISTRIBUTION: _bonus_scores,
        }

    def draw(self, jobs: Sequence[Job], logits: StepLogits, *, is_noted: bool = True) -> None:
        """Draw one token per job from its row of `logits` and add it to the draft in `job.progress`.

        Args:
            jobs: jobs that draft, or that score tokens as if they drafted.
            logits: one row per job.
            is_noted: whether the drafts note their top tokens.
        """
        top_n = self._top_n if is_noted else 0
        for kind, drawn_by, rows in _batches(jobs, logits.num_tokens):
            for job in drawn_by:
                job.progress = job.progress or DrawnDraft()
            token_ids = self._draw[kind](drawn_by, logits.select(rows), top_n)
            for job, token_id in zip(drawn_by, token_ids, strict=True):
                draft, request = job.progress, job.call.request
                if isinstance(request, ScoreRequest):
                    draft.score(token_id, int(request.token_ids[len(draft.token_ids)]))
                else:
                    draft.token_ids.append(token_id)

    def guess(self, jobs: Sequence[Job], logits: StepLogits) -> list[list[int]]:
        """Return, best first, the tokens that the target will most probably emit after each job's last draft token.

        Args:
            jobs: jobs whose draft tokens have all run.
            logits: one row per job.
        """
        guesses: dict[Job, list[int]] = {}
        for kind, guessed_for, rows in _batches(jobs, logits.num_tokens):
            scores = self._guess[kind](guessed_for, logits.select(rows).values)
            guesses.update(zip(guessed_for, _top(scores, self._top_n), strict=True))
        return [guesses[job] for job in jobs]

    def cut(self, distributions: torch.Tensor) -> Sequence[tuple[Support, float]]:
        """Return the support to draw from and the mass outside it, for each distribution (float64 [R, V])."""
        return cut_supports(distributions, self.s_max, self.coverage)

    def _draw_greedy(self, jobs: Sequence[Job], logits: StepLogits, top_n: int) -> list[int]:
        if top_n:
            _note(jobs, _top(_greedy_scores(jobs, logits.values), top_n))
        return greedy_choices(logits, [context_of(job) for job in jobs])

    def _draw_coupled(self, jobs: Sequence[Job], logits: StepLogits, top_n: int) -> list[int]:
        token_ids: list[int]
        if top_n:
            scores = _coupled_scores(jobs, logits.values)
            _note(jobs, _top(scores, top_n))
            token_ids = scores.argmax(dim=-1).tolist()
        else:
            token_ids, _ = coupled_choices(*_coupled_rows(jobs, logits.values))
        return token_ids

    def _draw_sampled(self, jobs: Sequence[Job], logits: StepLogits, top_n: int) -> list[int]:
        distributions = filtered_distributions(logits.values, [context_of(job) for job in jobs])
        return self.draw_from_cuts(jobs, self.cut(distributions), top_n)

    def draw_from_cuts(self, jobs: Sequence[Job], cuts: Sequence[tuple[Support, float]], top_n: int) -> list[int]:
        """Draw one token per job from its support; add everything except the token to the draft in `job.progress`.

        Args:
            jobs: jobs whose rounds carry distributions.
            cuts: results of `cut`.
            top_n: number of top tokens that the drafts note.
        """
        token_ids = []
        for job, (support, lost_mass) in zip(jobs, cuts, strict=True):
            token_ids.append(draw_from_support(support, draw_key_of(job), len(job.progress.token_ids)))
            job.progress.supports.append(support)
            job.progress.lost_mass.append(lost_mass)
            if top_n:
                best = np.argsort(support.weights, kind="stable")[: -top_n - 1 : -1]
                job.progress.top_token_ids.append(support.token_ids[best].tolist())
        return token_ids


def _batches(jobs: Sequence[Job], num_tokens: int) -> list[tuple[RowKind, list[Job], list[int]]]:
    """Return batches of bounded size of jobs of one kind, each with the indices of its rows."""
    rows_of: dict[RowKind, list[int]] = {}
    for row, job in enumerate(jobs):
        rows_of.setdefault(row_kind(job.call.position), []).append(row)
    return [
        (kind, [jobs[row] for row in rows], rows)
        for kind, rows_of_kind in rows_of.items()
        for rows in split_batches(rows_of_kind, lambda _: 1, num_tokens)
    ]


def _greedy_scores(jobs: Sequence[Job], logits: torch.Tensor) -> torch.Tensor:
    contexts = [context_of(job) for job in jobs]
    return processed_logits(logits, contexts) if any(c.changes_logits for c in contexts) else logits


def _coupled_scores(jobs: Sequence[Job], logits: torch.Tensor) -> torch.Tensor:
    return coupled_scores(*_coupled_rows(jobs, logits))


def _coupled_rows(jobs: Sequence[Job], logits: torch.Tensor) -> tuple[torch.Tensor, list[int], list[int], list[int]]:
    """Return the distributions, seeds, turns and positions from which coupled tokens are drawn."""
    return (
        filtered_distributions(logits, [context_of(job) for job in jobs]),
        [job.call.position.seed for job in jobs],
        [job.call.position.turn for job in jobs],
        [len(job.token_ids) for job in jobs],
    )


def _bonus_scores(jobs: Sequence[Job], logits: torch.Tensor) -> torch.Tensor:
    """Return log q at the bonus position, with 0 for the token that q gives for the target's bonus draw from p."""
    distributions = filtered_distributions(logits, [context_of(job) for job in jobs])
    uniforms = [
        draw_key_of(job).uniform(len(job.token_ids) - job.call.position.committed_len, DrawStream.BONUS) for job in jobs
    ]
    for distribution, uniform in zip(distributions, uniforms, strict=True):
        distribution[index_at_uniform(distribution.cpu().numpy(), uniform)] = 1.0
    return distributions.log_()


def _top(scores: torch.Tensor, num: int) -> list[list[int]]:
    """Return the ids of the highest scores of each row, best first, without impossible tokens.

    The order of equal scores is undefined: these are guesses, and a stable order would delay every draft step.
    """
    values, ids = scores.topk(min(num, scores.shape[-1]), dim=-1)
    return [
        [token_id for token_id, value in zip(*row, strict=True) if value > -np.inf]
        for row in zip(*(column.tolist() for column in to_host(ids, values)), strict=True)
    ]


def _note(jobs: Sequence[Job], top_token_ids: list[list[int]]) -> None:
    for job, token_ids in zip(jobs, top_token_ids, strict=True):
        job.progress.top_token_ids.append(token_ids)


def context_of(job: Job) -> FilterContext:
    """Return everything besides the logits that a job's next distribution depends on."""
    position = job.call.position
    return FilterContext(position.filters, job.token_ids, position.output_start, job.mask_of(0))


def draw_key_of(job: Job) -> DrawKey:
    """Return the key of a job's draws from its supports."""
    position = job.call.position
    return DrawKey(position.seed, position.turn, position.committed_len)
