"""Compose file, manifests and Dockerfiles agree with the services' own settings. Needs neither Docker nor kubectl."""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from specdec.rpc.health import LIVENESS

ROOT = Path(__file__).resolve().parents[3]
TEXT_SUFFIXES = {".py", ".md", ".toml", ".txt", ".yml", ".yaml", ".json", ".sh", ".cfg", ".ini", ".proto"}
SERVICES = {"draft": "draft_service", "target": "target_service", "coordinator": "coordinator"}
DOCKERFILES = {
    "draft": "specdec/service/Dockerfile",
    "target": "specdec/service/Dockerfile",
    "coordinator": "coordinator/Dockerfile",
    "gateway": "gateway/Dockerfile",
}
IMAGES = SERVICES | {"gateway": "gateway"}


#: Files of the base's workloads.
BASE_FILES = {
    "draft": "k8s/base/draft/draft.yaml",
    "target": "k8s/base/target/target.yaml",
    "coordinator": "k8s/base/coordinator.yaml",
    "redis": "k8s/base/redis.yaml",
}


def documents(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((ROOT / BASE_FILES[name]).read_text()))


def settings_of(name: str) -> Any:
    module = importlib.import_module(f"specdec.settings.{name}")
    return getattr(module, f"{name.title()}Settings")


def stages_of(name: str) -> list[str]:
    """The stages that end in a service's image, each from its FROM line on."""
    text = (ROOT / DOCKERFILES[name]).read_text()
    stages = re.findall(r"^FROM .*?(?=^FROM |\Z)", text, re.MULTILINE | re.DOTALL)
    target = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"][name]["build"].get("target")
    if target is None:
        return stages
    final = {"draft", "target"}
    return [stage for stage in stages if (stage_name := stage.split()[3]) == target or stage_name not in final]


def named_settings(text: str) -> set[tuple[str, str]]:
    return set(re.findall(r"SPECDEC_([A-Z]+)__([A-Z_]+)", text))


@pytest.mark.parametrize("path", ["docker-compose.yml", *(BASE_FILES[name] for name in SERVICES),
                                  *sorted(set(DOCKERFILES.values()))])  # fmt: skip
def test_every_variable_is_a_setting_of_its_service(path: str) -> None:
    named = named_settings((ROOT / path).read_text())
    assert named
    for service, setting in named:
        assert setting.lower() in settings_of(service.lower()).model_fields


@pytest.mark.parametrize("name", SERVICES)
def test_probes_ask_the_port_that_serves_plaintext_health(name: str) -> None:
    (container,) = documents(name)[0]["spec"]["template"]["spec"]["containers"]
    environment = {entry["name"]: entry.get("value", "") for entry in container["env"]}
    (health,) = (value for key, value in environment.items() if key.endswith("__HEALTH"))
    port = int(health.rpartition(":")[2])
    alive = {"port": port, "service": LIVENESS}  # not ready: that may take as long as a model loads
    assert container["startupProbe"]["grpc"] == container["livenessProbe"]["grpc"] == alive
    assert container["readinessProbe"]["grpc"] == {"port": port}
    assert port in {entry["containerPort"] for entry in container["ports"]}


def test_redis_refuses_writes_before_its_container_is_killed() -> None:
    (container,) = next(document for document in documents("redis") if document["kind"] == "StatefulSet")["spec"][
        "template"
    ]["spec"]["containers"]
    flags = dict(zip(container["args"][1::2], container["args"][2::2], strict=True))
    assert flags["--maxmemory-policy"] == "noeviction"
    assert (flags["--maxmemory"], container["resources"]["limits"]["memory"]) == ("512mb", "1536Mi")


def test_the_coordinator_starts_without_a_draft() -> None:
    services = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]
    conditions = {name: need["condition"] for name, need in services["coordinator"]["depends_on"].items()}
    assert conditions == {"redis": "service_healthy", "target": "service_healthy", "draft": "service_started"}


@pytest.mark.parametrize("name", IMAGES)
def test_an_image_listens_where_its_health_check_asks(name: str) -> None:
    dockerfile = "".join(stages_of(name))
    ports = re.findall(r"EXPOSE (\d+)|__LISTEN=0\.0\.0\.0:(\d+)|127\.0\.0\.1:(\d+)", dockerfile)
    assert len(ports) == 3
    assert len({port for found in ports for port in found if port}) == 1
    assert "\nUSER " in dockerfile
    assert re.findall(r"^CMD (.*)$", dockerfile, re.MULTILINE) == [f'["python", "-m", "{IMAGES[name]}"]']


def test_every_image_that_is_built_has_its_files_sent_to_the_builder() -> None:
    sent = (ROOT / ".dockerignore").read_text()
    for path in set(DOCKERFILES.values()):
        for names in re.findall(r"^COPY (?!--from)(.*)$", (ROOT / path).read_text(), re.MULTILINE):
            assert all(f"!{source.split('/')[0]}\n" in sent for source in names.split()[:-1]), (path, names)


def test_the_image_of_the_gateway_asks_for_keys_and_compose_publishes_it_to_this_machine_alone() -> None:
    assert named_settings("".join(stages_of("gateway"))) == {("GATEWAY", "LISTEN"), ("GATEWAY", "ALLOW_ANONYMOUS")}
    assert "ENV SPECDEC_GATEWAY__ALLOW_ANONYMOUS" not in "".join(stages_of("gateway"))
    service = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]["gateway"]
    assert service["environment"]["SPECDEC_GATEWAY__ALLOW_ANONYMOUS"] == "true"
    assert service["ports"] == ["127.0.0.1:8000:8000"]


