"""Renders overlays with `kubectl kustomize`, so that each object carries the name of the file it comes from.

An overlay is rendered through a temporary kustomization that has the overlay as its only resource and asks for
kustomize's origin annotations. A component that no overlay uses is rendered upon the base, after those
that its annotation `specdec.dev/needs` names.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from .documents import Document, Problem

KUSTOMIZATION = "kustomization.yaml"
_ORIGIN = "config.kubernetes.io/origin"
#: Annotation of a component's kustomization: components that must be named before it.
_NEEDS = "specdec.dev/needs"


@dataclass(frozen=True)
class Overlay:
    """One thing that can be applied: an overlay, or a component upon the base."""

    name: str
    """Path of its folder in the repository."""
    resources: tuple[Path, ...]
    components: tuple[Path, ...] = ()


class RenderingError(Exception):
    """An overlay does not render; `problem` says why."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(str(problem))
        self.problem = problem


def find_overlays(root: Path) -> list[Overlay]:
    """Return all overlays of `root`/k8s, and the components that none of them uses."""
    folders = {path.parent.resolve(): _read(path) for path in sorted((root / "k8s").rglob(KUSTOMIZATION))}
    components = {folder for folder, body in folders.items() if body.get("kind") == "Component"}
    used = {(folder / name).resolve() for folder, body in folders.items() for name in body.get("components") or ()}
    overlays = [Overlay(_relative(folder, root), (folder,)) for folder in folders if folder not in components]
    base = (root / "k8s" / "base").resolve()
    return overlays + [
        Overlay(_relative(folder, root), (base,), (*_needed(folder, folders[folder]), folder))
        for folder in sorted(components - used)
    ]


def _needed(folder: Path, component: dict[str, Any]) -> list[Path]:
    names = ((component.get("metadata") or {}).get("annotations") or {}).get(_NEEDS, "")
    return [folder.with_name(name) for name in names.split()]


def render(overlay: Overlay, root: Path, kubectl: Path) -> list[Document]:
    """Return the documents that `kubectl apply -k` would send. Raises RenderingError."""
    with _wrapped(overlay) as folder:
        run = subprocess.run([str(kubectl), "kustomize", str(folder)], capture_output=True, text=True)
        if run.returncode:
            message = " ".join(run.stderr.split()).replace(str(folder), overlay.name)
            raise RenderingError(Problem(f"{overlay.name}/{KUSTOMIZATION}", "Kustomization", "", message))
        bodies = [body for body in yaml.load_all(run.stdout, Loader=_Loader) if body]
        return [_document(body, folder, root, overlay) for body in bodies]


_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def _read(path: Path) -> dict[str, Any]:
    return yaml.load(path.read_text(), Loader=_Loader) or {}


def _relative(path: Path, root: Path) -> str:
    return path.relative_to(root.resolve()).as_posix()


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
        }
        (folder / KUSTOMIZATION).write_text(yaml.safe_dump(body))
        yield folder


def _document(body: dict[str, Any], folder: Path, root: Path, overlay: Overlay) -> Document:
    """Take the origin out of an object: it is no part of what is applied."""
    metadata = body.get("metadata") or {}
    annotations = metadata.get("annotations") or {}
    origin = yaml.safe_load(annotations.pop(_ORIGIN, "")) or {}
    if not annotations:
        metadata.pop("annotations", None)
    path = origin.get("path") or origin.get("configuredIn")
    file = _relative((folder / path).resolve(), root) if path else f"{overlay.name}/{KUSTOMIZATION}"
    return Document(file, body)
