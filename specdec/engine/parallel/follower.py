"""What every rank but the first does: the steps that it is told to, until it is told to end.

Not here: who tells (`engine.parallel.leader`), and what happens to a rank whose group is gone (`specdec.service.rank`).
"""

from __future__ import annotations

from specdec.engine.base import Worker
from specdec.engine.cold_tier import ColdTier
from specdec.engine.parallel.group import RankGroup
from specdec.engine.parallel.messages import END, NOTHING, STEP, unpack_plan
from specdec.engine.parallel.rank_tier import RankTier


def follow(ranks: RankGroup, worker: Worker, tier: ColdTier | None = None) -> None:
    """Returns when the first rank says so.

    Args:
        ranks: this rank's end of the group.
        worker: runs this rank's part of a step.
        tier: where this rank's part of the KV is kept; None: nowhere.

    Raises:
        RuntimeError: the group is lost, or a message is of an unknown kind.
    """
    parts = RankTier(tier, worker)
    while (kind := (message := ranks.receive())[0]) != END:
        if kind == STEP:
            plan = unpack_plan(message)
            parts.note(plan)
            worker.execute(plan)
        elif kind != NOTHING and not parts.hear(message, ranks.smallest):
            raise RuntimeError(f"a message of the unknown kind {kind}")
    worker.close()
