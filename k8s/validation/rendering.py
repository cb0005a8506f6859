"""Renders overlays with `kubectl kustomize`, so that each object carries the name of the file it comes from.

An overlay is rendered through a temporary kustomization that has the overlay as its only resource and asks for
kustomize's origin annotations. Components are rendered upon the base.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from .compositions import KUSTOMIZATION, Overlay
from .documents import Document, Problem

_ORIGIN = "config.kubernetes.io/origin"

#: Environment of kubectl and helm. They are started in threads, while `service_settings` changes this process's own in
#: another one: a program that inherited it would fail with "Bad address" now and then.
TOOL_ENVIRONMENT = dict(os.environ)


class RenderingError(Exception):
    """An overlay does not render; `problem` says why."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(str(problem))
        self.problem = problem


def render(overlay: Overlay, root: Path, kubectl: Path) -> list[Document]:
    """Return the documents that `kubectl apply -k` would send. Raises RenderingError."""
    with _wrapped(overlay) as folder:
        command = [str(kubectl), "kustomize", str(folder)]
        run = subprocess.run(command, env=TOOL_ENVIRONMENT, capture_output=True, text=True)
        if run.returncode:
            message = " ".join(run.stderr.split()).replace(str(folder), overlay.name)
            raise RenderingError(Problem(f"{overlay.name}/{KUSTOMIZATION}", "Kustomization", "", message))
        bodies = [body for body in yaml.load_all(run.stdout, Loader=_Loader) if body]
        return [_document(body, folder, root, overlay) for body in bodies]


_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


@contextmanager
def _wrapped(overlay: Overlay) -> Iterator[Path]:
    """Yield a folder with a kustomization that adds origin annotations to the overlay."""
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text).resolve()
        body = {
            "apiVersion": "kustomize.config.k8s.io/v1beta1",
            "kind": "Kustomization",
            "resources": [os.path.relpath(path, folder) for path in overlay.resources],
            "components": [os.path.relpath(path, folder) for path in overlay.components],
            "buildMetadata": ["originAnnotations"],
            **({"namespace": overlay.namespace} if overlay.namespace else {}),
        }
        (folder / KUSTOMIZATION).write_text(yaml.safe_dump(body))
        yield folder


def _document(body: dict[str, Any], folder: Path, root: Path, overlay: Overlay) -> Document:
    """Take the origin out of an object: it is not applied."""
    metadata = body.get("metadata") or {}
    annotations = metadata.get("annotations") or {}
    origin = yaml.load(annotations.pop(_ORIGIN, ""), Loader=_Loader) or {}
    if not annotations:
        metadata.pop("annotations", None)
    path = origin.get("path") or origin.get("configuredIn")
    if not path:
        return Document(f"{overlay.name}/{KUSTOMIZATION}", body)
    return Document((folder / path).resolve().relative_to(root.resolve()).as_posix(), body)
