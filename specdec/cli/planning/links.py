"""Links between the GPUs of a group, and the time of a sum over the group.

Each layer of a divided model adds up activations over its ranks twice. The sum is a ring: every rank sends and receives
2 (n - 1) messages, and 2 (n - 1) / n of the bytes. The times beside the bytes are those by which NCCL chooses between
its protocols (src/graph/tuning.cc): LL for few bytes, with a quarter of the rate, and Simple for many.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass

from specdec.contract.errors import InvalidRequest


@dataclass(frozen=True, slots=True)
class _Steps:
    """Time of one message of a ring, by protocol."""

    low_latency_s: float
    simple_s: float


_NVLINK, _PCIE, _NETWORK = _Steps(0.47e-6, 3.4e-6), _Steps(1.0e-6, 5.7e-6), _Steps(2.7e-6, 9.6e-6)
#: Time of a sum before its first message, and share of a link's rate, by protocol.
_LOW_LATENCY_BASE_S, _SIMPLE_BASE_S = 3.6e-6, 8.4e-6
#: NCCL expects at most 235 of the 300 GB/s of an A100's links.
_RATE_SHARE, _LOW_LATENCY_SHARE = 0.78, 0.25


@dataclass(frozen=True, slots=True)
class Link:
    """Connection between the GPUs of a group."""

    name: str
    gb_per_s: float
    """Rate of one GPU's links in one direction."""
    steps: _Steps
    source: str

    def sum_s(self, num_gpus: int, num_bytes: float) -> float:
        """Return the seconds in which `num_gpus` GPUs add up `num_bytes` each; 0 for one GPU."""
        if num_gpus == 1:
            return 0.0
        num_messages = 2 * (num_gpus - 1)
        sent_s = num_messages / num_gpus * num_bytes / (self.gb_per_s * 1e9 * _RATE_SHARE)
        return min(
            _LOW_LATENCY_BASE_S + num_messages * self.steps.low_latency_s + sent_s / _LOW_LATENCY_SHARE,
            _SIMPLE_BASE_S + num_messages * self.steps.simple_s + sent_s,
        )


#: Known links by the name that `--link` takes. Makers add up both directions; these are one.
LINKS = {
    link.name: link
    for link in (
        Link("nvlink-3", 300, _NVLINK, "NVIDIA A100 data sheet: 600 GB/s both ways"),
        Link("nvlink-4", 450, _NVLINK, "NVIDIA H100 data sheet: 900 GB/s both ways"),
        Link("nvlink-5", 900, _NVLINK, "NVIDIA DGX B200 data sheet: 1.8 TB/s both ways"),
        Link("infinity-fabric", 448, _NVLINK, "AMD Instinct MI300X data sheet: seven links of 128 GB/s both ways"),
        Link("pcie-3", 15.8, _PCIE, "PCI-SIG: 16 lanes of 8 GT/s"),
        Link("pcie-4", 31.5, _PCIE, "PCI-SIG: 16 lanes of 16 GT/s"),
        Link("pcie-5", 63, _PCIE, "PCI-SIG: 16 lanes of 32 GT/s"),
        Link("network-100g", 12.5, _NETWORK, "one adapter of 100 Gb/s a GPU"),
        Link("network-400g", 50, _NETWORK, "NVIDIA DGX H100 data sheet: one adapter of 400 Gb/s a GPU"),
    )
}


def link_of(name: str) -> Link:
    """Return a link. Raises InvalidRequest that names the known ones."""
    link = LINKS.get(name.lower())
    if link is None:
        near = difflib.get_close_matches(name.lower(), LINKS, 1)
        hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(LINKS)}"
        raise InvalidRequest(f"--link: unknown link {name!r}; {hint}", field="link")
    return link
