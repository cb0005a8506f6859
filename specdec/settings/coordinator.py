"""Settings of the coordinator, in addition to those that all services share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import BeforeValidator, Field, model_validator
from pydantic_settings import NoDecode, SettingsConfigDict

from specdec.contract.tenant import DEFAULT_TENANT
from specdec.settings.access import AccessSettings
from specdec.settings.addresses import is_loopback
from specdec.settings.pool_names import OptionalPoolName
from specdec.settings.shared import (
    DAY_S,
    Address,
    AddressList,
    OptionalAddress,
    ServiceSettings,
    TenantName,
    split_commas,
)
from specdec.settings.tracing import TracingSettings
from specdec.settings.transport import DiallingSettings

LookupKinds = Annotated[tuple[Literal["ngram", "suffix"], ...], NoDecode, BeforeValidator(split_commas)]


class CoordinatorSettings(AccessSettings, TracingSettings, DiallingSettings, ServiceSettings):
    """The coordinator: owns sessions, runs rounds between draft and target replicas, and serves clients."""

    model_config = SettingsConfigDict(env_prefix="SPECDEC_COORDINATOR__")

    listen: Address = "127.0.0.1:50051"
    """HOST:PORT to serve gRPC on. Port 0 selects a free port, which the log line "listening" names."""

    admin: OptionalAddress = "127.0.0.1:0"
    """HOST:PORT for operator calls, such as Promote, which need the right operate if there are keys. Port 0 selects a
    free port, which the log line "listening" and GetInfo name to operators. A coordinator without keys that listens on
    loopback answers them at --listen too."""

    tokenizer: str
    """Tokenizer of the target model: a directory, a GGUF file, or a hub id."""

    tool_parser: str = "auto"
    """Format in which the model writes tool calls: hermes, qwen_xml, llama3_json, mistral, mistral_tight,
    mistral_named or gemma4. auto: read from the checkpoint and its chat template. none: requests with tools are
    refused."""

    reasoning_parser: str = "auto"
    """Format in which the model marks its reasoning: think, mistral_think or gemma4_channel. auto: read from the
    checkpoint and its chat template. none: reasoning is a part of the answer."""

    loopback: OptionalAddress = ""
    """HOST:PORT on loopback that serves the same as --listen in plaintext, for processes of this machine such as a
    gateway on this machine. Unset: no such port."""

    max_connection_age_s: float | None = Field(default=300.0, ge=1.0, le=DAY_S)
    """Seconds after which a client's connection accepts no further calls and the client connects anew, so that calls
    reach coordinators that joined. Streams on the old connection go on until they end. none: no limit."""

    draft_endpoint: AddressList = ()
    """HOST:PORT of a draft replica; repeatable. Any static endpoint turns the replica registry off."""

    target_endpoint: AddressList = ()
    """HOST:PORT of a target replica; repeatable. Any static endpoint turns the replica registry off."""

    tenant: TenantName = DEFAULT_TENANT
    """Tenant of calls that name none: 1 to 64 letters, digits, "_", "." or "-". Coordinators of two tenants may share
    replicas and Redis, but no session, no KV block and no entry of the prefix directory."""

    tenant_header: Literal["on", "off"] = "off"
    """on: a call may name its tenant in the gRPC metadata "specdec-tenant". The coordinator believes every caller, so
    only trusted gateways may reach its port. off: a call that names another tenant than --tenant is refused with
    FORBIDDEN."""

    tenant_metrics: int = Field(default=0, ge=0, le=1000)
    """Number of tenants that have separate series at --metrics, in the order in which they come; all others share
    one. 0: no series by tenant."""

    lookup: LookupKinds = ()
    """Draft kinds that find drafts in text, without a model; repeatable. ngram: the tokens that followed the last
    repeat in the session. suffix: the tokens that followed most often, also in this tenant's other sessions. Each kind
    is a draft pool of its name. Requests that name no pool get the first one; if it finds nothing, a draft model
    drafts if there is one."""

    default_draft_pool: OptionalPoolName = ""
    """Pool of draft models for requests that name none; routed requests start with it while nothing is known. Unset, or
    while the pool has no replica: the first pool by name."""

    route: Literal["auto"] | None = None
    """auto: a request that names no draft pool gets the pool that is fastest for its class of requests, and may change
    the pool while it runs; the other pools are scored in the background. none: always the first pool."""

    learning_log: Path | None = None
    """Folder for a log of the target's outputs, on which `specdec distill` trains drafts. The log holds users' texts,
    in a subfolder for the tenant that only this user may read. It is written in the background. Unset: no log."""

    audit_share: float = Field(default=0.002, ge=0.0, le=1.0)
    """Share of the rounds that are verified again in the background, each in one target-only pass while its
    target is idle. The series `specdec:audit_...` and an error in the log name rounds that differ. 0: none."""

    default_mode: Literal["off", "rejection", "block", "coupled"] = "rejection"
    """Speculation mode of requests that name none. A sampled request with a seed is served in the mode coupled instead,
    unless this is off, which gives the same text: so one seed gives one text."""

    allow_grammars: bool = False
    """Accept grammars in requests (Lark or GBNF). A grammar can take seconds for each token, on a processor that other
    sessions need. JSON schemas, regular expressions and choices are always accepted."""

    draft_timeout_s: float | None = Field(default=5.0, gt=0.0)
    """Limit on the seconds that a round waits for its draft before it continues without one. The usual wait is far
    shorter: a multiple of what the pool's drafts have taken. "none": wait until the draft answers or dies."""

    target_wait_s: float = Field(default=60.0, ge=0.0, le=DAY_S)
    """Seconds that a request waits for a lost target replica to come back, before its first token or in the middle of
    its stream. Then it fails with UNAVAILABLE, and its session can be resumed. 0: it fails at once."""

    lease_ttl_s: float = Field(default=3.0, ge=0.1, le=DAY_S)
    """Seconds that a session stays locked after its coordinator has died, or after the store was last reached."""

    session_ttl_s: float = Field(default=3600.0, ge=0.1, le=3650 * DAY_S)
    """Seconds that an idle session is kept."""

    usage_days: float = Field(default=7.0, ge=0.0, le=3650.0)
    """Days for which the store keeps the usage record of each turn, which `specdec usage` reads. A record takes about
    130 bytes. 0: no turn gets a record."""

    max_queue: int = Field(default=1024, ge=1)
    """Limit on requests at once, running and waiting ones together; a further request is refused with QUEUE_FULL."""

    max_running: int | None = Field(default=None, ge=1)
    """Limit on requests that generate at once; further requests wait for a slot. none: 16 for each target, and more
    while requests wait and more streams make more tokens per second."""

    max_wait_s: float = Field(default=60.0, gt=0.0, le=DAY_S)
    """Predicted seconds of waiting for a slot beyond which a request is refused with QUEUE_FULL, once one request
    waits for each slot; and longest time that a request with a slot waits for KV blocks. A request with a deadline is
    refused wherever it would probably miss it."""

    tenant_max_streams: int | None = Field(default=None, ge=1)
    """Limit on the requests of one tenant at once, waiting ones included. none: no limit. This limit and those below
    refuse with QUOTA_EXCEEDED and give way to the limits of a tenant's key. This one and the two next to it hold for
    all coordinators of a system together, the others for each."""

    tenant_max_requests_per_minute: int | None = Field(default=None, ge=1)
    """Limit on the requests that one tenant begins in a minute. none: no limit."""

    tenant_max_tokens_per_minute: int | None = Field(default=None, ge=1)
    """Limit on the new prompt tokens and output tokens of one tenant in a minute. A stream that has begun goes on, and
    the tenant's next requests are refused until it is below the limit. none: no limit."""

    tenant_max_sessions: int | None = Field(default=None, ge=1)
    """Limit on the sessions of one tenant, idle ones included. none: no limit."""

    tenant_max_prompt_tokens: int | None = Field(default=None, ge=1)
    """Limit on the tokens of one tenant's session before the output of a request. none: no limit."""

    tenant_max_reserved_tokens: int | None = Field(default=None, ge=1)
    """Limit on the tokens that the requests of one tenant at once may reach: the prompt and the greatest length of the
    output of each. Targets reserve KV for them. none: no limit."""

    @model_validator(mode="after")
    def _check_transport(self) -> Self:
        if self.loopback and not is_loopback(self.loopback):
            raise ValueError(f"--loopback must be an address of loopback, not {self.loopback}")
        if self.admin and not (self.tls_cert or self.insecure or is_loopback(self.admin)):
            raise ValueError(
                f"--admin {self.admin} is reached from other machines: give --tls-cert and --tls-key, or --insecure to "
                "serve there in plaintext"
            )
        if self.admin and not (self.api_keys or self.jwt_jwks or is_loopback(self.admin)):
            raise ValueError(
                f"--admin {self.admin} is reached from other machines: give --api-keys or --jwt-jwks, so that only "
                "operators are answered there"
            )
        return self

    @model_validator(mode="after")
    def _check_endpoints(self) -> Self:
        if self.draft_endpoint and not self.target_endpoint:
            raise ValueError("--draft-endpoint needs a --target-endpoint beside it")
        if self.redis_url.startswith("memory:") and not self.target_endpoint:
            raise ValueError("--redis-url memory:// needs --target-endpoint: it has no replica registry")
        return self
