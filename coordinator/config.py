"""Settings of the coordinator: its own flags on top of the common ones."""

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
    """Tokenizer of the target model: a directory, a GGUF file, or a hub id."""

    draft_endpoint: AddressList = ()
    """HOST:PORT of a draft replica; repeatable. Any static endpoint turns the replica registry off."""

    target_endpoint: AddressList = ()
    """HOST:PORT of a target replica; repeatable. Any static endpoint turns the replica registry off."""

    tenant: TenantName = DEFAULT_TENANT
    """Whose sessions these are: 1 to 64 letters, digits, "_", "." or "-". Coordinators of two tenants may share
    replicas and Redis; they share no session, no KV block and no entry of the prefix directory."""

    prefix_directory: Literal["on", "off"] = "on"
    """Note in Redis which replicas hold which prefixes, and send new sessions to one that holds theirs, unless it is
    busier by more than that saves. off: by load alone."""

    lookup: LookupKinds = ()
    """Drafts found in text, without a model: ngram (what followed the last repeat in the session) or suffix (what has
    most often followed, in this tenant's other sessions as well); repeatable. Each is a draft pool of its name, the
    first is what requests get that name none, and where nothing is found a draft model is asked if there is one."""

    lookup_history_tokens: int = Field(default=200_000, ge=1_000, le=10_000_000)
    """Tokens of past outputs that suffix drafts look at; about 100 bytes each, in this coordinator's memory alone."""

    default_draft_pool: OptionalPoolName = ""
    """Of pools of draft models, the one that comes first: requests that name none get it, or begin with it where they
    are routed and nothing is known yet. Unset, or while it is not there: the first by name."""

    route: Literal["auto"] | None = None
    """auto: a request that names no draft pool gets the pool of draft models that its kind of requests goes fastest
    with, and another one on the way where that pays; what the others would have done is found out in the background.
    none: the first pool, always."""

    learning_log: Path | None = None
    """Folder for a log of what the target said, which `specdec distill` trains drafts on. It holds users' texts: in a
    folder of the tenant's own there, for this user alone, written in the background. Unset: nothing is logged."""

    learning_log_max_bytes: int = Field(default=1 << 30, ge=1 << 21)
    """Most bytes of the tenant's learning log; the oldest texts go first."""

    learning_log_max_age_s: float = Field(default=7 * 86400.0, gt=0.0)
    """Seconds after which what lies in the tenant's learning log is deleted, while a coordinator that keeps it runs."""

    timeline: Path | None = None
    """File to which a JSON line is added for every round: when the coordinator and its replicas did what. No text, no
    tokens; `specdec timeline FILE` makes a picture of it. Unset: nothing is noted."""

    default_mode: Literal["off", "rejection", "block", "coupled"] = "rejection"
    """Speculation mode of requests that name none."""

    draft_timeout_s: float | None = Field(default=5.0, gt=0.0)
    """The longest that a round waits for its draft before it goes on without; mostly it waits far less, some times what
    the pool's drafts have been taking. "none": until the draft answers or dies."""

    target_wait_s: float = Field(default=60.0, ge=0.0, le=DAY_S)
    """Seconds that a request waits for a lost target replica to come back, before its first token or in the middle of
    its stream. Then it fails with UNAVAILABLE, and its session can be resumed. 0: it fails at once."""

    lease_ttl_s: float = Field(default=3.0, ge=0.1, le=DAY_S)
    """How long a session stays locked after its coordinator has died, or after the store was last reached."""

    session_ttl_s: float = Field(default=3600.0, ge=0.1, le=3650 * DAY_S)
    """How long an idle session is kept."""

    max_queue: int = Field(default=1024, ge=1)
    """Most requests admitted at once; one more is refused with QUEUE_FULL."""

    poll_interval_s: float = Field(default=1.0, gt=0.0)
    """Seconds between two looks at the replicas: new ones are connected, dead ones tried again."""

    @model_validator(mode="after")
    def _check_endpoints(self) -> Self:
        if self.draft_endpoint and not self.target_endpoint:
            raise ValueError("--draft-endpoint needs a --target-endpoint beside it")
        if self.redis_url.startswith("memory:") and not self.target_endpoint:
            raise ValueError("--redis-url memory:// needs --target-endpoint: it has no registry to find replicas in")
        return self
