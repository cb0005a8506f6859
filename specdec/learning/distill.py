"""From a learning log and a draft to a new version of the draft, or to none where it learned nothing.

Not here: the command line (`specdec.cli.distill`), how the new version gets requests. torch is imported with it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

import torch

import specdec
from specdec.checkpoint import checkpoint_fingerprint, locate_checkpoint
from specdec.learning.samples import Samples
from specdec.learning.training import Learned, TrainingPlan, train
from specdec.learning.version import load_draft, require_new, write_version
from specdec.vocabulary import load_vocabulary, vocabulary_fingerprint


@dataclass(frozen=True, slots=True)
class Distillation:
    """What is to become of what."""

    log: Path
    """Folder of the logs of all tenants."""
    tenant: str
    draft: str
    """Directory or hub id of the checkpoint to begin with."""
    out: Path
    """Directory of the new version."""
    target_fingerprint: str
    """Of the model whose words count; "": of the only one in the log."""
    plan: TrainingPlan


def distill(
    asked: Distillation, on_step: Callable[[int, float, float], None] = lambda num_steps, kl_nats, done: None
) -> Learned:
    """Trains, and writes the new version where it is better on held-out sessions than the old one.

    Args:
        asked: what is to be done.
        on_step: as `train` has it.

    Raises:
        SpecdecError: as `Samples`, `load_draft` and `write_version`.
    """
    require_new(asked.out)
    vocabulary = vocabulary_fingerprint(load_vocabulary(asked.draft))
    samples = Samples(asked.log, asked.tenant, vocabulary, asked.target_fingerprint)
    torch.manual_seed(asked.plan.seed)
    model = load_draft(asked.draft)
    learned = train(model, samples, asked.plan, on_step)
    if learned.is_better:
        provenance = {
            "parent": asked.draft,
            "parent_fingerprint": checkpoint_fingerprint(locate_checkpoint(asked.draft)),
            "target_fingerprint": samples.target_fingerprint,
            "tenant": asked.tenant,
            "date": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
            "specdec": specdec.__version__,
            **asdict(learned),
        }
        write_version(model, asked.draft, asked.out, provenance)
    return learned
