"""Run the steps that the first rank sends, on every other rank, until it sends the end.

The messages come from `engine.parallel.leader`; `specdec.service.rank` ends a rank that has lost its group.
"""

from __future__ import annotations

from specdec.engine.base import Worker
from specdec.engine.cold_tier import ColdTier
from specdec.engine.parallel.group import RankGroup
from specdec.engine.parallel.rank_messages import END, NOTHING, STEP, unpack_plan
from specdec.engine.parallel.rank_tier import RankTier


def follow(ranks: RankGroup, worker: Worker, tier: ColdTier | None = None) -> None:
    """Run steps until the first rank sends the end.

    Args:
        ranks: this rank's end of the group.
        worker: worker that runs this rank's part of a step.
        tier: cold tier of this rank's part of the KV; None if there is none.

    Raises:
        RuntimeError: the group is lost, or a message has an unknown kind.
    """
    parts = RankTier(tier, worker)
    while (kind := (message := ranks.receive())[0]) != END:
        if kind == STEP:
            plan = unpack_plan(message)
            parts.note(plan)
            worker.execute(plan)
        elif kind != NOTHING and not parts.hear(message, ranks.smallest):
            raise RuntimeError(f"received a message of unknown kind {kind} from the first rank")
    worker.close()
