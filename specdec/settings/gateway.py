"""Settings of the HTTP gateway, in addition to those that all processes share."""

from __future__ import annotations

from ipaddress import ip_network
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, model_validator
from pydantic_settings import NoDecode, SettingsConfigDict

from specdec.contract.api_key import API_KEY_RULE, is_api_key
from specdec.settings.access import AccessSettings
from specdec.settings.addresses import is_loopback, name_of_host
from specdec.settings.shared import DAY_S, Address, ProcessSettings, split_commas
from specdec.settings.tracing import TracingSettings
from specdec.settings.transport import DiallingSettings

Texts = Annotated[tuple[str, ...], NoDecode, BeforeValidator(split_commas)]
"""Several texts: a repeated flag, or one comma-separated value."""


def _checked_networks(networks: tuple[str, ...]) -> tuple[str, ...]:
    for each in networks:
        if each != "*":
            try:
                ip_network(each)
            except ValueError as error:
                raise ValueError(f"must be *, IP addresses or networks such as 10.0.0.0/8: {error}") from None
    return networks


def _checked_key(key: str) -> str:
    if key and not is_api_key(key):
        raise ValueError(API_KEY_RULE)
    return key


class GatewaySettings(AccessSettings, TracingSettings, DiallingSettings, ProcessSettings):
    """The gateway: answers HTTP requests in OpenAI's and Anthropic's form, as a client of coordinators."""

    model_config = SettingsConfigDict(env_prefix="SPECDEC_GATEWAY__")

    listen: Address = "127.0.0.1:8000"
    """HOST:PORT to serve HTTP on. Port 0 selects a free one, which the log line "listening" names."""

    coordinator: Texts = ()
    """HOST:PORT or gRPC target of a coordinator; repeatable. Unset: the coordinators that the registry in --redis-url
    lists."""

    api_key: Annotated[str, AfterValidator(_checked_key)] = ""
    """One API key, for requests of the coordinator's own tenant: 1 to 4096 printable ASCII characters without spaces.
    Unset: no such key."""

    allow_anonymous: bool = False
    """Answer requests without an API key, for the coordinator's own tenant, also beyond loopback. Without any key, only
    a loopback address may be listened on unless this is set."""

    served_model_name: Texts = ()
    """Name of the model in requests and answers; repeatable. The first is shown in answers. Unset: the last part of the
    target model's path."""

    generation_config: Literal["on", "off"] = "on"
    """Defaults of sampling parameters. on: those that the model recommends in its generation_config.json. off: those
    of the API alone."""

    max_body_bytes: int = Field(default=8 * 1024 * 1024, ge=1024, lt=1 << 31)
    """Size of the largest request body. A larger one is refused with status 413."""

    header_timeout_s: float = Field(default=10.0, gt=0.0, le=DAY_S)
    """Seconds in which the headers of a request must arrive; then the connection is closed."""

    body_timeout_s: float = Field(default=30.0, gt=0.0, le=DAY_S)
    """Seconds in which the body of a request must arrive; then it is refused with status 408."""

    keep_alive_s: float = Field(default=15.0, gt=0.0, le=DAY_S)
    """Seconds of silence after which a stream sends a comment, so that proxies keep its connection open."""

    retry_s: float = Field(default=5.0, ge=0.0, le=DAY_S)
    """Seconds for which a request that has no token yet is tried again while coordinators refuse it or are away."""

    resume_s: float = Field(default=60.0, ge=0.0, le=DAY_S)
    """Seconds for which an interrupted stream is resumed at another coordinator before it ends with an error."""

    forwarded_allow_ips: Annotated[Texts, AfterValidator(_checked_networks)] = ()
    """Address or network of a proxy whose headers X-Forwarded-For and X-Forwarded-Proto name the client, such as
    10.0.0.0/8; repeatable. *: every caller. Unset: FORWARDED_ALLOW_IPS, or else the loopback addresses."""

    access_log: Literal["on", "off"] = "on"
    """Access log. on: one log record for each request, with method, path, status, time and its x-request-id; those of
    /health, /ready and /metrics at debug only. off: none."""

    cors_origin: Texts = ()
    """Origin of web pages, such as https://example.com, that browsers allow to call this gateway; repeatable. Unset:
    pages of the gateway itself alone."""

    allowed_host: Texts = ()
    """Name in the Host header, such as llm.example.com, under which a gateway that answers without API keys is served
    besides the names of loopback; repeatable. Unset: names of loopback alone on loopback, every name beyond it."""

    @model_validator(mode="after")
    def _check_hosts(self) -> Self:
        for host in self.allowed_host:
            if not name_of_host(host):
                raise ValueError(f"--allowed-host {host[:64]}: must be a host name, such as llm.example.com")
        return self

    @model_validator(mode="after")
    def _check_upstream(self) -> Self:
        if not self.coordinator and self.redis_url.startswith("memory:"):
            raise ValueError("--redis-url memory:// needs --coordinator: it has no registry of coordinators")
        return self

    @model_validator(mode="after")
    def _check_access(self) -> Self:
        if not (self.api_keys or self.api_key or self.jwt_jwks or self.allow_anonymous or is_loopback(self.listen)):
            raise ValueError(
                f"--listen {self.listen} is reached from other machines: give --api-keys, --api-key or "
                "--jwt-jwks, or --allow-anonymous to answer everyone"
            )
        return self
