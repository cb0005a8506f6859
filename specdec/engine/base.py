"""What engines are made of: what a step is, who carries it out, who is told of it.

Not here: any implementation, and what services call (`specdec.engine_api`). `Worker` is the only thing that touches
model weights and KV tensors; everything above it works on plain numbers, so one worker can run alone or as one rank of
several.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from specdec.errors import Unavailable, Unsupported

if TYPE_CHECKING:  # simulated replicas import the contract and do without torch
    import torch

    from specdec.engine.cold_tier import ColdTier


class LiveTable(Protocol):
    """A sequence's own block table, which lives longer than a step. Device thread only."""

    key: int
    """Of this table and no other of the process."""

    def __len__(self) -> int: ...

    def __getitem__(self, where: slice) -> list[int]: ...

    def take_kept(self) -> int:
        """How many of the first ids are what they were when this was last asked: one asks, who keeps a copy."""
        ...


@dataclass(frozen=True, slots=True)
class SequenceSlice:
    """Consecutive tokens of one sequence, to run in one step."""

    token_ids: tuple[int, ...]
    start: int
    """Position of `token_ids[0]`; KV of positions [0, start) is in the cache already."""
    block_table: tuple[int, ...]
    """KV block ids covering positions [0, start + len(token_ids))."""
    num_logit_rows: int
    """Logits are returned for the last this many tokens; 0 for a prefill chunk that is not the last."""
    draft_index: int = 0
    """In a draft step, of one token a slice: how many draft tokens the session has before the one that is drafted."""
    table: LiveTable | None = field(default=None, compare=False, repr=False)
    """Whose beginning `block_table` is, for who keeps a copy of it; None: nobody's. It goes to no other process."""


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One forward pass: a ragged batch of prefill chunks, draft steps and verification rows."""

    slices: tuple[SequenceSlice, ...]
    block_copies: tuple[tuple[int, int], ...] = ()
    """(from, to): KV blocks to copy whole before anything of the step is written; a branch begins with the partial
    block that it shares with its session. No block is copied to twice."""
    local_draft: str = ""
    """"": a full step. Else a draft step of the local draft of this name (`ModelShape.local_drafts`), one token and one
    logit row a slice. It writes only to the slots of its tokens, what the next full step over them writes again."""


@dataclass(frozen=True, slots=True)
class KvLayout:
    """What the bytes of a worker's KV blocks are. Blocks pass between workers only where all of this is equal."""

    dtype: str
    """Of the numbers."""
    layer_bytes: tuple[int, ...]
    """Bytes of one block in each layer."""
    rank: str = "tp1.0"
    """Which part of the model they belong to: `tpN.R` is rank R of N."""

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all layers."""
        return sum(self.layer_bytes)


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What the layers above a worker must know of its model."""

    vocabulary_size: int
    """Rows of the id-to-token map; logits beyond it are masked to -inf by the worker."""
    max_context_tokens: int
    eos_token_ids: tuple[int, ...]
    model_fingerprint: str
    vocabulary_fingerprint: str
    num_kv_blocks: int
    dtype: str
    device: str
    kv_layout: KvLayout | None = None
    """None: it has no KV blocks (a table, a simulation)."""
    local_drafts: tuple[str, ...] = ()
    """Names of what it can draft with by itself."""
    local_gammas: tuple[int, ...] = ()
    """Of each: most tokens that a draft can have, 0 for as many as are asked for. () where that is so of all."""


class WorkerLost(Unavailable):
    """A part of a worker is gone, and with it the worker: no step will run, and what it cached is worth nothing."""


class MultiStepDrafts(Enum):
    """Which steps that follow one another a worker runs by itself."""

    NONE = auto()
    GREEDY = auto()
    """Of tokens that are each the likeliest of the step before: `Worker.draft_greedy`."""
    ANY = auto()
    """`Worker.draft`."""


class Worker(Protocol):
    """Runs steps on a model with its paged KV cache. Called from one thread, one step at a time."""

    shape: ModelShape
    multi_step_drafts: MultiStepDrafts = MultiStepDrafts.NONE

    def execute(self, plan: StepPlan) -> torch.Tensor:
        """Runs one step.

        Returns:
            float32 [R, V] logits on the worker's device, V = `shape.vocabulary_size`, rows in the order of
            `plan.slices`, within a slice by position; R = sum of `num_logit_rows`. They may still be in the making
            on an accelerator, but a step without any has ended.

        Raises:
            WorkerLost: this step or an earlier one lost the worker. Whatever else it raises is of this step alone.
        """
        ...

    def draft(self, plan: StepPlan, num_steps: int, draw: Callable[[int, torch.Tensor], torch.Tensor]) -> bool:
        """Runs a step and then further ones of a token of each of its sequences, without reading anything in between.

        Args:
            plan: of one logit row a slice, without copies; each slice's table has blocks for all steps.
            num_steps: at least 1.
            draw: given the number of a step, from 0 on, and its logits (float32 [B, V] on the device, valid within the
                call): the tokens of the next, int64 [B] on the device. It must not wait for the device.

        Returns:
            False where this worker cannot; nothing was run then.
        """
        return False

    def draft_greedy(self, plan: StepPlan, num_steps: int) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        """Runs a step and then further ones of each sequence's likeliest token, until `num_steps` have been chosen.

        Args:
            plan: as for `draft`.
            num_steps: at least 1.

        Returns:
            [num_steps, B] logits and ids of the tokens that were chosen, as NumPy's argmax chooses: the first of equal
            ones, and what is no number before all others.
        """
        raise Unsupported("this worker takes its steps one by one")

    def read_blocks(self, block_ids: Sequence[int]) -> NDArray[np.uint8]:
        """Copies KV blocks out; of one rank of several, its own part of them.

        From any thread, while steps run too: whether a block was written meanwhile is the caller's to find out.

        Returns:
            uint8 [len(block_ids), shape.kv_layout.block_bytes]: of each block, layer after layer.
        """
        raise Unsupported("this worker has no KV blocks")

    def write_blocks(self, block_ids: Sequence[int], rows: NDArray[np.uint8]) -> None:
        """Copies into KV blocks what `read_blocks` of a worker of equal layout gave. Between two steps."""
        raise Unsupported("this worker has no KV blocks")

    def divided(self, tier: ColdTier) -> ColdTier:
        """A cold tier as it is used with this worker: of several ranks, each keeps and fetches its own part."""
        return tier

    def watch(self, note_lost: Callable[[WorkerLost], None]) -> None:
        """Names who is told, once and from any thread, when the worker is lost; at once where it is lost already.

        A worker of one process is lost with that, and never says so.
        """
        return

    def close(self) -> None:
        """Lets go of whoever else works for it; after the last step, from the thread that ran them. Idempotent."""
        return


class StepObserver(Protocol):
    """Is told of every step. Called from the device's thread."""

    def observe_step(self, *, num_sequences: int, num_tokens: int, seconds: float) -> None:
        """A step was run; `seconds` from its plan to the end of what was made of its logits."""
        ...
