"""The digest of what was asked: stored with a request, it tells a retry from another request under the same id.

It goes with the checked request from `validation` to `generation/generation_service`, and into the record of the turn.
A record outlives the version that wrote it, so a digest begins with the version of its form, and whoever compares also
takes the forms before (`RawGenerationParams.former_digests`). Form 1 had no version in front and was a hash of protobuf
bytes: only `wire` can compute it. Not here: comparing (`generation/request_log`). Called by `validation`.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import fields
from typing import Any

from coordinator.front.raw_params import RawGenerationParams, RawSamplingParams, RawSpeculationParams
from specdec.types import TokenIds

_VERSION = "2:"


def digest_of(asked: RawGenerationParams, prompt_token_ids: TokenIds | None) -> str:
    """Digest of what decides the output: a retry may differ in its ids and in what it expects or already holds.

    A field that was not sent adds nothing, so that fields which come later leave the digests of requests without them
    as they are.

    Args:
        asked: checked, so that its collections are short enough to be gone through and its numbers are finite.
        prompt_token_ids: of `asked`, where it has them.
    """
    asked_fields: dict[str, Any] = {
        "sampling": _sent_fields(asked.sampling),
        "speculation": _sent_fields(asked.speculation),
    }
    prompt = b""
    if asked.prompt is not None:
        asked_fields["input"] = "prompt"
        prompt = asked.prompt.encode("utf-8", "surrogatepass")
    elif prompt_token_ids is not None:
        asked_fields["input"] = "prompt_token_ids"
        prompt = prompt_token_ids.astype("<u4").tobytes()
    elif asked.messages is not None:
        asked_fields["input"] = [[turn.role, turn.content] for turn in asked.messages]
    # JSON has no zero byte in it, so the prompt cannot be taken for a part of it.
    text = json.dumps(asked_fields, sort_keys=True, separators=(",", ":")).encode() + b"\0"
    return _VERSION + hashlib.blake2b(text + prompt, digest_size=16).hexdigest()


def _sent_fields(asked: RawSamplingParams | RawSpeculationParams) -> dict[str, Any]:
    sent: dict[str, Any] = {}
    for field in fields(asked):
        value = getattr(asked, field.name)
        if field.name == "logit_bias":
            value = sorted([int(token_id), float(bias)] for token_id, bias in value.items()) or None
        elif field.name in ("stop", "stop_token_ids"):
            value = list(value) or None
        elif value == field.default:
            value = None
        if value is not None:
            sent[field.name] = value
    return sent
