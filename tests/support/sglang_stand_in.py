"""A stand-in for the part of SGLang that `specdec.integrations.sglang` calls and is called by.

Names, signatures, shapes and the order of calls are those of the wheel of SGLang 0.5.23 on PyPI (sha256 00b3cd5b265a…),
read in these files below sglang/srt: speculative/spec_registry.py and spec_info.py (the registry),
arg_groups/speculative_hook.py and overrides.py (when and with what settings are checked), speculative/ngram_worker.py
(the worker), managers/scheduler.py and overlap_utils.py (who calls it), kernels/ops/speculative/reconstruct_tree.py
(the meaning of the mask). The code is our own. Its model is the table model, which it verifies with greedily.
"""

from __future__ import annotations

import sys
from abc import ABC
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.table_worker import TableWorker


class CustomSpecAlgo:
    """A registered algorithm with the answers that SGLang gives where it says nothing itself."""

    def __init__(
        self,
        name: str,
        factory: Callable[[Any], type],
        *,
        supports_overlap: bool = False,
        validate_server_args: Callable[[Any], None] | None = None,
    ) -> None:
        self.name, self.factory = name, factory
        self.supports_overlap, self.validate_server_args = supports_overlap, validate_server_args

    def is_speculative(self) -> bool:
        return True

    def is_ngram(self) -> bool:
        return False

    def supports_grammar_overlap(self) -> bool:
        return False

    def has_draft_kv(self) -> bool:
        return True

    def handle_server_args(self, server_args: Any) -> None:
        pass

    def create_worker(self, server_args: Any) -> type:
        if not server_args.disable_overlap_schedule and not self.supports_overlap:
            raise ValueError("no overlap scheduling")
        return self.factory(server_args)


_registered: dict[str, CustomSpecAlgo] = {}


class SpeculativeAlgorithm(Enum):
    """The built-in algorithms, and the registry of others."""

    NGRAM = 1
    NONE = 2

    @classmethod
    def from_string(cls, name: str | None) -> Any:
        if name is None:
            return cls.NONE
        if name.upper() in cls.__members__:
            return cls[name.upper()]
        if name.upper() not in _registered:
            raise ValueError(f"unknown: {name}")
        return _registered[name.upper()]

    @classmethod
    def register(
        cls,
        name: str,
        *,
        supports_overlap: bool = False,
        validate_server_args: Callable[[Any], None] | None = None,
        spec_class: type[CustomSpecAlgo] = CustomSpecAlgo,
    ) -> Callable[[Callable[[Any], type]], Callable[[Any], type]]:
        if name.upper() in _registered or name.upper() in cls.__members__:
            raise ValueError(f"registered already: {name}")

        def decorate(factory: Callable[[Any], type]) -> Callable[[Any], type]:
            _registered[name.upper()] = spec_class(
                name.upper(), factory, supports_overlap=supports_overlap, validate_server_args=validate_server_args
            )
            return factory

        return decorate

    def create_future_map(
        self,
        device: Any,
        req_to_token_pool: Any,
        needs_cpu_seq_lens: bool = True,
        needs_confidence_relay: bool = False,
    ) -> Any:
        return ("relay of", self, device, req_to_token_pool, needs_cpu_seq_lens, needs_confidence_relay)


@dataclass
class Req:
    """A request of the scheduler."""

    rid: str
    origin_input_ids_unpadded: array[int]
    output_ids: array[int] = field(default_factory=lambda: array("q"))


@dataclass
class ScheduleBatch:
    """A batch in decode mode. `spec_info` has the tokens of the step before: int32 [rows * width] and int32 [rows]."""

    reqs: list[Req]
    spec_info: Any
    has_grammar: bool = False

    def grammar_needs_sync(self) -> bool:
        return self.has_grammar


