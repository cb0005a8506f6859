"""Settings of the services that check the credentials of clients: the coordinator and the gateway."""

from __future__ import annotations

from pathlib import Path
from typing import Self
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, model_validator

from specdec.settings.addresses import is_loopback_host


class AccessSettings(BaseModel):
    """Flags that name the credentials of clients."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    api_keys: Path | None = None
    """File with one API key a line: the SHA-256 of the key in hexadecimal, its tenant, its rights and its limits,
    divided by spaces. It is read again when it changes, and other users must not be able to read it. Unset: no such
    keys."""

    jwt_jwks: str = ""
    """JSON web key set, as a file or URL, of the issuer whose tokens are accepted in place of keys. Their claims tenant
    and rights say what they permit. Unset: no tokens."""

    jwt_issuer: str = ""
    """Issuer (claim iss) that tokens must have. Needed with --jwt-jwks."""

    jwt_audience: str = ""
    """Audience (claim aud) that tokens must have. Needed with --jwt-jwks."""

    @model_validator(mode="after")
    def _check_tokens(self) -> Self:
        given = [bool(value) for value in (self.jwt_jwks, self.jwt_issuer, self.jwt_audience)]
        if any(given) and not all(given):
            raise ValueError("--jwt-jwks, --jwt-issuer and --jwt-audience must be given together")
        if self.jwt_jwks.startswith("http://") and not is_loopback_host(urlsplit(self.jwt_jwks).hostname or ""):
            raise ValueError(
                f"--jwt-jwks {self.jwt_jwks} is fetched in plaintext, so others can give keys: use https://"
            )
        return self
