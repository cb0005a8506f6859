"""Which model a stream is meant for, and which process answers it: stated once a stream, in both directions' metadata.

A stream lives and dies with one process, and a process serves one model, so that what is agreed on when a stream opens
holds for every call on it: the replica refuses a stream that was meant for another model before it reads a call, and
the link takes no answer from a replica that did not say that it serves the model meant. Not here: what a caller does
about it (`link_stream` fails the calls, the coordinator looks again). Called by links and by the replicas' servicers.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from specdec.errors import Unavailable
from specdec.types import EngineInfo

MODEL_KEY = "specdec-model"
"""A model's fingerprint: the one meant, and the one that answers."""
INCARNATION_KEY = "specdec-incarnation"
"""Of the process that answers."""

#: More of a name is not told to anybody.
_MAX_NAME_CHARACTERS = 128

Metadata = Iterable[tuple[str, str | bytes]]


def meant_for(model: str) -> tuple[tuple[str, str], ...]:
    """What a caller says when it opens a stream. An empty fingerprint means whichever model is there."""
    return ((MODEL_KEY, model),) if model else ()


async def shake_hands_with_caller(context: Any, info: EngineInfo) -> None:
    """The replica's side: says who it is, unless another model is meant.

    Raises:
        Unavailable: the stream is meant for another model.
    """
    require_meant(_value(context.invocation_metadata(), MODEL_KEY), info)
    await context.send_initial_metadata(
        ((MODEL_KEY, info.model_fingerprint), (INCARNATION_KEY, info.incarnation))
    )  # fmt: skip


def require_meant(model: str, info: EngineInfo) -> None:
    """Raises Unavailable: a caller means another model."""
    meant = model[:_MAX_NAME_CHARACTERS]
    if meant and meant != info.model_fingerprint:
        raise Unavailable(f"replica {info.replica_id} serves model {info.model_fingerprint}, {meant} was meant")


def check_answering(metadata: Metadata | None, model: str) -> str:
    """The link's side: returns the incarnation of the process that answers a stream.

    Raises:
        Unavailable: a model is meant, and it is not that which answers.
    """
    answering = _value(metadata, MODEL_KEY)
    if model and answering != model:
        raise Unavailable(f"model {answering or 'of no name'} answers, {model} was meant")
    return _value(metadata, INCARNATION_KEY)


def _value(metadata: Metadata | None, wanted: str) -> str:
    return next((str(value) for key, value in metadata or () if key == wanted), "")
