"""From a local draft's name to its head: the one place that knows the kinds.

Not here: what a kind computes. Called by `specdec.engine.local_drafting`, and where a head learns
(`specdec.learning.heads`).
"""

from __future__ import annotations

from collections.abc import Callable

from specdec.engine.heads.base import DraftHead, TargetParts
from specdec.engine.heads.eagle3 import Eagle3
from specdec.engine.heads.head_file import HeadFile
from specdec.engine.heads.medusa import Medusa
from specdec.engine.heads.mtp import load_mtp
from specdec.errors import Unsupported
from specdec.settings.draft_specs import LocalDraftSpec

#: Those whose weights lie in a file of their own.
_OF_FILE: dict[str, Callable[[HeadFile, TargetParts], DraftHead]] = {"eagle3": Eagle3, "medusa": Medusa}


def load_head(spec: LocalDraftSpec, target: TargetParts) -> DraftHead:
    """Makes a head for a target.

    Raises:
        Unsupported: there is no head of this kind here.
        InvalidRequest: its files are missing, or do not fit the target; one sentence says which.
    """
    if spec.kind == "mtp":
        return load_mtp(spec, target)
    if spec.kind not in _OF_FILE:
        raise Unsupported(f"local draft {spec}: there are no {spec.kind} heads here", field="local_draft")
    return head_of_file(spec.kind, HeadFile.read(spec.path), target)


def head_of_file(kind: str, file: HeadFile, target: TargetParts) -> DraftHead:
    """Makes a head of tensors that are there already.

    Args:
        kind: one whose weights lie in a file of their own.
        file: with them.
        target: that it is for.

    Raises:
        InvalidRequest: they do not fit the target; one sentence says which.
    """
    return _OF_FILE[kind](file, target)
