"""Checks documents against the schemas of Kubernetes and of the operators whose custom resources are used.

The schemas of Kubernetes come with the package kubernetes-validate; unknown fields are refused. Those of custom
resources are in `k8s/schemas`, one file a kind (`kind-group-version.json`). A kind without a schema is a problem.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from jsonschema import Draft7Validator, Draft202012Validator
from jsonschema.exceptions import ValidationError, best_match
from kubernetes_validate.utils import schema_contents
from referencing import Registry, Resource

from .documents import Document, Problem

#: Oldest and newest supported Kubernetes versions.
KUBERNETES_VERSIONS = ("1.31", "1.37")
FOLDER = Path(__file__).resolve().parents[1] / "schemas"


def schema_problems(document: Document) -> Iterator[Problem]:
    """Yield what the schemas refuse; a document that several versions refuse alike gives one problem."""
    text = json.dumps(document.body, sort_keys=True)
    for field, message, versions in _violations(text):
        where = f" (Kubernetes {', '.join(versions)})" if versions else ""
        yield document.problem(field, message + where)


@cache
def _violations(text: str) -> list[tuple[str, str, list[str]]]:
    """Return field, message and versions. Overlays share most documents, so each is checked once."""
    body = json.loads(text)
    kind, group_version = body.get("kind"), body.get("apiVersion")
    if not kind or not group_version:
        return [("kind" if not kind else "apiVersion", "is missing", [])]
    found: dict[tuple[str, str], list[str]] = {}
    without = []
    for version in KUBERNETES_VERSIONS:
        validator = _core_validator(version, kind, group_version)
        if validator is None:
            without.append(version)
        elif error := best_match(validator.iter_errors(body)):
            found.setdefault((field_of(error), _words(error)), []).append(version)
    if without == list(KUBERNETES_VERSIONS):
        return _custom_violations(body, kind, group_version)
    if without:
        found[("apiVersion", f"{group_version} has no kind {kind}")] = without
    return [(field, message, versions) for (field, message), versions in found.items()]


def _custom_violations(body: Any, kind: str, group_version: str) -> list[tuple[str, str, list[str]]]:
    validator = _custom_validator(kind, group_version)
    if validator is None:
        name = _file_name(kind, group_version)
        return [
            (
                "kind",
                f"{kind} of {group_version} has no schema: Kubernetes has none, and k8s/schemas/{name} is missing",
                [],
            )
        ]
    error = best_match(validator.iter_errors(body))
    return [(field_of(error), _words(error), [])] if error else []


def field_of(error: ValidationError) -> str:
    """Return the path of the field that an error is about."""
    path = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in error.absolute_path)
    return path.removeprefix(".")


def _words(error: ValidationError) -> str:
    """Return the message without a printed object in front of it, which may be long."""
    return error.message if len(error.message) < 300 else f"…{error.message[-300:]}"


@cache
def _definitions(version: str) -> Registry[Any]:
    contents = schema_contents(f"kubernetes-json-schema/v{version}.0-local-strict/_definitions.json", version)
    return Resource.from_contents(contents) @ Registry()


@cache
def _core_validator(version: str, kind: str, group_version: str) -> Draft202012Validator | None:
    group, _, number = group_version.rpartition("/")
    name = "-".join(filter(None, (kind.lower(), group.partition(".")[0], number)))
    try:
        schema = schema_contents(f"kubernetes-json-schema/v{version}.0-local-strict/{name}.json", version)
    except FileNotFoundError:
        return None
    if {"group": group, "kind": kind, "version": number} not in schema.get("x-kubernetes-group-version-kind", ()):
        return None  # the file name has the first label of the group alone
    return Draft202012Validator(schema, registry=Resource.from_contents(schema) @ _definitions(version))


@cache
def _custom_validator(kind: str, group_version: str) -> Draft7Validator | None:
    path = FOLDER / _file_name(kind, group_version)
    return Draft7Validator(json.loads(path.read_text())) if path.is_file() else None


def _file_name(kind: str, group_version: str) -> str:
    return f"{kind.lower()}-{group_version.replace('/', '-')}.json"
