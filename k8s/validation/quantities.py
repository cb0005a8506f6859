"""Quantities of Kubernetes (`500m`, `2Gi`), sizes of Redis (`512mb`) and models of the hub (`Qwen/Qwen3-8B`)."""

from __future__ import annotations

import re

_UNITS = {
    "": 1.0, "m": 1e-3, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30,
    "Ti": 2.0**40,
}  # fmt: skip
_REDIS_UNITS = {
    "": 1.0, "b": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "kb": 2.0**10, "mb": 2.0**20, "gb": 2.0**30,
}  # fmt: skip
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_PARAMETERS = re.compile(r"(\d+(?:\.\d+)?)B(?![a-z])", re.IGNORECASE)
_BYTES_OF_A_PARAMETER = 2.0


def number_of(quantity: object) -> float | None:
    """Return a quantity in its base unit (cores, bytes or pieces); None for one that is missing or malformed."""
    found = re.fullmatch(r"([\d.]+)([A-Za-z]*)", str(quantity))
    if found is None or found[2] not in _UNITS:
        return None
    return float(found[1]) * _UNITS[found[2]]


def redis_bytes(text: object) -> float | None:
    """Return a size as redis.conf writes it, in bytes; None for one that is missing or malformed."""
    found = re.fullmatch(r"(\d+)([a-z]*)", str(text).lower())
    if found is None or found[2] not in _REDIS_UNITS:
        return None
    return float(found[1]) * _REDIS_UNITS[found[2]]


def is_hub_id(model: str) -> bool:
    """Return whether a model is named by its id on the hub, and not by a path."""
    return _HUB_ID.fullmatch(model) is not None


def hub_model_bytes(model: str) -> float:
    """Return the size of a hub model's files as its name tells it, in bytes; 0 where it tells none."""
    found = _PARAMETERS.search(model)
    return float(found[1]) * 1e9 * _BYTES_OF_A_PARAMETER if found else 0.0


def mebibytes(num_bytes: float) -> str:
    """Return a size in words, such as 1536Mi."""
    return f"{num_bytes / 2**20:.0f}Mi"
