"""Writes the dashboards of `monitoring/grafana` and the rules of k8s/components/monitoring (`make dashboards`)."""

from __future__ import annotations

import argparse
import sys

from monitoring.dashboards import FOLDER, written
from monitoring.rules import MANIFESTS, set_docs_address, written_objects


def main() -> int:
    """Write the files; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m monitoring", description=__doc__)
    parser.add_argument("--docs", metavar="URL", help="address of your documentation, for the runbooks of alerts")
    address = parser.parse_args().docs
    try:
        if address is not None:
            set_docs_address(address)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for folder, texts in ((FOLDER, written()), (MANIFESTS, written_objects())):
        for name, text in texts.items():
            (folder / name).write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
