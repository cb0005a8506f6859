"""What every rank but the first does: the steps that it is told to, until it is told to end.

Not here: who tells (`engine.parallel.lead`), and what happens to a rank whose group is gone (`specdec.service.rank`).
"""

from __future__ import annotations

from specdec.engine.base import Worker
from specdec.engine.parallel.group import RankGroup
from specdec.engine.parallel.messages import END, NOTHING, STEP, unpack_plan


def follow(ranks: RankGroup, worker: Worker) -> None:
    """Returns when the first rank says so.

    Args:
        ranks: this rank's end of the group.
        worker: runs this rank's part of a step.

    Raises:
        RuntimeError: the group is lost, or a message is of an unknown kind.
    """
    while (kind := (message := ranks.receive())[0]) != END:
        if kind == STEP:
            worker.execute(unpack_plan(message))
        elif kind != NOTHING:
            raise RuntimeError(f"a message of the unknown kind {kind}")
