"""`python -m target_service`: reads settings, loads the target model, serves until SIGTERM or Ctrl-C.

`specdec.service.replica_main` does the part that draft and target replicas share.
"""

from __future__ import annotations

if __name__ == "__main__":  # loading what follows takes a second, and a model longer
    from specdec.settings.early_signals import end_on_sigterm
    from specdec.settings.standard_streams import never_wait_for_readers

    end_on_sigterm()
    never_wait_for_readers()

import os
from collections.abc import Sequence
from dataclasses import replace
from importlib.util import find_spec
from typing import TYPE_CHECKING

from specdec.contract.engine_api import Engine
from specdec.engine.simulated.engines import SimulatedTarget
from specdec.observability.engine_metrics import EngineMetrics
from specdec.rpc.service_server import TARGET_SERVICE
from specdec.service.lifecycle import end_process
from specdec.service.replica_main import ReplicaKind, run_service
from specdec.settings.draft_specs import parse_local_drafts
from specdec.settings.engine_servers import OWN
from specdec.settings.target import TargetSettings
from target_service.servicer import TargetServicer

if TYPE_CHECKING:
    from specdec.engine.base import ModelShape, Worker
    from specdec.engine.loop.replica_engine import ReplicaOptions
    from specdec.structured.known_constraints import KnownConstraints
    from target_service.verifier import Verifier


def main(argv: Sequence[str] | None = None) -> int:
    """Run the service and return the exit code."""
    return run_service(KIND, argv)


def _build_verifier(
    worker: Worker, options: ReplicaOptions, settings: TargetSettings, metrics: EngineMetrics
) -> Verifier:
    from specdec.engine.sessions.kv_queue import WaitLimits
    from target_service.verifier import Verifier

    limits = WaitLimits(settings.max_waiting, settings.max_wait_s)
    return Verifier(
        worker,
        replace(options, wait_limits=limits, max_run=settings.max_run),
        observer=metrics,
        constraints=_known_constraints(settings, worker.shape) if find_spec("llguidance") else None,
    )


def _known_constraints(settings: TargetSettings, shape: ModelShape) -> KnownConstraints:
    from specdec.structured.known_constraints import KnownConstraints

    return KnownConstraints(settings.model, shape.eos_token_ids, shape.vocabulary_size, shape.vocabulary_fingerprint)


async def _open_backend(settings: TargetSettings, replica_id: str, metrics: EngineMetrics) -> Engine | None:
    if settings.backend == OWN:
        return None
    from target_service.backends.engine import open_backend_target

    return await open_backend_target(settings, replica_id, metrics, os.environ)


KIND = ReplicaKind(
    role="target",
    service_name=TARGET_SERVICE,
    settings_type=TargetSettings,
    # The draft tokens of a round, and the corrected or bonus token of the previous round.
    num_decode_rows=lambda settings: settings.max_gamma + 1,
    simulated_engine=lambda pair, settings, **options: SimulatedTarget(pair, max_run=settings.max_run, **options),
    build_engine=_build_verifier,
    local_drafts=lambda settings: parse_local_drafts(settings.local_draft),
    model_grace_s=lambda settings: settings.model_grace_s,
    build_servicer=TargetServicer,
    open_backend=_open_backend,
)


if __name__ == "__main__":
    end_process(main())
