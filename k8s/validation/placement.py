"""Spreads and affinities, which place pods, and the numbers of groups of pods."""

from __future__ import annotations

import math
from collections.abc import Iterator

from .documents import Body, Document, PodTemplate, Problem, at, of_kind
from .quantities import number_of
from .selectors import selects

_HOST = "kubernetes.io/hostname"
_TOPOLOGIES = (_HOST, "topology.kubernetes.io/zone", "topology.kubernetes.io/region")
_RULES = ("requiredDuringSchedulingIgnoredDuringExecution", "preferredDuringSchedulingIgnoredDuringExecution")


def placement_problems(documents: list[Document]) -> Iterator[Problem]:
    """Yield spreads over other pods than their own, affinities to no pod, and groups whose numbers differ."""
    templates = [template for document in documents for template in document.templates]
    for template in templates:
        for index, spread in enumerate(template.spec.get("topologySpreadConstraints") or ()):
            yield from _spread(template, f"topologySpreadConstraints[{index}]", spread)
        for kind in ("podAffinity", "podAntiAffinity"):
            for rule in _RULES:
                for index, term in enumerate(at(template.spec, "affinity", kind, rule) or ()):
                    where = f"affinity.{kind}.{rule}[{index}]"
                    yield from _affinity(template, where, term.get("podAffinityTerm", term), templates, kind)
    for document in of_kind(documents, "LeaderWorkerSet"):
        yield from _ranks(document)
    for document in of_kind(documents, "RayCluster"):
        yield from _ray(document)


def _spread(template: PodTemplate, where: str, spread: Body) -> Iterator[Problem]:
    selector = spread.get("labelSelector") or {}
    if not selector or not selects(selector, template.labels):
        message = f"does not select these pods, so they are not spread: must select {_shown(template)}"
        yield template.problem(f"{where}.labelSelector", message)
    yield from _topology(template, where, spread)


def _affinity(
    template: PodTemplate, where: str, term: Body, templates: list[PodTemplate], kind: str
) -> Iterator[Problem]:
    selector = term.get("labelSelector") or {}
    if not any(selects(selector, other.labels) for other in templates):
        yield template.problem(f"{where}.labelSelector", "selects no pod: give the labels of a workload")
    elif kind == "podAntiAffinity" and not selects(selector, template.labels):
        message = f"does not select these pods, so they are not kept apart: must select {_shown(template)}"
        yield template.problem(f"{where}.labelSelector", message)
    yield from _topology(template, where, term)


def _topology(template: PodTemplate, where: str, body: Body) -> Iterator[Problem]:
    key = str(body.get("topologyKey", ""))
    if "kubernetes.io/" in key and key not in _TOPOLOGIES:
        yield template.problem(f"{where}.topologyKey", f"no node has the label {key}: use {_HOST}")


def _shown(template: PodTemplate) -> str:
    return ", ".join(f"{name}={value}" for name, value in template.labels.items()) or "them by a label"


def _ranks(document: Document) -> Iterator[Problem]:
    """Yield the ports of a group at which its ranks would not find each other."""
    ports = {}
    for template in document.templates:
        for container in template.containers:
            for index, word in enumerate(container.body.get("command") or ()):
                if str(word).startswith("--store-port="):
                    ports[f"{container.path}.command[{index}]"] = str(word)
    (first, *rest) = ports.items() or [("", "")]
    for where, word in rest:
        if word != first[1]:
            yield document.problem(where, f"{word} must be {first[1]}, as the leader has")


def _ray(document: Document) -> Iterator[Problem]:
    """Yield parameters of Ray's processes that differ from the pods that they are in."""
    groups = [("spec.headGroupSpec", document.spec.get("headGroupSpec") or {})]
    groups += [
        (f"spec.workerGroupSpecs[{group['groupName']}]", group) for group in document.spec.get("workerGroupSpecs") or ()
    ]
    for path, group in groups:
        start = group.get("rayStartParams") or {}
        containers = at(group, "template", "spec", "containers") or [{}]
        ports = {str(port["containerPort"]) for one in containers for port in one.get("ports") or ()}
        port = str(start.get("node-manager-port", ""))
        if port and port not in ports:
            message = f"the pod has no port {port}; it has {', '.join(sorted(ports))}"
            yield document.problem(f"{path}.rayStartParams.node-manager-port", message)
        cores = number_of(at(containers[0], "resources", "requests", "cpu"))
        if path != "spec.headGroupSpec":
            yield from _group(document, path, group, cores)


def _group(document: Document, path: str, group: Body, cores: float | None) -> Iterator[Problem]:
    given = number_of(at(group, "rayStartParams", "num-cpus"))
    if given is not None and cores is not None and given > math.ceil(cores):
        message = f"{given:g} exceeds requests.cpu of the pod, {cores:g}: replicas would share cores"
        yield document.problem(f"{path}.rayStartParams.num-cpus", message)
    least, number, most = (group.get(name) for name in ("minReplicas", "replicas", "maxReplicas"))
    if number is not None and not (least or 0) <= number <= (most if most is not None else number):
        yield document.problem(f"{path}.replicas", f"{number} must be from minReplicas {least} to maxReplicas {most}")
