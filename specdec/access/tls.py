"""Files of transport security: the certificate of a process with its key, and the authorities that it trusts.

The one description of credentials that the settings, the SDK and the command line make and check. gRPC's objects are
made from it by `specdec.rpc.credentials`, the gateway's by `ServerContexts`. Loads nothing but the standard library.
"""

from __future__ import annotations

import logging
import os
import ssl
import stat
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import NoReturn

from specdec.contract.errors import InvalidRequest

#: Files that are replaced one after the other are read again until a reading sees no change.
_READ_ATTEMPTS = 5

#: OpenSSL's codes of certificates that are not valid yet and that have expired.
_DATE_CODES = (9, 10)

_log = logging.getLogger(__name__)

Signature = tuple[tuple[int, int, int] | None, ...]
"""Version of files: i-node, size and time of change of each; None for one that cannot be read."""


@dataclass(frozen=True, slots=True)
class Pem:
    """Contents of the files; None for a file that is not given."""

    ca: bytes | None
    cert: bytes | None
    key: bytes | None


@dataclass(frozen=True, slots=True)
class Tls:
    """Paths of PEM files for encrypted connections. A path that is "" is not given."""

    ca: str = ""
    """Certificates of the authorities that the other side's certificate must be signed by. "": those that gRPC trusts
    by itself."""
    cert: str = ""
    """This process's certificate, followed by the certificates of intermediate authorities."""
    key: str = ""
    """Key of the certificate, in a file that no other user may read."""
    server_name: str = ""
    """Name that a server's certificate must contain. "": the host that is dialled."""

    def check(self) -> None:
        """Check the files.

        Raises:
            InvalidRequest: a file is missing or malformed, the key belongs to another certificate or other users may
                read it, or the certificate has expired. The message names the file; the field is `tls_ca`, `tls_cert`
                or `tls_key`, as is the beginning of the message.
        """
        self._require_pair()
        for field, path in self._files():
            _require_readable(field, path)
        if self.ca:
            try:
                ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(self.ca)
            except ssl.SSLError as error:
                raise _refusal("tls_ca", f"{self.ca} has no certificate in PEM form") from error
        if self.cert:
            _require_valid_now(self.cert, self.server_context())

    @staticmethod
    def with_flag(error: InvalidRequest) -> str:
        """Return the message of an error of `check` with the flag in place of the field."""
        words = error.message.removeprefix(f"{error.field}: ")
        return f"--{error.field.replace('_', '-')}: {words}"

    def read(self) -> Pem:
        """Return the contents of the files, which belong together. Raises InvalidRequest as `check`."""
        for _ in range(_READ_ATTEMPTS):
            before = self.signature()
            self.check()
            ca, cert, key = (_contents(field, path) for field, path in self._named())
            if self.signature() == before:
                break
        return Pem(ca, cert, key)

    def signature(self) -> Signature:
        """Return a value that changes when a file is replaced or written."""
        return tuple(_version(path) for _, path in self._files())

    def server_context(self) -> ssl.SSLContext:
        """Return the context of a server of the standard library. Raises InvalidRequest."""
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        try:
            context.load_cert_chain(self.cert, self.key, password=self._refuse_encrypted_key)
        except OSError as error:
            raise self._pair_refusal(error) from error
        return context

    def _named(self) -> tuple[tuple[str, str], ...]:
        return (("tls_ca", self.ca), ("tls_cert", self.cert), ("tls_key", self.key))

    def _files(self) -> list[tuple[str, str]]:
        return [(field, path) for field, path in self._named() if path]

    def _require_pair(self) -> None:
        if self.cert and not self.key:
            raise _refusal("tls_key", f"the key of the certificate {self.cert} is not given")
        if self.key and not self.cert:
            raise _refusal("tls_cert", f"the certificate of the key {self.key} is not given")

    def _refuse_encrypted_key(self) -> NoReturn:
        raise _refusal("tls_key", f"{self.key} is encrypted; give a key without a passphrase")

    def _pair_refusal(self, error: OSError) -> InvalidRequest:
        if not isinstance(error, ssl.SSLError):
            return _refusal("tls_cert", f"cannot read {self.cert} and {self.key}: {error.strerror or error}")
        if error.reason == "KEY_VALUES_MISMATCH":
            return _refusal("tls_key", f"{self.key} is not the key of the certificate {self.cert}")
        try:  # which of the two files is malformed
            ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(self.cert)
        except ssl.SSLError:
            return _refusal("tls_cert", f"{self.cert} has no certificate in PEM form")
        return _refusal("tls_key", f"{self.key} has no key in PEM form ({error.reason or error})")


