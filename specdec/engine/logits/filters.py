"""Filtering of logits into distributions, batched over the rows of a step: temperature, top-k, top-p and min-p.

This is the PyTorch counterpart of `specdec.core.reference`. It takes the logits of a whole step (`[R, V]`, any device)
after the penalties of `specdec.engine.logits.penalties`. Rows with neutral filters cost a softmax. Other rows sort only
their top tokens, unless the distribution needs more. Everything is float64 except the plain greedy choice. A round's
distributions go to `specdec.engine.logits.rows`; greedy choices go into the answer directly. Called by
`specdec.engine.drafting` and the target service's `program`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

from specdec.contract.types import SamplingFilters
from specdec.engine.logits.penalties import FilterContext, column, process_logits, processed_logits
from specdec.engine.logits.step_logits import StepLogits
from specdec.engine.logits.transfer import to_device

MemberT = TypeVar("MemberT")

#: Maximum number of logits that are filtered at once, except for a single larger call. Each takes about 75 bytes.
MAX_BATCH_LOGITS = 1 << 24

#: Number of top tokens that top-p considers first.
_FIRST_CANDIDATES = 512

#: Factor by which top-p increases the number of candidates while they do not suffice.
_CANDIDATE_GROWTH = 16


def split_batches(
    members: Sequence[MemberT], num_rows: Callable[[MemberT], int], num_tokens: int
) -> list[list[MemberT]]:
    """Cut a step's calls into batches of at most `MAX_BATCH_LOGITS`; a larger call becomes a batch by itself.

    Args:
        members: the calls, in the order of their rows.
        num_rows: returns the number of logit rows of a call.
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
    """Return the argmax token of each row after bias, penalties and masks; ties go to the lower id.

    Args:
        logits: R rows.
        contexts: R contexts; temperature, top-k, top-p and min-p cannot change the result and are ignored.
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
    """Return the distribution of each row; the batched `specdec.core.reference.filtered_distribution`.

    Args:
        logits: float32 [R, V]; not changed.
        contexts: R contexts.

    Returns:
        float64 [R, V], whose rows sum to 1; one-hot for greedy rows.
    """
    return distributions_of(processed_logits(logits, contexts), [context.filters for context in contexts])


def distributions_of(
    scores: torch.Tensor, params: Sequence[SamplingFilters], short: torch.Tensor | None = None
) -> torch.Tensor:
    """Return the distributions of logits after bias, penalties and masks.

    Args:
        scores: float64 [R, V]; overwritten.
        params: R filters.
        short: bool [R], initially False. If given, nothing is read from the device, top-p considers only its first
            candidates, and the rows for which they do not suffice, whose distributions are wrong, become True.
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
        cut_short = None if short is None else short[index]
        distributions[index] = _cut_distributions(scores[index], [params[row] for row in cut], cut_short)
        if short is not None and cut_short is not None:
            short[index] = cut_short
    return distributions


def _limits_number(filters: SamplingFilters, num_tokens: int) -> bool:
    """Return whether top-k removes tokens from a row of `num_tokens` tokens."""
    return 0 < filters.top_k < num_tokens


def _weights(scores: torch.Tensor, params: Sequence[SamplingFilters]) -> torch.Tensor:
    """Overwrite and return `scores` (float64 [N, V]) with exp((logit - maximum) / T), so the largest weight is 1."""
    scores -= scores.amax(dim=-1, keepdim=True)
    if any(filters.temperature != 1.0 for filters in params):
        scores /= column(scores, [filters.temperature for filters in params])[:, None]
    return scores.exp_()


def _apply_min_p(weights: torch.Tensor, params: Sequence[SamplingFilters]) -> None:
    """Set weights (float64 [N, K], the largest 1) below min_p to 0, in place."""
    if any(filters.min_p > 0.0 for filters in params):
        weights[weights < column(weights, [filters.min_p for filters in params])[:, None]] = 0.0


