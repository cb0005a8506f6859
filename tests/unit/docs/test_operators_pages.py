"""Every command and manifest on the operators' pages is one that the programs take.

`kubectl apply` is rendered, `kubectl create` runs without a cluster, objects that a command names must be in the
manifests, services read their command lines, and `specdec plan` runs. Other `specdec` commands are parsed by
`tests/e2e/test_documented_code.py`. A command that is neither is named in `ELSEWHERE` with its reason.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import re
import shutil
import ssl
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from k8s.validation.documents import Document, of_kind
from k8s.validation.schemas import schema_problems
from k8s.validation.service_settings import SERVICES
from specdec.access.keys import hash_key, parse_keys
from specdec.cli import plan
from specdec.settings.reading import parse_settings
from tests.support.tutorial import FENCED, TUTORIAL, Command, commands_of, make_files, run, writes_a_file
from tests.unit.deployment.test_k8s_validate import KUBECTL
from tests.unit.deployment.test_overlays import ROOT, rendered

HOW_TO = ROOT / "docs" / "how-to"
PAGES = [
    TUTORIAL,
    *(HOW_TO / f"{name}.md" for name in ("production", "pools-on-kubernetes", "secure", "size-a-system", "run-redis",
                                         "limit-tenants", "scale", "update-a-model", "upgrade")),
]  # fmt: skip
#: Commands that other tests run, by what they look like.
ELSEWHERE = {
    r"specdec (?!plan)": "test_documented_code parses or runs it",
    r"SPECDEC_API_KEY=\S+ specdec ": "test_documented_code parses it",
    r"export SPECDEC_": "the commands after it read the variable",
    r"make (images|up|down)$": "test_pods builds the images; test_deployment_files compares the compose file",
    r"docker compose ": "needs Docker; the validator reads the compose file",
    r"curl ": "test_production of tests/pods sends such a request; test_documented_code sends the one without a key",
    r"helm (install|template) ": "test_chart_values renders the example of the page and asks for the refusal",
    r"pip uninstall ": "changes the environment of the reader",
    r"make push-images ": "needs a registry; its names are compared below",
}

needs_kubectl = pytest.mark.skipif(KUBECTL is None, reason="needs kubectl (`make k8s-tools`)")


COMMANDS = [command for page in PAGES for command in commands_of(page)]
KUBECTL_COMMANDS = [command for command in COMMANDS if command.text.startswith("kubectl ")]
PLANS = [command for command in COMMANDS if command.text.startswith("specdec plan ")]
STARTS = [command for command in COMMANDS if command.text.startswith("python -m ")]
#: Commands that write the files of the secrets, in their order; other pages show some of them once more.
FILES = [command for command in COMMANDS if writes_a_file(command)]


def test_every_command_is_tested_here_or_elsewhere() -> None:
    tested = {*KUBECTL_COMMANDS, *PLANS, *STARTS, *FILES}
    others = [command for command in COMMANDS if command not in tested and not command.text.startswith("sed ")]
    assert [one for one in others if not any(re.match(pattern, one.text) for pattern in ELSEWHERE)] == []
    assert [pattern for pattern in ELSEWHERE if not any(re.match(pattern, one.text) for one in others)] == []


# ---- kubectl ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def objects() -> set[tuple[str, str]]:
    """Return kinds, in lower case, and names of the objects of all folders that the pages apply."""
    folders = {command.words[-1] for command in KUBECTL_COMMANDS if " apply -k " in command.text}
    return {(one.kind.lower(), one.name) for folder in sorted(folders) for one in applied(folder)}


@cache
def applied(folder: str) -> list[Document]:
    return rendered(folder)


@needs_kubectl
@pytest.mark.parametrize("command", KUBECTL_COMMANDS, ids=lambda command: command.text)
def test_a_command_of_kubectl_names_what_the_manifests_have(
    command: Command, objects: set[tuple[str, str]], secrets: Path
) -> None:
    words = [word for word in command.words[1:] if word not in ("-n", "specdec")]
    match words:
        case ["apply", "-k", folder] | ["kustomize", folder]:
            assert any(document.kind == "Deployment" for document in applied(folder))
        case ["apply", "-f", file]:
            assert all(schema_problems_of(body) == [] for body in yaml.safe_load_all((ROOT / file).read_text()))
        case ["create", *rest]:
            made(rest, secrets)
        case ["rollout", "status" | "restart", name] | ["port-forward", name, *_]:
            assert tuple(name.split("/")) in objects
        case ["get", kind, *names]:
            assert kind.rstrip("s") in {found for found, _ in objects} | {"disaggregatedsetrolescaler"}
            assert all((kind, name) in objects for name in names)
        case _:
            raise AssertionError(f"{command.page}: {command.text} is not tested")


def made(arguments: list[str], folder: Path) -> dict[str, Any]:
    """Return the object that `kubectl create` would make of the files in a folder."""
    line = [str(KUBECTL), "create", *arguments, "--dry-run=client", "-o", "yaml"]
    done = subprocess.run(line, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return dict(yaml.safe_load(done.stdout))


@needs_kubectl
def test_the_tutorial_makes_every_object_that_production_refers_to(secrets: Path) -> None:
    outside = {(one["kind"], one["name"]): one for one in yaml.safe_load((ROOT / "k8s" / "outside.yaml").read_text())}
    bodies = [made(one.words[4:], secrets) for one in commands_of(TUTORIAL) if " create " in one.text]
    given = {(body["kind"], body["metadata"]["name"]): sorted(body["data"]) for body in bodies}
    assert given == {key: sorted(outside[key]["keys"]) for key in given}
    of_cluster = {("Gateway", "public"), ("Namespace", "gateways"), ("Namespace", "monitoring")}
    assert outside.keys() - given.keys() == {("Secret", "hugging-face"), *of_cluster}


# ---- files -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def secrets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the files that the tutorial makes."""
    if shutil.which("openssl") is None:
        pytest.skip("needs openssl")
    folder = tmp_path_factory.mktemp("secrets")
    make_files(folder)
    return folder


