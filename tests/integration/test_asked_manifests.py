"""Every probe of the rendered manifests is asked of a running service, and every query of its autoscalers of metrics.

The static checks of `k8s.validation` have tables of paths, names and label values. Here they are held against processes
with tiny models.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from k8s.validation.compositions import find_overlays
from k8s.validation.container_settings import configured_containers
from k8s.validation.documents import Container, Document, of_kind
from k8s.validation.label_values import STATIC
from k8s.validation.metrics import adapter_queries, adapter_rules
from k8s.validation.probes import PROBES
from k8s.validation.queries import Matcher, Selector, selectors_of_query
from k8s.validation.redis_servers import is_redis
from k8s.validation.references import Objects, read_outside
from k8s.validation.rendering import render
from k8s.validation.series import SCRAPE_LABELS
from tests.support.redis_fixture import RedisServer
from tests.support.scraping import Page
from tests.support.stack import Stack, free_port
from tests.support.tiny_models import build_tiny_pair
from tests.unit.deployment.test_k8s_validate import KUBECTL

ROOT = Path(__file__).resolve().parents[2]
PATIENCE_S = 120.0

pytestmark = pytest.mark.skipif(KUBECTL is None, reason="needs kubectl (`make k8s-tools`)")


@pytest.fixture(scope="module")
def documents() -> list[Document]:
    """Documents of all overlays."""
    assert KUBECTL is not None
    overlays = [one for one in find_overlays(ROOT) if one.name.startswith("k8s/overlays/")]
    return [document for overlay in overlays for document in render(overlay, ROOT, KUBECTL)]


class System:
    """Draft, target, coordinator and gateway as processes that have answered a request."""

    def __init__(self, stack: Stack, health: dict[str, str]) -> None:
        self.stack, self.health = stack, health

    @property
    def gateway(self) -> str:
        return self.stack.parts["gateway"].address

    def samples(self) -> list[Any]:
        """Return the samples of all metrics pages."""
        pages = [urlopen(f"http://{part.metrics}/metrics", timeout=PATIENCE_S) for part in self.stack.parts.values()]
        return [sample for page in pages for sample in Page(page.read().decode()).samples]


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    target, draft = build_tiny_pair("llama", tmp_path_factory.mktemp("models"))
    health = {name: f"127.0.0.1:{free_port()}" for name in ("target", "draft", "coordinator")}
    flags = {f"{name}_arguments": ("--health", address) for name, address in health.items()}
    with Stack(target, draft, gateway_arguments=(), has_metrics=True, **flags) as stack:
        system = System(stack, health)
        body = json.dumps({"prompt": "import os", "max_tokens": 24, "ignore_eos": True}).encode()
        headers = {"Content-Type": "application/json"}
        urlopen(Request(f"http://{system.gateway}/v1/completions", body, headers), timeout=PATIENCE_S).read()
        yield system


def distinct_probes(documents: list[Document]) -> dict[str, tuple[str, dict[str, Any]]]:
    """Return the probes of our services, each once, with the service that they ask."""
    configured, problems = configured_containers(Objects(documents, read_outside(ROOT)))
    assert problems == []
    found = {}
    for one in configured:
        for probe in PROBES:
            body = one.variables.container.body.get(probe) or {}
            question = {way: body[way] for way in ("grpc", "httpGet", "tcpSocket", "exec") if way in body}
            if question:
                found[f"{one.service.name} {json.dumps(question, sort_keys=True)}"] = (one.service.name, question)
    return found


def is_answered(system: System, service: str, question: dict[str, Any]) -> bool:
    """Ask a probe of a running service, at the port of this machine. HTTPS is asked as HTTP."""
    match question:
        case {"grpc": rest}:
            with grpc.insecure_channel(system.health[service]) as channel:
                request = health_pb2.HealthCheckRequest(service=str(rest.get("service", "")))
                try:
                    reply = health_pb2_grpc.HealthStub(channel).Check(request, timeout=PATIENCE_S, wait_for_ready=True)
                except grpc.RpcError:
                    return False
                return bool(reply.status == health_pb2.HealthCheckResponse.SERVING)
        case {"httpGet": rest}:
            try:
                with urlopen(f"http://{system.gateway}{rest['path']}", timeout=PATIENCE_S) as response:
                    return bool(response.status == 200)
            except HTTPError:
                return False
    pytest.fail(f"{service} is probed by {sorted(question)}, which is not asked here")


def test_every_probe_is_answered_by_its_service(documents: list[Document], system: System) -> None:
    probes = distinct_probes(documents)
    assert {service for service, _ in probes.values()} == {"draft", "target", "coordinator", "gateway"}
    assert [name for name, asked in probes.items() if not is_answered(system, *asked)] == []


@pytest.mark.parametrize(
    ("service", "question"),
    [
        ("target", {"grpc": {"service": "livenes"}}),
        ("coordinator", {"grpc": {"service": "ready"}}),
        ("gateway", {"httpGet": {"path": "/readyz"}}),
    ],
)
def test_a_misspelt_probe_is_not_answered(system: System, service: str, question: dict[str, Any]) -> None:
    assert not is_answered(system, service, question)


def redis_commands(documents: list[Document]) -> set[tuple[str, ...]]:
    """Return the words that probes of Redis ask, without those of encryption."""
    containers = [one for document in documents for template in document.templates for one in template.containers]
    servers: list[Container] = [one for one in containers if is_redis(one)]
    commands = [
        one.body[probe]["exec"]["command"] for one in servers for probe in PROBES if "exec" in one.body.get(probe, {})
    ]
    tls = ("--tls", "--cacert")
    return {
        tuple(word for before, word in zip(["", *words], words, strict=False) if word not in tls and before != tls[1])
        for words in commands
    }


@pytest.mark.skipif(shutil.which("redis-cli") is None, reason="needs redis-cli on the PATH")
def test_every_probe_of_redis_is_answered(documents: list[Document], tmp_path: Path) -> None:
    server = RedisServer(tmp_path)
    server.start()
    try:
        commands = redis_commands(documents)
        assert commands
        for program, *words in commands:
            asked = [program, "-s", server.url.removeprefix("unix://"), *words]
            answer = subprocess.run(asked, capture_output=True, text=True, timeout=PATIENCE_S)
            assert (answer.returncode, answer.stdout.strip()) == (0, "PONG"), asked
    finally:
        server.stop()


def queries_of(documents: list[Document]) -> set[str]:
    """Return the queries of scalers and of the rules of an adapter."""
    triggers = [one for document in of_kind(documents, "ScaledObject") for one in document.spec["triggers"]]
    found = {str(trigger["metadata"]["query"]) for trigger in triggers if "query" in trigger["metadata"]}
    for document in of_kind(documents, "ConfigMap"):
        for _, rule in adapter_rules(document):
            found |= set(adapter_queries(rule).values())
    return found


def is_fulfilled(matcher: Matcher, labels: dict[str, str]) -> bool:
    value = labels.get(matcher.name, "")
    is_equal = re.fullmatch(matcher.value, value) is not None if matcher.is_regex else value == matcher.value
    return is_equal == matcher.is_equal


def has_data(selector: Selector, samples: list[Any]) -> bool:
    """Return whether a sample fulfils a selector, labels apart that a scrape adds."""
    matchers = [one for one in selector.matchers if one.name not in SCRAPE_LABELS]
    return any(
        sample.name == selector.series and all(is_fulfilled(one, sample.labels) for one in matchers)
        for sample in samples
    )


def test_every_query_of_an_autoscaler_reads_series_that_running_services_have(
    documents: list[Document], system: System
) -> None:
    queries, samples = queries_of(documents), system.samples()
    assert len(queries) >= 10
    selectors = {selector for query in queries for selector in selectors_of_query(query)}
    assert [selector for selector in selectors if not has_data(selector, samples)] == []


def test_a_query_of_another_role_reads_nothing(system: System) -> None:
    (selector,) = selectors_of_query('sum(specdec:kv_cache_usage_perc{role="targets"})')
    assert not has_data(selector, system.samples())


def test_running_services_have_no_value_of_a_label_that_the_checks_do_not_know(system: System) -> None:
    given = {(name, value) for sample in system.samples() for name, value in sample.labels.items() if name in STATIC}
    assert len(given) >= 8
    assert {(name, value) for name, value in given if value not in STATIC[name]} == set()