def _dense_distributions(scores: torch.Tensor, params: Sequence[SamplingFilters]) -> torch.Tensor:
    """Return the distributions of rows without top-k and top-p, without sorting; overwrites `scores` (float64 [N,
    V])."""
    weights = _weights(scores, params)
    _apply_min_p(weights, params)
    return weights.div_(weights.sum(dim=-1, keepdim=True))


def _cut_distributions(
    scores: torch.Tensor, params: Sequence[SamplingFilters], short: torch.Tensor | None
) -> torch.Tensor:
    """Return the distributions of rows with top-k or top-p from their top tokens; `scores` is float64 [N, V]."""
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
    """Write the distributions of some rows from their top `num_candidates` tokens.

    Args:
        distributions: float64 [N, V], zero in the rows to write.
        scores: float64 [N, V], before temperature.
        params: N filters.
        rows: indices of the M rows.
        num_candidates: at least the largest top-k of the rows.
        totals: float64 [M]: total weight that top-p is a share of; None: the weight of the tokens that top-k keeps.

    Returns:
        bool [M]: whether top-p needs more candidates. Such a row without top-k is not right yet, unless all tokens were
        candidates. With top-p 1 the result is always True.
    """
    chosen = [params[row] for row in rows]
    index = to_device(rows, scores.device, torch.int64)
    values, ids = stable_topk(scores[index], num_candidates, floor=-torch.inf)  # [M, K]
    weights = _weights(values, chosen)
    if totals is None:
        limits = to_device([filters.top_k for filters in chosen], scores.device, torch.int64)
        weights[torch.arange(num_candidates, device=scores.device) >= limits[:, None]] = 0.0
        totals = weights.sum(dim=-1)
    # Top-p 1 is off: rounding in the sums must not remove tokens.
    bounds = totals * column(scores, [filters.top_p if filters.top_p < 1.0 else torch.inf for filters in chosen])
    reach = weights.cumsum(dim=-1)
    is_short = reach[:, -1] < bounds
    weights[torch.nn.functional.pad(reach[:, :-1], (1, 0)) >= bounds[:, None]] = 0.0
    _apply_min_p(weights, chosen)
    distributions[index[:, None], ids] = weights / weights.sum(dim=-1, keepdim=True)
    return is_short


def stable_topk(values: torch.Tensor, num: int, *, floor: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the `num` largest values of each row in descending order; ties go to the lower id.

    Args:
        values: float [N, V].
        num: 1..V; larger numbers select all.
        floor: value of entries that do not matter; it is undefined which of those are returned.

    Returns:
        Values and int64 ids, [N, min(num, V)].
    """
    if num >= values.shape[-1]:
        return torch.sort(values, dim=-1, descending=True, stable=True)
    top, ids = torch.topk(values, num + 1, dim=-1)
    cuts, next_values = top[:, num - 1], top[:, num]
    # topk takes any of the entries that tie at the cut. On an accelerator, checking for a tie would wait for the
    # device.
    if values.device.type != "cpu" or ((cuts == next_values) & (cuts > floor)).any():
        ids = _ids_from(values, cuts, num)
    else:
        ids = ids[:, :num].sort(dim=-1).values
    ordered, order = values.gather(-1, ids).sort(dim=-1, descending=True, stable=True)
    return ordered, ids.gather(-1, order)


def _ids_from(values: torch.Tensor, cuts: torch.Tensor, num: int) -> torch.Tensor:
    """Return the ids of each row's `num` largest values, ascending; ties at the cut go to the lower ids.

    Args:
        values: float [N, V].
        cuts: float [N]: the `num`-th largest of each row.
        num: 1..V.

    Returns:
        int64 [N, num].
    """
    above, at_cut = values > cuts[:, None], values == cuts[:, None]
    taken = above | (at_cut & (at_cut.cumsum(dim=-1) <= num - above.sum(dim=-1, keepdim=True)))
    # Each taken id goes to the place of its rank, all others to one extra place.
    places = torch.where(taken, taken.cumsum(dim=-1) - 1, num)
    ids = torch.arange(values.shape[-1], device=values.device).expand_as(places)
    return ids.new_zeros(len(values), num + 1).scatter_(1, places, ids)[:, :num]
