"""Settings that every process shares, those of gRPC services, and those that draft and target replicas share.

A service's settings are a frozen model. Each field is a flag of the service, an environment variable
(`SPECDEC_DRAFT__LISTEN`) and a key of its TOML file, and the docstring under the field is its `--help` text. A model
that is constructed directly reads nothing but its arguments; `specdec.settings.reading` reads the other sources. The
fields of one service alone are in `<service>/config.py`. Imports no torch, grpc or redis.
"""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, model_validator
from pydantic_settings import BaseSettings, NoDecode, PydanticBaseSettingsSource, SettingsConfigDict

from specdec.contract.errors import InvalidRequest
from specdec.contract.tenant import check_tenant
from specdec.settings.addresses import check_advertised, split_address
from specdec.settings.cluster_names import DEFAULT_CLUSTER, ClusterName
from specdec.settings.pool_names import PoolName
from specdec.settings.redis_url import SINGLE, UNIX, parse_redis_url
from specdec.settings.transport import TransportSettings

#: Upper limit of durations: a longer one is a mistake, and may exceed what Redis counts in milliseconds.
DAY_S = 86_400.0


def _checked_address(address: str) -> str:
    if address:
        split_address(address)
    return address


def _required_address(address: str) -> str:
    split_address(address)
    return address


def _checked_redis_url(url: str) -> str:
    parse_redis_url(url)
    return url


def _checked_tenant(tenant: str) -> str:
    try:
        return check_tenant(tenant)
    except InvalidRequest as error:
        raise ValueError(error.message.removeprefix("tenant: ")) from None


def _checked_tier_url(url: str) -> str:
    if url and (parsed := parse_redis_url(url)).kind not in (SINGLE, UNIX):
        raise ValueError(f"must begin with redis://, rediss:// or unix://, not {parsed.place!r}")
    return url


def _servers_of(url: str) -> set[tuple[str, int] | str]:
    """Return what identifies the Redis processes of a URL: hosts and ports, or a socket; not the database."""
    parsed = parse_redis_url(url)
    return {parsed.path} if parsed.kind == UNIX else set(parsed.addresses)


def split_commas(value: object) -> object:
    """Split a comma-separated value. Lists also come as repeated flags and as TOML arrays, which stay as they are."""
    if isinstance(value, str):
        return tuple(part.strip() for part in value.split(",") if part.strip())
    return value


def current_backend(name: str) -> str:
    """Return the name of a compile backend, translated if it is the one of an earlier release."""
    return "cuda-graphs" if name == "captured" else name


CompileBackend = Annotated[str, AfterValidator(current_backend)]
"""A compile backend; "captured", the former name of "cuda-graphs", is accepted for one release."""

Address = Annotated[str, AfterValidator(_required_address)]
"""HOST:PORT."""

Advertised = Annotated[str, AfterValidator(check_advertised)]
"""HOST:PORT, a host without a port, or "" if unset."""

OptionalAddress = Annotated[str, AfterValidator(_checked_address)]
"""HOST:PORT, or "" if unset."""

AddressList = Annotated[tuple[Address, ...], NoDecode, BeforeValidator(split_commas)]
"""Several HOST:PORT: a repeated flag, or one comma-separated value."""

RedisUrl = Annotated[str, AfterValidator(_checked_redis_url)]
"""redis://, rediss://, their Sentinel and Cluster forms, unix:// or memory:// (`specdec.settings.redis_url`)."""

OptionalTierUrl = Annotated[str, AfterValidator(_checked_tier_url)]
"""redis://, rediss:// or unix://, or "" if unset."""

TenantName = Annotated[str, AfterValidator(_checked_tenant)]
"""1 to 64 letters, digits, "_", "." or "-"."""


