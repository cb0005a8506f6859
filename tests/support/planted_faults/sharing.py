"""Faults of what workloads must have alike: URLs, keys, certificates, images, models, users, placement, queries."""

from __future__ import annotations

from typing import Any

from tests.support.planted_faults.overlay import Overlay, Place, at_env, at_field, entry_of, set_value
from tests.support.planted_faults.shared import argument, at_pod, changed, container_of, in_container, planted_in


def _trigger(overlay: Overlay, name: str, index: int, field: str, old: str, new: str) -> Place:
    document = overlay.named("ScaledObject", name)
    metadata = document.spec["triggers"][index]["metadata"]
    assert old in metadata[field]
    metadata[field] = metadata[field].replace(old, new)
    return Place(document, f"spec.triggers[{index}].metadata.{field}")


def _context(overlay: Overlay, workload: str) -> tuple[Any, Any]:
    container = container_of(overlay, workload)
    return container, container.template.spec["securityContext"]


# ---- Redis -----------------------------------------------------------------------------------------------------------


@planted_in("plain")
def host_of_redis(overlay: Overlay) -> Place:
    return set_value(container_of(overlay, "draft"), "REDIS_URL", "redis://reddis:6379/0")


@planted_in("plain")
def port_of_redis(overlay: Overlay) -> Place:
    return set_value(container_of(overlay, "target"), "REDIS_URL", "redis://redis:6380/0")


@planted_in("plain")
def service_that_is_no_redis(overlay: Overlay) -> Place:
    return set_value(container_of(overlay, "draft"), "REDIS_URL", "redis://coordinator:50051/0")


@planted_in("plain")
def database_of_one_service(overlay: Overlay) -> Place:
    return set_value(container_of(overlay, "target"), "REDIS_URL", "redis://redis:6379/1")


@planted_in("plain")
def cluster_of_one_service(overlay: Overlay) -> Place:
    return set_value(container_of(overlay, "draft"), "CLUSTER", "other")


@planted_in("rich")
def url_without_the_password(overlay: Overlay) -> Place:
    return set_value(container_of(overlay, "gateway"), "REDIS_URL", "redis://redis:6379/0")


@planted_in("rich")
def password_that_redis_does_not_ask_for(overlay: Overlay) -> Place:
    container = container_of(overlay, "redis")
    index = container.body["args"].index("--requirepass")
    del container.body["args"][index : index + 2]
    return at_env(container_of(overlay, "draft"), "SPECDEC_DRAFT__REDIS_URL")


@planted_in("rich")
def url_from_the_secret_of_the_hub(overlay: Overlay) -> Place:
    container = container_of(overlay, "target")
    entry = entry_of(container, "REDIS_URL")
    entry["valueFrom"] = {"secretKeyRef": {"name": "hugging-face", "key": "token"}}
    return at_env(container, entry["name"])


# ---- users, secrets, keys --------------------------------------------------------------------------------------------


@planted_in("plain")
def root_beside_run_as_non_root(overlay: Overlay) -> Place:
    container, context = _context(overlay, "target")
    context["runAsUser"] = 0
    return at_pod(container, "securityContext.runAsUser")


@planted_in("plain")
def root_in_a_container(overlay: Overlay) -> Place:
    return in_container(container_of(overlay, "draft"), "securityContext.runAsUser", 0)


@planted_in("plain")
def network_of_the_node(overlay: Overlay) -> Place:
    container = container_of(overlay, "coordinator")
    container.template.spec["hostNetwork"] = True
    return at_pod(container, "hostNetwork")


@planted_in("plain")
def disk_that_belongs_to_root(overlay: Overlay) -> Place:
    container, context = _context(overlay, "redis")
    del context["fsGroup"]
    return at_pod(container, "securityContext.fsGroup")


@planted_in("rich")
def secret_without_a_group(overlay: Overlay) -> Place:
    container, context = _context(overlay, "gateway")
    del context["fsGroup"]
    return at_pod(container, "securityContext.fsGroup")


