"""The contract of drafting while no call runs, for calls that have not been made yet.

A branch is such an assumed call, drafted on a fork of its session's sequence. If the call then arrives as assumed, the
fork becomes the session's sequence and the draft is the answer; otherwise the branch is dropped.

`draft_service` implements the contract. The loop calls it between steps, on the device thread, and runs a step of
branches only when no call is ready to run.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import dataclass

import torch

from specdec.engine.loop.job import Job
from specdec.engine.sessions.calls import Call
from specdec.engine.sessions.sequence import Sequence
from specdec.engine.sessions.table import SessionTable


@dataclass(eq=False, slots=True)
class Branch:
    """An assumed call, run as a job whose sequence is a fork."""

    job: Job
    block_copy: tuple[int, int] | None
    """Copy (from, to) of the partial block that the fork begins with; None once it is copied."""

    @property
    def is_alive(self) -> bool:
        """True while the fork lives; the session table may end it at any time."""
        return self.job.sequence.root is not None

    def note_run(self) -> None:
        """Note that the pending tokens, and the copy before them, have run."""
        self.job.sequence.kv_len = len(self.job.sequence)
        self.block_copy = None


class IdleDrafting:
    """No idle drafting; a service that drafts overrides every method."""

    def has_work(self) -> bool:
        """Return whether `next_step` would return branches. Called often."""
        return False

    def note_answered(self, job: Job) -> None:
        """Note that a call was answered. All tokens of its sequence have KV, so the next call may be assumed."""

    def take(self, sequence: Sequence, call: Call) -> Branch | None:
        """Return the branch that assumed `call` and has draft tokens, or None for a miss.

        The call's start has been checked. In both cases the other branches of the session end.
        """
        return None

    def resume(self, job: Job, branch: Branch) -> None:
        """Begin a job with the branch's draft, and finish it if the draft is complete.

        The job's sequence has become the branch's fork.
        """

    def next_step(self, sessions: SessionTable) -> Many[Branch]:
        """Return the branches to run now, each with pending tokens; new ones fork from `sessions`."""
        return ()

    def advance(self, branches: Many[Branch], logits: torch.Tensor, sessions: SessionTable) -> None:
        """Take the logits of a step, float32 [len(branches), V]."""
