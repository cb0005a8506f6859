"""Copies the manifests that the Helm chart installs as they are to `k8s/chart/files`: `python -m k8s.chart_files`.

A chart may read files of its own folder alone. Everything else of the chart is in its templates, and a test compares
what they give with what kustomize gives.
"""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDER = Path("k8s") / "chart" / "files"
#: What is copied, as patterns of paths in the repository.
SOURCES = (
    "k8s/base/network-policies.yaml",
    "k8s/base/priorities.yaml",
    "k8s/components/gateway/workload/network-policies.yaml",
    "k8s/components/hpa/adapter/rules.yaml",
    "k8s/components/model-hub/network-policy.yaml",
    "k8s/components/monitoring/*.yaml",
    "k8s/components/platform-*/*.yaml",
    "k8s/components/quotas/*.yaml",
    "monitoring/grafana/*.json",
)


def expected_files(root: Path = ROOT) -> dict[Path, str]:
    """Return the text of each file of the chart's folder by its path in the repository."""
    sources = [path for pattern in SOURCES for path in sorted(root.glob(pattern)) if path.stem != "kustomization"]
    return {FOLDER / path.relative_to(root): path.read_text() for path in sources}


def stale_files(root: Path = ROOT) -> list[Path]:
    """Return the paths of files that are missing, differ from their source, or have none."""
    expected = expected_files(root)
    present = {path.relative_to(root): path.read_text() for path in (root / FOLDER).rglob("*") if path.is_file()}
    return sorted(path for path in expected.keys() | present.keys() if expected.get(path) != present.get(path))


def main(root: Path = ROOT) -> None:
    """Write the files that are stale, remove those without a source, and print their paths."""
    expected = expected_files(root)
    for path in stale_files(root):
        if path in expected:
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            (root / path).write_text(expected[path])
        else:
            (root / path).unlink()
        print(path)


if __name__ == "__main__":
    main()
