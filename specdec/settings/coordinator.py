"""Settings of the coordinator, in addition to those that every service has."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import BeforeValidator, Field, model_validator
from pydantic_settings import NoDecode, SettingsConfigDict

from specdec.settings.base import DAY_S, Address, AddressList, ServiceSettings, TenantName, split_commas
from specdec.settings.pool_names import OptionalPoolName
from specdec.tenant import DEFAULT_TENANT

LookupKinds = Annotated[tuple[Literal["ngram", "suffix"], ...], NoDecode, BeforeValidator(split_commas)]


class CoordinatorSettings(ServiceSettings):
    """The coordinator: owns sessions, runs the rounds between draft and target replicas, serves clients."""

    model_config = SettingsConfigDict(env_prefix="SPECDEC_COORDINATOR__")

    listen: Address = "127.0.0.1:50051"
    """HOST:PORT to serve gRPC on. Port 0 takes a free one, which the log line "listening" names."""

    tokenizer: str
    """Tokenizer of the target model: a directory, a GGUF file or a hub id."""

    draft_endpoint: AddressList = ()
    """HOST:PORT of a draft replica; repeatable. Any static endpoint turns the replica registry off."""

    target_endpoint: AddressList = ()
    """HOST:PORT of a target replica; repeatable. Any static endpoint turns the replica registry off."""

    tenant: TenantName = DEFAULT_TENANT
    """Tenant that owns the sessions: 1 to 64 letters, digits, "_", "." or "-". Coordinators of two tenants may share
    replicas and Redis; they share no session, no KV block and no entry of the prefix directory."""

    prefix_directory: Literal["on", "off"] = "on"
    """Record in Redis which replicas hold which prefixes, and send a new session to a replica that holds its prefix,
    unless the load of that replica costs more than the prefix saves. off: choose by load alone."""

    lookup: LookupKinds = ()
    """Drafts from text, without a model: ngram (the tokens that followed the last repeat in the session) or suffix (the
    tokens that followed most often, in this tenant's other sessions too); repeatable. Each is a draft pool of that
    name. Requests that name no pool use the first. If it finds nothing, a draft model is used if there is one."""

    lookup_history_tokens: int = Field(default=200_000, ge=1_000, le=10_000_000)
    """Tokens of past outputs that suffix drafts search, about 100 bytes each in the memory of this coordinator."""

    default_draft_pool: OptionalPoolName = ""
    """Pool of draft models for requests that name no pool. With --route auto, requests begin with it until the router
    has measurements. Unset, or while the pool has no replica: the first pool by name."""

    route: Literal["auto"] | None = None
    """auto: a request without a draft pool uses the pool of draft models that is fastest for its class of requests,
    and may change pools while it runs; other pools are scored in the background. none: always the first pool."""

    learning_log: Path | None = None
    """Folder for a log of the target's outputs, on which `specdec distill` trains drafts. It contains users' texts.
    It is written in the background, in a folder per tenant that only this user may read. Unset: nothing is logged."""

    learning_log_max_bytes: int = Field(default=1 << 30, ge=1 << 21)
    """Most bytes of the tenant's learning log. The oldest texts are deleted first."""

    learning_log_max_age_s: float = Field(default=7 * 86400.0, gt=0.0)
    """Age at which texts in the tenant's learning log are deleted, while a coordinator that writes the log runs."""

    timeline: Path | None = None
    """File to which a JSON line is appended for every round, with the times of its steps in the coordinator and its
    replicas, without text or tokens. `specdec timeline FILE` draws it. Unset: no times are recorded."""

    default_mode: Literal["off", "rejection", "block", "coupled"] = "rejection"
    """Speculation mode of requests that name no mode."""

    draft_timeout_s: float | None = Field(default=5.0, gt=0.0)
    """Longest time that a round waits for its draft before it goes on without one. Usually the wait is much shorter: a
    small multiple of the pool's recent draft times. none: wait until the draft replica answers or fails."""

    lease_ttl_s: float = Field(default=3.0, ge=0.1, le=DAY_S)
    """Time that a session stays locked after its coordinator has failed, or after the store was last reached."""

    session_ttl_s: float = Field(default=3600.0, ge=0.1, le=3650 * DAY_S)
    """Time that an idle session is kept."""

    max_queue: int = Field(default=1024, ge=1)
    """Most requests admitted at once. Further requests are refused with QUEUE_FULL."""

    poll_interval_s: float = Field(default=1.0, gt=0.0)
    """Time between two checks of the replicas, which connect new replicas and try failed ones again."""

    @model_validator(mode="after")
    def _check_endpoints(self) -> Self:
        if self.draft_endpoint and not self.target_endpoint:
            raise ValueError("--draft-endpoint needs a --target-endpoint beside it")
        if self.redis_url.startswith("memory:") and not self.target_endpoint:
            raise ValueError("--redis-url memory:// needs --target-endpoint: it has no registry to find replicas in")
        return self
