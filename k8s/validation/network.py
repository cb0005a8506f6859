"""Network policies: what the services need of each other gets through, at the ports where they listen.

A policy is evaluated as a cluster does, from the pods that call to those that answer. Probes come from the pod's own
node, which is always let in.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator
from dataclasses import dataclass, replace

from .connections import CLIENTS, DNS, PROMETHEUS, Connection, needed_connections
from .container_settings import Configured
from .documents import Body, Document, PodTemplate, Problem, at, of_kind
from .references import OUTSIDE, Objects
from .selectors import selects

#: Address of the metadata service of clouds, which gives credentials.
_METADATA = ipaddress.ip_address("169.254.169.254")
#: Namespaces that every cluster, or every cluster of a platform, has.
_SYSTEM = (
    "kube-system", "openshift-dns", "openshift-ingress", "openshift-monitoring", "openshift-user-workload-monitoring",
)  # fmt: skip
#: Port of the resolver, by its namespace; "" for addresses. Policies see the port of the pod.
_DNS_PORTS = {"": 53, "kube-system": 53, "openshift-dns": 5353}
_NAMESPACE_LABEL = "kubernetes.io/metadata.name"


@dataclass(frozen=True)
class _Rule:
    policy: Document
    direction: str
    """egress or ingress."""
    index: int
    body: Body

    @property
    def peers_field(self) -> str:
        return f"spec.{self.direction}[{self.index}].{'to' if self.direction == 'egress' else 'from'}"

    @property
    def ports_field(self) -> str:
        return f"spec.{self.direction}[{self.index}].ports"

    @property
    def peers(self) -> list[Body]:
        """Peers that the rule names; none: every one."""
        return self.body.get("to" if self.direction == "egress" else "from") or []

    def rules(self, template: PodTemplate) -> bool:
        return selects(self.policy.spec.get("podSelector") or {}, template.labels)

    def names(self, connection: Connection) -> bool:
        """Return whether the other side of a connection is one of the peers."""
        other = connection.destination if self.direction == "egress" else connection.source
        return not self.peers or any(_is_meant(peer, other) for peer in self.peers)

    def has_port(self, connection: Connection) -> bool:
        """Return whether a connection's port is one of the ports."""
        ports = self.body.get("ports") or []
        if connection.destination == DNS:
            connection = replace(connection, ports=(_dns_port(self.peers),))
        return not ports or any(_is_port(entry, connection) for entry in ports)


def network_problems(configured: list[Configured], objects: Objects) -> Iterator[Problem]:
    """Yield connections that the policies of an overlay refuse though services need them, and rules without effect."""
    policies = of_kind(objects.documents, "NetworkPolicy")
    rules = [
        _Rule(policy, direction, index, body)
        for policy in policies
        for direction in ("egress", "ingress")
        for index, body in enumerate(policy.spec.get(direction) or ())
    ]
    for policy in policies:
        yield from _types(policy)
    for rule in rules:
        yield from _blocks(rule)
        yield from _namespaces(rule, objects)
        if rule.direction == "egress":
            yield from _ports_of_peers(rule, objects.documents)
            yield from _ports_of_resolvers(rule)
    if not policies:
        return
    for template in (template for document in objects.documents for template in document.templates):
        yield from _unruled(template, policies)
    for connection in needed_connections(configured, objects.documents):
        for direction, side in (("egress", connection.source), ("ingress", connection.destination)):
            if isinstance(side, PodTemplate):
                yield from _refused(connection, direction, side, policies, rules)


# ---- needed connections ----------------------------------------------------------------------------------------------


def _refused(
    connection: Connection, direction: str, template: PodTemplate, policies: list[Document], rules: list[_Rule]
) -> Iterator[Problem]:
    if not any(_rules(policy, template, direction) for policy in policies):
        return
    same = [rule for rule in rules if rule.direction == direction]
    if any(rule.rules(template) and rule.names(connection) and rule.has_port(connection) for rule in same):
        return
    for rule in same:
        named = bool(rule.peers) and rule.names(connection)
        near = (rule.rules(template), named, bool(rule.body.get("ports")) and rule.has_port(connection))
        problem = {
            (True, True, False): (rule.ports_field, f"add the port {connection.shown_port}"),
            (True, False, True): (rule.peers_field, f"name {connection.shown(direction)}"),
            (False, True, True): ("spec.podSelector", f"select {template.document.title}"),
        }.get(near)
        if problem:
            field, remedy = problem
            yield rule.policy.problem(field, f"{connection} gets through no policy ({direction}): {remedy}")
            return
    remedy = f"add a NetworkPolicy with {direction} for it"
    yield template.document.problem("metadata.labels", f"{connection} gets through no policy ({direction}): {remedy}")


def _rules(policy: Document, template: PodTemplate, direction: str) -> bool:
    return direction.capitalize() in _types_of(policy) and selects(
        policy.spec.get("podSelector") or {}, template.labels
    )


def _types_of(policy: Document) -> list[str]:
    """Return the directions that a policy rules: those that it names, or Kubernetes's default."""
    return policy.spec.get("policyTypes") or ["Ingress", *(["Egress"] if policy.spec.get("egress") else [])]


def _is_meant(peer: Body, other: PodTemplate | str) -> bool:
    """Return whether a peer of a rule means a pod of this namespace, or pods of the namespace of this name."""
    if other == DNS:
        return _is_resolver(peer)
    if "ipBlock" in peer:
        return other == CLIENTS  # load balancers outside the cluster
    if isinstance(other, PodTemplate):
        namespace = str(at(other.document.body, "metadata", "namespace") or "")
        is_there = "namespaceSelector" not in peer or selects(
            peer["namespaceSelector"] or {}, {_NAMESPACE_LABEL: namespace}
        )
        return is_there and selects(peer.get("podSelector") or {}, other.labels)
    if "namespaceSelector" not in peer:
        return False
    return other in (CLIENTS, PROMETHEUS) or selects(peer["namespaceSelector"] or {}, {_NAMESPACE_LABEL: other})


