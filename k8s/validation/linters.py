"""yamllint, hadolint and checkov over the sources and the rendered documents. Their settings are in `k8s/lint`."""

from __future__ import annotations

import json
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

from .documents import Document, Problem

SETTINGS = Path("k8s") / "lint"
_YAML = ("k8s", "monitoring/prometheus", "docker-compose.yml")


def lint_problems(root: Path, tools: Path, documents: Sequence[Document]) -> Iterator[Problem]:
    """Yield the findings of all three. `tools`: folder of the programs; `documents`: all rendered ones, once each."""
    yield from yamllint_problems(root, tools)
    yield from hadolint_problems(root, tools)
    yield from checkov_problems(root, tools, documents)


def yamllint_problems(root: Path, tools: Path) -> Iterator[Problem]:
    """Yield the findings in the sources of the manifests, in the compose file and in the rules."""
    output = _output(
        tools / "yamllint", "--strict", "-f", "parsable", "-c", root / SETTINGS / "yamllint.yaml", *_YAML, cwd=root
    )
    for line in output.splitlines():
        file, number, _, message = line.split(":", 3)
        yield Problem(file, "", f"line {number}", message.strip())


def hadolint_problems(root: Path, tools: Path) -> Iterator[Problem]:
    """Yield the findings in the Dockerfiles."""
    files = [
        path.relative_to(root) for path in sorted(root.glob("*/Dockerfile")) + sorted(root.glob("specdec/*/Dockerfile"))
    ]
    output = _output(tools / "hadolint", "-f", "json", "-c", root / SETTINGS / "hadolint.yaml", *files, cwd=root)
    for finding in json.loads(output or "[]"):
        yield Problem(finding["file"], "", f"line {finding['line']}", f"{finding['code']} {finding['message']}")


def checkov_problems(root: Path, tools: Path, documents: Sequence[Document]) -> Iterator[Problem]:
    """Yield the findings in rendered documents, which are written to a temporary folder, one file each."""
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        files = {}
        for index, (document, body) in enumerate((one, body) for one in documents for body in _bodies(one)):
            files[f"/{index}.yaml"] = document
            (folder / f"{index}.yaml").write_text(yaml.safe_dump(body))
        output = _output(
            tools / "checkov", "--directory", folder, "--framework", "kubernetes", "--output", "json", "--quiet",
            "--compact", "--skip-download", "--config-file", root / SETTINGS / "checkov.yaml", cwd=folder,
        )  # fmt: skip
        for report in _reports(json.loads(output or "[]")):
            for finding in report["results"]["failed_checks"]:
                document = files[finding["file_path"]]
                keys = ", ".join((finding.get("check_result") or {}).get("evaluated_keys") or ()) or "spec"
                yield document.problem(keys, f"{finding['check_id']} {finding['check_name']}")


def _bodies(document: Document) -> Iterator[dict[str, Any]]:
    """Yield what checkov checks: an object, or the pods of a custom resource, which it does not look into."""
    if "." not in document.group or document.group.endswith(".k8s.io") or not document.templates:
        yield document.body
        return
    for index, template in enumerate(document.templates):
        metadata = {"name": f"{document.name}-{index}", "namespace": "specdec", "labels": dict(template.labels)}
        if template.follows_leader:  # such pods have no probes
            metadata["annotations"] = {f"checkov.io/skip{number}": f"CKV_K8S_{number}=none" for number in (8, 9)}
        yield {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": template.spec}


def _reports(output: Any) -> list[dict[str, Any]]:
    reports = output if isinstance(output, list) else [output]
    return [report for report in reports if "results" in report]


def _output(program: Path, *arguments: str | Path, cwd: Path) -> str:
    """Return what a linter prints. Raises RuntimeError if it ends otherwise than with findings or without."""
    run = subprocess.run([str(program), *map(str, arguments)], cwd=cwd, capture_output=True, text=True)
    if run.returncode not in (0, 1):
        raise RuntimeError(f"{program.name} ended with {run.returncode}: {run.stderr.strip()[-500:]}")
    return run.stdout
