"""Score committed tokens: return q of each, the probability with which this draft would have sampled it.

Filters, cut and rounding are those of `drafting`, so q is the distribution that would have been sampled. In greedy and
coupled rounds q is 1 if the draft's choice is the token, else 0. The coordinator, which knows p, derives the
acceptance. Called by `drafting` with the logits of a call that `proposer` made.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from specdec.contract.types import Score, ScoreRequest, Support
from specdec.core.sparse import probability
from specdec.engine.logits.filters import filtered_distributions, greedy_choices
from specdec.engine.logits.penalties import FilterContext
from specdec.engine.logits.rows import coupled_choices
from specdec.engine.logits.step_logits import StepLogits
from specdec.engine.loop.job import Job, RowKind, row_kind

#: Function that cuts distributions (float64 [R, V]) to supports, each with the mass outside it.
Cut = Callable[[torch.Tensor], Sequence[tuple[Support, float]]]


def score_of(job: Job, logits: StepLogits, cut: Cut) -> Score:
    """Return the answer to a `ScoreRequest`.

    Args:
        job: job whose tokens have run: those of its position, then the scored ones but the last.
        logits: a row for each scored token, from the position before it.
        cut: cut of this replica's drafts.
    """
    request = job.call.request
    assert isinstance(request, ScoreRequest)
    position, scored = request.position, request.token_ids.tolist()
    contexts = [
        FilterContext(position.filters, job.token_ids[: position.committed_len + index], position.output_start)
        for index in range(len(scored))
    ]
    kind = row_kind(position)
    if kind is RowKind.DISTRIBUTION:
        supports = cut(filtered_distributions(logits.values, contexts))
        q = [probability(token_id, support) for token_id, (support, _) in zip(scored, supports, strict=True)]
    else:
        choices = greedy_choices(logits, contexts) if kind is RowKind.GREEDY else _coupled(request, logits, contexts)
        q = [float(choice == token_id) for choice, token_id in zip(choices, scored, strict=True)]
    return Score(tuple(q), forward_s=job.elapsed_s)


def _coupled(request: ScoreRequest, logits: StepLogits, contexts: Sequence[FilterContext]) -> list[int]:
    position, num_rows = request.position, len(contexts)
    distributions = filtered_distributions(logits.values, contexts)
    positions = [len(context.history) for context in contexts]
    choices, _ = coupled_choices(distributions, [position.seed] * num_rows, [position.turn] * num_rows, positions)
    return choices
