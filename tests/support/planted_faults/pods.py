"""Faults in fields that every pod needs."""

from __future__ import annotations

from tests.support.planted_faults.overlay import Overlay, Place, at_env, at_field, fault


@fault
def missing_probe(overlay: Overlay) -> Place:
    container = overlay.service()
    probe = overlay.random.choice(["startupProbe", "readinessProbe", "livenessProbe"])
    del container.body[probe]
    return at_field(container, probe)


@fault
def missing_resource(overlay: Overlay) -> Place:
    container = overlay.service()
    part, name = overlay.random.choice([("requests", "cpu"), ("requests", "memory"), ("limits", "memory")])
    del container.body["resources"][part][name]
    return at_field(container, f"resources.{part}.{name}")


@fault
def weak_container(overlay: Overlay) -> Place:
    container = overlay.template().containers[0]
    name = overlay.random.choice(["allowPrivilegeEscalation", "readOnlyRootFilesystem", "capabilities"])
    del container.body["securityContext"][name]
    return at_field(container, f"securityContext.{name}")


@fault
def pod_that_may_be_root(overlay: Overlay) -> Place:
    template = overlay.template()
    template.spec["securityContext"]["runAsNonRoot"] = False
    return Place(template.document, template.field("securityContext.runAsNonRoot"))


@fault
def mounted_token(overlay: Overlay) -> Place:
    template = overlay.template()
    template.spec["automountServiceAccountToken"] = True
    return Place(template.document, "automountServiceAccountToken")


@fault
def grace_shorter_than_the_drain(overlay: Overlay) -> Place:
    template = overlay.service().template
    template.spec["terminationGracePeriodSeconds"] = overlay.random.randint(1, 30)
    return Place(template.document, "terminationGracePeriodSeconds")


@fault
def probe_of_another_port(overlay: Overlay) -> Place:
    container = overlay.service()
    container.body["readinessProbe"] = {"grpc": {"port": container.ports["grpc"]}}
    return at_field(container, "readinessProbe")


@fault
def variable_twice(overlay: Overlay) -> Place:
    container = overlay.service()
    entry = overlay.random.choice([one for one in container.body["env"] if one["name"].startswith("SPECDEC_")])
    container.body["env"].append(dict(entry))
    return at_env(container, entry["name"])
