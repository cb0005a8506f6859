"""Contracts inside an engine: step plans, the worker that runs them, and observers of steps.

Only a `Worker` touches model weights and KV tensors. Everything above it works on plain numbers, so a worker can run
alone or as one rank of several. Services call engines by `specdec.contract.engine_api`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from specdec.contract.errors import Unavailable, Unsupported

if TYPE_CHECKING:  # simulated replicas import the contract and do without torch
    import torch

    from specdec.engine.cold_tier import ColdTier


class LiveTable(Protocol):
    """A sequence's block table, which exists for longer than a step. Device thread only."""

    key: int
    """Number that identifies this table within the process."""

    def __len__(self) -> int: ...

    def __getitem__(self, where: slice) -> list[int]: ...

    def take_kept(self) -> int:
        """Return how many leading block ids are unchanged since the previous call.

        Only the owner of the cached copy may call this.
        """
        ...


@dataclass(frozen=True, slots=True)
class SliceStates:
    """The recurrent state that a slice begins with, and those that are saved on the way.

    A slot holds the states of all recurrent layers of a hybrid after some number of a sequence's tokens.
    """

    source: int | None
    """Slot of the state before the slice's first token; None: the slice begins its sequence."""
    saves: tuple[tuple[int, int], ...] = ()
    """(n, slot), in ascending order of n: the slot receives the state after the slice's first n tokens. It may be the
    source."""


@dataclass(frozen=True, slots=True)
class SequenceSlice:
    """Consecutive tokens of one sequence, to run in one step."""

    token_ids: tuple[int, ...]
    start: int
    """Position of `token_ids[0]`; KV of positions [0, start) is in the cache already."""
    block_table: tuple[int, ...]
    """KV block ids covering positions [0, start + len(token_ids))."""
    num_logit_rows: int
    """Number of tokens, counted from the end, whose logits are returned; 0 for a prefill chunk other than the last."""
    draft_index: int = 0
    """In a draft step, which has one token a slice: number of the session's draft tokens before the drafted one."""
    states: SliceStates | None = None
    """States of a hybrid; None: the slice begins its sequence, and its states are not kept."""
    table: LiveTable | None = field(default=None, compare=False, repr=False)
    """Table of which `block_table` is a prefix, for workers that cache it; None if there is none. It is not sent to
    other processes."""


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One forward pass: a ragged batch of prefill chunks, draft steps and verification rows."""

    slices: tuple[SequenceSlice, ...]
    block_copies: tuple[tuple[int, int], ...] = ()
    """(from, to): KV blocks to copy whole before the step writes anything. A branch starts with a copy of the partial
    block that it shares with its session. No block is a destination twice."""
    local_draft: str = ""
    """Name of a local draft (`ModelShape.local_drafts`) for a draft step, with one token and one logit row a slice; ""
    for a full step. A draft step writes only to its tokens' slots, which the next full step over them overwrites."""


@dataclass(frozen=True, slots=True)
class KvLayout:
    """Layout of the bytes of a worker's KV blocks. Workers exchange blocks only if their layouts are equal."""

    dtype: str
    """Dtype of the numbers."""
    layer_bytes: tuple[int, ...]
    """Bytes of one block in each layer."""
    rank: str = "tp1.0"
    """Part of the model that the blocks belong to: `tpN.R` is rank R of N; fingerprints of draft heads follow."""

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all layers."""
        return sum(self.layer_bytes)


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Description of a worker's model for the layers above."""

    vocabulary_size: int
    """Rows of the id-to-token map; the worker does not return logits beyond it."""
    max_context_tokens: int
    eos_token_ids: tuple[int, ...]
    model_fingerprint: str
    vocabulary_fingerprint: str
    num_kv_blocks: int
    dtype: str
    device: str
    kv_layout: KvLayout | None = None
    """Layout of the KV blocks; None if there are none (a table model, a simulation)."""
    local_drafts: tuple[str, ...] = ()
    """Names of the drafts that the worker computes itself."""
    local_gammas: tuple[int, ...] = ()
    """Most tokens of each local draft, 0 if there is no limit; () if none has a limit."""
    num_states: int = 0
    """Number of slots for recurrent states; 0: the model has none."""
    state_bytes: int = 0
    """Bytes of one slot."""


