"""specdec's draft pool inside vLLM: a proposer for vLLM's `custom_class` speculation.

    vllm serve MODEL --speculative-config '{"method": "custom_class", "num_speculative_tokens": 4,
        "model": "specdec.integrations.vllm.DraftPoolProposer"}'

with the environment variables of `settings.DraftPoolSettings`. vLLM keeps its API, its sampler and its KV; the draft
model runs in a draft service of its own, and vLLM goes on without drafts while that service does not answer. vLLM calls
its proposer experimental; this one is for vLLM 0.32 and its V1 model runner.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specdec.contract.errors import Unsupported
from specdec.integrations.settings import open_draft_pool, read_settings


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
