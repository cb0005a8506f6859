"""One measured figure, with where and when it was measured; rows in and out of JSON.

`pairs` and the suites obtain figures, `report` shows them.
"""

import json
import os
import platform
import subprocess
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from datetime import UTC, datetime
from pathlib import Path


def hardware_name() -> str:
    """The processor as the kernel names it, and how many logical cores this process may use."""
    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [line.partition(":")[2].strip() for line in cpuinfo.read_text().splitlines() if "model name" in line]
        model = names[0] if names else model
    return f"{len(os.sched_getaffinity(0))} cores, {model}"


def commit_name() -> str:
    """The commit this tree stands on, with `+` where tracked files differ; `unknown` outside a git checkout."""
    root = Path(__file__).resolve().parents[2]
    try:
        command = ["git", "-C", str(root), "describe", "--always", "--abbrev=12", "--dirty=+", "--exclude=*"]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


@dataclass(frozen=True)
class Origin:
    """Fields that every row of one run shares."""

    hardware: str = field(default_factory=hardware_name)
    commit: str = field(default_factory=commit_name)
    date: str = field(default_factory=lambda: datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"))


@dataclass(frozen=True, kw_only=True)
class Row:
    """One figure.

    A ratio names what it is measured against in `ratio_to` and carries its interval; a plain figure leaves them None.
    """

    suite: str
    row: int | None = None
    """Number of the agreed row it answers; None for figures that only inform."""
    case: str
    system: str
    metric: str
    value: float
    unit: str
    origin: Origin
    ratio_to: str | None = None
    low: float | None = None
    """Lower end of the 95 % interval of a ratio."""
    high: float | None = None
    num_pairs: int | None = None
    required: float | None = None
    """Ratio that must be reached; the row falls short when the whole interval lies below."""
    at_most: float | None = None
    """Limit of a cost; the row falls short when the whole interval lies above."""
    quick: bool = False
    """Measured by `--quick`: fewer pairs than a kept figure needs."""
    simulated: bool = False
    x: float | None = None
    """Position of the figure in a sweep; None outside one."""
    x_name: str | None = None
    """Swept quantity: streams, position, delay."""
    note: str | None = None
    """Remark that is printed under the table and in the plot."""

    @property
    def falls_short(self) -> bool:
        """Return whether the whole interval lies on the wrong side of the requirement."""
        if self.at_most is not None and (self.value if self.low is None else self.low) > self.at_most:
            return True
        return self.required is not None and (self.value if self.high is None else self.high) < self.required

    def to_json(self) -> dict[str, object]:
        """A flat object: the row's own fields and its origin's."""
        fields = asdict(self)
        return fields | fields.pop("origin")


def write_json(rows: Sequence[Row], path: Path) -> None:
    """Write the rows as one JSON list."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps([row.to_json() for row in rows], indent=1) + "\n")


def read_json(path: Path) -> list[Row]:
    """Return the rows that `write_json` wrote to a file."""
    of_origin = {each.name for each in fields(Origin)}
    return [
        Row(
            origin=Origin(**{name: kept[name] for name in of_origin}),
            **{name: value for name, value in kept.items() if name not in of_origin},
        )
        for kept in json.loads(path.read_text())
    ]
