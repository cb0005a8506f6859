"""Check the numbers by which a model's files state its sizes. A boolean is not a number here."""

from __future__ import annotations

from typing import Any

from specdec.contract.errors import InvalidRequest

#: Most layers of a model.
MOST_LAYERS = 10_000
#: Largest of all other sizes.
MOST = 100_000_000


def is_count(value: Any, least: int, most: int) -> bool:
    """Return whether a value is a whole number in a range."""
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


def require_count(model: str, key: str, value: Any, *, least: int = 1, most: int = MOST) -> int:
    """Return a size of a model; 0 for None, which stands for a key that is absent.

    Args:
        model: name of the model.
        key: key of its config.json or GGUF header.
        value: a whole number, or one for each layer, of which the largest counts and some may be 0.
        least: its least value.
        most: its largest value.

    Raises:
        InvalidRequest: the value is no such number. The message has the key, the value and the limits.
    """
    if value is None:
        return 0
    value = list(value) if isinstance(value, tuple) else value
    if isinstance(value, list) and value and all(is_count(number, 0, most) for number in value):
        value = max(value) or value
    if not is_count(value, least, most):
        raise InvalidRequest(
            f"model {model!r} has {key} {value!r:.80}, which must be a whole number from {least} to {most}: its files "
            "are damaged or were written wrongly, so convert or download it again",
            field="model",
        )
    return int(value)
