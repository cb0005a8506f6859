"""The version and the name of the distribution, and the builds that tell two sources of one version apart.

The distribution is not called `specdec`, because another project has this name on PyPI. The import and the command are.
"""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path

__version__ = "0.2.0"

DISTRIBUTION = "specdec-serving"
"""Name of the project for pip and `importlib.metadata`, as in pyproject.toml."""


def install_command(extra: str) -> str:
    """Return the command that installs an extra of pyproject.toml, for an error message."""
    return f'pip install "{DISTRIBUTION}[{extra}]"'


#: Kinds of files that decide what a process does.
_SOURCES = frozenset((".cpp", ".h", ".lua", ".py"))
_DIGEST_BYTES = 4


def build_of(package: str) -> str:
    """Return the build of a service: a hash of specdec's sources, a dot, and a hash of the service's own ones.

    Processes of one release have one build per service, however they were installed. The first hash is that of every
    service of the system. A package that is not installed as files has "" in place of its hash.
    """
    return f"{_hash_of('specdec')}.{_hash_of(package)}"


@cache
def _hash_of(package: str) -> str:
    folder = Path(__file__).resolve().parents[2] / package
    digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    paths = sorted(path for path in folder.rglob("*") if path.suffix in _SOURCES)
    for path in paths:
        digest.update(f"{path.relative_to(folder).as_posix()}\0".encode())
        digest.update(hashlib.blake2b(path.read_bytes()).digest())
    return digest.hexdigest() if paths else ""
