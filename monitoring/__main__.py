"""Writes the dashboards of `monitoring/grafana` (`make dashboards`)."""

from __future__ import annotations

from monitoring.dashboards import FOLDER, written


def main() -> None:
    """Write one JSON file for each dashboard."""
    for name, text in written().items():
        (FOLDER / name).write_text(text)


if __name__ == "__main__":
    main()
