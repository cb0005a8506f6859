"""A real worker without a model: its logits are a pure function of the tokens its KV slots hold.

It stores every token it is given in the slot that the block table names, with its position, and computes a logit row
from what it finds in the slots of positions 0..n. So a wrong block table, a block written twice, a gap or a stale slot
changes the logits or is refused. Called by tests of the engine's control side.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Mapping, Sequence
from types import MappingProxyType

import numpy as np
import pytest
import torch

from specdec.contract.types import BLOCK_TOKENS
from specdec.engine.base import KvLayout, ModelShape, SequenceSlice, StepPlan, Worker
from specdec.engine.loop import watchdog


@pytest.fixture(autouse=True)
def held_steps_are_no_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the watchdog wait for as long as a test may take: a step that a gate holds looks like a hanging device.

    Import the fixture into modules that close gates and do not test hanging devices.
    """
    monkeypatch.setattr(watchdog, "PATIENCE_S", 600.0)


class TableWorker(Worker):
    """Implements `specdec.engine.base.Worker`."""

    def __init__(
        self,
        *,
        vocabulary_size: int = 24,
        num_blocks: int = 64,
        context: int = 512,
        spread: float = 2.0,
        salt: int = 0,
        eos_token_ids: tuple[int, ...] = (1,),
        vocabulary: str = "table",
        local_drafts: Mapping[str, int] = MappingProxyType({}),
        local_gammas: tuple[int, ...] = (),
    ) -> None:
        """`salt` makes another model; equal parameters make the same one. `vocabulary` is only told. `local_drafts`:
        the salts of what it can draft with by itself; `local_gammas` is told."""
        self.shape = ModelShape(
            vocabulary_size=vocabulary_size,
            max_context_tokens=context,
            eos_token_ids=eos_token_ids,
            model_fingerprint=f"table-{salt}-{vocabulary}",
            vocabulary_fingerprint=vocabulary,
            num_kv_blocks=num_blocks,
            dtype="float32",
            device="cpu",
            kv_layout=KvLayout("slots", (BLOCK_TOKENS * 16,)),
            local_drafts=tuple(local_drafts),
            local_gammas=local_gammas,
        )
        self._local_salts = dict(local_drafts)
        self.steps: list[StepPlan] = []
        self.fail_next: BaseException | None = None
        """The next step raises this, after having written to its slots."""
        self.fail_always: BaseException | None = None
        """Every step raises this, likewise."""
        self.fail_from_tokens = 1
        """Steps of fewer tokens do not raise `fail_always`."""
        self.non_finite: dict[int, float] = {}
        """Logit rows that follow this token id hold nothing but this value."""
        self.local_tokens: tuple[int, ...] = ()
        """Tokens that local drafts have; (): all."""
        self.gate = threading.Event()
        """Cleared: a step waits in `execute` until it is set."""
        self.gate.set()
        self.entered = threading.Semaphore(0)
        """Released once a step, on entering `execute`."""
        self.num_read = self.num_written = 0
        """Blocks copied out and in."""
        self._spread = spread
        self.salt = salt
        self._slots = np.full((num_blocks * BLOCK_TOKENS, 2), -1, dtype=np.int64)  # token id, position

    def execute(self, plan: StepPlan) -> torch.Tensor:
        self.steps.append(plan)
        self.entered.release()
        self.gate.wait()
        for source, destination in plan.block_copies:
            self._copy_block(source, destination)
        written: set[int] = set()
        for part in plan.slices:
            for offset, token_id in enumerate(part.token_ids):
                slot = _slot(part, part.start + offset)
                if slot in written:
                    raise ValueError(f"slot {slot} is written twice in a step")
                written.add(slot)
                self._slots[slot] = token_id, part.start + offset
        if self.fail_next is not None:
            error, self.fail_next = self.fail_next, None
            raise error
        if self.fail_always is not None and len(written) >= self.fail_from_tokens:
            raise self.fail_always
        salt = self._local_salts[plan.local_draft] if plan.local_draft else None
        rows = [row for part in plan.slices for row in self._rows(part, salt)]
        return torch.from_numpy(np.array(rows, dtype=np.float32).reshape(len(rows), self.shape.vocabulary_size))

    def read_blocks(self, block_ids: Sequence[int]) -> np.ndarray:
        self.num_read += len(block_ids)
        return self._blocks()[list(block_ids)].reshape(len(block_ids), -1).view(np.uint8)

    def write_blocks(self, block_ids: Sequence[int], rows: np.ndarray) -> None:
        self.num_written += len(block_ids)
        self._blocks()[list(block_ids)] = np.ascontiguousarray(rows).view(np.int64).reshape(-1, BLOCK_TOKENS, 2)

    def logits_after(self, token_ids: Sequence[int], salt: int | None = None) -> np.ndarray:
        """float32 [V]: the row that follows `token_ids`; of the model of another `salt`."""
        salt = self.salt if salt is None else salt
        if int(token_ids[-1]) in self.non_finite:
            return np.full(self.shape.vocabulary_size, self.non_finite[int(token_ids[-1])], dtype=np.float32)
        digest = hashlib.blake2b(np.asarray(token_ids, dtype="<i8").tobytes(), digest_size=8).digest()
        generator = np.random.default_rng([salt, int.from_bytes(digest, "little")])
        shared = np.random.default_rng(int.from_bytes(digest, "little")).normal(size=self.shape.vocabulary_size)
        own = generator.normal(size=self.shape.vocabulary_size)
        return (self._spread * (shared + (0.4 * own if salt else 0.0))).astype(np.float32)

    def greedy_continuation(self, token_ids: Sequence[int], num_tokens: int) -> list[int]:
        """What greedy decoding appends to `token_ids`."""
        tokens = list(token_ids)
        for _ in range(num_tokens):
            tokens.append(int(np.argmax(self.logits_after(tokens))))
        return tokens[len(token_ids) :]

    def _copy_block(self, source: int, destination: int) -> None:
        self._blocks()[destination] = self._blocks()[source]

    def _blocks(self) -> np.ndarray:
        return self._slots.reshape(-1, BLOCK_TOKENS, 2)

    def _rows(self, part: SequenceSlice, salt: int | None) -> list[np.ndarray]:
        end = part.start + len(part.token_ids)
        held = self._slots[[_slot(part, position) for position in range(end)]]
        if not np.array_equal(held[:, 1], np.arange(end)):
            raise ValueError(f"slots hold positions {held[:, 1].tolist()}, not 0..{end - 1}")
        rows = [self.logits_after(held[: end - back, 0], salt) for back in range(part.num_logit_rows - 1, -1, -1)]
        if salt is not None and self.local_tokens:
            for row in rows:
                row[np.setdiff1d(np.arange(len(row)), self.local_tokens)] = -np.inf
        return rows


def _slot(part: SequenceSlice, position: int) -> int:
    return part.block_table[position // BLOCK_TOKENS] * BLOCK_TOKENS + position % BLOCK_TOKENS
