"""Limits of GPUs, from their makers' data sheets."""

from __future__ import annotations

import difflib
from dataclasses import dataclass

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


#: Known cards by the name that `--gpu` takes.
CARDS = {
    card.name: card
    for card in (
        Card("a10", 24, 600, 125, "NVIDIA A10 data sheet"),
        Card("a100-40gb", 40, 1555, 312, "NVIDIA A100 data sheet, SXM"),
        Card("a100-80gb", 80, 2039, 312, "NVIDIA A100 data sheet, SXM"),
        Card("b200", 180, 8000, 2250, "NVIDIA DGX B200 data sheet, per GPU"),
        Card("h100", 80, 3350, 989, "NVIDIA H100 data sheet, SXM"),
        Card("h100-pcie", 80, 2000, 756, "NVIDIA H100 data sheet, PCIe"),
        Card("h200", 141, 4800, 989, "NVIDIA H200 data sheet, SXM"),
        Card("l4", 24, 300, 121, "NVIDIA L4 data sheet"),
        Card("l40s", 48, 864, 362, "NVIDIA L40S data sheet"),
        Card("mi300x", 192, 5300, 1307, "AMD Instinct MI300X data sheet"),
        Card("rtx-4090", 24, 1008, 165, "NVIDIA Ada architecture paper"),
        Card("t4", 16, 320, 65, "NVIDIA T4 data sheet"),
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
