"""From logits to distributions, batched over the rows of a step: the torch twin of `specdec.core.reference`.

Takes the logits of one whole step (`[R, V]`, any device); rows whose filters are neutral cost a softmax, and sorting
happens on the likeliest few tokens unless the distribution itself is wider. Everything is float64 but the plain greedy
choice. A round's rows go from here to `specdec.engine.logits.rows`, or, when greedy, straight into the answer.

Not here: drawing, supports (`rows`). Called by `specdec.engine.drafting` and the target service's `program`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

from specdec.engine.logits.penalties import FilterContext, column, process_logits, processed_logits
from specdec.engine.logits.step_logits import StepLogits
from specdec.engine.logits.transfer import to_device
from specdec.types import SamplingFilters

MemberT = TypeVar("MemberT")

#: Logits that distributions are made of at once, as far as one call's rows allow: some 75 bytes of working memory each.
MAX_BATCH_LOGITS = 1 << 24

#: Candidates a top-p cut looks at first.
_FIRST_CANDIDATES = 512

#: And how many times more it looks at next, where those did not reach far enough.
_CANDIDATE_GROWTH = 16


def split_batches(
    members: Sequence[MemberT], num_rows: Callable[[MemberT], int], num_tokens: int
) -> list[list[MemberT]]:
    """Cuts a step's calls into batches that `MAX_BATCH_LOGITS` allows; one too large for it is a batch of its own.

    Args:
        members: in the order of their rows.
        num_rows: how many rows of logits a member has.
        num_tokens: V, the width of a row.
    """
    batches: list[list[MemberT]] = []
    room = 0
    for member in members:
        size = num_rows(member) * num_tokens
        if size > room:
            batches.append([])
            room = MAX_BATCH_LOGITS
        batches[-1].append(member)
        room -= size
    return batches


def greedy_choices(logits: StepLogits, contexts: Sequence[FilterContext]) -> list[int]:
    """The likeliest token of each row after bias, penalties and masks; ties go to the lower id.

    Args:
        logits: R rows.
        contexts: R contexts; temperature, top-k, top-p and min-p cannot change the answer and are not looked at.
    """
    touched = [row for row, context in enumerate(contexts) if context.changes_logits]
    choices = list(logits.top_ids)
    if touched:
        scores = logits.select(touched).values.to(torch.float64)  # [N, V]
        process_logits(scores, [contexts[row] for row in touched])
        for row, choice in zip(touched, scores.argmax(dim=-1).tolist(), strict=True):
            choices[row] = choice
    return choices


def filtered_distributions(logits: torch.Tensor, contexts: Sequence[FilterContext]) -> torch.Tensor:
    """The distribution of each row; the batched `specdec.core.reference.filtered_distribution`.

    Args:
        logits: float32 [R, V]; not changed.
        contexts: R contexts.

    Returns:
        float64 [R, V], rows sum to 1; one-hot where greedy.
    """
    return distributions_of(processed_logits(logits, contexts), [context.filters for context in contexts])


def distributions_of(
    scores: torch.Tensor, params: Sequence[SamplingFilters], short: torch.Tensor | None = None
) -> torch.Tensor:
    """`filtered_distributions` of what bias, penalties and masks have been done to: float64 [R, V], overwritten.

    Args:
        scores: float64 [R, V].
        params: R filters.
        short: bool [R], False. Where it is given nothing is read from the device, and it becomes True for the rows
            whose distribution is not right yet: top-p alone reaches further than was looked.
    """
    greedy = [row for row, filters in enumerate(params) if filters.is_greedy]
    dense = [
        row
        for row, filters in enumerate(params)
        if not filters.is_greedy and not _limits_number(filters, scores.shape[-1]) and filters.top_p >= 1.0
    ]
    cut = sorted(set(range(len(params))) - set(greedy) - set(dense))
    if len(dense) == len(params):
        return _dense_distributions(scores, params)
    if len(cut) == len(params):
        return _cut_distributions(scores, params, short)
    distributions = torch.zeros_like(scores)
    if greedy:
        distributions[greedy, scores[greedy].argmax(dim=-1)] = 1.0
    if dense:
        index = to_device(dense, scores.device, torch.int64)
        distributions[index] = _dense_distributions(scores[index], [params[row] for row in dense])
    if cut:
        index = to_device(cut, scores.device, torch.int64)
        own_short = None if short is None else short[index]
        distributions[index] = _cut_distributions(scores[index], [params[row] for row in cut], own_short)
        if short is not None and own_short is not None:
            short[index] = own_short
    return distributions


def _limits_number(filters: SamplingFilters, num_tokens: int) -> bool:
    """Whether top-k cuts anything off a row of `num_tokens` tokens."""
    return 0 < filters.top_k < num_tokens


def _weights(scores: torch.Tensor, params: Sequence[SamplingFilters]) -> torch.Tensor:
    """exp(logit / T) with the likeliest at exactly 1; overwrites `scores` (float64 [N, V]) and returns it."""
    scores -= scores.amax(dim=-1, keepdim=True)
    if any(filters.temperature != 1.0 for filters in params):
        scores /= column(scores, [filters.temperature for filters in params])[:, None]
    return scores.exp_()


def _apply_min_p(weights: torch.Tensor, params: Sequence[SamplingFilters]) -> None:
    """Drops weights (float64 [N, K], the largest 1) below min_p, in place."""
    if any(filters.min_p > 0.0 for filters in params):
        weights[weights < column(weights, [filters.min_p for filters in params])[:, None]] = 0.0


def _dense_distributions(scores: torch.Tensor, params: Sequence[SamplingFilters]) -> torch.Tensor:
    """Distributions of rows with neither top-k nor top-p: no sorting; overwrites `scores` (float64 [N, V])."""
    weights = _weights(scores, params)
    _apply_min_p(weights, params)
    return weights.div_(weights.sum(dim=-1, keepdim=True))


def _cut_distributions(
    scores: torch.Tensor, params: Sequence[SamplingFilters], short: torch.Tensor | None
) -> torch.Tensor:
    """Distributions of rows with top-k or top-p, made from their likeliest tokens alone; `scores` float64 [N, V]."""
    num_tokens = scores.shape[-1]
    distributions = torch.zeros_like(scores)
    limited = [row for row, filters in enumerate(params) if _limits_number(filters, num_tokens)]
    nucleus = [row for row, filters in enumerate(params) if not _limits_number(filters, num_tokens)]
    if limited:
        _cut_rows(distributions, scores, params, limited, max(params[row].top_k for row in limited))
    num_candidates = min(num_tokens, _FIRST_CANDIDATES)
    if nucleus:
        index = to_device(nucleus, scores.device, torch.int64)
        totals = _weights(scores[index], [params[row] for row in nucleus]).sum(dim=-1)
    while nucleus:
        is_short = _cut_rows(distributions, scores, params, nucleus, num_candidates, totals)
        if num_candidates == num_tokens:
            break
        if short is not None:
            short[index] = is_short
            break
        left = [place for place, row_is_short in enumerate(is_short.tolist()) if row_is_short]
        nucleus = [nucleus[place] for place in left]
        totals = totals[to_device(left, scores.device, torch.int64)]
        num_candidates = min(num_tokens, num_candidates * _CANDIDATE_GROWTH)
    return distributions


def _cut_rows(
    distributions: torch.Tensor,
    scores: torch.Tensor,
    params: Sequence[SamplingFilters],
    rows: list[int],
    num_candidates: int,
    totals: torch.Tensor | None = None,
) -> torch.Tensor:
    """Writes the distributions of `rows` from their likeliest `num_candidates` tokens.

    Args:
        distributions: float64 [N, V], zeros where written.
        scores: float64 [N, V], before temperature.
        params: N filters.
        rows: which of the N, M of them.
        num_candidates: no smaller than the largest top-k among them.
        totals: float64 [M], the weight that top-p is a share of; None: that of the tokens top-k left.

    Returns:
        bool [M]: whether top-p reaches past the candidates, as top-p 1 always does; of rows without top-k, unless those
        were all tokens, the distribution is not right yet.
    """
    chosen = [params[row] for row in rows]
    index = to_device(rows, scores.device, torch.int64)
    values, ids = stable_topk(scores[index], num_candidates, floor=-torch.inf)  # [M, K]
    weights = _weights(values, chosen)
    if totals is None:
        limits = to_device([filters.top_k for filters in chosen], scores.device, torch.int64)
        weights[torch.arange(num_candidates, device=scores.device) >= limits[:, None]] = 0.0
        totals = weights.sum(dim=-1)
    # Top-p 1 is off: rounding in the sums must not cut a tail.
    bounds = totals * column(scores, [filters.top_p if filters.top_p < 1.0 else torch.inf for filters in chosen])
    reach = weights.cumsum(dim=-1)
    is_short = reach[:, -1] < bounds
    weights[torch.nn.functional.pad(reach[:, :-1], (1, 0)) >= bounds[:, None]] = 0.0
    _apply_min_p(weights, chosen)
    distributions[index[:, None], ids] = weights / weights.sum(dim=-1, keepdim=True)
    return is_short


def stable_topk(values: torch.Tensor, num: int, *, floor: float) -> tuple[torch.Tensor, torch.Tensor]:
    """The `num` largest of each row, largest first, ties by lower id.

    Args:
        values: float [N, V].
        num: 1..V, or more for all.
        floor: the value of entries that cannot matter; which of those are returned is not defined.

    Returns:
        Values and int64 ids, [N, min(num, V)].
    """
    if num >= values.shape[-1]:
        return torch.sort(values, dim=-1, descending=True, stable=True)
    top, ids = torch.topk(values, num + 1, dim=-1)
    cuts, next_values = top[:, num - 1], top[:, num]
    # topk takes any of the entries that tie at the cut. To find out whether one does would wait for an accelerator.
    if values.device.type != "cpu" or ((cuts == next_values) & (cuts > floor)).any():
        ids = _ids_from(values, cuts, num)
    else:
        ids = ids[:, :num].sort(dim=-1).values
    ordered, order = values.gather(-1, ids).sort(dim=-1, descending=True, stable=True)
    return ordered, ids.gather(-1, order)


def _ids_from(values: torch.Tensor, cuts: torch.Tensor, num: int) -> torch.Tensor:
    """The ids of each row's `num` largest, ascending; of those that equal the smallest of them, the lower ids.

    Args:
        values: float [N, V].
        cuts: float [N]: the `num`-th largest of each row.
        num: 1..V.

    Returns:
        int64 [N, num].
    """
    above, at_cut = values > cuts[:, None], values == cuts[:, None]
    taken = above | (at_cut & (at_cut.cumsum(dim=-1) <= num - above.sum(dim=-1, keepdim=True)))
    # Each taken id to the place of its rank, the others to one place more.
    places = torch.where(taken, taken.cumsum(dim=-1) - 1, num)
    ids = torch.arange(values.shape[-1], device=values.device).expand_as(places)
    return ids.new_zeros(len(values), num + 1).scatter_(1, places, ids)[:, :num]