class ProcessSettings(TransportSettings, BaseSettings):
    """Flags that every process has. A service subclasses it and sets `env_prefix`."""

    model_config = SettingsConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, hide_input_in_errors=True, protected_namespaces=()
    )

    listen: Address
    """HOST:PORT to serve on. Port 0 selects a free one, which the log line "listening" names."""

    metrics: OptionalAddress = ""
    """HOST:PORT that serves Prometheus metrics over HTTP at /metrics. Unset: no metrics."""

    redis_url: RedisUrl = "redis://127.0.0.1:6379/0"
    """Redis that holds sessions and the replica registry: redis://HOST:PORT/DB, redis+sentinel://HOST:PORT,.../SERVICE,
    redis+cluster://HOST:PORT,... or unix:///PATH, with rediss for TLS. memory:// keeps both in this process and works
    with static endpoints only."""

    cluster: ClusterName = DEFAULT_CLUSTER
    """Name of the system that this process belongs to: 1 to 64 letters, digits, "_", "." or "-". It is a part of every
    key in Redis, so that systems with different names share no session, replica or response of one Redis."""

    store_wait_s: float = Field(default=60.0, ge=0.0, le=DAY_S)
    """Time that this process waits at its start for a Redis that does not answer yet; then it ends. 0: no wait."""

    log_format: Literal["json", "text"] = "json"
    """Format of log records: one JSON object per line, or plain text."""

    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Least severe log records that are written. Prompts and tokens appear at debug only."""

    service_key: str = ""
    """Key that the services of one system share, of 16 characters or more: a file, or env:NAME for an environment
    variable. Replicas then answer only callers that send it, and the registry holds only records that are signed with
    it. The first line of a file is the key in use, further ones are accepted too. Unset: no such key."""

    drain_grace_s: float = Field(default=30.0, ge=0.0)
    """Time that calls in flight may still run after SIGTERM before they are cancelled."""

    config: str = ""
    """TOML file whose top-level keys are these settings, with underscores. Flags and environment win over it."""

    @property
    def end_grace_s(self) -> float:
        """Longest time from SIGTERM until the last call in flight is cancelled."""
        return self.drain_grace_s

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Read arguments only: `specdec.settings.reading` reads the environment and files."""
        return (init_settings,)


class ServiceSettings(ProcessSettings):
    """Flags that every gRPC service has."""

    advertise: Advertised = ""
    """HOST:PORT that other services should dial, or a host, also an IPv6 address, which gets the port really bound.
    Unset: --listen with that port; for a host of 0.0.0.0 or [::], this machine's own address."""

    health: OptionalAddress = ""
    """HOST:PORT of a second, plaintext port that serves only grpc.health.v1, already while the process loads. The
    service name "liveness" is SERVING there unless the process must be restarted; the empty name is SERVING once the
    process accepts calls. Unset: no such port."""

    max_message_bytes: int = Field(default=4 * 1024 * 1024, ge=64 * 1024, lt=1 << 31)
    """Size of the largest gRPC message accepted. A larger one is refused with RESOURCE_EXHAUSTED."""

    @model_validator(mode="after")
    def _check_own_certificate(self) -> Self:
        if self.tls_ca and not self.tls_cert:
            raise ValueError("--tls-ca needs --tls-cert and --tls-key beside it")
        return self