class WorkerLost(Unavailable):
    """A part of a worker, and with it the worker, is lost: it runs no more steps, and its cache is void."""


class MultiStepDrafts(Enum):
    """Consecutive draft steps that a worker runs without returning to the host."""

    NONE = auto()
    GREEDY = auto()
    """Steps of the previous step's argmax tokens, by `Worker.draft_greedy`."""
    ANY = auto()
    """Steps of any tokens, by `Worker.draft`."""


class Worker(Protocol):
    """Runs steps on a model with its paged KV cache. Called from one thread, one step at a time."""

    shape: ModelShape
    multi_step_drafts: MultiStepDrafts = MultiStepDrafts.NONE

    def execute(self, plan: StepPlan) -> torch.Tensor:
        """Run one step.

        Returns:
            float32 [R, V] logits on the worker's device, V = `shape.vocabulary_size`, rows in the order of
            `plan.slices`, within a slice by position; R = sum of `num_logit_rows`. An accelerator may still be
            computing them, but a step without logit rows has ended.

        Raises:
            WorkerLost: this step or an earlier one lost the worker. Any other error concerns this step alone.
        """
        ...

    def draft(self, plan: StepPlan, num_steps: int, draw: Callable[[int, torch.Tensor], torch.Tensor]) -> bool:
        """Run a step and further steps of one token of each sequence, without reading results in between.

        Args:
            plan: plan with one logit row a slice, without copies; each slice's table has blocks for all steps.
            num_steps: number of steps, at least 1.
            draw: maps the index of a step and its logits (float32 [B, V] on the device, valid during the call) to the
                tokens of the next step, int64 [B] on the device. It must not wait for the device.

        Returns:
            False if this worker does not support the plan; then it has run nothing.
        """
        return False

    def draft_greedy(self, plan: StepPlan, num_steps: int) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        """Run a step and further steps of each sequence's argmax token, until `num_steps` tokens are chosen.

        Args:
            plan: plan as for `draft`.
            num_steps: number of steps, at least 1.

        Returns:
            [num_steps, B] logits and ids of the chosen tokens, with NumPy's argmax: the first of equal logits, and NaN
            before all numbers.
        """
        raise Unsupported("this worker does not draft several tokens at once")

    def read_blocks(self, block_ids: Sequence[int]) -> NDArray[np.uint8]:
        """Copy KV blocks out; one rank of several copies its own part of them.

        Any thread may call this while steps run; the caller must find out whether a block was written meanwhile.

        Returns:
            uint8 [len(block_ids), shape.kv_layout.block_bytes]: each block, layer after layer.
        """
        raise Unsupported("this worker has no KV blocks")

    def write_blocks(self, block_ids: Sequence[int], rows: NDArray[np.uint8]) -> None:
        """Store rows that `read_blocks` of a worker with an equal layout returned. Call between two steps."""
        raise Unsupported("this worker has no KV blocks")

    def divided(self, tier: ColdTier) -> ColdTier:
        """Return the cold tier to use with this worker, in which each of several ranks keeps its own part."""
        return tier

    def watch(self, note_lost: Callable[[WorkerLost], None]) -> None:
        """Set the function that is called once, from any thread, when the worker is lost; call it now if it is lost.

        A worker of one process is lost together with the process and never calls it.
        """
        return

    def close(self) -> None:
        """End the processes that work for this one. Call after the last step, from the thread of steps. Idempotent."""
        return


class StepObserver(Protocol):
    """Observer of steps. Called from the device thread."""

    def observe_step(self, *, num_sequences: int, num_tokens: int, seconds: float) -> None:
        """Record a step; `seconds` is the time from its plan until its logits were processed."""
        ...

    def observe_queue(self, seconds: float) -> None:
        """Record that an answered call waited `seconds` for its first step."""
        ...

    def observe_masks(self, seconds: float) -> None:
        """Record the time that the masks of one call in one step took. Called from any thread."""
        ...