class ReloadedFiles:
    """Contents of files that may be replaced while they are in use. Any thread may call."""

    def __init__(self, tls: Tls) -> None:
        """Raises InvalidRequest as `Tls.check`."""
        self._tls, self._lock = tls, threading.Lock()
        self._signature = tls.signature()
        self.pem = tls.read()

    def changed(self) -> bool:
        """Return whether `pem` has changed since the last call. Files that cannot be used are logged and left out."""
        with self._lock:
            signature = self._tls.signature()
            if signature == self._signature:
                return False
            self._signature = signature
            try:
                self.pem = self._tls.read()
            except InvalidRequest as error:
                _log.error("new certificate refused, the one before stays in use: %s", error.message)
                return False
            _log.info("certificate reloaded", extra={"certificate": self._tls.cert})
            return True


def reloading_context(tls: Tls) -> ssl.SSLContext:
    """Return a server's context of the standard library that gives new connections the certificate of today.

    Raises:
        InvalidRequest: as `Tls.check`.
    """
    files = ReloadedFiles(tls)
    context = tls.server_context()
    current = context

    def choose(connection: ssl.SSLObject, server_name: str | None, first: ssl.SSLContext) -> None:
        nonlocal current
        if files.changed():
            with suppress(InvalidRequest):  # replaced again meanwhile; the next connection reads it
                current = tls.server_context()
        if current is not first:
            connection.context = current

    # Called at the beginning of each handshake, also for clients that send no name.
    context.sni_callback = choose
    return context


def _require_readable(field: str, path: str) -> None:
    contents = _contents(field, path)
    if not contents:
        raise _refusal(field, f"{path} is empty")
    if field == "tls_key":
        _require_private(path)


def _contents(field: str, path: str) -> bytes | None:
    if not path:
        return None
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError as error:
        raise _refusal(field, f"cannot read {path}: {error.strerror or error}") from error


def _require_private(path: str) -> None:
    """Refuse a key that other users may read.

    A group may read a key of root, through which a process of another user gets it: Kubernetes mounts secrets so.
    """
    try:
        status = os.stat(path)
    except OSError as error:
        raise _refusal("tls_key", f"cannot read {path}: {error.strerror or error}") from error
    allowed = stat.S_IRGRP if status.st_uid == 0 and os.geteuid() != 0 else 0
    mode = stat.S_IMODE(status.st_mode)
    if mode & (stat.S_IRWXG | stat.S_IRWXO) & ~allowed:
        raise _refusal("tls_key", f"other users may read {path} (mode {mode:04o}); run chmod 600 {path}")


def _require_valid_now(cert: str, server: ssl.SSLContext) -> None:
    """Refuse a certificate that has expired or is not valid yet, as a handshake without a network tells."""
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname = False
    client.load_verify_locations(cert)
    client.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # the certificate itself is what is trusted here
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    asking = client.wrap_bio(to_client, to_server)
    answering = server.wrap_bio(to_server, to_client, server_side=True)
    try:
        for step in (asking.do_handshake, answering.do_handshake, asking.do_handshake):
            _advance(step)
    except ssl.SSLCertVerificationError as error:
        if error.verify_code in _DATE_CODES:  # what the certificate is for is checked by the other side
            raise _refusal("tls_cert", f"{cert}: {error.verify_message}") from error


def _advance(step: Callable[[], None]) -> None:
    with suppress(ssl.SSLWantReadError):
        step()


def _version(path: str) -> tuple[int, int, int] | None:
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_ino, status.st_size, status.st_mtime_ns


def _refusal(field: str, words: str) -> InvalidRequest:
    return InvalidRequest(f"{field}: {words}", field=field)
