"""Settings of transport security, which every process has: its certificate, the authorities that it trusts, and leave
to do without."""

from __future__ import annotations

from typing import Self

from pydantic import BaseModel, ConfigDict, model_validator

from specdec.access.tls import Tls
from specdec.contract.errors import InvalidRequest
from specdec.settings.addresses import is_loopback


class TransportSettings(BaseModel):
    """Flags of transport security."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    listen: str
    """Replaced by the address of each service."""

    tls_cert: str = ""
    """PEM file with the certificate of --listen, followed by those of intermediate authorities. Connections are
    encrypted then. The file is read again when it changes. Unset: --listen speaks plaintext."""

    tls_key: str = ""
    """PEM file with the key of --tls-cert, which no other user may read."""

    tls_ca: str = ""
    """PEM file with the certificates of the authorities that this process trusts. Draft and target replicas accept only
    clients with a certificate that one of these has signed. Coordinators and gateways connect to replicas and
    coordinators with TLS, and show them --tls-cert. Unset: replicas accept any client; coordinators and gateways
    connect in plaintext."""

    insecure: bool = False
    """Serve in plaintext at an address of --listen that other machines can reach. Without it, such an address needs
    --tls-cert."""

    @property
    def server_tls(self) -> Tls | None:
        """Credentials of the port of `listen`; None: plaintext."""
        return self._tls if self.tls_cert else None

    @property
    def channel_tls(self) -> Tls | None:
        """Credentials of connections to other services; None: plaintext."""
        return self._tls if self.tls_ca else None

    @property
    def _tls(self) -> Tls:
        return Tls(
            ca=self.tls_ca, cert=self.tls_cert, key=self.tls_key, server_name=getattr(self, "tls_server_name", "")
        )

    @model_validator(mode="after")
    def _check_certificate_files(self) -> Self:
        try:
            self._tls.check()
        except InvalidRequest as error:
            raise ValueError(Tls.with_flag(error)) from None
        return self

    @model_validator(mode="after")
    def _check_plaintext(self) -> Self:
        if not (self.tls_cert or self.insecure or is_loopback(self.listen)):
            raise ValueError(
                f"--listen {self.listen} is reached from other machines: give --tls-cert and --tls-key, or --insecure "
                "to serve there in plaintext"
            )
        return self


class DiallingSettings(TransportSettings):
    """Flags of a service that connects to others."""

    tls_server_name: str = ""
    """Name that the certificates of dialled services must have, if they are dialled by an address that their
    certificates cannot have, such as a pod's. Unset: the host that is dialled."""

    @model_validator(mode="after")
    def _check_server_name(self) -> Self:
        if self.tls_server_name and not self.tls_ca:
            raise ValueError("--tls-server-name needs --tls-ca beside it")
        return self
