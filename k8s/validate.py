"""Renders the manifests and checks every document, and the compose file, against their schemas. Needs no cluster.

It does not prove that images exist or pods start; `tests/integration/test_compose_commands.py` runs the compose file's
commands. Called by `make k8s-validate`; all schemas come with installed packages, so no network is needed.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import kubernetes_validate
import yaml

ROOT = Path(__file__).resolve().parents[1]
#: Oldest and newest supported Kubernetes versions.
KUBERNETES_VERSIONS = ("1.31", "1.34")


def render(directory: Path) -> list[dict]:
    """Return the documents that `kubectl apply -k` would send. Raises CalledProcessError when they do not render."""
    rendered = subprocess.run(
        ["kubectl", "kustomize", str(directory)], check=True, stdout=subprocess.PIPE, text=True
    ).stdout
    return [document for document in yaml.safe_load_all(rendered) if document]


def violations(documents: list[dict]) -> list[str]:
    """Return one line for each document and version that the schema refuses, unknown fields included."""
    found = []
    for document in documents:
        name = f"{document['kind']}/{document['metadata']['name']}"
        for version in KUBERNETES_VERSIONS:
            try:
                kubernetes_validate.validate(document, version, strict=True)
            except kubernetes_validate.ValidationError as error:
                path = ".".join(str(part) for part in error.path)
                found.append(f"{name} (Kubernetes {version}): {path}: {error.message}")
    return found


def main() -> int:
    if shutil.which("kubectl") is None:
        print("error: kubectl is needed to render the manifests; none is on the PATH", file=sys.stderr)
        return 1
    failed = False
    for directory in sorted(path.parent for path in (ROOT / "k8s").rglob("kustomization.yaml")):
        try:
            documents = render(directory)
        except subprocess.CalledProcessError:
            return 1  # kubectl has said why
        found = violations(documents)
        print(f"{directory.relative_to(ROOT)}: {len(documents)} documents, {len(found)} violations")
        for line in found:
            print(f"error: {line}", file=sys.stderr)
        failed = failed or bool(found)
    print("docker-compose.yml: ", end="", flush=True)
    compose = ["check-jsonschema", "--builtin-schema", "vendor.compose-spec", str(ROOT / "docker-compose.yml")]
    return 1 if subprocess.run(compose).returncode or failed else 0


if __name__ == "__main__":
    sys.exit(main())
