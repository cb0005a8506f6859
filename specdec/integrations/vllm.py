"""specdec's draft pool inside vLLM: a proposer for vLLM's `custom_class` speculation.

    vllm serve MODEL --speculative-config '{"method": "custom_class", "num_speculative_tokens": 4,
        "model": "specdec.integrations.vllm.DraftPoolProposer"}'

with the environment variables of `DraftPoolSettings`, since vLLM's flags have no place for them. vLLM keeps its API,
its sampler and its KV; the draft model runs in a draft service, and vLLM goes on without drafts while that service does
not answer. vLLM calls its proposer experimental; this one is for vLLM 0.32 and its V1 model runner.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specdec.access.tls import Tls
from specdec.checkpoints.vocabulary import load_vocabulary, vocabulary_fingerprint
from specdec.contract.errors import InvalidSetting, Unsupported
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


class DraftPoolProposer:
    """The proposer that vLLM makes once and calls after every step. Not used on several ranks."""

    def __init__(self, vllm_config: Any) -> None:
        """
        Args:
            vllm_config: vLLM's `VllmConfig`.

        Raises:
            InvalidSetting: an environment variable is missing or wrong; the message names it.
            Unsupported: the model runs on several ranks, which would have to wait for the same drafts.
            Unavailable: a draft replica cannot be reached.
        """
        if vllm_config.parallel_config.world_size > 1:
            raise Unsupported("specdec's proposer runs on one rank: start vLLM with --tensor-parallel-size 1")
        self._gamma = int(vllm_config.speculative_config.num_speculative_tokens)
        self._max_tokens = int(vllm_config.model_config.max_model_len)
        self._pool = open_draft_pool(read_settings(), vllm_config.model_config.tokenizer)

    def load_model(self, *_: Any, **__: Any) -> None:
        """Do nothing: the draft model runs in the draft service."""

    def propose(
        self,
        sampled_token_ids: Sequence[Sequence[int]],
        num_tokens_no_spec: NDArray[np.integer[Any]],
        token_ids_cpu: NDArray[np.integer[Any]],
        **_: Any,
    ) -> list[list[int]]:
        """Return draft tokens for each row of vLLM's batch; [] for a row without any.

        Args:
            sampled_token_ids: tokens of the step by row; empty for a row whose prompt has not ended.
            num_tokens_no_spec: int [rows]: number of tokens of each row, the sampled ones included.
            token_ids_cpu: int [rows, max_model_len]: tokens of each row.
        """
        rows = {
            row: token_ids_cpu[row, : int(num_tokens_no_spec[row])].astype(np.uint32)
            for row, sampled in enumerate(sampled_token_ids)
            if len(sampled) and int(num_tokens_no_spec[row]) + self._gamma < self._max_tokens
        }
        drafts = self._pool.propose(rows, self._gamma) if rows else {}
        return [drafts.get(row, []) for row in range(len(sampled_token_ids))]
