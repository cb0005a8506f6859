"""Renders the Helm chart with each of its example values (`k8s/chart/ci`), as `helm install` would send it."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import yaml

from .documents import Document, Problem
from .rendering import TOOL_ENVIRONMENT, RenderingError
from .schemas import KUBERNETES_VERSIONS

CHART = Path("k8s") / "chart"
NAMESPACE = "specdec"
_SOURCE = re.compile(r"^# Source: specdec/(?P<path>.+)$", re.MULTILINE)
_SEPARATOR = re.compile(r"^---$", re.MULTILINE)
_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def find_helm(tools: Path) -> Path | None:
    """Return the path of helm: in `tools`, or else on the PATH."""
    return next((path for path in (tools / "helm", Path(shutil.which("helm") or "")) if path.is_file()), None)


def find_chart_values(root: Path) -> list[Path]:
    """Return the files of example values."""
    return sorted((root / CHART / "ci").glob("*-values.yaml"))


def render_chart(root: Path, helm: Path, *arguments: str) -> list[Document]:
    """Return what `helm install` would send.

    Args:
        root: folder of the repository.
        helm: path of the program.
        arguments: further ones of `helm template`, such as `--values FILE`.

    Raises:
        RenderingError: helm refuses the values, or a template does not render; the problem has helm's words.
    """
    command = [str(helm), "template", "specdec", str(root / CHART), "--namespace", NAMESPACE]
    command += ["--kube-version", KUBERNETES_VERSIONS[0], *arguments]
    run = subprocess.run(command, env=TOOL_ENVIRONMENT, capture_output=True, text=True)
    if run.returncode:
        raise RenderingError(Problem((CHART / "templates").as_posix(), "", "", " ".join(run.stderr.split())))
    return [document for part in _SEPARATOR.split(run.stdout) for document in _documents(part)]


def _documents(part: str) -> list[Document]:
    """Return the object of a part of helm's output, with the template that it comes from."""
    source, body = _SOURCE.search(part), yaml.load(part, Loader=_Loader)
    return [Document((CHART / source["path"]).as_posix(), body)] if source and body else []
