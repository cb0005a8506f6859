"""Files of mounted ConfigMaps and Secrets in a temporary folder, so that settings which read files can be checked.

A Secret that the operator makes has a certificate, its key and its authority in files of the names that cert-manager
gives them. Other contents are unknown.
"""

from __future__ import annotations

import datetime
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from .documents import Container, Document, at
from .environment import UNKNOWN, data_of
from .references import Objects


@dataclass(frozen=True)
class Mounts:
    """Folders of this machine that have the files of each mount path."""

    folders: Mapping[str, Path]

    def here(self, value: str) -> str:
        """Return a value with a path of the container replaced by the path of its copy on this machine."""
        for path, folder in self.folders.items():
            if value == path or value.startswith(f"{path}/"):
                return str(folder) + value.removeprefix(path)
        return value

    def there(self, text: str) -> str:
        """Return a text with paths of this machine replaced by those of the container."""
        for path, folder in self.folders.items():
            text = text.replace(str(folder), path)
        return text


@contextmanager
def mounted(container: Container, objects: Objects) -> Iterator[Mounts]:
    """Write the files that a container's ConfigMaps and Secrets give it."""
    volumes = {volume["name"]: volume for volume in container.template.spec.get("volumes") or ()}
    with tempfile.TemporaryDirectory() as text:
        folders = {}
        for index, mount in enumerate(container.body.get("volumeMounts") or ()):
            files = _files(volumes.get(mount["name"], {}), objects)
            if files is not None and "subPath" not in mount:
                folder = Path(text) / str(index)
                folder.mkdir()
                for name, contents in files.items():
                    (folder / name).write_text(contents)
                    (folder / name).chmod(0o600)
                folders[mount["mountPath"].rstrip("/")] = folder
        yield Mounts(folders)


def _files(volume: Mapping[str, object], objects: Objects) -> dict[str, str] | None:
    for source, kind, key in (("configMap", "ConfigMap", "name"), ("secret", "Secret", "secretName")):
        if source in volume:
            name = at(volume, source, key) or ""
            names = {item["key"]: item["path"] for item in at(volume, source, "items") or ()}
            contents = _contents(kind, name, objects.documents, objects)
            return {names.get(key, key): text for key, text in contents.items() if not names or key in names}
    return None


def _contents(kind: str, name: str, documents: list[Document], objects: Objects) -> dict[str, str]:
    known = data_of(kind, name, documents)
    if known is not None:
        return dict(known)
    certificate, key = _certificate()
    examples = {"tls.crt": certificate, "ca.crt": certificate, "tls.key": key}
    return {name: examples.get(name, UNKNOWN) for name in objects.outside.get((kind, name), ())}


@cache
def _certificate() -> tuple[str, str]:
    """Return a certificate that is valid now, and its key."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "specdec")])
    now, day = datetime.datetime.now(datetime.UTC), datetime.timedelta(days=1)
    certificate = (
        x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(key.public_key())
        .serial_number(1).not_valid_before(now - day).not_valid_after(now + day).sign(key, hashes.SHA256())
    )  # fmt: skip
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return certificate.public_bytes(serialization.Encoding.PEM).decode(), private.decode()
