"""Pre-drafting: draft a session's next round while the target verifies this one (docs/protocol.md section 6).

**Experimental.** It is off by default. The experiment ends with removal if `python -m bench orchestration --rows 9` on
the presets, and `python -m bench gpu` on a GPU, show rounds with `--predraft on` that are not at least 1.1 times as
fast as without it at any stated round-trip time.

A round of L draft tokens has few outcomes: k accepted tokens, 0..L, then one token of the target. For each k, and for
the top F tokens at that position, a branch assumes the outcome and drafts from it. The top tokens after k < L are those
that the draft computed there, without the rejected token. After L they are known once the main branch has run the last
draft token.

    committed ─┬─ x1 ─┬─ x2 (main)  ─┬─ t  ▸ branches of k = 2
               │      └─ t           └─ t'
               └─ t   └─ t'          ▸ branches of k = 1
                  ▸ branches of k = 0

The next call names the outcome by its committed tokens. The branch that assumed exactly those, with the same
parameters, seed and turn, becomes the session's sequence, and its draft is the answer, cut or extended to the requested
gamma. All other branches end. Draft tokens are sampled with the keys of their round, so a hit and a miss give the same
tokens. The contents of a branch's draft never decide whether it is used.

The model and the cut of supports are fixed in this process, so no key names them. `fan_out_policy` chooses the fan-out.
Called by the engine loop on the device thread.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Many
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from typing import Protocol

import numpy as np
import torch

from draft_service.drafting import DraftProgram, is_complete, proposal_of, request_of
from draft_service.fan_out_policy import MAX_FAN_OUT, FanOutPolicy, Predraft
from specdec.contract.types import BLOCK_TOKENS, ProposeRequest, SessionPosition
from specdec.engine.drafting.drawing import DrawnDraft
from specdec.engine.loop.idle_drafting import Branch, IdleDrafting
from specdec.engine.loop.job import Job, split_non_finite
from specdec.engine.sessions.calls import Call
from specdec.engine.sessions.sequence import Sequence
from specdec.engine.sessions.table import SessionTable

#: Top tokens that a draft notes at each position: the guesses, and the sampled token, which may be one of them.
NUM_LIKELIEST = MAX_FAN_OUT + 1

#: Limit on sessions that are pre-drafted at once. A replica with more sessions has no idle time.
MAX_TREES = 8

#: Limit on the branches of one step, for which a call may have to wait.
MAX_STEP_BRANCHES = 64

_NO_TOKENS = np.empty(0, dtype=np.uint32)


class PredraftObserver(Protocol):
    """Receiver of pre-drafting statistics; called from the device thread."""

    def observe_predraft(self, *, outcome: str, num_branches: int, num_wasted: int, num_tokens: int) -> None:
        """Record the end of a round's branches.

        Args:
            outcome: hit, extended (a hit with fewer tokens than requested), miss, or unasked (no call arrived).
            num_branches: number of branches.
            num_wasted: number of branches that no call used.
            num_tokens: number of their draft tokens.
        """
        ...


@dataclass(eq=False, slots=True)
class SpeculationTree:
    """An answered round and the branches that grow from it."""

    root: Sequence
    request: ProposeRequest
    draft: DrawnDraft
    fan_out: int
    """Fan-out of the branches; 0: only times are measured."""
    answered_s: float
    is_expanded: bool = False
    main_branch: Branch | None = None
    """Branch that runs the last draft token; branches of full acceptance follow it."""
    branches: list[Branch] = field(default_factory=list)
    """Branches, the more probable ones first as far as known."""
    is_over: bool = False
    """True once the next call has arrived: the tree waits for its answer only to measure the round."""

    @property
    def num_draft_tokens(self) -> int:
        return len(self.draft.token_ids)

    @property
    def has_work(self) -> bool:
        if self.is_over or not self.fan_out:
            return False
        return not self.is_expanded or next(self.growing(), None) is not None

    def growing(self) -> Iterator[Branch]:
        """Return the branches with pending tokens."""
        if self.main_branch is not None and self.main_branch.is_alive and self.main_branch.job.num_pending:
            yield self.main_branch
        for branch in self.branches:
            if branch.is_alive and branch.job.answer is None:
                yield branch

    def remove(self, jobs: Many[Job]) -> None:
        """Drop the branches of `jobs`; their blocks are released with those of the tree."""
        self.branches = [branch for branch in self.branches if branch.job not in jobs]
        if self.main_branch is not None and self.main_branch.job in jobs:
            self.main_branch = None

    def assumed(self, position: SessionPosition) -> Branch | None:
        """Return the branch that assumed the committed tokens of `position` and has draft tokens, or None."""
        for branch in self.branches:
            job = branch.job
            if (
                branch.is_alive
                and _num_drafted(branch)
                and job.call.position.committed_len == position.committed_len
                and np.array_equal(job.token_ids[position.start : position.committed_len], position.token_ids)
                and _parameters(job.call.position) == _parameters(position)
            ):
                return branch
        return None


class Predrafter(IdleDrafting):
    """Idle drafting with trees of branches between calls."""

    def __init__(
        self,
        program: DraftProgram,
        *,
        policy: Predraft,
        max_context_tokens: int,
        observer: PredraftObserver | None = None,
        clock: Callable[[], float],
    ) -> None:
        """`program` must note the top `NUM_LIKELIEST` tokens of each position."""
        self._program = program
        self._fan_out_policy = FanOutPolicy(policy)
        self._max_context_tokens = max_context_tokens
        self._observer = observer
        self._clock = clock
        self._trees: OrderedDict[str, SpeculationTree] = OrderedDict()  # by session id, the newest last
        self._step_began_s = 0.0
        self._step_fan_out = 0

    def has_work(self) -> bool:
        return any(tree.has_work for tree in self._trees.values())

    def note_answered(self, job: Job) -> None:
        """Begin a tree; beyond the limit the oldest one ends."""
        now_s = self._clock()
        before = self._trees.pop(job.sequence.session_id, None)
        if before is not None:
            self._note_round(before, job.call.position, now_s)
        if job.call.constraint is not None:
            return  # a branch would need masks of its own
        draft: DrawnDraft = job.progress
        if len(draft.top_token_ids) != len(draft.token_ids):
            return  # drafted in a step with too many jobs to note top tokens
        request = request_of(job.call)
        fan_out = self._fan_out_policy.choose(request.gamma)
        self._trees[job.sequence.session_id] = SpeculationTree(job.sequence, request, draft, fan_out, now_s)
        if len(self._trees) > MAX_TREES:
            _, oldest = self._trees.popitem(last=False)
            self._end(oldest, None, "unasked")

    def take(self, sequence: Sequence, call: Call) -> Branch | None:
        """Return the branch that assumed `call`; see `IdleDrafting.take`."""
        tree = self._trees.get(sequence.session_id)
        if tree is None or tree.root is not sequence or tree.is_over:
            return None
        if _is_next(tree, call.position):
            self._fan_out_policy.observe_wait(self._clock() - tree.answered_s)
        branch = tree.assumed(call.position)
        outcome = "miss" if branch is None else "hit" if _suffices(branch, request_of(call)) else "extended"
        self._end(tree, branch, outcome)
        return branch

    def resume(self, job: Job, branch: Branch) -> None:
        """Answer with the branch's draft, or continue it; see `IdleDrafting.resume`."""
        job.progress = branch.job.progress
        job.progress.cut(request_of(job.call).gamma)
        if is_complete(job):
            job.finish(proposal_of(job))
        elif not job.num_pending:
            job.append(job.progress.token_ids[-1])  # the branch was complete and did not run its last token

    def next_step(self, sessions: SessionTable) -> Many[Branch]:
        """Return the growing branches, those of the newest tree first, up to the limit of a step."""
        batch: list[Branch] = []
        fan_outs: list[int] = []
        for tree in reversed(self._trees.values()):
            if tree.has_work and not tree.is_expanded:
                self._expand(tree, sessions)
            if tree.has_work:
                batch += tree.growing()
                fan_outs.append(tree.fan_out)
        self._step_fan_out = fan_outs[0] if len(fan_outs) == 1 else 0  # the time of several trees would say little
        self._step_began_s = self._clock()
        return batch[:MAX_STEP_BRANCHES]

    def advance(self, branches: Many[Branch], logits: torch.Tensor, sessions: SessionTable) -> None:
        """Sample a token for every branch, and branch from the main branches that have run."""
        jobs, non_finite, read = split_non_finite([branch.job for branch in branches], logits)
        trees = [tree for tree in self._trees.values() if tree.has_work or tree.main_branch is not None]
        for tree in trees if non_finite else ():
            tree.remove(non_finite)
        tree_of_main_branch = {tree.main_branch.job: tree for tree in trees if tree.main_branch is not None}
        main_branch_rows = [row for row, job in enumerate(jobs) if job in tree_of_main_branch]
        branch_rows = [row for row, job in enumerate(jobs) if job not in tree_of_main_branch]
        if branch_rows:
            self._program.draw([jobs[row] for row in branch_rows], read.select(branch_rows))
        if main_branch_rows:
            main_branches = [jobs[row] for row in main_branch_rows]
            for job, guesses in zip(
                main_branches, self._program.guess(main_branches, read.select(main_branch_rows)), strict=True
            ):
                tree = tree_of_main_branch[job]
                grown = self._branches(tree, job.sequence, tree.num_draft_tokens, guesses, sessions)
                tree.branches[:0] = grown  # full acceptance first: with a useful draft it is the most probable outcome
        if self._step_fan_out:
            self._fan_out_policy.observe_step(self._step_fan_out, self._clock() - self._step_began_s)

    def _expand(self, tree: SpeculationTree, sessions: SessionTable) -> None:
        """Make the branches of partial acceptance, and the main branch."""
        tree.is_expanded = True
        request, draft = tree.request, tree.draft
        if tree.root.kv_len < request.position.committed_len + tree.num_draft_tokens - 1:
            return  # the session was released or evicted meanwhile
        if draft.token_ids[-1] not in request.position.filters.end_token_ids:
            tree.main_branch = self._main_branch(tree, sessions)
        by_length = []
        for num_accepted, rejected in enumerate(draft.token_ids):
            guesses = [token_id for token_id in draft.top_token_ids[num_accepted] if token_id != rejected]
            by_length.append(self._branches(tree, tree.root, num_accepted, guesses, sessions))
        # The first guesses of all lengths, then the second ones, because a step may not have room for all.
        tree.branches = [branch for rank in zip_longest(*by_length) for branch in rank if branch is not None]

    def _main_branch(self, tree: SpeculationTree, sessions: SessionTable) -> Branch | None:
        committed_len = tree.request.position.committed_len
        num_run = committed_len + tree.num_draft_tokens - 1
        return self._fork(tree.root, num_run, tree.draft.token_ids[-1], tree.request, num_run + 1, sessions)

    def _branches(
        self, tree: SpeculationTree, source: Sequence, num_accepted: int, guesses: list[int], sessions: SessionTable
    ) -> list[Branch]:
        """Return one branch a guess, at most `fan_out`; `source` holds the accepted tokens with KV."""
        position = tree.request.position
        accepted_len = position.committed_len + num_accepted
        gamma = min(tree.request.gamma, self._max_context_tokens - accepted_len - 1)
        if gamma < 1:
            return []
        branches = []
        for token_id in [guess for guess in guesses if guess not in position.filters.end_token_ids][: tree.fan_out]:
            assumed = replace(
                position, start=accepted_len, prefix_hash=b"", token_ids=np.array([token_id], dtype=np.uint32)
            )
            request = ProposeRequest(assumed, gamma)
            branch = self._fork(source, accepted_len, token_id, request, accepted_len + gamma, sessions)
            if branch is None:
                break
            branches.append(branch)
        return branches

    def _fork(
        self,
        source: Sequence,
        length: int,
        token_id: int,
        request: ProposeRequest,
        max_kv_len: int,
        sessions: SessionTable,
    ) -> Branch | None:
        """Return a branch that forks from `source` after `length` tokens with `token_id`; None if blocks are short."""
        fork = sessions.fork(source, length, max_kv_len)
        if fork is None:
            return None
        fork.append(np.array([token_id], dtype=np.uint32))
        call = Call(request=request, identity=(), draft_token_ids=_NO_TOKENS, num_logit_rows=1, max_kv_len=max_kv_len)
        job = Job(call, fork, arrival_step=0, arrival_s=self._clock(), clock=self._clock)
        index, offset = divmod(length, BLOCK_TOKENS)
        return Branch(job, (source.block_table[index], fork.block_table[index]) if offset else None)

    def _end(self, tree: SpeculationTree, taken: Branch | None, outcome: str) -> None:
        """End a tree's branches; the session table ends their forks."""
        if self._observer is not None and tree.fan_out:
            self._observer.observe_predraft(
                outcome=outcome,
                num_branches=len(tree.branches),
                num_wasted=len(tree.branches) - (taken is not None),
                num_tokens=sum(_num_drafted(branch) for branch in tree.branches),
            )
        tree.is_over = True
        tree.main_branch = None
        tree.branches = []

    def _note_round(self, tree: SpeculationTree, answered: SessionPosition, now_s: float) -> None:
        """Note that a session with a tree was answered again."""
        if tree.is_over and _is_next(tree, answered):
            self._fan_out_policy.observe_round(tree.fan_out, now_s - tree.answered_s)


def _is_next(tree: SpeculationTree, position: SessionPosition) -> bool:
    """Return whether a round directly follows the tree's; only then its time is measured."""
    before = tree.request.position
    return (
        position.turn == before.turn and 0 < position.committed_len - before.committed_len <= tree.num_draft_tokens + 1
    )


def _suffices(branch: Branch, request: ProposeRequest) -> bool:
    """Return whether a branch has all requested tokens, or ended at an end token."""
    return (
        _num_drafted(branch) >= request.gamma
        or branch.job.progress.token_ids[-1] in request.position.filters.end_token_ids
    )


def _num_drafted(branch: Branch) -> int:
    return len(branch.job.progress.token_ids) if branch.job.progress is not None else 0


def _parameters(position: SessionPosition) -> tuple[object, ...]:
    """Return the parameters on which a draft depends besides the committed tokens and gamma."""
    return position.filters, position.seed, position.turn, position.output_start, position.draw_rule
