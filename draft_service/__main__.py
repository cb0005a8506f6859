"""`python -m draft_service`: reads settings, loads the draft model, serves until SIGTERM or Ctrl-C.

`specdec.service.replica_main` does the part that draft and target replicas share.
"""

from __future__ import annotations

if __name__ == "__main__":  # loading what follows takes a second, and a model longer
    from specdec.settings.early_signals import end_on_sigterm
    from specdec.settings.standard_streams import never_wait_for_readers

    end_on_sigterm()
    never_wait_for_readers()

import logging
import os
from collections.abc import Sequence
from functools import lru_cache
from importlib.util import find_spec
from typing import TYPE_CHECKING

from draft_service.servicer import DraftServicer
from specdec.checkpoints.vocabulary import load_tokenizer
from specdec.contract.engine_api import DraftEngine, Engine
from specdec.contract.errors import SpecdecError
from specdec.engine.simulated.engines import SimulatedDraft
from specdec.observability.engine_metrics import EngineMetrics
from specdec.rpc.service_server import DRAFT_SERVICE
from specdec.service.lifecycle import end_process
from specdec.service.replica_main import ReplicaKind, run_service
from specdec.settings.draft import DraftSettings
from specdec.settings.engine_servers import OWN

if TYPE_CHECKING:
    from specdec.checkpoints.cross_vocabulary.pair import TokenizerPair
    from specdec.engine.base import Worker
    from specdec.engine.loop.replica_engine import ReplicaOptions
    from specdec.structured.known_constraints import KnownConstraints

_log = logging.getLogger(__name__)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the service and return the exit code."""
    return run_service(KIND, argv)


def _build_proposer(
    worker: Worker, options: ReplicaOptions, settings: DraftSettings, metrics: EngineMetrics
) -> DraftEngine:
    from draft_service.fan_out_policy import Predraft
    from draft_service.proposer import DraftOptions, Proposer

    drafting = DraftOptions(predraft=Predraft(settings.predraft))
    if (pair := _pair_of(settings)) is not None:
        from draft_service.cross_vocabulary.translating_proposer import CrossVocabularyProposer

        ends = [] if pair.target_end_id is None else [pair.target_end_id]
        constraints = _known_constraints(settings.for_tokenizer, ends, pair.target_size)
        return CrossVocabularyProposer(worker, pair, options, drafting, observer=metrics, constraints=constraints)
    shape = worker.shape
    constraints = _known_constraints(settings.model, shape.eos_token_ids, shape.vocabulary_size)
    return Proposer(worker, options, drafting, observer=metrics, constraints=constraints)


def _known_constraints(model: str, eos_token_ids: Sequence[int], vocabulary_size: int) -> KnownConstraints | None:
    """Return what masks drafts; None without llguidance or an end token, which costs acceptance alone."""
    if find_spec("llguidance") is None or not eos_token_ids:
        return None
    from specdec.structured.known_constraints import KnownConstraints

    return KnownConstraints(model, eos_token_ids, vocabulary_size, is_authority=False)


def _check(settings: DraftSettings) -> None:
    """Check the tokenizers before the model is loaded; raise the errors of `make_pair` and `load_tokenizer`."""
    if (pair := _pair_of(settings)) is not None:
        _log.info("drafting for the tokens of %s: %s are shared", settings.for_tokenizer, pair.summary)


def _pair_of(settings: DraftSettings) -> TokenizerPair | None:
    """Return both tokenizers if the target's differs, else None."""
    return _load_pair(settings.model, settings.for_tokenizer) if settings.for_tokenizer else None


@lru_cache(maxsize=1)
def _load_pair(model: str, target: str) -> TokenizerPair | None:
    from specdec.checkpoints.cross_vocabulary.pair import make_pair

    try:
        own, theirs = (model, load_tokenizer(model)), (target, load_tokenizer(target))
        return None if own[1].get_vocab() == theirs[1].get_vocab() else make_pair(own, theirs)
    except SpecdecError as error:
        raise type(error)(f"--for-tokenizer: {error.message}", field=error.field) from error


async def _open_server(settings: DraftSettings, replica_id: str, metrics: EngineMetrics) -> Engine | None:
    if settings.backend == OWN:
        return None
    from draft_service.server_draft import open_server_draft

    return await open_server_draft(settings, replica_id, metrics, os.environ)


KIND = ReplicaKind(
    role="draft",
    service_name=DRAFT_SERVICE,
    settings_type=DraftSettings,
    # After a fully accepted round: its last draft token and the bonus token.
    num_decode_rows=lambda settings: 2,
    simulated_engine=lambda pair, settings, **options: SimulatedDraft(pair, **options),
    build_engine=_build_proposer,
    build_servicer=DraftServicer,
    check=_check,
    is_shadow=lambda settings: settings.shadow == "on",
    open_backend=_open_server,
)


if __name__ == "__main__":
    end_process(main())
