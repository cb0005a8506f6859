"""Several draft steps drawn where their logits are, and read at the end.

The device goes on with the token that it finds. What counts is drawn on the host afterwards, from what was read, by
the same code and the same keys as one step at a time: greedy and coupled tokens are the device's own (one argmax of the
same numbers), sampled ones are drawn from the support that travels. There the device's running sums may be rounded
otherwise than the host's, at the edge of a support: a draft whose token it did not foresee ends the run there and goes
on by itself, so what is drawn never depends on how it was run. So does one whose law reaches further than a run looks,
after its last token has run once more. The tokens go back to `engine.loop.steps`.

Not here: the steps themselves, one at a time (`drawing`), when drafts are run (`run_policy`). Called by the draft
service's `drafting`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from specdec.core.random import DrawKey, Stream, philox4x32, seed_words
from specdec.core.sparse import support_of_top
from specdec.engine.base import StepPlan, Worker
from specdec.engine.drafting.drawing import Draft, Drawing, context_of, draw_key_of
from specdec.engine.drafting.multi_step_policy import MultiStepPolicy
from specdec.engine.logits.device_draws import dense_coupled_scores, support_draws
from specdec.engine.logits.filters import distributions_of, stable_topk
from specdec.engine.logits.penalties import RunningHistory
from specdec.engine.logits.rows import FIRST_CANDIDATES, noise_keys
from specdec.engine.logits.transfer import to_device, to_host
from specdec.engine.loop.job import Job, RowKind, row_kind


class GreedyMultiStep:
    """Implements `engine.loop.job.MultiStepDraft`."""

    def __init__(self, jobs: Sequence[Job], num_steps: int, go_on: Callable[[Job], None]) -> None:
        """
        Args:
            jobs: those that run, in the order of their rows.
            num_steps: that each of them still wants.
            go_on: ends a job that has got its token, or lets it go on.
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
            job.progress = job.progress or Draft()
            job.progress.token_ids.append(token_id)
            self._go_on(job)
            if job.answer is None:
                going.append(job)
        return non_finite, going