@pytest.mark.parametrize("name", IMAGES)
def test_compose_builds_the_image_that_make_builds(name: str) -> None:
    service = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"][name]
    target = f"--target {service['build']['target']} " if "target" in service["build"] else ""
    assert service["build"]["dockerfile"] == DOCKERFILES[name]
    built = subprocess.run(["make", "-n", "images"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert f"-f {DOCKERFILES[name]} {target}-t {service['image']} ." in built


@pytest.mark.parametrize("name", IMAGES)
def test_an_image_leaves_the_package_index_to_pip(name: str) -> None:
    stages = stages_of(name)
    installing = [stage for stage in stages if "pip " in stage]
    assert len(installing) == 2
    for stage in installing:
        before, _, _ = stage.partition("pip ")
        for variable in ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL"):
            assert f"\nARG {variable}\n" in before, "pip reads it, and it has no default"
    assert "://" not in "".join(stages)
    assert not re.search(r"--(extra-)?index-url|--find-links|--trusted-host", "".join(stages))
    compose = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
    assert compose["services"][name]["build"]["args"] == ["PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL"]


def test_no_file_names_the_host_of_a_package_index() -> None:
    hosts = re.compile(r"pypi\.(org|python)|pythonhosted\.org|download\.pytorch\.org|index-url[= ]+[\"']?https?:")
    texts = []
    for folder, subfolders, names in os.walk(ROOT):
        subfolders[:] = [name for name in subfolders if not name.startswith(".") and name != "site-packages"]
        paths = [Path(folder, name) for name in names if not name.startswith(".")]
        texts += [path for path in paths if path.suffix in TEXT_SUFFIXES or path.name in ("Dockerfile", "Makefile")]
    texts += [ROOT / ".ci" / "run", ROOT / ".dockerignore"]
    assert len(texts) > 200
    naming = [path for path in texts if hosts.search(path.read_text(errors="replace")) and "results" not in path.parts]
    assert [str(path.relative_to(ROOT)) for path in naming] == []


def test_the_images_of_replicas_compile_their_kernels_from_the_files_that_are_there_by_then(tmp_path: Path) -> None:
    dockerfile = (ROOT / DOCKERFILES["target"]).read_text()
    before, command, after = dockerfile.partition("RUN python -m specdec.engine.kernels ")
    for names in re.findall(r"^COPY (.*)$", before, re.MULTILINE):
        *sources, destination = names.split()
        for source in sources:
            if (ROOT / source).is_dir():
                shutil.copytree(ROOT / source, tmp_path / destination, ignore=shutil.ignore_patterns("prebuilt"))
            else:
                (tmp_path / destination).mkdir(parents=True, exist_ok=True)
                shutil.copy(ROOT / source, tmp_path / destination)
    directory = after.split()[0]
    compiler = tmp_path / "compiler" / "g++"
    compiler.parent.mkdir()
    compiler.write_text(f'#!/bin/sh\nexec {shutil.which("g++")} "$@" -O0\n')  # whether they compile is the question
    compiler.chmod(0o755)
    environ = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    environ["PATH"] = f"{compiler.parent}{os.pathsep}{environ['PATH']}"
    command_line = [sys.executable, *command.split()[2:], directory]
    subprocess.run(command_line, cwd=tmp_path, env=environ, check=True, capture_output=True)
    assert list((tmp_path / directory).glob("*.so"))
    _, _, shipped = after.partition("\nFROM ")
    # Compilers are for Triton's launchers, where torch carries CUDA.
    commands = [line for line in shipped.splitlines() if "g++" in line and not line.startswith("#")]
    assert [line.count("torch.version.cuda") for line in commands] == [1]


@pytest.mark.parametrize("dockerfile", sorted(set(DOCKERFILES.values())))
def test_an_image_installs_nothing_under_our_name_from_an_index(dockerfile: str) -> None:
    text = (ROOT / dockerfile).read_text()
    (command,) = re.findall(r'RUN python -c "(import tomllib.*?)" > requirements\.txt', text, re.DOTALL)
    written = subprocess.run(
        [sys.executable, "-c", command.replace("\\\n", "")], cwd=ROOT, capture_output=True, text=True, check=True
    )
    names = {re.split(r"[^\w.-]", line)[0].lower() for line in written.stdout.splitlines()}
    assert "specdec" not in names
    assert ("torch" in names) == (dockerfile == "specdec/service/Dockerfile")
    assert {"grpcio", "redis", "pydantic"} <= names


@pytest.mark.parametrize("dockerfile", sorted(set(DOCKERFILES.values())))
def test_the_modules_that_an_image_imports_while_it_is_built_exist(dockerfile: str) -> None:
    commands = re.findall(r'python -c "(import .*?)"', (ROOT / dockerfile).read_text().replace("\\\n", ""), re.DOTALL)
    names = [name.strip() for command in commands for name in command.split(";")[0][len("import ") :].split(",")]
    assert names
    assert [name for name in names if importlib.util.find_spec(name) is None] == []
