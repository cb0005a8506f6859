"""Faults in the variables of our services."""

from __future__ import annotations

from k8s.validation.documents import at
from tests.support.planted_faults.overlay import Overlay, Place, at_env, entry_of, fault, prefix_of, set_value


@fault
def misspelt_setting(overlay: Overlay) -> Place:
    container = overlay.service()
    entry = overlay.random.choice([one for one in container.body["env"] if one["name"].startswith("SPECDEC_")])
    letters = list(entry["name"])
    where = overlay.random.choice(
        [i for i in range(len(prefix_of(container)), len(letters) - 1) if letters[i] != letters[i + 1]]
    )
    letters[where], letters[where + 1] = letters[where + 1], letters[where]
    entry["name"] = "".join(letters)
    return at_env(container, entry["name"])


@fault
def malformed_address(overlay: Overlay) -> Place:
    setting = overlay.random.choice(["LISTEN", "HEALTH", "METRICS"])
    return set_value(overlay.service(), setting, overlay.random.choice(["nowhere", "0.0.0.0", "0.0.0.0:99999"]))


@fault
def value_out_of_range(overlay: Overlay) -> Place:
    container = overlay.named("Deployment", overlay.random.choice(["draft", "target"])).templates[0].containers[0]
    setting, value = overlay.random.choice([("MAX_GAMMA", "0"), ("TENSOR_PARALLEL", "65"), ("REGISTRY_TTL_S", "-1")])
    return set_value(container, setting, value)


@fault
def word_instead_of_number(overlay: Overlay) -> Place:
    return set_value(overlay.service(), "DRAIN_GRACE_S", "30s")


@fault
def setting_of_another_service(overlay: Overlay) -> Place:
    container = overlay.named("Deployment", "coordinator").templates[0].containers[0]
    name = overlay.random.choice(["SPECDEC_TARGET__MAX_GAMMA", "SPECDEC_DRAFT__PREDRAFT"])
    container.body["env"].append({"name": name, "value": "4"})
    return at_env(container, name)


@fault
def setting_of_no_service(overlay: Overlay) -> Place:
    container = overlay.service()
    container.body["env"].append({"name": "SPECDEC_DRAT__POOL", "value": "fast"})
    return at_env(container, "SPECDEC_DRAT__POOL")


@fault
def wrong_scheme_of_redis(overlay: Overlay) -> Place:
    return set_value(overlay.service(), "REDIS_URL", "http://redis:6379/0")


@fault
def missing_model(overlay: Overlay) -> Place:
    container = overlay.named("Deployment", overlay.random.choice(["draft", "target"])).templates[0].containers[0]
    container.body["env"].remove(entry_of(container, "MODEL"))
    return Place(container.template.document, f"containers[{container.name}]")


@fault
def undefined_variable(overlay: Overlay) -> Place:
    return set_value(overlay.service(), "ADVERTISE", "$(POD_PI):50051")


@fault
def port_that_the_container_lacks(overlay: Overlay) -> Place:
    return set_value(overlay.service(), "METRICS", "0.0.0.0:9999")


@fault
def setting_that_compose_gives_otherwise(overlay: Overlay) -> Place:
    return set_value(overlay.service(), "STORE_WAIT_S", "61")


@fault
def draft_pool_named_twice(overlay: Overlay) -> Place:
    first = overlay.named("Deployment", "draft")
    other = overlay.copy_of(first, "draft-large")
    for labels in (at(other.spec, "selector", "matchLabels"), other.templates[0].labels):
        labels["app.kubernetes.io/name"] = "draft-large"  # type: ignore[index]
    other.body["spec"]["replicas"] = 1
    return Place(other, "containers[draft]")
