"""The program of a draft with another tokenizer: turn logits over draft-vocabulary tokens into tokens of the target.

A draft token is made in one of two ways. Both are exact, because the way is chosen before the token is sampled:

- **by common tokens**: the distribution is restricted to tokens whose bytes are a token of the target (summed if
  several are) and renormalised, *then* filtered, cut, rounded and sampled like any draft;
- **as text**: the draft continues with its own top tokens, and their bytes become tokens as the target's tokenizer
  would continue the session's text. Each of them is a point mass. The last one is left out, because later text may
  change it.

Text is used from the first position at which the restriction would lose more than `MAX_LOST_MASS`. It is used from the
beginning of a round if that share of the session's latest tokens has no counterpart: these tokens are draws of p, and
estimate the part of p that the restriction cannot reach. Penalties, bias and filters apply to the target's ids.

Drafts of a constrained request are always drawn from common tokens, those that the constraint allows: text would be
that of a model that knows nothing of the constraint. A draft ends where no common token is legal.

`draft_service.drafting` samples tokens and `sessions` keeps a session's text. Device thread only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from draft_service.cross_vocabulary.translated_sessions import CrossVocabularyPosition
from draft_service.drafting import DraftProgram, proposal_of
from specdec.checkpoints.cross_vocabulary.pair import TokenizerPair
from specdec.checkpoints.cross_vocabulary.retokenizer import retokenise
from specdec.contract.types import Proposal, ProposeRequest, Score, ScoreRequest, Stages, Support, TokenIds
from specdec.engine.drafting.drawing import DrawnDraft
from specdec.engine.logits.step_logits import StepLogits
from specdec.engine.logits.transfer import to_device, to_host
from specdec.engine.loop.constraint_masks import rows_without_token
from specdec.engine.loop.job import Job, Program
from specdec.engine.sessions.calls import Call

#: Lost share of a distribution above which the restriction costs more acceptance than point masses do.
MAX_LOST_MASS = 0.1

_NO_TOKENS = np.empty(0, dtype=np.uint32)


@dataclass(slots=True)
class CrossVocabularyRequest(ProposeRequest):
    """A round as the engine runs it, in draft-vocabulary tokens, with the request in the target's tokens."""

    target_request: ProposeRequest | ScoreRequest
    translated: CrossVocabularyPosition
    max_steps: int
    """Limit on the draft-vocabulary tokens to draft."""


class SharedTokens:
    """Rows of logits over draft-vocabulary tokens, restricted to the common tokens."""

    def __init__(self, pair: TokenizerPair, device: torch.device) -> None:
        """`pair` has the model's token map; rows of logits have its number of tokens, V."""
        self._is_shared = pair.tokens.target_of >= 0  # [V]
        self._num_target_tokens = pair.target_size
        self._unshared = torch.from_numpy(np.flatnonzero(~self._is_shared)).to(device)
        draft_vocab_ids = np.flatnonzero(self._is_shared)
        target_ids = pair.tokens.target_of[draft_vocab_ids]
        order = np.argsort(target_ids, kind="stable")
        # The first draft-vocabulary token of every target token, then the second ones of those that have several ...
        rank = np.arange(len(order)) - np.searchsorted(target_ids[order], target_ids[order])
        self._layers = [
            tuple(torch.from_numpy(ids[order][rank == index]).to(device) for ids in (draft_vocab_ids, target_ids))
            for index in range(int(rank.max(initial=0)) + 1)
        ]

    def restrict(self, logits: torch.Tensor) -> torch.Tensor:
        """Return float32 [R, target vocabulary] from [R, V]: -inf if the draft has no token of those bytes."""
        restricted = logits.new_full((len(logits), self._num_target_tokens), -torch.inf)
        (draft_vocab_ids, target_ids), *further = self._layers
        restricted[:, target_ids] = logits[:, draft_vocab_ids]
        for draft_vocab_ids, target_ids in further:
            restricted[:, target_ids] = torch.logaddexp(restricted[:, target_ids], logits[:, draft_vocab_ids])
        return restricted

    def lost_masses(self, logits: StepLogits, temperatures: Sequence[float]) -> list[float]:
        """Return each row's mass on tokens that are not common; 0 or 1 for a greedy row."""
        if not len(self._unshared):
            return [0.0] * len(logits)
        lost = [float(not self._is_shared[token_id]) for token_id in logits.top_ids]
        sampled = [row for row, temperature in enumerate(temperatures) if temperature > 0.0]
        if sampled:
            values = logits.select(sampled).values
            heat = to_device([temperatures[row] for row in sampled], values.device, torch.float32)
            weights = ((values - values.amax(dim=-1, keepdim=True)) / heat[:, None]).exp_()
            (shares,) = to_host(weights[:, self._unshared].sum(dim=-1) / weights.sum(dim=-1))
            for row, share in zip(sampled, shares.tolist(), strict=True):
                lost[row] = share
        return lost