class NGRAMWorker(ABC):  # noqa: B024 - as SGLang's, which has a metaclass
    """Verifies with the table model what `_prepare_draft_tokens` returns."""

    def __init__(self, server_args: Any, gpu_id: int, nccl_port: int, target_worker: Any) -> None:
        self.draft_token_num: int = server_args.speculative_num_draft_tokens
        self.enable_overlap = not server_args.disable_overlap_schedule
        self._model: TableWorker = target_worker
        self.num_steps = 0

    def _prepare_draft_tokens(self, batch: ScheduleBatch) -> tuple[np.ndarray, np.ndarray]:
        raise NotImplementedError("the corpus is not a part of the stand-in")

    def _update_ngram_corpus(self, batch: ScheduleBatch) -> None:
        raise NotImplementedError("the corpus is not a part of the stand-in")

    def forward_batch_generation(self, batch: ScheduleBatch, histories: Sequence[Sequence[int]]) -> Any:
        """Return the next `spec_info`. `histories`: the true tokens of the rows, which SGLang has as KV."""
        self.num_steps += 1
        width = self.draft_token_num
        drafts, mask = self._prepare_draft_tokens(batch)
        assert drafts.dtype == mask.dtype == np.int64
        assert len(drafts) == len(batch.reqs) * width
        assert len(mask) == len(batch.reqs) * width * width
        accepted = torch.zeros(len(batch.reqs), width, dtype=torch.int32)
        lengths = torch.zeros(len(batch.reqs), dtype=torch.int32)
        for row, history in enumerate(histories):
            tokens = drafts.reshape(-1, width)[row].tolist()
            assert tokens[0] == history[-1]  # the root is the newest token
            chosen = self._walk(tokens, mask.reshape(-1, width, width)[row], history)
            accepted[row, : len(chosen)] = torch.tensor(chosen)
            lengths[row] = len(chosen)
        self._update_ngram_corpus(batch)
        return SimpleNamespace(accept_tokens=accepted.flatten(), accept_lens=lengths)

    def _walk(self, tokens: Sequence[int], mask: np.ndarray, history: Sequence[int]) -> list[int]:
        """Return the model's greedy tokens along the tree."""
        parents = [max(np.flatnonzero(mask[node, :node]), default=-1) for node in range(len(tokens))]
        node, chosen = 0, []
        while True:
            chosen += self._model.greedy_continuation([*history, *chosen], 1)
            children = [child for child, parent in enumerate(parents) if parent == node]
            fitting = [child for child in children if tokens[child] == chosen[-1]]
            if not fitting:
                return chosen
            node = fitting[0]


def server_args(**settings: Any) -> SimpleNamespace:
    """Return SGLang's settings as far as they are read, with SGLang's defaults."""
    defaults = {
        "model_path": "unused",
        "tokenizer_path": None,
        "device": "cuda",
        "tp_size": 1,
        "pp_size": 1,
        "disaggregation_mode": "null",
        "disable_overlap_schedule": False,
        "enable_mixed_chunk": True,
        "max_running_requests": None,
        "speculative_use_rejection_sampling": False,
        "speculative_draft_model_path": None,
        "speculative_num_draft_tokens": None,
        "speculative_num_steps": None,
        "speculative_eagle_topk": None,
        "speculative_ngram_max_bfs_breadth": 10,
        "speculative_ngram_external_corpus_path": None,
    }
    return SimpleNamespace(**(defaults | settings))


def install(monkeypatch: pytest.MonkeyPatch, *, is_hip: bool = False) -> None:
    """Let `import sglang` find the stand-in until the test ends."""
    _registered.clear()
    contents: dict[str, dict[str, Any]] = {
        "utils": {"is_hip": lambda: is_hip},
        "arg_groups.overrides": {"resolving_view": lambda args: args},
        "speculative.spec_info": {"SpeculativeAlgorithm": SpeculativeAlgorithm, "CustomSpecAlgo": CustomSpecAlgo},
        "speculative.ngram_worker": {"NGRAMWorker": NGRAMWorker},
    }
    for name, members in contents.items():
        module = ModuleType(f"sglang.srt.{name}")
        vars(module).update(members)
        monkeypatch.setitem(sys.modules, module.__name__, module)
