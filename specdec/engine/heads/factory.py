"""Make the draft head of a local draft's kind.

Called by `specdec.engine.local_drafting` and, for training, by `specdec.learning.heads`.
"""

from __future__ import annotations

from collections.abc import Callable

from specdec.contract.errors import Unsupported
from specdec.engine.heads.eagle3 import Eagle3
from specdec.engine.heads.head_file import HeadFile
from specdec.engine.heads.interface import DraftHead, TargetParts
from specdec.engine.heads.medusa import Medusa
from specdec.engine.heads.mtp import load_mtp
from specdec.settings.draft_specs import LocalDraftSpec

#: Kinds whose weights are in a separate file.
_OF_FILE: dict[str, Callable[[HeadFile, TargetParts], DraftHead]] = {"eagle3": Eagle3, "medusa": Medusa}


def load_head(spec: LocalDraftSpec, target: TargetParts) -> DraftHead:
    """Return the head of a local draft for a target.

    Raises:
        Unsupported: the kind is unknown.
        InvalidRequest: its files are missing or do not fit the target; the message names them.
    """
    if spec.kind == "mtp":
        return load_mtp(spec, target)
    if spec.kind not in _OF_FILE:
        kinds = ", ".join((*_OF_FILE, "mtp"))
        raise Unsupported(f"local draft {spec}: heads of kind {spec.kind} are not supported; use {kinds}",
                          field="local_draft")  # fmt: skip
    return head_of_file(spec.kind, HeadFile.read(spec.path), target)


def head_of_file(kind: str, file: HeadFile, target: TargetParts) -> DraftHead:
    """Return a head of tensors that are already read.

    Args:
        kind: kind whose weights are in a separate file.
        file: the head's tensors.
        target: target of the head.

    Raises:
        InvalidRequest: the tensors do not fit the target; the message names one.
    """
    return _OF_FILE[kind](file, target)