class CrossVocabularyJob(Job):
    """A job as `DraftProgram` sees it: it drafts in the target's tokens."""

    def __init__(self, job: Job, pair: TokenizerPair) -> None:
        request = job.call.request
        assert isinstance(request, CrossVocabularyRequest)
        call = Call(
            request.target_request,
            job.call.identity,
            _NO_TOKENS,
            num_logit_rows=1,
            max_kv_len=0,
            constraint=job.call.constraint,
        )
        super().__init__(call, job.sequence, arrival_step=job.last_step, arrival_s=0.0, clock=lambda: job.elapsed_s)
        self._job = job
        self._pair = pair
        self._before = request.translated.open_piece
        self._gamma = request.gamma
        self._num_steps_left = request.max_steps
        committed = request.translated.committed
        self._history = np.empty(len(committed) + request.gamma, dtype=np.uint32)
        self._history[: len(committed)] = committed
        self._history_len = len(committed)
        self._text = b""
        self.is_text = job.call.constraint is None and request.translated.unmapped_share > MAX_LOST_MASS
        """True if the job drafts as text."""
        # Its time went into the draft-vocabulary tokens that had to run.
        num_run = job.call.position.committed_len - job.num_cached_tokens
        self.num_cached_tokens = max(0, len(committed) - num_run)
        self.progress: DrawnDraft = DrawnDraft()

    @property
    def token_ids(self) -> TokenIds:
        """uint32: committed tokens and single draft tokens, in the target's vocabulary."""
        return self._history[: self._history_len]

    @property
    def round_start(self) -> int:
        """Number of committed and drafted tokens, in the target's vocabulary."""
        return self._history_len

    @property
    def stages(self) -> Stages | None:
        """Stages of the underlying job."""
        return self._job.stages

    @property
    def kv_len(self) -> int:
        """Number of committed tokens; the text of all of them is known."""
        return self.call.position.committed_len

    def append(self, token_id: int) -> None:
        """Continue with a token of the target."""
        self._history[self._history_len] = token_id
        self._history_len += 1
        piece = self._pair.target.token_bytes[token_id]
        self._before = self._before + piece if piece else b""  # no token spans a special token
        self._num_steps_left -= 1
        self._job.append(int(self._pair.tokens.draft_vocab_of[token_id]))

    def finish(self, answer: Proposal | Score) -> None:
        """End the job."""
        self._job.finish(answer)

    def end(self) -> None:
        """End the draft with the tokens that it has."""
        self._finish_with([])

    def append_text(self, draft_vocab_id: int) -> None:
        """Continue with the text of a draft-vocabulary token, or end once it gives enough tokens of the target."""
        piece = self._pair.draft.token_bytes[draft_vocab_id]
        self._text += piece
        token_ids = retokenise(self._pair.target, self._before, self._text)
        self._num_steps_left -= 1
        num_missing = self._gamma - len(self.progress.token_ids)
        if not piece:  # the text ends here, so its last token is final
            end_id = int(self._pair.tokens.target_of[draft_vocab_id])
            self._finish_with([*token_ids, end_id] if end_id >= 0 else token_ids)
        elif len(token_ids) > num_missing:
            self._finish_with(token_ids[:num_missing])
        elif self._num_steps_left <= 0:
            self._finish_with(token_ids[:-1] or token_ids)
        else:
            self._job.append(draft_vocab_id)

    def _finish_with(self, token_ids: list[int]) -> None:
        """End the draft with point masses."""
        draft, request = self.progress, self.call.request
        if isinstance(request, ScoreRequest):
            draft.score_text(token_ids, request.token_ids.tolist())
            self.finish(Score(tuple(draft.q), forward_s=self.elapsed_s))
            return
        for token_id in token_ids[: self._gamma - len(draft.token_ids)]:
            draft.token_ids.append(token_id)
            if self.call.position.carries_distributions:
                draft.supports.append(Support(np.array([token_id], np.uint32), np.ones(1, np.uint16)))
                draft.lost_mass.append(0.0)
        self.finish(proposal_of(self))


class CrossVocabularyProgram(Program):
    """Program that turns rows over draft-vocabulary tokens into draft tokens of the target."""

    masks_own_rows = True

    def __init__(self, program: DraftProgram, pair: TokenizerPair, device: torch.device) -> None:
        """
        Args:
            program: samples over the target's vocabulary.
            pair: both tokenizers, with the model's token map.
            device: device of the rows.
        """
        self._program = program
        self._pair = pair
        self._shared = SharedTokens(pair, device)

    def masked_tokens(self, job: Job) -> tuple[TokenIds, list[int]]:
        """See `Program.masked_tokens`; a constraint is about the target's tokens."""
        return super().masked_tokens(self._draft_of(job))

    def advance(self, jobs: Sequence[Job], logits: StepLogits) -> None:
        """Draft one token, or the text of one draft-vocabulary token, for each job."""
        drafts = [self._draft_of(job) for job in jobs]
        for draft, job in zip(drafts, jobs, strict=True):
            draft.masks = job.masks
        undecided = [row for row, draft in enumerate(drafts) if not draft.is_text and draft.masks is None]
        if undecided:
            temperatures = [drafts[row].call.position.filters.temperature for row in undecided]
            lost_masses = self._shared.lost_masses(logits.select(undecided), temperatures)
            for row, lost in zip(undecided, lost_masses, strict=True):
                drafts[row].is_text = lost > MAX_LOST_MASS
        drawn = [row for row, draft in enumerate(drafts) if not draft.is_text]
        if drawn:
            self._draw([drafts[row] for row in drawn], self._shared.restrict(logits.select(drawn).values))
        for draft, draft_vocab_id in zip(drafts, logits.top_ids, strict=True):
            if draft.is_text:
                draft.append_text(draft_vocab_id)

    def _draw(self, drafts: Sequence[CrossVocabularyJob], restricted: torch.Tensor) -> None:
        """Draft one common token for each job. A draft ends if none of the legal tokens is common."""
        logits = StepLogits.read(restricted)
        without_token = {job for job, _ in rows_without_token(drafts, logits)}
        going = [row for row, draft in enumerate(drafts) if draft not in without_token]
        if going:
            self._program.draw([drafts[row] for row in going], logits.select(going), is_noted=False)
        for draft in drafts:
            if draft in without_token:
                draft.end()

    def _draft_of(self, job: Job) -> CrossVocabularyJob:
        if job.progress is None:
            job.progress = CrossVocabularyJob(job, self._pair)
        draft: CrossVocabularyJob = job.progress
        return draft