def _is_resolver(peer: Body) -> bool:
    """Return whether a peer is where clusters resolve names: a namespace of the system, or an address of the node."""
    if "ipBlock" in peer:
        network = ipaddress.ip_network(str(at(peer, "ipBlock", "cidr")), strict=False)
        return network.is_link_local and network.num_addresses == 1
    return _namespace_of(peer) in _DNS_PORTS and "namespaceSelector" in peer


def _dns_port(peers: list[Body]) -> int:
    return max((_DNS_PORTS.get(_namespace_of(peer), 53) for peer in peers), default=53)


def _namespace_of(peer: Body) -> str:
    return str(at(peer, "namespaceSelector", "matchLabels", _NAMESPACE_LABEL) or "")


def _is_port(entry: Body, connection: Connection) -> bool:
    if entry.get("protocol", "TCP") != connection.protocol:
        return False
    port = entry.get("port")
    if isinstance(port, int) and "endPort" in entry:
        return any(port <= each <= entry["endPort"] for each in connection.ports if isinstance(each, int))
    return port is None or port in connection.ports


# ---- rules by themselves ---------------------------------------------------------------------------------------------


def _types(policy: Document) -> Iterator[Problem]:
    for direction in ("ingress", "egress"):
        if policy.spec.get(direction) and direction.capitalize() not in _types_of(policy):
            message = f"must name {direction.capitalize()}, or spec.{direction} has no effect"
            yield policy.problem("spec.policyTypes", message)


def _unruled(template: PodTemplate, policies: list[Document]) -> Iterator[Problem]:
    """Yield a pod that everything may reach, or that may reach everything."""
    for direction in ("ingress", "egress"):
        if not any(_rules(policy, template, direction) for policy in policies):
            message = f"no NetworkPolicy rules the {direction} of these pods: add one that refuses what none names"
            yield template.document.problem("metadata.labels", message)


def _blocks(rule: _Rule) -> Iterator[Problem]:
    for peer in rule.peers:
        block = peer.get("ipBlock")
        if block is None:
            continue
        try:
            network = ipaddress.ip_network(block["cidr"])
            excepted = [ipaddress.ip_network(text) for text in block.get("except") or ()]
        except ValueError as error:
            yield rule.policy.problem(f"{rule.peers_field}.ipBlock", f"{error}: write a network such as 10.0.0.0/8")
            continue
        for each in excepted:
            if each.version != network.version or not each.subnet_of(network):  # type: ignore[arg-type]
                message = f"except: {each} is no part of {network}"
                yield rule.policy.problem(f"{rule.peers_field}.ipBlock", message)
        is_wide = rule.direction == "egress" and network.num_addresses > 1 and _METADATA in network
        if is_wide and not any(_METADATA in each for each in excepted):
            message = f"{network} reaches the metadata service of clouds: add 169.254.0.0/16 to except"
            yield rule.policy.problem(f"{rule.peers_field}.ipBlock", message)


def _namespaces(rule: _Rule, objects: Objects) -> Iterator[Problem]:
    for peer in rule.peers:
        selector = peer.get("namespaceSelector") or {}
        names = [at(selector, "matchLabels", _NAMESPACE_LABEL)]
        for expression in selector.get("matchExpressions") or ():
            names += (expression.get("values") or []) if expression.get("key") == _NAMESPACE_LABEL else []
        for name in filter(None, names):
            if name not in _SYSTEM and not objects.has("Namespace", name):
                message = f"there is no Namespace {name}, and {OUTSIDE} lists none"
                yield rule.policy.problem(f"{rule.peers_field}.namespaceSelector", message)


def _ports_of_peers(rule: _Rule, documents: list[Document]) -> Iterator[Problem]:
    """Yield ports that the selected peers of this namespace do not have."""
    pods = [
        template
        for document in documents
        for template in document.templates
        if any(_is_own(peer) and _is_meant(peer, template) for peer in rule.peers)
    ]
    for entry in rule.body.get("ports") or ():
        port = entry.get("port")
        for pod in pods:
            ports = [one for container in pod.containers for one in container.body.get("ports") or ()]
            same = [one for one in ports if port in (one["containerPort"], one.get("name"))]
            if port is not None and not same:
                yield rule.policy.problem(
                    rule.ports_field, f"{pod.document.title} has no port {port}: {_listed(ports)}"
                )
                break
            if port is not None and all(one.get("protocol", "TCP") != entry.get("protocol", "TCP") for one in same):
                yield rule.policy.problem(rule.ports_field, f"{pod.document.title} has {port} with another protocol")
                break


def _ports_of_resolvers(rule: _Rule) -> Iterator[Problem]:
    """Yield ports of a rule to the resolver at which it does not answer."""
    ports = rule.body.get("ports") or []
    is_for_names = any(map(_is_resolver, rule.peers)) and any(entry.get("protocol") == "UDP" for entry in ports)
    wanted = _dns_port(rule.peers)
    for entry in ports if is_for_names else ():
        if entry.get("port") != wanted:
            message = f"{entry.get('port')} is no port at which names are resolved: use {wanted}"
            yield rule.policy.problem(rule.ports_field, message)


def _is_own(peer: Body) -> bool:
    return "podSelector" in peer and "namespaceSelector" not in peer


def _listed(ports: list[Body]) -> str:
    return "it has " + (", ".join(f"{one['containerPort']} ({one.get('name', '-')})" for one in ports) or "none")
