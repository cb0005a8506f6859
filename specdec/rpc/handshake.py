"""The handshake of a stream: which model it is meant for, and which process answers it.

Both sides state it once per stream, in gRPC metadata or in the first message on a Unix socket. A stream ends with its
process, so the handshake holds for every call on the stream. A process serves one model, and the same model with each
of its adapters. The replica refuses a stream that is meant for another one before it reads a call; the link takes no
answer from a replica that did not state the model that was meant.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from specdec.contract.engine_api import EngineInfo
from specdec.contract.errors import Unavailable

MODEL_KEY = "specdec-model"
"""Fingerprint of the model that the caller expects, or of the model that the replica serves."""
INCARNATION_KEY = "specdec-incarnation"
"""Incarnation of the process that answers."""

#: Longest part of a received fingerprint that is repeated in a message.
_MAX_NAME_CHARACTERS = 128

Metadata = Iterable[tuple[str, str | bytes]]


def meant_for(model: str) -> tuple[tuple[str, str], ...]:
    """Return the caller's metadata of a stream; an empty fingerprint accepts any model."""
    return ((MODEL_KEY, model),) if model else ()


async def shake_hands_with_caller(context: Any, info: EngineInfo) -> str:
    """Send the replica's metadata to a caller; return the fingerprint of the model that answers its stream.

    Raises:
        Unavailable: the stream is meant for another model.
    """
    model = require_meant(_value(context.invocation_metadata(), MODEL_KEY), info)
    await context.send_initial_metadata(((MODEL_KEY, model), (INCARNATION_KEY, info.incarnation)))
    return model


def require_meant(model: str, info: EngineInfo) -> str:
    """Return the fingerprint of the model that answers a stream: the meant one, or the replica's own for "".

    Raises:
        Unavailable: the replica does not serve the model that is meant.
    """
    meant = model[:_MAX_NAME_CHARACTERS]
    if meant and not info.serves(meant):
        raise Unavailable(
            f"replica {info.replica_id} serves model {info.model_fingerprint}, the call is meant for model {meant}"
        )
    return meant or info.model_fingerprint


def check_answering(metadata: Metadata | None, model: str) -> str:
    """Return the incarnation of the process that answers a stream, from its metadata.

    Raises:
        Unavailable: `model` is not "" and another model answers.
    """
    answering = _value(metadata, MODEL_KEY)
    if model and answering != model:
        raise Unavailable(f"model {answering or '(not stated)'} answers, the call is meant for model {model}")
    return _value(metadata, INCARNATION_KEY)


def _value(metadata: Metadata | None, wanted: str) -> str:
    return next((str(value) for key, value in metadata or () if key == wanted), "")
