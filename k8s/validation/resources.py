"""Requests and limits of containers, and the GPUs that their settings use."""

from __future__ import annotations

from collections.abc import Iterator

from .autoscaling import num_replicas
from .container_settings import Configured
from .documents import Container, Document, PodTemplate, Problem, at, of_kind
from .quantities import number_of

_GPU = "nvidia.com/gpu"


def resource_problems(containers: list[Container], configured: list[Configured]) -> Iterator[Problem]:
    """Yield requests above their limits, and GPUs that a container has and does not use or uses and does not have."""
    for container in containers:
        yield from _requests(container)
    for one in configured:
        yield from _gpus(one)
        yield from _threads(one)


def quota_problems(documents: list[Document]) -> Iterator[Problem]:
    """Yield quotas that the pods of an overlay exceed already at their lowest numbers."""
    templates = [template for document in documents for template in document.templates]
    pods = [(template, num_replicas(template, documents)) for template in templates]
    for quota in of_kind(documents, "ResourceQuota"):
        for name, value in (quota.spec.get("hard") or {}).items():
            needed = sum(count * _counted(template, name) for template, count in pods)
            if needed > (number_of(value) or 0.0):
                message = f"{value} must be {needed:g} or more for the pods of the overlay"
                yield quota.problem(f"spec.hard.{name}", message)


def _counted(template: PodTemplate, name: str) -> float:
    """Return what one pod counts for a resource of a quota; 0 for one that is counted otherwise."""
    if name == "pods":
        return 1.0
    part, _, resource = name.partition(".")
    containers = template.containers if resource in ("cpu", "memory") else []
    return sum(number_of(at(one.body, "resources", part, resource)) or 0.0 for one in containers)


def _requests(container: Container) -> Iterator[Problem]:
    requests = at(container.body, "resources", "requests") or {}
    limits = at(container.body, "resources", "limits") or {}
    for part, values in (("requests", requests), ("limits", limits)):
        for name, value in values.items():
            number = number_of(value)
            if number is None or (number == 0 and name in ("cpu", "memory")):
                yield container.problem(
                    f"resources.{part}.{name}", f"{value} is no quantity above 0, such as 500m or 2Gi"
                )
            elif name == "memory" and number < 2**20:
                yield container.problem(f"resources.{part}.memory", f"{value} is {number:g} bytes: give Mi or Gi")
    for name, value in requests.items():
        request, limit = number_of(value), number_of(limits.get(name))
        if request is not None and limit is not None and request > limit:
            yield container.problem(
                f"resources.requests.{name}", f"{value} exceeds the limit, which is {limits[name]}: lower it"
            )
        elif "/" in name and request != limit:
            yield container.problem(
                f"resources.limits.{name}", f"must be {value}, as in requests: devices are not shared"
            )


def _gpus(one: Configured) -> Iterator[Problem]:
    settings, container = one.settings, one.variables.container
    if not hasattr(settings, "device"):
        return
    num_gpus = int(number_of(at(container.body, "resources", "limits", _GPU)) or 0)
    if settings.device.startswith("cuda") and not num_gpus:
        message = f"is unset, and {one.service.prefix}DEVICE is {settings.device}: give a number of GPUs"
        yield container.problem(f"resources.limits.{_GPU}", message)
    elif num_gpus and settings.device == "cpu":
        yield one.variables.problem("device", f"cpu leaves {num_gpus} GPU of the container unused: must be cuda")
    # The ranks of a group of pods have a GPU each, which their command counts.
    is_group = "leaderTemplate" in container.template.parent
    if num_gpus and not is_group and settings.tensor_parallel > num_gpus:
        message = f"{settings.tensor_parallel} processes need as many GPUs; limits.{_GPU} is {num_gpus}"
        yield one.variables.problem("tensor_parallel", message)
    elif num_gpus > max(1, settings.tensor_parallel) and not is_group:
        message = f"{num_gpus} GPUs, and {one.service.prefix}TENSOR_PARALLEL is {settings.tensor_parallel}: use as many"
        yield container.problem(f"resources.limits.{_GPU}", message)


def _threads(one: Configured) -> Iterator[Problem]:
    container, num_threads = one.variables.container, getattr(one.settings, "num_threads", None)
    cores = number_of(at(container.body, "resources", "requests", "cpu"))
    if num_threads and cores and num_threads > max(1.0, cores + 1):
        message = (
            f"{num_threads} threads on requests.cpu {cores:g}: a step on more cores than a pod gets waits: use fewer"
        )
        yield one.variables.problem("num_threads", message)
