"""Checks of certificates in PEM files: dates, names, the key that belongs to them, and their issuer.

Dates are read from the certificate that a handshake has verified, without a network for files. So the standard library
is enough.
"""

from __future__ import annotations

import ssl
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from specdec.cli.checks.finding import Finding, fail, ok, warn

#: Days before the end of a certificate from which on it is warned of.
_WARN_DAYS = 30
_DAY_S = 86_400
#: OpenSSL's codes of certificates that are not valid yet and that have expired.
_DATE_CODES = (9, 10)


def check_certificates(cert: str, key: str, ca: str) -> Iterator[Finding]:
    """Check the files of `--tls-cert`, `--tls-key` and `--tls-ca`; "" for a file that is not given."""
    if bool(cert) != bool(key):
        given, absent = ("--tls-cert", "--tls-key") if cert else ("--tls-key", "--tls-cert")
        yield fail("tls key", f"{given} without {absent}", "give the certificate and its key")
    elif cert:
        yield from _check_pair(Path(cert), Path(key), ca)
    if ca:
        yield from _check_authorities(Path(ca))


def _check_pair(cert: Path, key: Path, ca: str) -> Iterator[Finding]:
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        server.load_cert_chain(cert, key, password=_refuse_passphrase)
        mode = stat.S_IMODE(key.stat().st_mode)
        itself = trusting(cafile=str(cert))
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            yield fail("tls key", f"{key} is not the key of the certificate {cert}", "give the files of one pair")
        else:
            yield fail("tls key", f"{cert} or {key} is not in PEM form ({error.reason or error})", "convert it to PEM")
        return
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        yield fail("tls key", f"cannot use {cert} and {key}: {reason}", "give files that this user may read")
        return
    if mode & (stat.S_IRGRP | stat.S_IROTH | stat.S_IWGRP | stat.S_IWOTH):
        yield fail("tls key", f"other users may read {key} (mode {mode:04o})", f"run chmod 600 {key}")
    else:
        yield ok("tls key", f"{key} belongs to {cert}")
    yield dates_of("tls certificate", lambda: _verified(server, itself), where=str(cert))
    if ca:
        yield from _check_issuer(cert, ca, server)


def _refuse_passphrase() -> NoReturn:
    raise ValueError("the key is encrypted with a passphrase, which services cannot ask for")


def trusting(*, cafile: str | None = None, cadata: bytes | None = None) -> ssl.SSLContext:
    """Return a client that accepts certificates which are among these or signed by them, whatever host they name."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.load_verify_locations(cafile=cafile, cadata=cadata)
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # a certificate alone can be trusted
    return context


def _verified(server: ssl.SSLContext, client: ssl.SSLContext) -> dict[str, Any]:
    """Return the fields of a server's certificate. Raises SSLCertVerificationError if the client refuses it."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    asking = client.wrap_bio(to_client, to_server)
    answering = server.wrap_bio(to_server, to_client, server_side=True)
    for step in (asking.do_handshake, answering.do_handshake, asking.do_handshake):
        with suppress(ssl.SSLWantReadError):
            step()
    return asking.getpeercert() or {}


def dates_of(name: str, read: Callable[[], dict[str, Any]], *, where: str) -> Finding:
    """Return whether a certificate is valid now, and for how long.

    Args:
        name: name of the check.
        read: returns the fields of the certificate, or raises SSLCertVerificationError for one outside its dates.
        where: file or address of the certificate.
    """
    try:
        fields = read()
    except ssl.SSLCertVerificationError as error:
        return fail(name, f"{where}: {error.verify_message}", "issue a new one; services read the file again")
    names = ", ".join(str(entry[1]) for entry in fields.get("subjectAltName", ())[:3])
    return _until(name, f"{where} ({names or 'no host names'})", fields["notAfter"])


def _until(name: str, what: str, end: str) -> Finding:
    """Return what the end of a certificate means; `end` is written as OpenSSL does."""
    left_s = ssl.cert_time_to_seconds(end) - time.time()
    if left_s <= 0:
        return fail(name, f"{what} expired on {end}", "issue a new one; services read the file again")
    if left_s < _WARN_DAYS * _DAY_S:
        return warn(name, f"{what} ends in {left_s / _DAY_S:.0f} days, on {end}", "issue a new one before that")
    return ok(name, f"{what} is valid for {left_s / _DAY_S:.0f} days")


def _check_issuer(cert: Path, ca: str, server: ssl.SSLContext) -> Iterator[Finding]:
    try:
        _verified(server, trusting(cafile=ca))
    except ssl.SSLCertVerificationError as error:
        if error.verify_code not in _DATE_CODES:  # dates have a finding of their own
            found = f"{cert} is not accepted by services that trust {ca}: {error.verify_message}"
            yield fail("tls issuer", found, "issue it by an authority of --tls-ca, or give that authority")
    except OSError:  # reported with the authorities
        return
    else:
        yield ok("tls issuer", f"{cert} was issued by an authority in {ca}")


def _check_authorities(ca: Path) -> Iterator[Finding]:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    try:
        context.load_verify_locations(ca)
    except OSError as error:
        reason = "has no certificate in PEM form" if isinstance(error, ssl.SSLError) else f"{error.strerror or error}"
        yield fail("tls authority", f"{ca}: {reason}", "give the PEM file of the authorities to trust")
        return
    for fields in context.get_ca_certs():
        names = [str(entry[0][1]) for entry in fields.get("subject", ())]
        yield _until("tls authority", f"{ca} ({', '.join(names) or 'no name'})", str(fields["notAfter"]))
