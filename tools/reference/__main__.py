"""`python -m tools.reference [--check]`: write what the documentation takes from the code, or compare it.

Written are the pages of docs/reference that describe code, and the tables and the picture that show kept measurements.
`make reference` runs it. `tests/unit/docs/test_generated_pages.py` makes the same comparison.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

from tools.reference import (
    command_line,
    configuration,
    errors,
    figures,
    grpc_api,
    http_api,
    metrics,
    speed_chart,
)

COMMAND = "make reference"

#: Whole files, by their path from the root of the repository.
PAGES: dict[str, Callable[[], str]] = {
    "docs/reference/command-line.md": command_line.page,
    "docs/reference/configuration.md": configuration.page,
    "docs/reference/errors.md": errors.page,
    "docs/reference/grpc-api.md": grpc_api.page,
    "docs/reference/http-api.md": http_api.page,
    "docs/reference/metrics.md": metrics.page,
    "docs/speed.svg": speed_chart.chart,
}

#: Pages of which only the tables of figures are written.
PAGES_WITH_FIGURES = ("README.md", "docs/performance.md")


def main(argv: list[str]) -> int:
    """Write what differs from the code, or only report it with `--check`; return the exit code."""
    is_check = argv == ["--check"]
    texts = {name: expected(name) for name in (*PAGES, *PAGES_WITH_FIGURES)}
    drifted = [(name, text) for name, text in texts.items() if text != committed(name)]
    for name, text in drifted:
        if is_check:
            print(f"error: {name} differs from the code: run {COMMAND}", file=sys.stderr)
        else:
            (figures.ROOT / name).write_text(text, encoding="utf-8")
            print(f"wrote {name}")
    return 1 if is_check and drifted else 0


def expected(name: str) -> str:
    """Return the text of a file as it should be."""
    return PAGES[name]() if name in PAGES else figures.fill(committed(name))


def committed(name: str) -> str:
    """Return the text of a file, or "" where it does not exist."""
    path = figures.ROOT / name
    return path.read_text(encoding="utf-8") if path.is_file() else ""


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
