"""Train a draft on a learning log and write the new version, unless the draft learned nothing.

Called by `specdec.cli.distill`; importing this module imports torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol

import torch

from specdec.checkpoints.locate import checkpoint_fingerprint, locate_checkpoint
from specdec.checkpoints.vocabulary import load_vocabulary, vocabulary_fingerprint, vocabulary_size
from specdec.contract.errors import InvalidRequest, Unsupported
from specdec.contract.version import __version__
from specdec.engine.heads.head_file import HeadFile
from specdec.engine.model.checkpoint_model import SERVED_DTYPES
from specdec.learning.heads import Head
from specdec.learning.learner import DraftModel, ExitAdapter, Learner
from specdec.learning.samples import Samples
from specdec.learning.trained_model import load_model, require_new, stored_dtype, write_model, write_tensors
from specdec.learning.training import Learned, TrainingPlan, train
from specdec.settings.draft_specs import EARLY_EXIT, HEAD_KINDS, LocalDraftSpec, is_local_draft, parse_local_draft

#: Logits of a step, at each draft depth: 512 MB.
_MAX_STEP_LOGITS = 1 << 27


@dataclass(frozen=True, slots=True)
class Distillation:
    """Inputs and output of one distillation."""

    log: Path
    """Folder of the logs of all tenants."""
    tenant: str
    draft: str
    """Draft to begin with: directory or hub id of a draft model, or a local draft as `--local-draft` names it."""
    out: Path
    """Directory of the new version."""
    target_fingerprint: str
    """Fingerprint of the target whose text is learned; "" for the only one in the log."""
    plan: TrainingPlan
    target_model: str = ""
    """Directory or hub id of the target, for a local draft; "" for a draft model."""


class _Draft(Protocol):
    """A draft that is trained, with the way to store it."""

    fingerprint: str
    """Fingerprint of the draft to begin with."""

    @property
    def learner(self) -> Learner: ...

    def write(self, out: Path, provenance: Mapping[str, Any]) -> None:
        """Raises InvalidRequest: it cannot be written."""
        ...


def distill(
    distillation: Distillation, on_step: Callable[[int, float, float], None] = lambda num_steps, kl_nats, done: None
) -> Learned:
    """Trains, and writes the new version if it is better on held-out sessions than the old one.

    Args:
        distillation: inputs and output.
        on_step: as `train` has it.

    Raises:
        InvalidRequest: the log is of another target than `target_model`.
        Unsupported: the draft is a part of the target's own checkpoint.
        SpecdecError: as `Samples`, `load_model`, `Head`, `ExitAdapter`, `write_model` and `write_tensors`.
    """
    require_new(distillation.out)
    spec = parse_local_draft(distillation.draft) if is_local_draft(distillation.draft) else None
    if spec is not None and not HEAD_KINDS.get(spec.kind, True):
        raise Unsupported(f"--draft: {spec} is a part of the target's own checkpoint, and is not trained")
    spoken = load_vocabulary(distillation.target_model or distillation.draft)
    vocabulary, num_tokens = vocabulary_fingerprint(spoken), vocabulary_size(spoken)
    samples = Samples(distillation.log, distillation.tenant, vocabulary, num_tokens, distillation.target_fingerprint)
    torch.manual_seed(distillation.plan.seed)
    draft: _Draft
    if spec is None:
        draft = _Model(distillation.draft)
    else:
        _require_target(distillation.target_model, vocabulary, samples.target_fingerprint)
        draft = _LocalDraft(spec, distillation.target_model, num_tokens)
    most_tokens = _MAX_STEP_LOGITS // num_tokens
    plan = replace(distillation.plan, batch_tokens=min(distillation.plan.batch_tokens, most_tokens))
    learned = train(draft.learner, samples, plan, on_step)
    if learned.is_better:
        provenance = {
            "parent": distillation.draft,
            "parent_fingerprint": draft.fingerprint,
            "target_fingerprint": samples.target_fingerprint,
            "tenant": distillation.tenant,
            "date": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
            "specdec": __version__,
            **asdict(learned),
        }
        draft.write(distillation.out, provenance)
    return learned


class _Model:
    """A draft model."""

    def __init__(self, draft: str) -> None:
        self._draft, self._model = draft, load_model(draft)
        self.learner = DraftModel(self._model, stored_dtype(draft))
        self.fingerprint = checkpoint_fingerprint(locate_checkpoint(draft))

    def write(self, out: Path, provenance: Mapping[str, Any]) -> None:
        write_model(self._model, self._draft, out, provenance)


class _LocalDraft:
    """A local draft of a target."""

    def __init__(self, spec: LocalDraftSpec, target_model: str, num_tokens: int) -> None:
        self._spec = spec
        file = None if spec.kind == EARLY_EXIT else HeadFile.read(spec.path)  # before the target, which takes longer
        target = load_model(target_model, "--target-model").requires_grad_(False)
        self.learner: ExitAdapter | Head = (
            ExitAdapter(spec, target, num_tokens) if file is None else Head(spec.kind, file, target, num_tokens)
        )
        self.fingerprint = self.learner.fingerprint

    def write(self, out: Path, provenance: Mapping[str, Any]) -> None:
        learner, config = self.learner, {}
        file, metadata = "adapter.safetensors", {"num_layers": str(self._spec.num_layers)}
        if isinstance(learner, Head):
            file, metadata, config = "model.safetensors", {"format": "pt"}, learner.config
        write_tensors(learner.tensors, out, provenance, file=file, metadata=metadata, config=config)


def _require_target(target_model: str, vocabulary: str, target_fingerprint: str) -> None:
    """Raises InvalidRequest unless the log's words are this model's, in whatever arithmetic it is served."""
    directory = locate_checkpoint(target_model)
    if target_fingerprint not in (checkpoint_fingerprint(directory, vocabulary, dtype) for dtype in SERVED_DTYPES):
        raise InvalidRequest(
            f"--target-model: the log holds words of target {target_fingerprint}, which is not {target_model}",
            field="target_model",
        )
