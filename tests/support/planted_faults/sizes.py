"""Faults of sizes and counts: memory, disks, GPUs, replicas."""

from __future__ import annotations

from tests.support.planted_faults.overlay import Overlay, Place, at_field, set_value
from tests.support.planted_faults.shared import argument, at_pod, changed, container_of, in_container, planted_in

GPU = "nvidia.com/gpu"


@planted_in("plain")
def request_above_the_limit(overlay: Overlay) -> Place:
    return in_container(container_of(overlay, "coordinator"), "resources.requests.memory", "2Gi")


@planted_in("plain")
def cores_above_the_limit(overlay: Overlay) -> Place:
    container = container_of(overlay, "target")
    container.body["resources"]["limits"]["cpu"] = "1500m"
    return at_field(container, "resources.requests.cpu")


@planted_in("plain")
def memory_in_thousandths(overlay: Overlay) -> Place:
    return in_container(container_of(overlay, "draft"), "resources.requests.memory", "512m")


@planted_in("plain")
def threads_without_cores(overlay: Overlay) -> Place:
    return set_value(container_of(overlay, "target"), "NUM_THREADS", "16")


@planted_in("rich")
def gpu_in_requests_only(overlay: Overlay) -> Place:
    container = container_of(overlay, "target")
    container.body["resources"]["requests"][GPU] = container.body["resources"]["limits"].pop(GPU)
    return at_field(container, f"resources.limits.{GPU}")


@planted_in("rich")
def device_without_a_gpu(overlay: Overlay) -> Place:
    container = container_of(overlay, "draft")
    del container.body["resources"]["limits"][GPU]
    return at_field(container, f"resources.limits.{GPU}")


@planted_in("rich")
def gpu_that_is_not_used(overlay: Overlay) -> Place:
    return set_value(container_of(overlay, "target"), "DEVICE", "cpu")


@planted_in("rich")
def ranks_without_gpus(overlay: Overlay) -> Place:
    return set_value(container_of(overlay, "target"), "TENSOR_PARALLEL", "4")


@planted_in("rich")
def shared_memory_above_the_limit(overlay: Overlay) -> Place:
    container = container_of(overlay, "target")
    volume = next(one for one in container.template.spec["volumes"] if one["name"] == "shm")
    volume["emptyDir"]["sizeLimit"] = "64Gi"
    return at_pod(container, "volumes[shm].emptyDir.sizeLimit")


@planted_in("plain")
def cache_of_ten_mebibytes(overlay: Overlay) -> Place:
    container = container_of(overlay, "target")
    volume = next(one for one in container.template.spec["volumes"] if one["name"] == "model-cache")
    volume["emptyDir"] = {"sizeLimit": "10Mi"}
    return at_pod(container, "volumes[model-cache].emptyDir.sizeLimit")


@planted_in("rich")
def claim_below_the_models(overlay: Overlay) -> Place:
    document = overlay.named("PersistentVolumeClaim", "models")
    requests = document.spec["resources"]["requests"]
    return changed(document, "spec.resources.requests.storage", requests, "storage", "500Mi")


@planted_in("rich")
def claim_of_one_node(overlay: Overlay) -> Place:
    document = overlay.named("PersistentVolumeClaim", "models")
    return changed(document, "spec.accessModes", document.spec, "accessModes", ["ReadWriteOnce"])


@planted_in("plain")
def limit_below_maxmemory(overlay: Overlay) -> Place:
    return in_container(container_of(overlay, "redis"), "resources.limits.memory", "512Mi")


@planted_in("plain")
def maxmemory_above_the_limit(overlay: Overlay) -> Place:
    container = container_of(overlay, "redis")
    argument(container, "--maxmemory", "4gb")
    return at_field(container, "resources.limits.memory")


@planted_in("plain")
def redis_without_a_limit_of_its_own(overlay: Overlay) -> Place:
    container = container_of(overlay, "redis")
    index = container.body["args"].index("--maxmemory")
    del container.body["args"][index : index + 2]
    return at_field(container, "args")


@planted_in("plain")
def redis_that_evicts_sessions(overlay: Overlay) -> Place:
    return argument(container_of(overlay, "redis"), "--maxmemory-policy", "allkeys-lru")


@planted_in("plain")
def redis_without_a_log(overlay: Overlay) -> Place:
    return argument(container_of(overlay, "redis"), "--appendonly", "no")


@planted_in("plain")
def disk_of_ten_mebibytes(overlay: Overlay) -> Place:
    document = container_of(overlay, "redis").template.document
    requests = document.spec["volumeClaimTemplates"][0]["spec"]["resources"]["requests"]
    field = "volumeClaimTemplates[data].spec.resources.requests.storage"
    return changed(document, field, requests, "storage", "10Mi")


@planted_in("plain")
def disk_at_another_folder(overlay: Overlay) -> Place:
    container = container_of(overlay, "redis")
    container.body["volumeMounts"][0]["mountPath"] = "/var/lib/redis"
    return at_field(container, "volumeMounts")


@planted_in("plain")
def budget_that_stops_every_drain(overlay: Overlay) -> Place:
    document = overlay.named("PodDisruptionBudget", "target")
    return changed(document, "spec.maxUnavailable", document.spec, "maxUnavailable", 0)


@planted_in("plain")
def budget_of_no_percent(overlay: Overlay) -> Place:
    document = overlay.named("PodDisruptionBudget", "coordinator")
    return changed(document, "spec.maxUnavailable", document.spec, "maxUnavailable", "0%")


@planted_in("plain")
def budget_that_keeps_the_only_replica(overlay: Overlay) -> Place:
    document = overlay.named("PodDisruptionBudget", "draft")
    del document.spec["maxUnavailable"]
    return changed(document, "spec.minAvailable", document.spec, "minAvailable", 1)


@planted_in("plain")
def budget_that_keeps_all(overlay: Overlay) -> Place:
    document = overlay.named("PodDisruptionBudget", "coordinator")
    del document.spec["maxUnavailable"]
    return changed(document, "spec.minAvailable", document.spec, "minAvailable", "100%")


@planted_in("plain")
def budget_that_keeps_none(overlay: Overlay) -> Place:
    document = overlay.named("PodDisruptionBudget", "coordinator")
    return changed(document, "spec.maxUnavailable", document.spec, "maxUnavailable", "100%")


@planted_in("plain")
def replicas_without_a_budget(overlay: Overlay) -> Place:
    overlay.documents.remove(overlay.named("PodDisruptionBudget", "target"))
    return Place(container_of(overlay, "target").template.document, "containers")


@planted_in("plain")
def rollout_that_cannot_move(overlay: Overlay) -> Place:
    document = container_of(overlay, "target").template.document
    strategy = {"rollingUpdate": {"maxUnavailable": 0, "maxSurge": 0}}
    return changed(document, "spec.strategy.rollingUpdate", document.spec, "strategy", strategy)


@planted_in("rich")
def targets_that_end_when_idle(overlay: Overlay) -> Place:
    document = overlay.named("ScaledObject", "target")
    return changed(document, "spec.minReplicaCount", document.spec, "minReplicaCount", 0)


@planted_in("cloud")
def quota_below_the_pods(overlay: Overlay) -> Place:
    document = overlay.one("ResourceQuota")
    return changed(document, "spec.hard.requests.memory", document.spec["hard"], "requests.memory", "2Gi")
