"""The network policies let exactly the intended connections through, evaluated for every pair and port."""

from __future__ import annotations

import ipaddress
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

COMPONENTS = Path(__file__).resolve().parents[3] / "k8s" / "components"
BASE = COMPONENTS.with_name("base")
SERVICES = ("draft", "target", "coordinator")


class Peer(NamedTuple):
    """A pod, or with an `address` a host outside the cluster."""

    namespace: str
    labels: dict[str, str]
    ports: dict[str, int]
    address: str = ""


def documents(name: str) -> list[dict[str, Any]]:
    folder = BASE / name if name in ("draft", "target") else BASE
    return list(yaml.safe_load_all((folder / f"{name}.yaml").read_text()))


def pod(name: str) -> Peer:
    workload = next(document for document in documents(name) if document["kind"] in ("Deployment", "StatefulSet"))
    template = workload["spec"]["template"]
    (container,) = template["spec"]["containers"]
    ports = {entry["name"]: entry["containerPort"] for entry in container["ports"]}
    return Peer("specdec", template["metadata"]["labels"], ports)


OURS = {name: pod(name) for name in (*SERVICES, "redis")}
OURS["a newcomer"] = Peer("specdec", {"app.kubernetes.io/name": "new"}, {"http": 80})
STRANGERS = {
    "a client": Peer("shop", {"app": "web"}, {"http": 443}),
    "prometheus": Peer("monitoring", {"app": "prometheus"}, {"web": 9090}),
    "the cluster's resolver": Peer("kube-system", {"k8s-app": "kube-dns"}, {"dns": 53}),
    "the node's resolver": Peer("", {}, {"dns": 53}, "169.254.20.10"),
    "the metadata server": Peer("", {}, {"https": 443, "dns": 53}, "169.254.169.254"),
    "another machine here": Peer("", {}, {"https": 443}, "10.1.2.3"),
    "the internet": Peer("", {}, {"https": 443, "dns": 53}, "198.51.100.7"),
}
PEERS = OURS | STRANGERS

EXPECTED = {
    *((client, "coordinator", "grpc") for client in ("a client", "prometheus", "the cluster's resolver")),
    ("coordinator", "draft", "grpc"),
    ("coordinator", "target", "grpc"),
    *((service, "redis", "redis") for service in SERVICES),
    *(("prometheus", service, "metrics") for service in SERVICES),
    *((name, resolver, "dns") for name in OURS for resolver in ("the cluster's resolver", "the node's resolver")),
}


def selects(selector: dict[str, Any], labels: dict[str, str]) -> bool:
    assert selector.keys() <= {"matchLabels", "matchExpressions"}
    expressions = selector.get("matchExpressions", [])
    assert all(expression["operator"] == "In" for expression in expressions)
    return selector.get("matchLabels", {}).items() <= labels.items() and all(
        labels.get(expression["key"]) in expression["values"] for expression in expressions
    )


def is_within(address: str, network: str) -> bool:
    return ipaddress.ip_address(address) in ipaddress.ip_network(network)


def is_meant(where: dict[str, Any], peer: Peer) -> bool:
    if "ipBlock" in where:
        return bool(peer.address) and (
            is_within(peer.address, where["ipBlock"]["cidr"])
            and not any(is_within(peer.address, network) for network in where["ipBlock"].get("except", []))
        )
    if peer.address:
        return False
    in_namespace = (
        selects(where["namespaceSelector"], {"kubernetes.io/metadata.name": peer.namespace})
        if "namespaceSelector" in where
        else peer.namespace == "specdec"
    )
    return in_namespace and selects(where.get("podSelector", {}), peer.labels)


def is_let_through(policies: list[dict[str, Any]], direction: str, us: Peer, them: Peer, port_name: str) -> bool:
    """Return whether a connection passes: always without a policy for the pod, else if one policy lists it."""
    if us.namespace != "specdec":
        return True
    specs = [policy["spec"] for policy in policies]
    ruling = [spec for spec in specs if direction in spec["policyTypes"] and selects(spec["podSelector"], us.labels)]
    number = (us if direction == "Ingress" else them).ports[port_name]
    rules = [rule for spec in ruling for rule in spec.get(direction.lower(), [])]
    return not ruling or any(
        any(is_meant(where, them) for where in rule["from" if direction == "Ingress" else "to"])
        and any(entry["port"] in (number, port_name) for entry in rule["ports"])
        for rule in rules
    )


def connections(policies: list[dict[str, Any]]) -> set[tuple[str, str, str]]:
    return {
        (source, destination, port_name)
        for source in PEERS
        for destination, peer in PEERS.items()
        for port_name in peer.ports
        if source != destination
        and (source in OURS or destination in OURS)
        and is_let_through(policies, "Egress", PEERS[source], peer, port_name)
        and is_let_through(policies, "Ingress", peer, PEERS[source], port_name)
    }


def test_exactly_the_connections_that_are_needed_are_let_through() -> None:
    assert connections(documents("network-policies")) == EXPECTED


@pytest.mark.parametrize("name", [policy["metadata"]["name"] for policy in documents("network-policies")])
def test_every_policy_matters(name: str) -> None:
    policies = [policy for policy in documents("network-policies") if policy["metadata"]["name"] != name]
    assert connections(policies) != EXPECTED


def test_the_model_hub_component_lets_services_out_to_the_internet_by_https_alone() -> None:
    hub = list(yaml.safe_load_all((COMPONENTS / "model-hub" / "network-policy.yaml").read_text()))
    more = connections(documents("network-policies") + hub) - EXPECTED
    assert more == {(service, "the internet", "https") for service in SERVICES}


def test_the_policies_are_applied_with_everything_else() -> None:
    assert "network-policies.yaml" in yaml.safe_load((BASE / "kustomization.yaml").read_text())["resources"]
