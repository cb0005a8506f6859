"""Build the images of the services and of Redis upon a base of Debian's packages, which needs no registry of images.

The base stands for `python:3.12-slim` and has Debian's Python 3.11. The image of Redis has Debian's version, 7.0. Every
layer is kept by what goes into it, so that a second build takes seconds.
"""

from __future__ import annotations

import hashlib
import shutil
from dataclasses import dataclass

from .pip_settings import mounts
from .programs import ROOT, STORE, ProgramFailed, buildah, podman, run

_FILES = STORE / "build"
_RELEASE = "bookworm"
_PACKAGES = ("ca-certificates", "python3", "python3-pip", "python-is-python3")
_PATH = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
#: As in the official image, arguments follow an entry point, user 999 owns the data, and other pods may connect.
_REDIS = """\
ARG PYTHON_IMAGE
FROM ${PYTHON_IMAGE}
RUN apt-get update -qq && apt-get install -y -qq --no-install-recommends redis-server \\
    && apt-get clean && rm -rf /var/lib/apt/lists/* && install -d -o 999 -g 999 /data
WORKDIR /data
ENTRYPOINT ["sh", "-c", "exec \\"$0\\" \\"$@\\" --protected-mode no"]
"""


@dataclass(frozen=True)
class Source:
    """One Dockerfile, and the stage of it that is wanted."""

    dockerfile: str
    stage: str = ""


#: By the last part of the name of the image in the manifests, without its tag.
SOURCES = {
    "coordinator": Source("coordinator/Dockerfile"),
    "draft-service": Source("specdec/service/Dockerfile", "draft"),
    "target-service": Source("specdec/service/Dockerfile", "target"),
    "gateway": Source("gateway/Dockerfile"),
    "redis": Source(str(_FILES / "redis")),
}


def build(names: list[str]) -> str:
    """Build the images that manifests name, each with its tag. Return the name of the base."""
    base = _base()
    # The mounted paths are the same in every build, because buildah makes a layer anew when one changes.
    _FILES.mkdir(exist_ok=True)
    (_FILES / "redis").write_text(_REDIS)
    pip_mounts = mounts(_FILES)
    for name in names:
        _build_one(name, SOURCES[name.rpartition("/")[2].partition(":")[0]], base, pip_mounts)
    return base


def size_mb(name: str) -> float:
    """Return the size of an image, its base included, in MB (10**6 bytes)."""
    return int(podman("image", "inspect", "--format", "{{.Size}}", name)) / 1e6


def _build_one(name: str, source: Source, base: str, pip_mounts: list[str]) -> None:
    volumes = [word for mount in pip_mounts for word in ("--volume", mount)]
    stage = ["--target", source.stage] if source.stage else []
    # A chroot is enough, because a build needs neither a network nor cgroups of its own.
    buildah(
        "build", "--isolation", "chroot", "--layers", *volumes, *stage, "--build-arg", f"PYTHON_IMAGE={base}",
        "--file", source.dockerfile, "--tag", name, ROOT,
    )  # fmt: skip


def _base() -> str:
    """Return the name of the base, which is made where there is none of these packages."""
    digest = hashlib.sha256("\n".join((_RELEASE, *_PACKAGES)).encode()).hexdigest()[:12]
    name = f"localhost/specdec-base:{digest}"
    try:
        podman("image", "inspect", name)
    except ProgramFailed:
        _make_base(name)
    return name


def _make_base(name: str) -> None:
    root, archive = STORE / "base", STORE / "base.tar"
    shutil.rmtree(root, ignore_errors=True)
    run("debootstrap", "--variant=minbase", f"--include={','.join(_PACKAGES)}", _RELEASE, root)
    for marker in root.glob("usr/lib/python3*/EXTERNALLY-MANAGED"):
        marker.unlink()  # pip is to install beside Debian's packages, as it does in the official image
    for downloads in (root / "var/cache/apt/archives", root / "var/lib/apt/lists"):
        shutil.rmtree(downloads)
    run("tar", "--directory", root, "--create", "--file", archive, ".")
    podman("import", "--change", f"ENV {_PATH}", archive, name)
    archive.unlink()
    shutil.rmtree(root)
