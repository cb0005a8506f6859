"""Multi-step drafts: several draft steps that a worker runs without returning to the host between them.

`GreedyMultiStep` takes the argmax tokens that the worker chose, which a single step would have chosen too.

`DeviceMultiStep` draws on the device, and the device continues with the token that it drew. All results are read at the
end, and the host then draws the final tokens with the same code and keys as for single steps. Greedy and coupled tokens
are the device's own (the argmax of the same numbers); sampled tokens are drawn from the support that is reported. The
device may round running sums at the edge of a support differently. If the host draws another token than the device, the
multi-step draft ends there for that job, so the tokens never depend on how they were run. It also ends for a job whose
distribution needs more candidates than the device considered; the job's last token then runs again.

The tokens go back to `engine.loop.steps`. Single steps are drawn by `drawing`; `multi_step_policy` decides between the
two. Called by the draft service's `drafting`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from specdec.core.random import UNIFORM_BITS, DrawKey, DrawStream, philox4x32, seed_words
from specdec.core.sparse import MAX_WEIGHT, support_of_top
from specdec.engine.base import StepPlan, Worker
from specdec.engine.drafting.drawing import Drawing, DrawnDraft, context_of, draw_key_of
from specdec.engine.drafting.multi_step_policy import MultiStepPolicy
from specdec.engine.logits.filters import distributions_of, stable_topk
from specdec.engine.logits.penalties import RunningHistory
from specdec.engine.logits.rows import FIRST_CANDIDATES, noise_keys
from specdec.engine.logits.transfer import to_device, to_host
from specdec.engine.loop.job import Job, RowKind, row_kind

#: Number of entries whose noise is computed at once; limits working memory.
_CHUNK = 1 << 21


def dense_coupled_scores(distributions: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Return log distribution + keyed Gumbel noise, float64 [R, V]; -inf where the distribution is 0.

    Equals `rows.coupled_scores` in every entry, without reading which entries have mass.

    Args:
        distributions: float64 [R, V].
        keys: int64 [R, 4].
    """
    num_rows, num_tokens = distributions.shape
    scores = distributions.log()
    key = keys[:, :, None].unbind(1)  # [R, 1] each
    num_pairs = max(1, _CHUNK // (2 * num_rows))
    for first in range(0, -(-num_tokens // 2), num_pairs):
        pairs = torch.arange(first, min(first + num_pairs, -(-num_tokens // 2)), device=distributions.device)
        low_seed, high_seed, turn, position = key
        words = philox4x32((turn, position, pairs[None, :], int(DrawStream.COUPLED)), (low_seed, high_seed))
        bits = torch.stack(((words[0] << 20) | (words[1] >> 12), (words[2] << 20) | (words[3] >> 12)), dim=-1)
        uniforms = bits.flatten(1).to(torch.float64).add_(0.5).mul_(2.0**-UNIFORM_BITS)
        noise = uniforms.log_().neg_().log_().neg_()
        part = slice(2 * first, min(2 * first + noise.shape[1], num_tokens))
        scores[:, part] += noise[:, : part.stop - part.start]
    return scores


def support_draws(masses: torch.Tensor, ids: torch.Tensor, coverage: float, words: torch.Tensor) -> torch.Tensor:
    """Return one token drawn from each row's support, int64 [R].

    Equals `core.sparse.draw_from_support` except for the rounding of a running sum.

    Args:
        masses: float64 [R, K] of each row's top tokens, in descending order.
        ids: int64 [R, K].
        coverage: share of the distribution that a support covers.
        words: int64 [R, 2]: upper and lower 32 bits of each row's random number.
    """
    sizes = (masses.cumsum(dim=-1) < coverage).sum(dim=-1) + 1
    weights = (masses / masses[:, :1] * MAX_WEIGHT).round().to(torch.int64)
    weights = weights.masked_fill(torch.arange(masses.shape[1], device=masses.device) >= sizes[:, None], 0)
    ids, order = ids.sort(dim=-1)
    reach = weights.gather(-1, order).cumsum(dim=-1)
    totals = reach[:, -1]  # below 2^26, so nothing wraps
    points = (words[:, 0] * totals + ((words[:, 1] * totals) >> 32)) >> 32
    # A row of NaNs gives an arbitrary entry, which must still be a token id.
    entries = (reach <= points[:, None]).sum(dim=-1, keepdim=True).clamp(max=ids.shape[1] - 1)
    return ids.gather(-1, entries)[:, 0]


class GreedyMultiStep:
    """Implements `engine.loop.job.MultiStepDraft` with argmax tokens."""

    def __init__(self, jobs: Sequence[Job], num_steps: int, go_on: Callable[[Job], None]) -> None:
        """
        Args:
            jobs: the jobs, in the order of their rows.
            num_steps: number of tokens that each of them still needs.
            go_on: called with a job after each of its tokens; finishes the job or continues it.
        """
        self.num_steps = num_steps
        self._jobs = jobs
        self._go_on = go_on
        self._logits: list[list[float]] = []
        self._token_ids: list[list[int]] = []

    def run_on(self, worker: Worker, plan: StepPlan) -> bool:
        """See `MultiStepDraft.run_on`."""
        logits, token_ids = worker.draft_greedy(plan, self.num_steps)
        self._logits, self._token_ids = logits.tolist(), token_ids.tolist()
        return True

    def take(self, index: int, jobs: Sequence[Job]) -> tuple[list[Job], list[Job]]:
        """See `MultiStepDraft.take`."""
        non_finite, going = [], []
        for job, logit, token_id in zip(self._jobs, self._logits[index], self._token_ids[index], strict=True):
            if job not in jobs:
                continue
            if not math.isfinite(logit):
                non_finite.append(job)
                continue
            job.progress = job.progress or DrawnDraft()
            job.progress.token_ids.append(token_id)
            self._go_on(job)
            if job.answer is None:
                going.append(job)
        return non_finite, going


class DeviceMultiStep:
    """Implements `engine.loop.job.MultiStepDraft` with tokens that the device draws."""

    def __init__(
        self,
        drawing: Drawing,
        policy: MultiStepPolicy,
        jobs: Sequence[Job],
        num_steps: int,
        top_n: int,
        go_on: Callable[[Job], None],
    ) -> None:
        """
        Args:
            drawing: draws the final tokens.
            policy: notes the end of the multi-step draft.
            jobs: the jobs, in the order of their rows.
            num_steps: number of tokens that each of them still needs.
            top_n: number of top tokens that the drafts note.
            go_on: called with a job after each of its tokens; finishes the job or continues it.
        """
        self.num_steps = num_steps
        self._drawing = drawing
        self._policy = policy
        self._jobs = jobs
        self._top_n = top_n
        self._go_on = go_on
        rows_of: dict[RowKind, list[int]] = {}
        for row, job in enumerate(jobs):
            job.progress = job.progress or DrawnDraft()
            rows_of.setdefault(row_kind(job.call.position), []).append(row)
        self._parts = [_Part(kind, [jobs[row] for row in rows], rows, drawing, num_steps, top_n)
                       for kind, rows in rows_of.items()]  # fmt: skip
        self._drawn: list[list[torch.Tensor]] = []
        self._steps: list[list[NDArray[Any]]] = []

    def run_on(self, worker: Worker, plan: StepPlan) -> bool:
        """See `MultiStepDraft.run_on`."""
        if not worker.draft(plan, self.num_steps, self._draw):
            return False
        read = iter(to_host(*(tensor for drawn in self._drawn for tensor in drawn)))
        self._steps = [[next(read) for _ in drawn] for drawn in self._drawn]
        return True

    def _draw(self, index: int, logits: torch.Tensor) -> torch.Tensor:
        """See `engine.base.Worker.draft`."""
        maxima, token_ids = logits.max(dim=-1)
        noted = []
        for part in self._parts:
            part_ids, part_noted = part.draw(index, logits, token_ids)
            token_ids = part_ids if len(self._parts) == 1 else token_ids.index_copy(0, part.index_on(logits), part_ids)
            noted += part_noted
        self._drawn.append([maxima, token_ids, *noted])
        return token_ids

    def take(self, index: int, jobs: Sequence[Job]) -> tuple[list[Job], list[Job]]:
        """See `MultiStepDraft.take`."""
        maxima, device_ids, *noted = self._steps[index]
        non_finite, going = [], []
        columns = iter(noted)
        for part in self._parts:
            part_noted = [next(columns) for _ in range(part.num_noted)]
            for place, (job, row) in enumerate(zip(part.jobs, part.rows, strict=True)):
                if job not in jobs:
                    continue
                if not math.isfinite(maxima[row]):
                    non_finite.append(job)
                    continue
                if part.is_wide(place, part_noted):
                    job.progress.is_wide = True
                    job.sequence.kv_len -= 1  # the last token runs again for its logits
                    continue
                token_id = self._token_of(part, job, place, int(device_ids[row]), part_noted)
                job.progress.token_ids.append(token_id)
                self._go_on(job)
                if job.answer is None and token_id == device_ids[row]:
                    going.append(job)
        if index == self.num_steps - 1:
            self._policy.note_end(self._jobs)
        return non_finite, going

    def _token_of(self, part: _Part, job: Job, place: int, device_id: int, noted: Sequence[NDArray[Any]]) -> int:
        if part.kind is RowKind.DISTRIBUTION:
            cut = support_of_top(noted[1][place], noted[0][place], self._drawing.coverage)
            return self._drawing.draw_from_cuts([job], [cut], self._top_n)[0]
        if self._top_n:
            is_possible = noted[0][place] > -np.inf
            job.progress.top_token_ids.append(noted[1][place][is_possible].tolist())
        return device_id


class _Part:
    """The rows of one `RowKind`."""

    def __init__(
        self, kind: RowKind, jobs: list[Job], rows: list[int], drawing: Drawing, num_steps: int, top_n: int
    ) -> None:
        self.kind = kind
        self.jobs = jobs
        self.rows = rows
        self._drawing = drawing
        self._num_steps = num_steps
        self._top_n = top_n
        self._contexts = [context_of(job) for job in jobs]
        self._looks_once = kind is not RowKind.GREEDY and any(c.filters.top_p < 1.0 for c in self._contexts)
        """True if the last noted tensor tells which rows' top-p needs more candidates than are considered."""
        self._num_tokens = 0
        self._history: RunningHistory | None = None
        """Histories, if bias, penalties or a mask change one of the rows."""
        self._index: torch.Tensor | None = None
        self._keys: torch.Tensor | None = None

    @property
    def num_noted(self) -> int:
        """Number of tensors that `draw` returns besides the tokens."""
        return 2 * (self.kind is RowKind.DISTRIBUTION or self._top_n > 0) + self._looks_once

    def is_wide(self, place: int, noted: Sequence[NDArray[Any]]) -> bool:
        """Return whether the candidates noted for the row at `place` do not suffice to draw from."""
        if self._looks_once and noted[-1][place]:
            return True
        if self.kind is not RowKind.DISTRIBUTION:
            return False
        masses = noted[0]
        has_more = masses.shape[1] < min(self._drawing.s_max, self._num_tokens)
        return has_more and bool(masses[place].sum() < self._drawing.coverage)

    def index_on(self, like: torch.Tensor) -> torch.Tensor:
        """Return the row indices, int64, on the device of `like`."""
        if self._index is None:
            self._index = to_device(self.rows, like.device, torch.int64)
        return self._index

    def draw(self, index: int, logits: torch.Tensor, argmax: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Return the tokens of the part's rows and further tensors to read; `argmax` is that of all rows."""
        if len(self.rows) < len(logits):
            logits, argmax = (tensor.index_select(0, self.index_on(logits)) for tensor in (logits, argmax))
        if not any(context.changes_logits for context in self._contexts):
            return self._draw_from(index, logits, argmax)
        if self._history is None:
            self._history = RunningHistory(self._contexts, logits.shape[-1], logits.device)
        scores = self._history.processed_logits(logits)
        token_ids, noted = self._draw_from(index, scores, scores.argmax(dim=-1))
        self._history.add(token_ids)
        return token_ids, noted

    def _draw_from(
        self, index: int, scores: torch.Tensor, argmax: torch.Tensor
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Draw from the part's rows alone, after bias, penalties and masks."""
        if self.kind is RowKind.GREEDY:
            return argmax, self._top(scores)
        filters = [context.filters for context in self._contexts]
        short = [torch.zeros(len(scores), dtype=torch.bool, device=scores.device)] if self._looks_once else []
        distributions = distributions_of(scores.to(torch.float64, copy=True), filters, *short)
        if self.kind is RowKind.COUPLED:
            keys = self._keys_on(scores.device).clone()
            keys[:, 3] += index
            scores = dense_coupled_scores(distributions, keys)
            return scores.argmax(dim=-1), [*self._top(scores), *short]
        self._num_tokens = distributions.shape[-1]
        num_candidates = min(self._drawing.s_max, self._num_tokens, FIRST_CANDIDATES)
        masses, ids = stable_topk(distributions, num_candidates, floor=0.0)
        words = self._words_on(scores.device)[index]
        return support_draws(masses, ids, self._drawing.coverage, words), [masses, ids, *short]

    def _top(self, scores: torch.Tensor) -> list[torch.Tensor]:
        if not self._top_n:
            return []
        return list(scores.topk(min(self._top_n, scores.shape[-1]), dim=-1))

    def _keys_on(self, device: torch.device) -> torch.Tensor:
        """Return the noise keys of the first position, int64 [R, 4]."""
        if self._keys is None:
            seeds = [job.call.position.seed for job in self.jobs]
            turns = [job.call.position.turn for job in self.jobs]
            self._keys = noise_keys(seeds, turns, [len(job.token_ids) for job in self.jobs], device)
        return self._keys

    def _words_on(self, device: torch.device) -> torch.Tensor:
        """Return the random numbers of all draws, int64 [steps, R, 2]: upper and lower 32 bits."""
        if self._keys is None:
            keys = [(draw_key_of(job), len(job.progress.token_ids)) for job in self.jobs]
            words = [[_words(key, first + step) for key, first in keys] for step in range(self._num_steps)]
            self._keys = to_device(words, device, torch.int64)
        return self._keys


def _words(key: DrawKey, index: int) -> tuple[int, int]:
    """Return the upper and lower 32 bits that `DrawKey.below` uses at one index of a round."""
    upper, lower, _, _ = philox4x32((key.turn, key.committed_len, index, int(DrawStream.PROPOSE)), seed_words(key.seed))
    return upper, lower
