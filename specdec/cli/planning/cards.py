"""GPUs by their makers' data sheets, and the time of a model's step on one.

A step takes as long as the slower of reading memory and multiplying. The shares of a card's peak, and the costs that do
not depend on the model, are those of one H100 with a random model in the shape of Llama 3.1 8B (docs/performance.md,
"On a GPU"): one row in 6.7 ms, a draft of a seventh of the weights in 1.3 ms, and 4 ms of a round outside of both.
Other cards may reach other shares.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass

from specdec.cli.planning.links import LINKS, Link
from specdec.cli.planning.steady_state import CallTimes
from specdec.contract.errors import InvalidRequest


@dataclass(frozen=True, slots=True)
class Card:
    """One GPU."""

    name: str
    memory_gb: float
    bandwidth_gb_per_s: float
    """Peak rate of its memory."""
    tflops: float
    """Peak rate of 16-bit matrix products, without sparsity."""
    source: str
    link: Link = LINKS["pcie-4"]
    """Link to the other cards of a group, unless `--link` names another one."""


#: Known cards by the name that `--gpu` takes.
CARDS = {
    card.name: card
    for card in (
        Card("a10", 24, 600, 125, "NVIDIA A10 data sheet"),
        Card("a100-40gb", 40, 1555, 312, "NVIDIA A100 data sheet, SXM", LINKS["nvlink-3"]),
        Card("a100-80gb", 80, 2039, 312, "NVIDIA A100 data sheet, SXM", LINKS["nvlink-3"]),
        Card("b200", 180, 8000, 2250, "NVIDIA DGX B200 data sheet, per GPU", LINKS["nvlink-5"]),
        Card("h100", 80, 3350, 989, "NVIDIA H100 data sheet, SXM", LINKS["nvlink-4"]),
        Card("h100-pcie", 80, 2000, 756, "NVIDIA H100 data sheet, PCIe", LINKS["pcie-5"]),
        Card("h200", 141, 4800, 989, "NVIDIA H200 data sheet, SXM", LINKS["nvlink-4"]),
        Card("l4", 24, 300, 121, "NVIDIA L4 data sheet"),
        Card("l40s", 48, 864, 362, "NVIDIA L40S data sheet"),
        Card("mi300x", 192, 5300, 1307, "AMD Instinct MI300X data sheet", LINKS["infinity-fabric"]),
        Card("rtx-4090", 24, 1008, 165, "NVIDIA Ada architecture paper"),
        Card("t4", 16, 320, 65, "NVIDIA T4 data sheet", LINKS["pcie-3"]),
    )
}


def card_of(name: str) -> Card:
    """Return a card. Raises InvalidRequest that names the known ones."""
    card = CARDS.get(name.lower())
    if card is None:
        near = difflib.get_close_matches(name.lower(), CARDS, 1)
        hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(CARDS)}"
        raise InvalidRequest(f"--gpu: unknown GPU {name!r}; {hint}", field="gpu")
    return card


BANDWIDTH_SHARE = 0.73
#: Assumed: prompts and large batches were not measured.
FLOPS_SHARE = 0.5
#: Time of the host before and after a step, in which the device waits.
HOST_S = 0.0005
#: The first two of one H100. The last two are those of two CPU cores with simulated engines (`python -m bench planning`
#: and `python -m bench crowd`).
CALLS = CallTimes(target_s=0.0017, draft_s=0.0019, opening_s=0.008, coordinator_s=0.00023)
#: Bytes of an activation that ranks add up, and sums of a layer: after attention and after the MLP.
_ACTIVATION_BYTES, _SUMS_PER_LAYER = 2, 2
#: Share of a card's memory for weights and KV cache; the rest is for activations, graphs and libraries.
MEMORY_SHARE = 0.88


@dataclass(frozen=True, slots=True)
class PlacedModel:
    """A model on a group of equal cards."""

    name: str
    num_parameters: int
    num_layers: int
    kv_bytes_per_token: int
    weight_bytes: int
    card: Card
    num_gpus: int
    """Cards of one replica: its tensor-parallel degree."""
    state_bytes: int = 0
    """Bytes of one sequence's recurrent states in a hybrid."""
    hidden_size: int = 0
    """Width of the activations that ranks add up."""

    @property
    def kv_bytes(self) -> float:
        """Memory of a replica that is left for KV; negative if the weights do not fit."""
        return self.num_gpus * self.card.memory_gb * 1e9 * MEMORY_SHARE - self.weight_bytes

    def session_bytes(self, num_tokens: float) -> float:
        """Return the memory of a session of `num_tokens` tokens: its KV, and two recurrent states of a hybrid."""
        return num_tokens * self.kv_bytes_per_token + 2 * self.state_bytes

    def step_s(self, num_sequences: float, num_rows: float, context_tokens: float) -> float:
        """Return the seconds of a step.

        Args:
            num_sequences: sequences in the batch.
            num_rows: mean rows of each.
            context_tokens: mean tokens of KV of each.
        """
        # A step reads one recurrent state of a sequence and writes one.
        num_bytes = self.weight_bytes + num_sequences * self.session_bytes(context_tokens)
        reading_s = num_bytes / (self.num_gpus * self.card.bandwidth_gb_per_s * 1e9 * BANDWIDTH_SHARE)
        rows = num_sequences * num_rows
        return max(reading_s, self._multiplying_s(rows)) + HOST_S + self._summing_s(rows)

    def prefill_s(self, num_tokens: int) -> float:
        """Return the seconds in which a prompt is computed."""
        return self.step_s(1, num_tokens, 0)

    def _multiplying_s(self, num_rows: float) -> float:
        flops = 2.0 * self.num_parameters * num_rows
        return flops / (self.num_gpus * self.card.tflops * 1e12 * FLOPS_SHARE)

    def _summing_s(self, num_rows: float) -> float:
        num_bytes = num_rows * self.hidden_size * _ACTIVATION_BYTES
        return _SUMS_PER_LAYER * self.num_layers * self.card.link.sum_s(self.num_gpus, num_bytes)
