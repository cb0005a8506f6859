"""The wheel in fresh environments: the client alone, and `specdec up` without a clone. `make wheel-check` runs this."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MAX_PACKAGES = 15
#: Bytecode included; 14 MB are the demo's models and 19 are gRPC.
MAX_BYTES = 62 * 1000**2

pytestmark = [pytest.mark.full, pytest.mark.timeout(1200)]

#: What a fresh environment has in it; `pkg_resources` and the last two are parts of setuptools.
OF_VENV = ("pip", "setuptools", "pkg_resources", "_distutils_hack", "distutils-precedence")

#: Variables that would lead to the clone's code, or change where pip installs.
LEFT_OUT = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "SPECDEC_ENDPOINT")


def run(*words: str | Path, cwd: Path, check: bool = True) -> subprocess.CompletedProcess[str]:
    environ = {name: value for name, value in os.environ.items() if name not in LEFT_OUT}
    return subprocess.run(list(map(str, words)), cwd=cwd, env=environ, check=check, capture_output=True, text=True)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the wheel from the files that git tracks, as a release does."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    tracked = run("git", "ls-files", "-z", cwd=ROOT).stdout.split("\0")
    for name in filter(None, tracked):
        if (ROOT / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes((ROOT / name).read_bytes())
    run(sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", out, ".", cwd=source)
    (built,) = out.glob("*.whl")
    return built


class Environment:
    """A fresh virtual environment and an empty folder to run its programs in."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "empty"
        self.folder.mkdir()
        run(sys.executable, "-m", "venv", folder / "venv", cwd=folder)
        self.bin = folder / "venv" / "bin"
        (self.site_packages,) = (folder / "venv" / "lib").glob("python*/site-packages")

    def install(self, *words: str | Path) -> None:
        run(self.bin / "python", "-m", "pip", "install", "-q", "-c", ROOT / "constraints.txt", *words, cwd=self.folder)

    def python(self, statement: str) -> str:
        return run(self.bin / "python", "-c", statement, cwd=self.folder).stdout

    def specdec(self, *words: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        return run(self.bin / "specdec", *words, cwd=self.folder, check=check)

    def packages(self) -> list[str]:
        listed = run(self.bin / "python", "-m", "pip", "list", "--format", "json", cwd=self.folder).stdout
        return sorted({package["name"] for package in json.loads(listed)} - {"pip", "setuptools"})

    def num_bytes(self) -> int:
        files = [path for path in self.site_packages.rglob("*") if path.is_file()]
        parts = ((path, path.relative_to(self.site_packages).parts[0]) for path in files)
        return sum(path.stat().st_size for path, top in parts if not top.startswith(OF_VENV))


@pytest.fixture(scope="module")
def client(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    environment = Environment(tmp_path_factory.mktemp("client"))
    environment.install(wheel)
    return environment


@pytest.fixture(scope="module")
def served(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """Return an environment with the wheel and the dependencies of the tests' own one, but not the clone."""
    environment = Environment(tmp_path_factory.mktemp("served"))
    environment.install("--no-deps", wheel)
    (environment.site_packages / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return environment


def test_the_wheel_has_the_services_the_demo_models_and_type_marker_and_no_benchmarks(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.partition("/")[0] for name in names if ".dist-info/" not in name} == {
        "specdec", "draft_service", "target_service", "coordinator", "gateway",
    }  # fmt: skip
    assert "specdec/py.typed" in names
    for role in ("target", "draft"):
        assert f"specdec/models/demo/{role}/model.safetensors" in names
        assert f"specdec/models/demo/{role}/tokenizer.json" in names
    assert "specdec/models/demo/eagle3/model.safetensors" in names


def test_a_client_only_install_is_small(client: Environment) -> None:
    packages, num_bytes = client.packages(), client.num_bytes()
    print(f"\nclient-only install: {len(packages)} packages, {num_bytes / 1e6:.1f} MB: {', '.join(packages)}")
    assert len(packages) <= MAX_PACKAGES
    assert num_bytes <= MAX_BYTES


def test_a_client_only_install_has_the_sdk_and_the_commands_that_call_a_system(client: Environment) -> None:
    assert client.python("from specdec import AsyncClient, Client; print(Client.__name__)") == "Client\n"
    assert "generate" in client.specdec("--help").stdout
    for command in ("generate", "chat", "status", "pools", "promote", "bench", "health", "top", "completion"):
        assert client.specdec(command, "--help").returncode == 0
    refused = client.specdec("generate", "hi", "--endpoint", "127.0.0.1:1", check=False)
    assert refused.stderr.startswith("error: no coordinator at 127.0.0.1:1")


@pytest.mark.parametrize(
    "words",
    [
        ("up",),
        ("serve", "model"),
        ("distill", "--log", "x", "--draft", "y", "--out", "z"),
        ("advise", "--target", "model"),
    ],
)
def test_a_command_that_needs_the_services_names_the_extra_to_install(
    client: Environment, words: tuple[str, ...]
) -> None:
    refused = client.specdec(*words, check=False)
    assert refused.returncode == 1
    assert refused.stderr.endswith(' is not installed: run pip install "specdec-serving[serve]" (UNSUPPORTED)\n')
    assert "Traceback" not in refused.stderr


def test_an_installed_specdec_up_serves_the_demo_pair_without_a_clone(served: Environment) -> None:
    assert str(served.site_packages) in served.python("import specdec; print(specdec.__file__)")
    environ = {name: value for name, value in os.environ.items() if name not in LEFT_OUT}
    up = subprocess.Popen(
        [served.bin / "specdec", "up", "--listen", "127.0.0.1:0"], cwd=served.folder, env=environ,
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
    )  # fmt: skip
    try:
        assert up.stdout is not None
        ready = up.stdout.readline()
        assert ready.startswith("ready grpc=")
        endpoint = ready.split()[1].removeprefix("grpc=")
        generated = served.specdec("generate", "import os", "--temperature", "0", "--endpoint", endpoint)
        assert re.match(r"\d+ tokens in ", generated.stderr)
        shown = served.python(f"from specdec import Client; print(Client('{endpoint}').info().target_model)")
        assert shown.strip().endswith("specdec/models/demo/target")
    finally:
        up.send_signal(signal.SIGTERM)
        up.wait(60)
    assert list(served.folder.iterdir()) == []