class ReplicaSettings(ServiceSettings):
    """Flags that draft and target services share."""

    model: str
    """Hugging Face checkpoint: a directory, a GGUF file or a hub id."""

    device: str = "auto"
    """Device that runs the model: cpu, cuda or cuda:N. auto selects a GPU if the machine has one."""

    dtype: Literal["auto", "float32", "bfloat16", "float16", "int8"] = "auto"
    """Arithmetic of the weights. On a GPU, auto follows the checkpoint. On a CPU, auto computes in float32 and keeps
    weights in 16 bits if the checkpoint stores them so: the text is float32's, and half the memory is read."""

    compile_backend: CompileBackend = "auto"
    """Implementation of the model's steps: native (kernels for Llama-shaped models on a CPU, compiled at the first
    start), cuda-graphs (CUDA graphs of draft steps and verifications, for the same models on a GPU), eager, or any
    installed backend of torch.compile, such as inductor (steps of one session, compiled at every start). auto selects
    native on a CPU and cuda-graphs on a GPU for models that they support, else eager."""

    tensor_parallel: int = Field(default=1, ge=1, le=64)
    """Number of processes that share one model: each holds a part of every layer, on its GPU or on its share
    of this machine's cores. They run every step together, and start and end together."""

    deterministic: bool = False
    """Make a session's logits independent of other sessions and of how its tokens were divided into steps, so that
    greedy text is the same alone and under load. On a GPU prompts take longer; on a CPU the native kernels do it
    anyway. Configurations that cannot guarantee it are refused."""

    unix_socket: Literal["on", "off"] = "on"
    """Accept the frames of this user's coordinators on this machine over a Unix socket too, which is faster (Linux).
    All other coordinators use gRPC, and so do these if the socket fails. off: gRPC only."""

    self_check: Literal["on", "off"] = "on"
    """Compare the logits of a few tokens with the model's forward pass in transformers before serving, and refuse a
    model that this engine computes differently. off: serve it without the check."""

    pool: PoolName = "default"
    """Name of the replica pool that this process belongs to."""

    replica_id: str = ""
    """Unique name of this process in its pool. Unset: a random one."""

    num_threads: int | None = Field(default=None, ge=1, le=1024)
    """Number of CPU threads of one forward pass. Unset: OMP_NUM_THREADS, or else the fastest of one thread, all cores
    but one, and all cores, as measured before serving."""

    max_context_tokens: int | None = Field(default=None, ge=2)
    """Length of the longest sequence served, prompt and output together. Unset: the model's own limit. A small KV
    cache may limit it further."""

    kv_cache_bytes: int | None = Field(default=None, ge=1)
    """Size of the KV cache; with --tensor-parallel, of each process. Unset: chosen from the model and the free
    memory."""

    kv_reserve_tokens: int = Field(default=4096, ge=1)
    """Largest number of output tokens for which a request gets KV blocks in advance. They stay reserved for it until
    its turn ends, so it never waits for KV. A request that may grow further gets blocks as it grows; if none are
    left, the youngest requests pause and run their tokens again later."""

    gpu_memory_utilization: float | None = Field(default=None, gt=0.0, le=1.0)
    """Share of a GPU's whole memory that this process may use for weights, KV cache and working memory. Set it when
    processes share a GPU, so that the share of each does not depend on which starts first. --kv-cache-bytes wins over
    it. Unset: nearly all memory that is free once the weights are loaded."""

    kv_tier_url: OptionalTierUrl = ""
    """URL of a second Redis (maxmemory-policy allkeys-lru) that keeps the KV of committed tokens outside this process.
    A replica that gets a session without its KV fetches it from there if that is measured to be faster than computing
    it again. Unset: no KV tier."""

    max_gamma: int = Field(default=16, ge=1, le=256)
    """Most draft tokens per round."""

    max_step_tokens: int = Field(default=2048, ge=1)
    """Most tokens of one forward pass, all sessions together."""

    prefill_budget_ms: float = Field(default=50.0, gt=0.0)
    """Time by which prompts may lengthen a forward pass that other sessions share or wait for, as predicted from
    measured times. One block of 16 tokens always runs. A smaller value keeps running streams even; a larger one
    shortens the time to the first token."""

    registry_ttl_s: float = Field(default=10.0, ge=0.1, le=DAY_S)
    """Time that the replica registry remembers this process after its last heartbeat. It sends three per such time."""

    @model_validator(mode="after")
    def _keep_sessions_from_eviction(self) -> Self:
        if self.kv_tier_url and _servers_of(self.kv_tier_url) & _servers_of(self.redis_url):
            raise ValueError("--kv-tier-url is the Redis of --redis-url: evicting KV there would evict sessions")
        return self
