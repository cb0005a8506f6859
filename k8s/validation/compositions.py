"""Overlays, components upon the base, and every pair of components: all that can be applied.

A component says in the annotations of its kustomization how it goes with others:

    specdec.dev/position: late   after those without a position, since it copies or replaces what they patch
    specdec.dev/position: last   after all others: it sets what every object of theirs must have
    specdec.dev/needs: a b       components that must be named before it
    specdec.dev/excludes: a b    components that must not be named beside it
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from .documents import Body, Problem, at

KUSTOMIZATION = "kustomization.yaml"
_POSITIONS = ("", "late", "last")
_PREFIX = "specdec.dev/"
_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


@dataclass(frozen=True)
class Overlay:
    """One thing that can be applied: an overlay, or components upon the base."""

    name: str
    """Path of its folder in the repository; for a pair of components both, with ` + ` between them."""
    resources: tuple[Path, ...]
    components: tuple[Path, ...] = ()
    namespace: str = ""
    """Namespace that components are put into; empty for an overlay, which names its own."""


@dataclass(frozen=True)
class Component:
    """A component that overlays name: a folder of k8s/components."""

    folder: Path
    position: int
    """Index in `_POSITIONS`: lower ones are named before higher ones."""
    needs: tuple[str, ...]
    excludes: frozenset[str]

    @property
    def name(self) -> str:
        return self.folder.name


def find_overlays(root: Path) -> list[Overlay]:
    """Return all overlays of `root`/k8s, and the components that none of them uses, after those that they need."""
    folders = _kustomizations(root)
    components = {folder for folder, body in folders.items() if body.get("kind") == "Component"}
    used = {(folder / name).resolve() for folder, body in folders.items() for name in body.get("components") or ()}
    overlays = [Overlay(_relative(folder, root), (folder,)) for folder in folders if folder not in components]
    named = _components(root)
    unused = [
        (folder, _with_needs([folder.name], named) if folder.name in named else []) for folder in components - used
    ]
    return overlays + [
        _upon_base(_relative(folder, root), tuple(named[name].folder for name in names) or (folder,), root)
        for folder, names in sorted(unused)
    ]


def find_pairs(root: Path) -> list[Overlay]:
    """Return every pair of components upon the base, in the order that they ask for, with what they need."""
    components = _components(root)
    pairs: dict[tuple[Path, ...], Overlay] = {}
    for first, second in itertools.combinations(components.values(), 2):
        names = _with_needs([first.name, second.name], components)
        chosen = sorted((components[name] for name in names), key=lambda one: (one.position, names.index(one.name)))
        if not any(one.name in other.excludes for one in chosen for other in chosen):
            folders = tuple(one.folder for one in chosen)
            title = " + ".join(one.name for one in chosen)
            pairs.setdefault(tuple(sorted(folders)), _upon_base(f"k8s/components/{title}", folders, root))
    return list(pairs.values())


def composition_problems(root: Path) -> Iterator[Problem]:
    """Yield overlays that name components in a wrong order, beside others, or without those that they need."""
    components = _components(root)
    for folder, body in _kustomizations(root).items():
        named = [components[Path(name).name] for name in body.get("components") or () if Path(name).name in components]
        yield from (
            Problem(f"{_relative(folder, root)}/{KUSTOMIZATION}", str(body.get("kind") or "Kustomization"), *rest)
            for rest in _order(named)
        )
    for component in components.values():
        file = f"{_relative(component.folder, root)}/{KUSTOMIZATION}"
        for name in sorted({*component.needs, *component.excludes} - components.keys()):
            yield Problem(file, "Component", "metadata.annotations", f"names {name}: there is no such component")


def compose_overlay(root: Path, *names: str) -> Overlay:
    """Return components upon the base, in this order."""
    folder = (root / "k8s" / "components").resolve()
    return _upon_base(f"k8s/components/{' + '.join(names)}", tuple(folder / name for name in names), root)


def _upon_base(name: str, components: tuple[Path, ...], root: Path) -> Overlay:
    base = (root / "k8s" / "base").resolve()
    return Overlay(name, (base,), components, str(_kustomizations(root)[base].get("namespace", "")))


def _order(named: list[Component]) -> Iterator[tuple[str, str]]:
    names = [one.name for one in named]
    for index, one in enumerate(named):
        where = f"components[{one.name}]"
        if later := [other.name for other in named[:index] if other.position > one.position]:
            yield where, f"must be named before {', '.join(later)}, which would not reach what it adds"
        if missing := [name for name in one.needs if name not in names[:index]]:
            yield where, f"needs {', '.join(missing)} before it"
        if excluded := [name for name in names if name in one.excludes]:
            yield where, f"cannot be used with {', '.join(excluded)}"


def _with_needs(names: Iterable[str], components: dict[str, Component]) -> list[str]:
    found = [each for name in names for each in (*_with_needs(components[name].needs, components), name)]
    return list(dict.fromkeys(found))


def _components(root: Path) -> dict[str, Component]:
    """Return the components by name. Parts of a component, in folders of its own, are none."""
    folder = (root / "k8s" / "components").resolve()
    found = {path: body for path, body in _kustomizations(root).items() if path.parent == folder}
    return {path.name: _component(path, body) for path, body in found.items()}


def _component(folder: Path, body: Body) -> Component:
    says = at(body, "metadata", "annotations") or {}
    position = str(says.get(f"{_PREFIX}position", ""))
    needs, excludes = (str(says.get(f"{_PREFIX}{name}", "")).split() for name in ("needs", "excludes"))
    return Component(folder, _POSITIONS.index(position), tuple(needs), frozenset(excludes))


def _kustomizations(root: Path) -> dict[Path, Body]:
    paths = sorted((root / "k8s").rglob(KUSTOMIZATION))
    return {path.parent.resolve(): yaml.load(path.read_text(), Loader=_Loader) or {} for path in paths}


def _relative(path: Path, root: Path) -> str:
    return path.relative_to(root.resolve()).as_posix()