class DeviceMultiStep:
    """Implements `engine.loop.job.MultiStepDraft`."""

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
            drawing: what the drafts are drawn by.
            policy: told of the run's end.
            jobs: those that may run, in the order of their rows.
            num_steps: that each of them still wants.
            top_n: how many of the likeliest tokens the drafts note; 0: none.
            go_on: ends a job that has got its token, or lets it go on.
        """
        self.num_steps = num_steps
        self._drawing = drawing
        self._policy = policy
        self._jobs = jobs
        self._top_n = top_n
        self._go_on = go_on
        rows_of: dict[RowKind, list[int]] = {}
        for row, job in enumerate(jobs):
            job.progress = job.progress or Draft()
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
            own_ids, own_noted = part.draw(index, logits, token_ids)
            token_ids = own_ids if len(self._parts) == 1 else token_ids.index_copy(0, part.index_on(logits), own_ids)
            noted += own_noted
        self._drawn.append([maxima, token_ids, *noted])
        return token_ids

    def take(self, index: int, jobs: Sequence[Job]) -> tuple[list[Job], list[Job]]:
        """See `MultiStepDraft.take`."""
        maxima, foreseen, *noted = self._steps[index]
        non_finite, going = [], []
        columns = iter(noted)
        for part in self._parts:
            own = [next(columns) for _ in range(part.num_noted)]
            for place, (job, row) in enumerate(zip(part.jobs, part.rows, strict=True)):
                if job not in jobs:
                    continue
                if not math.isfinite(maxima[row]):
                    non_finite.append(job)
                    continue
                if part.is_wide(place, own):
                    job.progress.is_wide = True
                    job.sequence.kv_len -= 1  # whose logits are needed again
                    continue
                token_id = self._token_of(part, job, place, int(foreseen[row]), own)
                job.progress.token_ids.append(token_id)
                self._go_on(job)
                if job.answer is None and token_id == foreseen[row]:
                    going.append(job)
        if index == self.num_steps - 1:
            self._policy.note_run(self._jobs)
        return non_finite, going

    def _token_of(self, part: _Part, job: Job, place: int, foreseen: int, noted: Sequence[NDArray[Any]]) -> int:
        if part.kind is RowKind.DISTRIBUTION:
            cut = support_of_top(noted[1][place], noted[0][place], self._drawing.coverage)
            return self._drawing.draw_from_cuts([job], [cut], self._top_n)[0]
        if self._top_n:
            is_possible = noted[0][place] > -np.inf
            job.progress.top_token_ids.append(noted[1][place][is_possible].tolist())
        return foreseen


class _Part:
    """The rows of one kind."""

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
        """Whether the last that it notes tells which rows' top-p reaches further than is looked."""
        self._num_tokens = 0
        self._history: RunningHistory | None = None
        """Where bias, penalties or a mask touch one of its rows."""
        self._index: torch.Tensor | None = None
        self._keys: torch.Tensor | None = None

    @property
    def num_noted(self) -> int:
        """Tensors beside the tokens that `draw` gives."""
        return 2 * (self.kind is RowKind.DISTRIBUTION or self._top_n > 0) + self._looks_once

    def is_wide(self, place: int, noted: Sequence[NDArray[Any]]) -> bool:
        """Whether what was noted of a row, its `place` among them, does not reach far enough to draw from."""
        if self._looks_once and noted[-1][place]:
            return True
        if self.kind is not RowKind.DISTRIBUTION:
            return False
        masses = noted[0]
        has_more = masses.shape[1] < min(self._drawing.s_max, self._num_tokens)
        return has_more and bool(masses[place].sum() < self._drawing.coverage)

    def index_on(self, like: torch.Tensor) -> torch.Tensor:
        """Its rows, int64, on the device of `like`."""
        if self._index is None:
            self._index = to_device(self.rows, like.device, torch.int64)
        return self._index

    def draw(self, index: int, logits: torch.Tensor, argmax: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """The tokens of its rows, and what is to be read beside them; `argmax` of all rows."""
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
        """As `draw`, of its own rows alone, after bias, penalties and masks."""
        if self.kind is RowKind.GREEDY:
            return argmax, self._top(scores)
        filters = [context.filters for context in self._contexts]
        reach = [torch.zeros(len(scores), dtype=torch.bool, device=scores.device)] if self._looks_once else []
        distributions = distributions_of(scores.to(torch.float64, copy=True), filters, *reach)
        if self.kind is RowKind.COUPLED:
            keys = self._keys_on(scores.device).clone()
            keys[:, 3] += index
            scores = dense_coupled_scores(distributions, keys)
            return scores.argmax(dim=-1), [*self._top(scores), *reach]
        self._num_tokens = distributions.shape[-1]
        num_looked_at = min(self._drawing.s_max, self._num_tokens, FIRST_CANDIDATES)
        masses, ids = stable_topk(distributions, num_looked_at, floor=0.0)
        words = self._words_on(scores.device)[index]
        return support_draws(masses, ids, self._drawing.coverage, words), [masses, ids, *reach]

    def _top(self, scores: torch.Tensor) -> list[torch.Tensor]:
        if not self._top_n:
            return []
        return list(scores.topk(min(self._top_n, scores.shape[-1]), dim=-1))

    def _keys_on(self, device: torch.device) -> torch.Tensor:
        """Of the noise at the first position, int64 [R, 4]."""
        if self._keys is None:
            asked = [job.call.position for job in self.jobs]
            positions = [len(job.token_ids) for job in self.jobs]
            self._keys = noise_keys([a.seed for a in asked], [a.turn for a in asked], positions, device)
        return self._keys

    def _words_on(self, device: torch.device) -> torch.Tensor:
        """What tokens are drawn by, int64 [steps, R, 2]: the upper and the lower 32 bits."""
        if self._keys is None:
            keys = [(draw_key_of(job), len(job.progress.token_ids)) for job in self.jobs]
            words = [[_words(key, first + step) for key, first in keys] for step in range(self._num_steps)]
            self._keys = to_device(words, device, torch.int64)
        return self._keys


def _words(key: DrawKey, index: int) -> tuple[int, int]:
    """The upper and the lower 32 bits of `DrawKey.below` at one index of a round."""
    upper, lower, _, _ = philox4x32((key.turn, key.committed_len, index, int(Stream.PROPOSE)), seed_words(key.seed))
    return upper, lower
