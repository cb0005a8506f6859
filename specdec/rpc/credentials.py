"""gRPC's credentials, made from certificate files (`specdec.access.tls`), and words for connections that TLS refused.

Called by `channels`, which dials and binds every address, and where failed calls are described.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import grpc

from specdec.access.service_key import read_service_key
from specdec.access.tls import Pem, ReloadedFiles, Tls
from specdec.rpc.handshake import Metadata

#: What is wrong with the other side, by a part of gRPC's message about a handshake. The first match counts.
_HANDSHAKE_FAILURES = (
    (re.compile("WRONG_VERSION_NUMBER"), "it answers in plaintext, and this side uses TLS"),
    (re.compile("certificate has expired"), "its certificate has expired"),
    (re.compile("certificate is not yet valid"), "its certificate is not valid yet"),
    (
        re.compile("unable to get (local )?issuer certificate|self.signed certificate|unable to verify the first"),
        "its certificate is not signed by a trusted authority (tls_ca)",
    ),
    (
        re.compile("Hostname Verification Check failed"),
        "its certificate is for another host; dial a name that the certificate has, or give that name "
        "(tls_server_name)",
    ),
    (re.compile(r"CERTIFICATE_VERIFY_FAILED: ([^:]+)"), r"its certificate was refused: \1"),
    (re.compile(r"[Hh]andshake failed"), "the TLS handshake failed"),
)
#: gRPC's message about a connection that the other side closed before it was used.
_CLOSED = re.compile("failed to connect to all addresses.*(Socket closed|[Cc]onnection reset|Broken pipe)")


def service_metadata(source: str, environ: Mapping[str, str]) -> Metadata:
    """Return gRPC metadata of a call as services make it to replicas; () if `source` is "".

    Args:
        source: a service key as `--service-key` names it.
        environ: environment of the process.

    Raises:
        InvalidRequest: the key cannot be read.
    """
    key = read_service_key(source, environ)
    return key.metadata if key else ()


def channel_credentials(tls: Tls) -> grpc.ChannelCredentials:
    """Return the credentials of a new channel, from the files as they are now. Raises InvalidRequest."""
    pem = tls.read()
    return grpc.ssl_channel_credentials(pem.ca, pem.key, pem.cert)


def server_credentials(tls: Tls, *, demands_client_certificate: bool) -> grpc.ServerCredentials:
    """Return credentials of a port. Each new connection gets the certificate that the files hold by then.

    Args:
        tls: the server's certificate and key, and the authorities of its clients.
        demands_client_certificate: whether a client needs a certificate that an authority of `tls.ca` has signed.

    Raises:
        InvalidRequest: as `Tls.check`.
    """
    files = ReloadedFiles(tls)

    def configuration(pem: Pem) -> grpc.ServerCertificateConfiguration:
        roots = pem.ca if demands_client_certificate else None
        return grpc.ssl_server_certificate_configuration([(pem.key or b"", pem.cert or b"")], root_certificates=roots)

    def fetch() -> Any:  # None: as before, which gRPC's types leave out
        return configuration(files.pem) if files.changed() else None

    return grpc.dynamic_ssl_server_credentials(
        configuration(files.pem), fetch, require_client_authentication=demands_client_certificate
    )


def describe_refused_connection(details: str, tls: Tls | None) -> str:
    """Return in words why TLS, or its absence, prevented a connection; "" if gRPC's message does not tell.

    Args:
        details: gRPC's message about the failed call.
        tls: the credentials of the channel; None: plaintext.
    """
    for pattern, words in _HANDSHAKE_FAILURES:
        if found := pattern.search(details):
            return found.expand(words)
    if not _CLOSED.search(details):
        return ""
    if tls is None:
        return "it closed the connection at once, as a port with TLS does, and this side uses none (tls_ca)"
    if tls.cert:
        return "it closed the connection at once, as it does if it does not accept this side's certificate (tls_cert)"
    return "it closed the connection at once, as it does if it demands a certificate of this side (tls_cert)"
