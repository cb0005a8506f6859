"""Volumes: who may read and write them, and whether their size is enough for what is kept there."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from .container_settings import Configured
from .documents import Body, Container, Document, PodTemplate, Problem, at, of_kind
from .quantities import hub_model_bytes, is_hub_id, mebibytes, number_of

#: Folders that our processes write to, by the variable that names them; None: whatever the variables say.
_WRITTEN = {None: "/tmp", "HF_HOME": "", "XDG_CACHE_HOME": ""}
#: Least sizes: of scratch files, and of models and compiled kernels.
_LEAST_BYTES = {None: 16.0 * 2**20, "HF_HOME": 2.0**30, "XDG_CACHE_HOME": 2.0**30}
_ENDING = ("Job", "CronJob")
_OTHERS_READ = 0o004


def volume_of(template: PodTemplate, name: str) -> Body | None:
    """Return a volume of a pod; None for a claim that the workload makes for each pod."""
    return next((volume for volume in template.spec.get("volumes") or () if volume["name"] == name), None)


def mount_of(container: Container, path: str) -> Body | None:
    """Return the mount that a path of the container is on."""
    mounts = [
        mount
        for mount in container.body.get("volumeMounts") or ()
        if path == mount["mountPath"] or path.startswith(f"{mount['mountPath'].rstrip('/')}/")
    ]
    return max(mounts, key=lambda mount: len(mount["mountPath"]), default=None)


def claim_bytes(template: PodTemplate, name: str) -> float | None:
    """Return the size of the claim that a workload makes for each pod; None where it makes none of this name."""
    for claim in template.parent.get("volumeClaimTemplates") or ():
        if at(claim, "metadata", "name") == name:
            return number_of(at(claim, "spec", "resources", "requests", "storage"))
    return None


def volume_problems(configured: list[Configured], documents: list[Document]) -> Iterator[Problem]:
    """Yield secrets that a pod cannot read or that others can, and volumes that are too small or used by too many."""
    for document in documents:
        for template in document.templates:
            for volume in template.spec.get("volumes") or ():
                yield from _secret(template, volume)
                yield from _empty(template, volume)
            yield from _claims(template)
    for one in configured:
        for variable in _WRITTEN:
            yield from _written(one, variable)
    yield from _shared(configured, documents)


def _secret(template: PodTemplate, volume: Body) -> Iterator[Problem]:
    if "secret" not in volume:
        return
    where = f"volumes[{volume['name']}].secret.defaultMode"
    modes = [volume["secret"].get("defaultMode", 0o644)]
    modes += [item["mode"] for item in volume["secret"].get("items") or () if "mode" in item]
    for mode in modes:
        if mode & _OTHERS_READ:
            yield template.problem(where, f"{mode:04o} lets every user read the secret: must be 0440")
        elif not mode & 0o440:
            yield template.problem(where, f"{mode:04o} gives no user the right to read the secret: it must be 0440")
        elif not _has_group(template):
            message = f"is unset, and only the group may read volumes[{volume['name']}] (mode {mode:04o}): set it"
            yield template.problem("securityContext.fsGroup", message)


def _has_group(template: PodTemplate) -> bool:
    """Return whether volumes belong to a group of the pod. A platform that chooses users chooses their group, too."""
    context = template.spec.get("securityContext") or {}
    return context.get("fsGroup") is not None or context.get("runAsUser") is None


def _claims(template: PodTemplate) -> Iterator[Problem]:
    """Yield claims that belong to root, so that the pod's user cannot write them."""
    own = {at(claim, "metadata", "name") for claim in template.parent.get("volumeClaimTemplates") or ()}
    claims = own | {
        volume["name"] for volume in template.spec.get("volumes") or () if "persistentVolumeClaim" in volume
    }
    mounts = [mount for container in template.all_containers for mount in container.body.get("volumeMounts") or ()]
    written = sorted({mount["name"] for mount in mounts if mount["name"] in claims and not mount.get("readOnly")})
    if written and not _has_group(template):
        message = f"is unset, so a new claim belongs to root and the pod cannot write {', '.join(written)}: set it"
        yield template.problem("securityContext.fsGroup", message)


def _empty(template: PodTemplate, volume: Body) -> Iterator[Problem]:
    """Yield a volume in memory without a limit, or with one that the containers' memory does not hold."""
    body = volume.get("emptyDir") or {}
    if body.get("medium") != "Memory":
        return
    where, size = f"volumes[{volume['name']}].emptyDir.sizeLimit", number_of(body.get("sizeLimit"))
    if size is None:
        yield template.problem(where, "is required: files in memory count as the container's memory")
        return
    for container in template.containers:
        limit = number_of(at(container.body, "resources", "limits", "memory"))
        names = {mount["name"] for mount in container.body.get("volumeMounts") or ()}
        if volume["name"] in names and limit is not None and size >= limit:
            message = f"{body['sizeLimit']} must be below the memory limit of {container.name}, {mebibytes(limit)}"
            yield template.problem(where, message)


def _written(one: Configured, variable: str | None) -> Iterator[Problem]:
    container, variables = one.variables.container, one.variables.environment.variables
    if variable is not None and variable not in variables:
        return
    path = _WRITTEN[variable] if variable is None else variables[variable].value
    mount = mount_of(container, path)
    if mount is None:
        where = "volumeMounts" if variable is None else f"env[{variable}]"
        yield container.problem(where, f"{path} is on no volume, and the root filesystem is read-only: mount one")
        return
    where = f"volumeMounts[{mount['name']}]"
    if mount.get("readOnly"):
        yield container.problem(f"{where}.readOnly", f"{one.service.name} writes to {path}: must be false")
    size = at(volume_of(container.template, mount["name"]), "emptyDir", "sizeLimit")
    if size is not None and (number_of(size) or 0.0) < (least := _LEAST_BYTES[variable]):
        field = f"volumes[{mount['name']}].emptyDir.sizeLimit"
        message = f"{size} is too small for {path} of {container.name}: give {mebibytes(least)} or more"
        yield container.template.problem(field, message)


def _shared(configured: list[Configured], documents: list[Document]) -> Iterator[Problem]:
    """Yield claims of several pods that one node alone can mount, and those that do not hold the models."""
    models = {one.settings.model for one in configured if is_hub_id(getattr(one.settings, "model", ""))}
    needed = sum(map(hub_model_bytes, models))
    for claim in of_kind(documents, "PersistentVolumeClaim"):
        users = [template for document in documents for template in document.templates if _uses(template, claim.name)]
        serving = [template for template in users if template.document.kind not in _ENDING]
        if not serving:
            yield claim.problem("metadata.name", f"no service mounts {claim.name}: name it in a volume of the pods")
        modes = claim.spec.get("accessModes") or []
        if len(users) > 1 and not {"ReadWriteMany", "ReadOnlyMany"} & set(modes):
            message = f"{', '.join(modes)} lets one node mount it, and {len(users)} workloads do: use ReadWriteMany"
            yield claim.problem("spec.accessModes", message)
        size = number_of(at(claim.spec, "resources", "requests", "storage"))
        least = max(needed, _LEAST_BYTES["HF_HOME"])
        if users and size is not None and size < least:
            message = (
                f"{mebibytes(size)} must be {mebibytes(least)} or more for {', '.join(sorted(models)) or 'models'}"
            )
            yield claim.problem("spec.resources.requests.storage", message)


def _uses(template: PodTemplate, claim: str) -> bool:
    volumes: list[dict[str, Any]] = template.spec.get("volumes") or []
    return any(at(volume, "persistentVolumeClaim", "claimName") == claim for volume in volumes)
