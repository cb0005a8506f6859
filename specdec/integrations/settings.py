"""Settings of a draft pool inside another engine, from the environment of the engine's process.

Called by `vllm`, whose flags have no place for them.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from specdec.access.tls import Tls
from specdec.checkpoints.vocabulary import load_vocabulary, vocabulary_fingerprint
from specdec.contract.errors import InvalidSetting
from specdec.integrations.draft_pool import DraftPool


@dataclass(frozen=True, slots=True)
class DraftPoolSettings:
    """Settings from the environment."""

    endpoints: tuple[str, ...]
    """SPECDEC_DRAFT_ENDPOINT: HOST:PORT of draft replicas, separated by commas."""
    deadline_s: float
    """SPECDEC_DRAFT_DEADLINE_MS: longest time that a step waits for draft tokens, 50 by default."""
    service_key: str
    """SPECDEC_SERVICE_KEY: key that the draft replicas want; unset: none."""
    tls: Tls | None
    """SPECDEC_TLS_CA, SPECDEC_TLS_CERT, SPECDEC_TLS_KEY: files of the connection; unset: plaintext."""


def read_settings(environ: Mapping[str, str] = os.environ) -> DraftPoolSettings:
    """Return the settings of an environment.

    Raises:
        InvalidSetting: a variable is missing or wrong; the message names it.
    """
    endpoints = tuple(each.strip() for each in environ.get("SPECDEC_DRAFT_ENDPOINT", "").split(",") if each.strip())
    if not endpoints:
        raise InvalidSetting("SPECDEC_DRAFT_ENDPOINT is not set: name draft replicas, HOST:PORT")
    text = environ.get("SPECDEC_DRAFT_DEADLINE_MS", "50")
    try:
        deadline_ms = float(text)
    except ValueError:
        deadline_ms = 0.0
    if not 0.0 < deadline_ms <= 60_000.0:
        raise InvalidSetting(f"SPECDEC_DRAFT_DEADLINE_MS must be above 0 and at most 60000, got {text!r}")
    ca, cert, key = (environ.get(f"SPECDEC_TLS_{name}", "") for name in ("CA", "CERT", "KEY"))
    tls = Tls(ca=ca, cert=cert, key=key) if ca else None
    return DraftPoolSettings(endpoints, deadline_ms / 1e3, environ.get("SPECDEC_SERVICE_KEY", ""), tls)


def open_draft_pool(settings: DraftPoolSettings, tokenizer: str) -> DraftPool:
    """Connect to the draft replicas of an engine.

    Args:
        settings: settings of the environment.
        tokenizer: checkpoint directory or hub id of the engine's tokenizer.

    Raises:
        InvalidRequest: the tokenizer cannot be loaded.
        InvalidSetting: a draft replica has another vocabulary.
        Unavailable: a draft replica cannot be reached.
    """
    return DraftPool(
        settings.endpoints,
        vocabulary_fingerprint=vocabulary_fingerprint(load_vocabulary(tokenizer)),
        deadline_s=settings.deadline_s,
        metadata=(("authorization", f"Bearer {settings.service_key}"),) if settings.service_key else (),
        tls=settings.tls,
    )
