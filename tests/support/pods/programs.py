"""Run podman and buildah with a store, a configuration and networks of their own, apart from the machine's others.

The programs are Debian's. `runc` runs the containers, because crun refuses a machine that has both kinds of cgroups.
Called by `images`, `cluster` and `pod`.
"""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
#: Images, volumes and networks, kept between runs.
STORE = ROOT / ".pods"
#: State of what runs. Podman refuses a path of more than 50 characters.
_RUN = Path("/run/specdec-pods")
_NEEDED = ("buildah", "podman", "runc", "debootstrap", "catatonit", "iptables", "tar")
_NETWORKING = ("netavark", "aardvark-dns")
#: Folders that podman looks for its network programs in.
_FOLDERS = ("/usr/local/libexec/podman", "/usr/local/lib/podman", "/usr/libexec/podman", "/usr/lib/podman")


class ProgramFailed(Exception):
    """A program ended with an error, which the text holds."""


def unable() -> str:
    """Return why there can be no pods here; "" where there can."""
    if os.geteuid() != 0:
        return "pods need root"
    return f"pods need {', '.join(names)} (run make test-pods)" if (names := missing()) else ""


def missing() -> list[str]:
    """Return the names of the programs that are needed and not installed."""
    absent = [name for name in _NEEDED if shutil.which(name) is None]
    return absent + [name for name in _NETWORKING if not any(Path(folder, name).exists() for folder in _FOLDERS)]


def run(
    *command: str | Path, text: str | None = None, timeout_s: float | None = None, with_errors: bool = False
) -> str:
    """Return what a command prints, on the stream of errors too if asked. Raises ProgramFailed with the end of it."""
    words = [str(word) for word in command]
    try:
        done = subprocess.run(
            words, input=text, capture_output=True, text=True, env=_environ(), cwd=ROOT, timeout=timeout_s, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise ProgramFailed(f"{' '.join(words)}: no end within {timeout_s} s") from error
    if done.returncode:
        raise ProgramFailed(f"{' '.join(words)}: status {done.returncode}: {(done.stdout + done.stderr)[-3000:]}")
    return done.stdout + (done.stderr if with_errors else "")


def podman(
    *arguments: str | Path, text: str | None = None, timeout_s: float | None = None, with_errors: bool = False
) -> str:
    """Return what a podman command prints."""
    networks = ("--network-config-dir", STORE / "networks", "--tmpdir", _RUN / "libpod")
    command = ("podman", *_store(), *networks, *arguments)
    return run(*command, text=text, timeout_s=timeout_s, with_errors=with_errors)


def buildah(*arguments: str | Path) -> str:
    """Return what a buildah command prints."""
    return run("buildah", *_store(), *arguments)


def _store() -> tuple[str | Path, ...]:
    return ("--root", STORE / "storage", "--runroot", _RUN / "storage", "--storage-driver", "overlay")


@cache
def _environ() -> dict[str, str]:
    """Write the configuration of containers; return the environment that names it."""
    path = STORE / "containers.conf"
    path.parent.mkdir(exist_ok=True)
    path.write_text(
        f"[containers]\ndefault_ulimits = [{', '.join(_limits())}]\n"
        '[engine]\ncgroup_manager = "cgroupfs"\nruntime = "runc"\nevents_logger = "file"\n'
        '[network]\nnetwork_backend = "netavark"\n'
    )
    return os.environ | {"CONTAINERS_CONF": str(path)}


def _limits() -> list[str]:
    """Return limits that root may set without CAP_SYS_RESOURCE: podman's own defaults are higher ones."""
    num_files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    # Podman lowers its own limit to this number, and may not raise it for a container.
    max_processes = int(Path("/proc/sys/kernel/pid_max").read_text())
    num_processes = resource.getrlimit(resource.RLIMIT_NPROC)[1]
    if num_processes == resource.RLIM_INFINITY or num_processes > max_processes:
        num_processes = max_processes
    return [f'"nofile={num_files}:{num_files}"', f'"nproc={num_processes}:{num_processes}"']
