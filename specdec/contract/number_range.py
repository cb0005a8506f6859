"""Range, default and meaning of a number in a request: declared with the field, checked wherever the number arrives."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any


@dataclass(frozen=True, slots=True)
class NumberRange:
    """Finite numbers from `least`, or above `above`, up to `most`, or below `below`. None: no such limit."""

    default: float
    meaning: str = ""
    """Meaning of the number, as a part of a sentence."""
    least: float | None = None
    above: float | None = None
    most: float | None = None
    below: float | None = None

    def holds(self, value: float) -> bool:
        """Return whether a value is finite and within the limits."""
        return (
            math.isfinite(value)
            and (self.least is None or value >= self.least)
            and (self.above is None or value > self.above)
            and (self.most is None or value <= self.most)
            and (self.below is None or value < self.below)
        )

    @property
    def is_bounded(self) -> bool:
        """Return whether the limits exclude infinity."""
        return self.most is not None or self.below is not None

    @property
    def words(self) -> str:
        """The limits as they follow "must be"; "" for none."""
        if self.is_bounded:
            low = f"({self.above:g}" if self.above is not None else f"[{self.least:g}"
            return f"in {low}, " + (f"{self.most:g}]" if self.most is not None else f"{self.below:g})")
        if self.above is not None:
            return f"above {self.above:g}"
        return "" if self.least is None else f"at least {self.least:g}"


def ranged(default: float, meaning: str, **limits: float) -> Any:
    """Return the dataclass field of a number with a `NumberRange`."""
    return field(default=default, metadata={"range": NumberRange(default, meaning, **limits)})


def ranges_of(kind: Any) -> Mapping[str, NumberRange]:
    """Return the ranges of a dataclass's fields that have one, by name and in their order."""
    return {each.name: each.metadata["range"] for each in fields(kind) if "range" in each.metadata}
