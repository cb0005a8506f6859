"""Read the workloads of an overlay: pod templates with their replicas, strategies and the names of their services.

A workload becomes manifests of pods for `podman kube play`. Podman 4.3 knows neither `status.podIP` nor `$(NAME)` in a
variable or argument, so they are resolved here, as the kubelet does. It would ask probes in a way of its own and
publish ports on this machine, so both are left out of what it reads. `pod` asks the probes and acts on the hook.
"""

from __future__ import annotations

import copy
import math
import os
import re
import shutil
from dataclasses import dataclass
from typing import Any

from k8s.validation.compositions import Overlay
from k8s.validation.documents import Body, Document, at, of_kind
from k8s.validation.rendering import render

from .programs import ROOT, STORE

Secrets = dict[str, dict[str, str]]
#: Fields of a container that podman does not read.
_LEFT_OUT = ("startupProbe", "readinessProbe", "livenessProbe", "lifecycle", "ports")
_TOOLS = ROOT / ".venv-k8s" / "bin"


@dataclass(frozen=True)
class Workload:
    """A Deployment or a StatefulSet."""

    document: Document
    num_replicas: int
    service_names: tuple[str, ...]
    """Names of the Services that select the pods."""
    config_maps: dict[str, Body]
    """Data of each ConfigMap, by its name."""
    secrets: Secrets
    """Contents of each Secret, by its name: those of the overlay, and those that the operator makes."""

    @property
    def name(self) -> str:
        return self.document.name

    @property
    def container(self) -> Body:
        """The only container of a pod."""
        (container,) = self.document.spec["template"]["spec"]["containers"]
        return dict(container)

    @property
    def image(self) -> str:
        return str(self.container["image"])

    @property
    def grace_s(self) -> float:
        """Time between SIGTERM and SIGKILL, the hook before SIGTERM included."""
        return float(self.document.spec["template"]["spec"].get("terminationGracePeriodSeconds", 30))

    @property
    def pre_stop_s(self) -> float:
        """Length of the sleep before SIGTERM."""
        return float(at(self.container, "lifecycle", "preStop", "sleep", "seconds") or 0)

    def restart_grace_s(self, probe: str) -> float:
        """Return the time between SIGTERM and SIGKILL where a probe wants a restart."""
        return float(self.container[probe].get("terminationGracePeriodSeconds", self.grace_s))

    def rolling(self, name: str) -> int:
        """Return `maxSurge` or `maxUnavailable`."""
        return int(at(self.document.spec, "strategy", "rollingUpdate", name))

    def manifest(self, pod: str, address: str) -> Body:
        """Return the manifest of one pod with this name and IP address."""
        template = copy.deepcopy(self.document.spec["template"])
        spec = template["spec"]
        for container in spec["containers"]:
            values = self.variables(container, pod, address)
            container["env"] = [{"name": name, "value": value} for name, value in values.items()]
            container["args"] = [_expanded(str(word), values) for word in container.get("args") or ()]
            for field in _LEFT_OUT:
                container.pop(field, None)
        claims = [claim["metadata"]["name"] for claim in self.document.spec.get("volumeClaimTemplates") or ()]
        volumes = [{"name": name, "persistentVolumeClaim": {"claimName": f"{name}-{pod}"}} for name in claims]
        spec["volumes"] = [*map(self._mounted, spec.get("volumes") or ()), *volumes]
        spec.pop("imagePullSecrets", None)
        spec["restartPolicy"] = "Never"  # by podman: `pod` restarts the container and counts it
        metadata = {"name": pod, "labels": template["metadata"]["labels"]}
        return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}

    def _mounted(self, volume: Body) -> Body:
        """Return a volume; a Secret is a folder of this machine, with owner and mode as `fsGroup` sets them."""
        if "secret" not in volume:
            return dict(volume)
        contents = self.secrets[volume["secret"]["secretName"]]
        named = {item["key"]: item["path"] for item in volume["secret"].get("items") or ()}
        paths = named or {key: key for key in contents}
        folder = STORE / "secrets" / self.name / volume["name"]
        folder.mkdir(parents=True, exist_ok=True)
        for key, path in paths.items():
            (folder / path).write_text(contents[key])
            os.chown(folder / path, 0, self.document.spec["template"]["spec"]["securityContext"]["fsGroup"])
            (folder / path).chmod(volume["secret"]["defaultMode"])
        return {"name": volume["name"], "hostPath": {"path": str(folder), "type": "Directory"}}

    def variables(self, container: Body, pod: str, address: str) -> dict[str, str]:
        """Return the variables of a container of the pod with this name and IP address."""
        values: dict[str, str] = {}
        for entry in container.get("env") or ():
            value = (
                str(entry["value"]) if "value" in entry else self._value(entry["valueFrom"], container, pod, address)
            )
            values[entry["name"]] = _expanded(value, values)
        return values

    def _value(self, source: Body, container: Body, pod: str, address: str) -> str:
        match source:
            case {"configMapKeyRef": {"name": name, "key": key}}:
                return str(self.config_maps[name][key])
            case {"secretKeyRef": {"name": name, "key": key}}:
                return self.secrets[name][key]
            case {"fieldRef": {"fieldPath": field}}:
                return {"status.podIP": address, "metadata.name": pod}[field]
            case {"resourceFieldRef": {"resource": "requests.cpu"}}:
                return str(math.ceil(_cores(at(container, "resources", "requests", "cpu"))))
        raise ValueError(f"{self.document.title}: a variable from {source} is not resolved here")


def read(overlay: str, outside: Secrets) -> list[Workload]:
    """Return the workloads of an overlay, by its path in the repository. `outside`: Secrets that the operator makes."""
    documents = render(Overlay(overlay, (ROOT / overlay,)), ROOT, _kubectl())
    config_maps = {document.name: document.body.get("data") or {} for document in of_kind(documents, "ConfigMap")}
    secrets = {document.name: document.body["stringData"] for document in of_kind(documents, "Secret")} | outside
    return [
        Workload(
            document, _num_replicas(document, documents), _service_names(document, documents), config_maps, secrets
        )
        for document in of_kind(documents, "Deployment", "StatefulSet")
    ]


def _kubectl() -> Any:
    own = _TOOLS / "kubectl"
    found = own if own.exists() else shutil.which("kubectl")
    if not found:
        raise FileNotFoundError("no kubectl: run make k8s-tools")
    return found


def _num_replicas(document: Document, documents: list[Document]) -> int:
    """Return the replicas that a workload names, or the least ones of its autoscaler."""
    least = [
        scaler.spec["minReplicas"]
        for scaler in of_kind(documents, "HorizontalPodAutoscaler")
        if scaler.spec["scaleTargetRef"]["name"] == document.name
    ]
    return int(document.spec.get("replicas") or (least[0] if least else 1))


def _service_names(document: Document, documents: list[Document]) -> tuple[str, ...]:
    labels = document.spec["template"]["metadata"]["labels"].items()
    services = of_kind(documents, "Service")
    return tuple(service.name for service in services if service.spec["selector"].items() <= labels)


def _expanded(text: str, values: dict[str, str]) -> str:
    return re.sub(r"\$\((\w+)\)", lambda found: values.get(found[1], found[0]), text)


def _cores(text: str) -> float:
    return float(text.removesuffix("m")) / 1000 if text.endswith("m") else float(text)