@planted_in("rich")
def secret_that_every_user_reads(overlay: Overlay) -> Place:
    container = container_of(overlay, "gateway")
    volume = next(one for one in container.template.spec["volumes"] if "secret" in one)
    volume["secret"]["defaultMode"] = 0o644
    return at_pod(container, f"volumes[{volume['name']}].secret.defaultMode")


@planted_in("rich")
def key_file_that_the_secret_lacks(overlay: Overlay) -> Place:
    container = container_of(overlay, "gateway")
    return set_value(container, "API_KEYS", entry_of(container, "API_KEYS")["value"] + "x")


@planted_in("rich")
def key_file_beside_its_volume(overlay: Overlay) -> Place:
    container = container_of(overlay, "gateway")
    return set_value(container, "API_KEYS", entry_of(container, "API_KEYS")["value"].replace("/keys/", "/secrets/"))


@planted_in("rich")
def keys_of_one_service_alone(overlay: Overlay) -> Place:
    container = container_of(overlay, "coordinator")
    container.body["env"].remove(entry_of(container, "API_KEYS"))
    return at_field(container, "")


@planted_in("rich")
def service_without_the_key_of_services(overlay: Overlay) -> Place:
    container = container_of(overlay, "target")
    container.body["env"].remove(entry_of(container, "SERVICE_KEY"))
    return at_field(container, "")


@planted_in("cloud")
def certificate_of_one_service_alone(overlay: Overlay) -> Place:
    container = container_of(overlay, "draft")
    for name in ("TLS_CERT", "TLS_KEY", "TLS_CA"):
        container.body["env"].remove(entry_of(container, name))
    set_value(container, "INSECURE", "true")
    return at_env(container, "SPECDEC_DRAFT__TLS_CERT")


@planted_in("cloud")
def gateway_that_dials_in_plaintext(overlay: Overlay) -> Place:
    container = container_of(overlay, "gateway")
    for name in ("TLS_CA", "TLS_SERVER_NAME"):
        container.body["env"].remove(entry_of(container, name))
    return at_env(container, "SPECDEC_GATEWAY__TLS_CA")


@planted_in("cloud")
def certificate_in_place_of_the_authority(overlay: Overlay) -> Place:
    return set_value(container_of(overlay, "target"), "TLS_CA", "/tls/tls.crt")


@planted_in("cloud")
def certificate_of_redis_on_no_volume(overlay: Overlay) -> Place:
    container = container_of(overlay, "redis")
    return argument(container, "--tls-cert-file", "/certificates/tls.crt")


# ---- images and models -----------------------------------------------------------------------------------------------


@planted_in("rich")
def tag_of_one_image(overlay: Overlay) -> Place:
    container = container_of(overlay, "gateway")
    return in_container(container, "image", container.body["image"].rpartition(":")[0] + ":latest")


@planted_in("plain")
def registry_of_one_image(overlay: Overlay) -> Place:
    container = container_of(overlay, "target")
    return in_container(container, "image", "example.com/" + container.body["image"])


@planted_in("plain")
def misspelt_image(overlay: Overlay) -> Place:
    container = container_of(overlay, "draft")
    return in_container(container, "image", container.body["image"].replace("draft-service", "draft"))


@planted_in("plain")
def missing_pull_secret(overlay: Overlay) -> Place:
    container = container_of(overlay, "draft")
    container.template.spec["imagePullSecrets"] = [{"name": "registri"}]
    return at_pod(container, "imagePullSecrets[0]")


@planted_in("plain")
def tokenizer_of_the_draft(overlay: Overlay) -> Place:
    container = container_of(overlay, "coordinator")
    source = container_of(overlay, "draft")
    entry = entry_of(container, "TOKENIZER")
    entry["valueFrom"] = entry_of(source, "MODEL")["valueFrom"]
    return at_env(container, entry["name"])


