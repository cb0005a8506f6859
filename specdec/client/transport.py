"""The way of a client to its server: plaintext or certificate files, and the proxy that it is told to use.

Both clients use this module, and the command line for the names of the variables.
"""

from __future__ import annotations

import logging
import os
from functools import lru_cache
from urllib.parse import urlsplit

from specdec.access.tls import Tls
from specdec.contract.errors import InvalidRequest
from specdec.rpc.channels import is_local

CA_VARIABLE = "SPECDEC_TLS_CA"
CERT_VARIABLE = "SPECDEC_TLS_CERT"
KEY_VARIABLE = "SPECDEC_TLS_KEY"
SERVER_NAME_VARIABLE = "SPECDEC_TLS_SERVER_NAME"
PROXY_VARIABLE = "SPECDEC_PROXY"

_log = logging.getLogger(__name__)


def resolve_tls(tls: Tls | bool | None) -> Tls | None:
    """Return the credentials of a client's connections; None: plaintext.

    Args:
        tls: the files; True: encrypt, and trust the authorities that gRPC trusts by itself; False: plaintext; None: the
            files of SPECDEC_TLS_CA, SPECDEC_TLS_CERT and SPECDEC_TLS_KEY, or plaintext without the first.

    Raises:
        InvalidRequest: a file cannot be used, or the argument has another type.
    """
    if tls is None:
        tls = tls_of(*(os.environ.get(name, "") for name in (CA_VARIABLE, CERT_VARIABLE, KEY_VARIABLE)),
                     server_name=os.environ.get(SERVER_NAME_VARIABLE, ""))  # fmt: skip
        if tls is None:
            return None
    if isinstance(tls, bool):
        return Tls() if tls else None
    if not isinstance(tls, Tls):
        raise InvalidRequest(f"tls must be a Tls, True, False or None, got {type(tls).__name__}", field="tls")
    tls.check()
    return tls


def tls_of(ca: str, cert: str, key: str, *, server_name: str) -> Tls | None:
    """Return the credentials that paths from flags or the environment make; None without any.

    Raises:
        InvalidRequest: the authorities are not given, but something else is.
    """
    if not ca and (cert or key or server_name):
        raise InvalidRequest(
            f"tls_ca: a client's certificate, key or server name needs the authorities that it trusts ({CA_VARIABLE})",
            field="tls_ca",
        )
    return Tls(ca=ca, cert=cert, key=key, server_name=server_name) if ca else None


def resolve_proxy(endpoint: str) -> str:
    """Return the URL of the HTTP proxy to an endpoint, from SPECDEC_PROXY; "" for none, as to this machine.

    Variables for web traffic, such as `https_proxy`, do not count.

    Raises:
        InvalidRequest: the variable is not such a URL. It may hold a password, so the message leaves it out.
    """
    proxy = os.environ.get(PROXY_VARIABLE, "")
    if not proxy or is_local(endpoint):
        return ""
    try:
        url = urlsplit(proxy)
        is_usable = url.scheme == "http" and bool(url.hostname) and bool(url.port) and url.path in ("", "/")
    except ValueError:
        is_usable = False
    if not is_usable:
        raise InvalidRequest(
            f"{PROXY_VARIABLE}: the proxy must be named as http://HOST:PORT or http://USER:PASSWORD@HOST:PORT",
            field="proxy",
        )
    return proxy


def exposes_key(endpoint: str, tls: Tls | None, api_key: str | None) -> bool:
    """Return whether a client would send a key over a network that can read it."""
    return api_key is not None and tls is None and not is_local(endpoint)


def require_private_key(endpoint: str, tls: Tls | None, api_key: str | None, *, insecure: bool) -> None:
    """Check that no key travels in plaintext beyond this machine, or log it if `insecure` allows it.

    Raises:
        InvalidRequest: it would.
    """
    if not exposes_key(endpoint, tls, api_key):
        return
    if not insecure:
        raise InvalidRequest(
            f"api_key: the way to {endpoint} is not encrypted, and every machine on it could read the key: give tls, "
            "or insecure=True to send it in plaintext",
            field="api_key",
        )
    _warn_of_plaintext(endpoint)


@lru_cache(maxsize=1024)
def _warn_of_plaintext(endpoint: str) -> None:
    """Log it once for each endpoint."""
    _log.warning("the key for %s is sent in plaintext (insecure)", endpoint)
