"""What a replica may do while no call runs: work on calls that nobody has made yet.

A branch is such a call, assumed and drafted on a fork of its session's sequence. If the call then comes as assumed, the
fork becomes the session's own and what was drafted is its answer; if not, nothing of the branch remains.

Not here: which calls are worth assuming (`draft_service.predraft`). The loop asks its `IdleDrafting` between steps, on
the device thread, and runs a step of it only when no call is ready to run.
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
    """A call that nobody has made yet, worked on as a job whose sequence is a fork."""

    job: Job
    block_copy: tuple[int, int] | None
    """The partial block that the fork begins with, until it has been copied."""

    @property
    def is_alive(self) -> bool:
        """Whether its fork still stands; the session table may end it at any time."""
        return self.job.sequence.root is not None

    def note_run(self) -> None:
        """Its pending tokens, and the copy before them, have run."""
        self.job.sequence.kv_len = len(self.job.sequence)
        self.block_copy = None


class IdleDrafting:
    """A service without such work; one that has some overrides all of this."""

    def has_work(self) -> bool:
        """Whether `next_step` would give anything. Called often."""
        return False

    def note_answered(self, job: Job) -> None:
        """A call was answered and its sequence holds only what has KV: the next one may be assumed from here."""

    def take(self, sequence: Sequence, call: Call) -> Branch | None:
        """The branch that assumed `call`, with something drafted; None, a miss, where there is none.

        The call's start is known to be right. Either way the other branches of the session end now.
        """
        return None

    def resume(self, job: Job, branch: Branch) -> None:
        """Begins a job with what the branch drafted, and finishes it if that will do.

        The job's sequence has become the branch's fork.
        """

    def next_step(self, sessions: SessionTable) -> Many[Branch]:
        """The branches to run now, each with tokens pending; new ones fork from `sessions`."""
        return ()

    def advance(self, branches: Many[Branch], logits: torch.Tensor, sessions: SessionTable) -> None:
        """Takes the logits of a step: float32 [len(branches), V]."""
