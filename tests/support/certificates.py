"""Makes certificate authorities, certificates and keys for tests of transport security, as files in PEM."""

from __future__ import annotations

import datetime
import ipaddress
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

_DAY = datetime.timedelta(days=1)


@dataclass(frozen=True, slots=True)
class Pair:
    """Paths of a certificate and its key."""

    cert: str
    key: str


class Authority:
    """A certificate authority that writes its files to a folder."""

    def __init__(self, folder: Path, name: str = "ca") -> None:
        self._folder = folder
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        own = _builder(self._name, self._name, self._key.public_key(), days=30)
        own = own.add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        self.path = str(folder / f"{name}.pem")
        Path(self.path).write_bytes(own.sign(self._key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM))

    def issue(self, name: str, *hosts: str, days: float = 30) -> Pair:
        """Write NAME.pem and NAME.key, over earlier files of that name.

        Args:
            name: common name and name of the files.
            hosts: host names and addresses; none: 127.0.0.1 and localhost.
            days: days until the certificate expires; below 0: it has expired.
        """
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        names = x509.SubjectAlternativeName([_general_name(host) for host in hosts or ("127.0.0.1", "localhost")])
        usages = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH])
        builder = _builder(subject, self._name, key.public_key(), days=days)
        builder = builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        signed = builder.add_extension(names, critical=False).add_extension(usages, critical=False)
        pair = Pair(str(self._folder / f"{name}.pem"), str(self._folder / f"{name}.key"))
        certificate = signed.sign(self._key, hashes.SHA256())
        Path(pair.cert).write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
        secret = key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        Path(pair.key).touch(mode=0o600)
        Path(pair.key).write_bytes(secret)
        return pair


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, *, days: float
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    builder = x509.CertificateBuilder().subject_name(subject).issuer_name(issuer).public_key(key)
    builder = builder.serial_number(x509.random_serial_number())
    return builder.not_valid_before(now - 60 * _DAY).not_valid_after(now + days * _DAY)


def _general_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)
