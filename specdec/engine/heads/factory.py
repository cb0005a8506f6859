"""From a local draft's name to its head: the one place that knows the kinds.

Not here: what a kind computes. Called by `specdec.engine.loader`.
"""

from __future__ import annotations

from collections.abc import Callable

from specdec.engine.heads.base import DraftHead, TargetParts
from specdec.engine.heads.eagle3 import load_eagle3
from specdec.engine.heads.medusa import load_medusa
from specdec.engine.heads.mtp import load_mtp
from specdec.errors import Unsupported
from specdec.local_drafts import LocalDraftSpec

#: Makes the head of one kind. Raises InvalidRequest: a file is missing or of the wrong shape, and says which.
HeadLoader = Callable[[LocalDraftSpec, TargetParts], DraftHead]

_LOADERS: dict[str, HeadLoader] = {"eagle3": load_eagle3, "medusa": load_medusa, "mtp": load_mtp}


def load_head(spec: LocalDraftSpec, target: TargetParts) -> DraftHead:
    """Makes a head for a target.

    Raises:
        Unsupported: there is no head of this kind here.
        InvalidRequest: its files are missing, or do not fit the target; one sentence says which.
    """
    loader = _LOADERS.get(spec.kind)
    if loader is None:
        raise Unsupported(f"local draft {spec}: there are no {spec.kind} heads here", field="local_draft")
    return loader(spec, target)
