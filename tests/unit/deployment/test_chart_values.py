"""Values of the Helm chart change what they name, or are refused in one line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from k8s.validation.rendering import RenderingError
from tests.unit.deployment.test_chart import ROOT, installed, needs_helm, values_of

pytestmark = needs_helm

PEER = "redis.peers[0].ipBlock.cidr=10.0.0.5/32"
TLS = ("tls.enabled=true", "tls.secret=specdec-tls")
SIZES = ("requests.cpu", "requests.memory", "limits.memory")


def environment(deployment: dict[str, Any]) -> dict[str, Any]:
    (container,) = deployment["spec"]["template"]["spec"]["containers"].values()
    return {name: entry.get("value", entry.get("valueFrom")) for name, entry in container["env"].items()}


def changed(*settings: str) -> dict[str, Any]:
    return installed(*(word for setting in settings for word in ("--set", setting)))


@pytest.mark.parametrize("number", [0, 1, 3])
def test_there_may_be_any_number_of_draft_pools(number: int) -> None:
    objects = changed(
        "drafts.pools.default=null", *(f"drafts.pools.p{index}.model=m{index}" for index in range(number))
    )
    for kind in ("Deployment", "PodDisruptionBudget"):
        assert sorted(title for title in objects if title.startswith(f"{kind}/draft")) == [
            f"{kind}/draft-p{index}" for index in range(number)
        ]
    pools = [environment(objects[f"Deployment/draft-p{index}"]) for index in range(number)]
    assert [(pool["SPECDEC_DRAFT__POOL"], pool["SPECDEC_DRAFT__MODEL"]) for pool in pools] == [
        (f"p{index}", f"m{index}") for index in range(number)
    ]


def test_pools_scale_and_are_placed_on_their_own() -> None:
    objects = changed(
        "autoscaling.kind=keda",
        "drafts.pools.code.accelerator=nvidia",
        "drafts.pools.code.minReplicas=0",
        "drafts.pools.code.nodeSelector.card=l4",
        "drafts.pools.code.settings.max_sessions=1000000",
        "targets.pools.canary.autoscale=false",
        "targets.pools.canary.replicas=1",
    )
    scalers = {title.partition("/")[2] for title in objects if title.startswith("ScaledObject/")}
    assert scalers == {"coordinator", "draft", "draft-code", "target"}
    code = objects["ScaledObject/draft-code"]["spec"]
    assert code["minReplicaCount"] == 0
    assert all('pool="code"' in trigger["metadata"]["query"] for trigger in code["triggers"].values())
    pod = objects["Deployment/draft-code"]["spec"]["template"]["spec"]
    assert pod["nodeSelector"] == {"nvidia.com/gpu.present": "true", "card": "l4"}
    assert environment(objects["Deployment/draft-code"])["SPECDEC_DRAFT__MAX_SESSIONS"] == "1000000"
    assert "nodeSelector" not in objects["Deployment/draft"]["spec"]["template"]["spec"]
    assert objects["Deployment/target-canary"]["spec"]["replicas"] == 1


@pytest.mark.parametrize(
    ("settings", "url"),
    [
        (["redis.mode=external", "redis.url=rediss://redis.example:6380/0"], "rediss://redis.example:6380/0"),
        (
            ["redis.mode=sentinel", "redis.sentinels={a:26379,b:26379}", "redis.service=main"],
            "redis+sentinel://a:26379,b:26379/main",
        ),
        (
            ["redis.mode=sentinel", "redis.sentinels={a:26379}", "redis.service=main", *TLS],
            "rediss+sentinel://a:26379/main?ssl_ca_certs=/tls/ca.crt",
        ),
    ],
)
def test_another_redis_takes_the_place_of_the_own_one(settings: list[str], url: str) -> None:
    objects = changed(PEER, *settings)
    assert objects["Secret/specdec-redis"]["stringData"] == {"url": url}
    assert "StatefulSet/redis" not in objects
    assert "Service/redis" not in objects
    assert objects["NetworkPolicy/redis-outside"]["spec"]["egress"][0]["to"] == [{"ipBlock": {"cidr": "10.0.0.5/32"}}]


def test_a_secret_replaces_the_address_of_redis() -> None:
    objects = changed(PEER, "redis.mode=external", "redis.secret=ours")
    assert "Secret/specdec-redis" not in objects
    wanted = {"secretKeyRef": {"name": "ours", "key": "url"}}
    assert environment(objects["Deployment/target"])["SPECDEC_TARGET__REDIS_URL"] == wanted


def test_images_come_by_digest_from_one_registry() -> None:
    digest = "sha256:" + "0" * 64
    objects = changed("images.registry=r.example:5000/llm", f"images.digests.target={digest}", "images.tag=1.2.3")
    images = {
        name: objects[f"Deployment/{name}"]["spec"]["template"]["spec"]["containers"][name]["image"]
        for name in ("target", "draft")
    }
    assert images == {
        "target": f"r.example:5000/llm/target-service@{digest}",
        "draft": "r.example:5000/llm/draft-service:1.2.3",
    }


def test_dashboards_and_rules_get_the_labels_by_which_operators_find_them() -> None:
    objects = changed("monitoring.enabled=true", "monitoring.dashboards=true", "monitoring.labels.release=prometheus")
    assert objects["PodMonitor/specdec"]["metadata"]["labels"] == {"release": "prometheus"}
    for path in (ROOT / "monitoring/grafana").glob("*.json"):
        board = objects[f"ConfigMap/specdec-dashboard-{path.stem}"]
        assert board["metadata"]["labels"] == {"grafana_dashboard": "1"}
        assert board["data"] == {path.name: path.read_text()}


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (["autoscaling.kind=vpa"], ["autoscaling", "kind", "none", "hpa", "keda"]),
        (["platform=azure"], ["platform", "generic", "gke", "eks", "openshift"]),
        (["drafts.pools.code.modl=x"], ["drafts", "pools", "code", "modl"]),
        (["drafts.pools.Code.model=x"], ["drafts", "pools", "Code"]),
        (["targets.defaults.minReplicas=0"], ["targets", "defaults", "minReplicas", "1"]),
        (["targets.pools.default=null"], ["targets", "pools", "default"]),
        (["redis.mode=null"], ["redis", "mode"]),
        (["images.tag=10"], ["images", "tag", "string"]),
        (["images.digests.draft=sha256:12"], ["images", "digests", "draft", "sha256:[0-9a-f]{64}"]),
        (["tls.enabled=true"], ["tls", "secret", "1"]),
        (["keys.enabled=true"], ["keys", "secret", "1"]),
        (["tls.secret=A_b"], ["tls", "secret", "[a-z0-9]"]),
        (["coordinator.resources.requests.cpu=1"], ["coordinator", "resources", "limits"]),
        (["gateway.enabled=true"], ["keys.enabled: false", "gateway.enabled needs true", "keys.secret"]),
        (["gateway.routes.enabled=true"], ["gateway.routes.enabled", "enable the gateway"]),
        (["platform=gke"], ["platform: gke needs", "gateway.enabled and tls.enabled"]),
        (["autoscaling.kind=hpa", "drafts.pools.code.minReplicas=0"], ["drafts.pools.code.minReplicas: 0", "keda"]),
        (["coordinator.minReplicas=7"], ["coordinator.maxReplicas: 6 is below", "7"]),
        (["drafts.pools.code.settings.listen=x"], ["drafts.pools.code.settings.listen", "remove it"]),
        (["networkPolicies.to.drafts[0].podSelector.a=b"], ["networkPolicies.to.drafts", "use one of coordinator"]),
        (["redis.url=redis://a:1"], ["redis: url, sentinels and peers", "mode own"]),
        (["redis.mode=external"], ["redis.url: mode external needs it"]),
        (["redis.mode=external", "redis.url=redis://a:1"], ["redis.peers: mode external needs them", "ipBlock"]),
        (["redis.mode=sentinel", PEER], ["redis.sentinels: mode sentinel needs them"]),
        (
            ["redis.mode=external", PEER, "redis.url=redis://a:1", *TLS],
            ["redis.url: redis://a:1 is not encrypted", "rediss://"],
        ),
        (
            ["drafts.pools.code.accelerator=nvidia", *(f"drafts.pools.code.resources.{name}=1" for name in SIZES)],
            ["drafts.pools.code.resources.limits", "nvidia.com/gpu"],
        ),
    ],
)  # fmt: skip
def test_values_that_are_wrong_or_do_not_fit_are_refused_by_name(settings: list[str], words: list[str]) -> None:
    with pytest.raises(RenderingError) as caught:
        changed(*settings)
    assert [word for word in words if word not in str(caught.value)] == []


def test_the_example_of_the_page_gives_the_pools_that_it_names(tmp_path: Path) -> None:
    section = (ROOT / "docs/how-to/pools-on-kubernetes.md").read_text().partition("## With Helm")[2]
    (tmp_path / "values.yaml").write_text(section.partition("```yaml\n")[2].partition("```")[0])
    objects = installed("--values", str(tmp_path / "values.yaml"))
    models = {
        title.partition("/")[2]: value
        for title, body in objects.items()
        if title.startswith("Deployment/")
        for name, value in environment(body).items()
        if name.endswith("__MODEL")
    }
    assert models == {"draft": "Qwen/Qwen3-0.6B", "draft-code": "Qwen/Qwen3-1.7B", "target": "Qwen/Qwen3-8B"}
    assert objects["HorizontalPodAutoscaler/draft-code"]["spec"]["maxReplicas"] == 2


def test_policies_of_a_platform_can_be_changed_only_on_that_platform() -> None:
    peer = "networkPolicies.from.gateway-from-load-balancers[0].ipBlock.cidr=10.1.0.0/16"
    (rule,) = installed(*values_of("eks"), "--set", peer)["NetworkPolicy/gateway-from-load-balancers"]["spec"][
        "ingress"
    ]
    assert rule["from"] == [{"ipBlock": {"cidr": "10.1.0.0/16"}}]
    with pytest.raises(RenderingError, match="gateway-from-load-balancers: there is no such policy"):
        changed(peer)
