"""`python -m draft_service`: reads settings, loads the draft model, serves until SIGTERM or Ctrl-C.

Only what is a draft replica's own; the rest is `specdec.service.replica_main`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from draft_service.config import DraftSettings
from draft_service.servicer import DraftServicer
from specdec.engine.simulated.engines import SimulatedDraft
from specdec.observability.metrics import EngineMetrics
from specdec.rpc.server import DRAFT_SERVICE
from specdec.service.lifecycle import end_process
from specdec.service.replica_main import ReplicaKind, run_service

if TYPE_CHECKING:
    from draft_service.proposer import Proposer
    from specdec.engine.base import Worker
    from specdec.engine.loop.replica import ReplicaOptions


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the service; returns the exit code."""
    return run_service(KIND, argv)


def _build_proposer(
    worker: Worker, options: ReplicaOptions, settings: DraftSettings, metrics: EngineMetrics
) -> Proposer:
    from draft_service.pace import Predraft
    from draft_service.proposer import DraftOptions, Proposer

    drafting = DraftOptions(settings.max_support, settings.support_coverage, Predraft(settings.predraft))
    return Proposer(worker, options, drafting, observer=metrics)


KIND = ReplicaKind(
    role="draft",
    service_name=DRAFT_SERVICE,
    settings_type=DraftSettings,
    # After a round whose tokens were all accepted: the last of them, and the bonus token.
    num_decode_rows=lambda settings: 2,
    simulated_engine=SimulatedDraft,
    build_engine=_build_proposer,
    build_servicer=DraftServicer,
)


if __name__ == "__main__":
    end_process(main())