@planted_in("plain")
def cache_on_no_volume(overlay: Overlay) -> Place:
    container = container_of(overlay, "draft")
    next(one for one in container.body["env"] if one["name"] == "HF_HOME")["value"] = "/model"
    return at_env(container, "HF_HOME")


# ---- placement -------------------------------------------------------------------------------------------------------


@planted_in("plain")
def spread_of_other_pods(overlay: Overlay) -> Place:
    container = container_of(overlay, "target")
    selector = container.template.spec["topologySpreadConstraints"][0]["labelSelector"]
    selector["matchLabels"]["app.kubernetes.io/name"] = "draft"
    return at_pod(container, "topologySpreadConstraints[0].labelSelector")


@planted_in("plain")
def topology_that_no_node_has(overlay: Overlay) -> Place:
    container = container_of(overlay, "target")
    container.template.spec["topologySpreadConstraints"][0]["topologyKey"] = "kubernetes.io/host"
    return at_pod(container, "topologySpreadConstraints[0].topologyKey")


@planted_in("plain")
def affinity_to_no_pod(overlay: Overlay) -> Place:
    container = container_of(overlay, "coordinator")
    rule = "requiredDuringSchedulingIgnoredDuringExecution"
    term = {"topologyKey": "kubernetes.io/hostname", "labelSelector": {"matchLabels": {"app": "coordinator"}}}
    container.template.spec["affinity"] = {"podAntiAffinity": {rule: [term]}}
    return at_pod(container, f"affinity.podAntiAffinity.{rule}[0].labelSelector")


@planted_in("plain")
def object_of_another_namespace(overlay: Overlay) -> Place:
    document = overlay.named("Service", "redis")
    return changed(document, "metadata.namespace", document.body["metadata"], "namespace", "specdec-2")


# ---- queries ---------------------------------------------------------------------------------------------------------


@planted_in("rich")
def role_that_no_service_has(overlay: Overlay) -> Place:
    return _trigger(overlay, "target", 0, "query", 'role="target"', 'role="targets"')


@planted_in("rich")
def role_of_other_pods(overlay: Overlay) -> Place:
    return _trigger(overlay, "target", 2, "query", 'role="target"', 'role="draft"')


@planted_in("rich")
def query_of_both_roles(overlay: Overlay) -> Place:
    return _trigger(overlay, "coordinator", 1, "query", '{role=""}', "")


@planted_in("rich")
def pool_that_is_not_there(overlay: Overlay) -> Place:
    return _trigger(overlay, "draft", 2, "query", 'pool="default"', 'pool="fast"')


@planted_in("rich")
def cause_that_no_round_has(overlay: Overlay) -> Place:
    return _trigger(overlay, "draft", 0, "query", "no_replica", "no_replicas")


@planted_in("rich")
def job_that_scrapes_nothing(overlay: Overlay) -> Place:
    return _trigger(overlay, "target", 1, "query", "queued", 'queued{job="coordinator"}')


@planted_in("rich")
def container_of_other_pods(overlay: Overlay) -> Place:
    return _trigger(overlay, "coordinator", 0, "query", 'container="coordinator"', 'container="gateway"')


@planted_in("rich")
def namespace_of_a_query(overlay: Overlay) -> Place:
    return _trigger(overlay, "target", 1, "query", "queued", 'queued{namespace="default"}')


@planted_in("rich")
def threshold_that_is_no_number(overlay: Overlay) -> Place:
    return _trigger(overlay, "draft", 1, "threshold", "24", "24 calls")


@planted_in("rich")
def address_of_another_prometheus(overlay: Overlay) -> Place:
    return _trigger(overlay, "draft", 1, "serverAddress", "prometheus-operated", "prometheus")


@planted_in("rich")
def drafts_that_nothing_wakes(overlay: Overlay) -> Place:
    document = overlay.named("ScaledObject", "draft")
    return changed(document, "spec.triggers", document.spec, "triggers", document.spec["triggers"][1:2])