def test_the_certificate_has_the_names_by_which_services_are_dialled(secrets: Path) -> None:
    context = ssl.create_default_context(cafile=secrets / "ca.crt")
    context.load_cert_chain(secrets / "tls.crt", secrets / "tls.key")
    shown = subprocess.run(
        ["openssl", "verify", "-CAfile", "ca.crt", "-verify_hostname", "redis", "tls.crt"],
        cwd=secrets, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert shown.returncode == 0, shown.stderr
    text = subprocess.run(
        ["openssl", "x509", "-in", "tls.crt", "-noout", "-ext", "subjectAltName,extendedKeyUsage"],
        cwd=secrets, capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    assert all(word in text for word in ("DNS:specdec", "DNS:redis", "Server Authentication", "Client Authentication"))


def test_the_keys_are_those_of_the_files_that_their_owners_get(secrets: Path) -> None:
    (access,) = parse_keys((secrets / "keys.txt").read_text()).values()
    assert (access.key_hash, access.tenant) == (hash_key((secrets / "acme.key").read_text()), "acme")
    password = (secrets / "password").read_text()
    assert (secrets / "url").read_text() == f"rediss://:{password}@redis:6379/0?ssl_ca_certs=/tls/ca.crt"


def test_the_page_about_keys_makes_a_key_file_that_is_read(tmp_path: Path) -> None:
    for command in FILES:
        if command.page == "secure.md":
            run(command, tmp_path)
    (access,) = parse_keys((tmp_path / "keys.txt").read_text()).values()
    assert access.key_hash == hash_key("my-secret-key")
    assert len((tmp_path / "service.key").read_text()) > 16


# ---- services and plans ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", STARTS, ids=lambda command: command.text)
def test_a_service_takes_its_command_line(command: Command, secrets: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module, *flags = command.words[2:]
    folder = secrets / "named"
    folder.mkdir(exist_ok=True)
    for flag in flags:
        if flag.endswith((".pem", ".key", ".txt")):
            source = {"ca.pem": "ca.crt", "keys.txt": "keys.txt", "service.key": "service.key"}.get(
                flag, "tls.key" if flag.endswith(".key") else "tls.crt"
            )
            (folder / flag).write_bytes((secrets / source).read_bytes())
            (folder / flag).chmod(0o600)
    monkeypatch.chdir(folder)
    (service,) = [one for one in SERVICES.values() if one.module == module]
    parse_settings(service.settings_type, prog=module, argv=flags)


@pytest.mark.parametrize("command", PLANS, ids=lambda command: command.text)
def test_a_plan_is_calculated(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    parser = argparse.ArgumentParser()
    plan.add_parser(parser.add_subparsers(), {})
    args = parser.parse_args(command.words[1:])
    with contextlib.redirect_stdout(io.StringIO()) as shown:
        assert plan.run(args, {}) == 0
    assert command.words[2].rpartition("/")[2] in shown.getvalue()


# ---- images and manifests --------------------------------------------------------------------------------------------


@needs_kubectl
def test_the_tutorial_puts_the_images_that_were_pushed_into_every_pod(tmp_path: Path) -> None:
    for folder in ("k8s", "monitoring"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for command in commands_of(TUTORIAL):
        if command.text.startswith("sed "):
            run(command, tmp_path)
    (push,) = [command for command in COMMANDS if command.text.startswith("make push-images ")]
    given = dict(word.split("=") for word in push.words[2:])
    documents = rendered("k8s/overlays/production", tmp_path)
    images = {one.body["image"] for document in documents for part in document.templates for one in part.all_containers}
    pushed = {
        f"{given['REGISTRY']}/{name}:{given['TAG'].removeprefix('v')}"
        for name in ("coordinator", "draft-service", "gateway", "target-service")
    }
    assert {image for image in images if not image.startswith("redis:")} == pushed
    assert [one.spec["hostnames"] for one in of_kind(documents, "HTTPRoute")] == [["llm.acme.example"]]


def schema_problems_of(body: dict[str, Any]) -> list[str]:
    return [str(problem) for problem in schema_problems(Document("", body))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_manifest_on_a_page_can_be_read(page: Path) -> None:
    for block in FENCED.finditer(page.read_text()):
        if block["language"] == "yaml":
            body = yaml.safe_load(block["code"])
            if "apiVersion" not in body:  # values of the chart, which test_chart_values renders
                assert body.keys() <= yaml.safe_load((ROOT / "k8s/chart/values.yaml").read_text()).keys()
            elif body["apiVersion"].startswith("cert-manager.io/"):  # has no schema here
                assert body["spec"]["secretName"] == "specdec-tls"
            else:
                assert schema_problems_of(body) == []


def test_ports_of_operators_and_of_health_probes_are_two() -> None:
    page = (HOW_TO / "secure.md").read_text()
    (forwarded,) = re.findall(r"port-forward deployment/coordinator (\d+)", page)
    settings = (ROOT / "k8s" / "components" / "api-keys" / "kustomization.yaml").read_text()
    assert f'SPECDEC_COORDINATOR__ADMIN, value: "127.0.0.1:{forwarded}"' in settings
    base = (ROOT / "k8s" / "base" / "coordinator.yaml").read_text()
    assert forwarded not in re.findall(r"containerPort: (\d+)", base)
