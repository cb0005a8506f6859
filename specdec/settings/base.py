"""Settings every service shares, and the one way a service reads its command line.

A service's settings are a frozen model whose fields are the flags: flag > environment (`SPECDEC_DRAFT__LISTEN`) >
TOML file (`--config`) > default, and the docstring under a field is its `--help` text. Constructing a model directly
reads nothing but its arguments; only `parse_settings`, called by a service's `__main__`, looks at the environment.

Not here: what a service does with its settings; its own fields (`<service>/config.py`). No torch, grpc or redis.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn, Self, TypeVar
from urllib.parse import urlsplit

from pydantic import AfterValidator, BeforeValidator, Field, ValidationError, model_validator
from pydantic_settings import (
    BaseSettings,
    CliSettingsSource,
    EnvSettingsSource,
    NoDecode,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    SettingsError,
)

from specdec.errors import InvalidRequest
from specdec.settings.addresses import split_address
from specdec.settings.pool_names import PoolName
from specdec.tenant import check_tenant

#: Of settings in seconds: more of them than that is a mistake, and beyond what Redis counts in milliseconds an error.
DAY_S = 86_400.0

_REDIS_SCHEMES = ("redis", "rediss", "unix", "memory")

#: What `--help` calls the value of a flag, by how the flag ends; else by its type.
_VALUE_NAMES = {
    **dict.fromkeys(("listen", "advertise", "health", "metrics", "endpoint"), "HOST:PORT"),
    **dict.fromkeys(("lookup", "local-draft"), "KIND"),
    **dict.fromkeys(("model", "tokenizer"), "PATH_OR_HUB_ID"),
    **dict.fromkeys(("redis-url", "tier-url"), "URL"),
    "config": "FILE",
    "-s": "SECONDS",
    "-ms": "MILLISECONDS",
    "-bytes": "BYTES",
}
_TYPE_NAMES = {"str": "NAME", "int": "N", "float": "NUMBER"}


def _checked_address(address: str) -> str:
    if address:
        split_address(address)
    return address


def _required_address(address: str) -> str:
    split_address(address)
    return address


def checked_redis_url(url: str) -> str:
    if urlsplit(url).scheme not in _REDIS_SCHEMES:
        raise ValueError(f"must begin with redis://, rediss://, unix:// or be memory://, not {url!r}")
    return url


def _checked_tenant(tenant: str) -> str:
    try:
        return check_tenant(tenant)
    except InvalidRequest as error:
        raise ValueError(error.message.removeprefix("tenant: ")) from None


def checked_tier_url(url: str) -> str:
    if url and urlsplit(url).scheme not in _REDIS_SCHEMES[:-1]:
        raise ValueError(f"must begin with redis://, rediss:// or unix://, not {url!r}")
    return url


def _server_of(url: str) -> tuple[str | None, int | None, str]:
    """Which Redis process a URL means, whatever database of it."""
    parts = urlsplit(url)
    return (None, None, parts.path) if parts.scheme == "unix" else (parts.hostname, parts.port or 6379, "")


def split_commas(value: object) -> object:
    """Lists come as repeated flags, as comma-separated environment values, or as TOML arrays."""
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

OptionalAddress = Annotated[str, AfterValidator(_checked_address)]
"""HOST:PORT, or "" for none."""

AddressList = Annotated[tuple[Address, ...], NoDecode, BeforeValidator(split_commas)]
"""Several HOST:PORT: a repeated flag, or one comma-separated value."""

RedisUrl = Annotated[str, AfterValidator(checked_redis_url)]
"""redis://, rediss://, unix:// or memory://."""

OptionalTierUrl = Annotated[str, AfterValidator(checked_tier_url)]
"""redis://, rediss:// or unix://, or "" for none."""

TenantName = Annotated[str, AfterValidator(_checked_tenant)]
"""1 to 64 letters, digits, "_", "." or "-"."""


class ServiceSettings(BaseSettings):
    """Flags that every service has. A service subclasses it and sets `env_prefix`."""

    model_config = SettingsConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, hide_input_in_errors=True, protected_namespaces=()
    )

    listen: Address
    """HOST:PORT to serve gRPC on. Port 0 takes a free one, which the log line "listening" names."""

    advertise: OptionalAddress = ""
    """HOST:PORT that other services should dial. Unset: --listen with the port really bound; for a host of 0.0.0.0 or
    [::], this machine's own address."""

    health: OptionalAddress = ""
    """HOST:PORT for a second, always plaintext port with nothing but grpc.health.v1. Unset: none."""

    metrics: OptionalAddress = ""
    """HOST:PORT for Prometheus metrics over HTTP at /metrics. Unset: none."""

    redis_url: RedisUrl = "redis://127.0.0.1:6379/0"
    """Redis that holds sessions and the replica registry. memory:// keeps both in this process: static endpoints
    only."""

    log_format: Literal["json", "text"] = "json"
    """One JSON object a line, or plain text."""

    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Least severe records that are written. Prompts and tokens appear at debug only."""

    max_message_bytes: int = Field(default=4 * 1024 * 1024, ge=64 * 1024, lt=1 << 31)
    """Largest gRPC message accepted; a larger one is refused with RESOURCE_EXHAUSTED."""

    drain_grace_s: float = Field(default=30.0, ge=0.0)
    """On SIGTERM: how long calls in flight may still run before they are cancelled."""

    config: str = ""
    """TOML file whose top-level keys are these settings, with underscores. Flags and environment win over it."""

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """A model is its arguments: the environment and files are read by `parse_settings` alone."""
        return (init_settings,)


class ReplicaSettings(ServiceSettings):
    """Flags that draft and target services have in common."""

    model: str
    """Hugging Face checkpoint: a directory, a GGUF file, or a hub id."""

    device: str = "auto"
    """Where the model runs: cpu, cuda, cuda:1, ...; auto takes a GPU when there is one."""

    dtype: Literal["auto", "float32", "bfloat16", "float16", "int8"] = "auto"
    """Arithmetic of the weights; auto follows the checkpoint on a GPU; on a CPU it is float32, with weights kept in 16
    bits where the checkpoint stores them so: the same text as float32, half the memory read."""

    compile_backend: CompileBackend = "auto"
    """How steps run: native (kernels of our own for Llama-shaped models on a CPU, compiled at the first start),
    cuda-graphs (draft steps and verifications recorded as CUDA graphs, for the same models on a GPU), eager, any
    backend of torch.compile that is installed, such as inductor (steps of one session, compiled at every start), or
    auto: native on a CPU and cuda-graphs on a GPU for models that they support, else eager."""

    tensor_parallel: int = Field(default=1, ge=1, le=64)
    """So many processes hold the model together, each its part of every layer, and run every step together: each on a
    GPU of its own, or on its share of this machine's cores. They begin and end as one."""

    deterministic: bool = False
    """A session's logits do not depend on what else is served, nor on how its tokens were cut into steps, so greedy
    text is the same alone and in company. On a GPU this takes slower kernels; on a CPU the native kernels keep it
    anyway. What cannot keep it is refused."""

    lane: Literal["on", "off"] = "on"
    """Take the frames of this user's coordinators on this machine over a Unix socket, too, which is quicker (Linux).
    All others, and those for whom that fails, use gRPC. off: gRPC only."""

    self_check: Literal["on", "off"] = "on"
    """Before serving, compare the logits of a few tokens with the model's own forward pass in transformers, and refuse
    a model that this engine computes differently; off serves it as it is."""

    pool: PoolName = "default"
    """Name of the replica pool this process belongs to."""

    replica_id: str = ""
    """Unique name of this process in its pool. Unset: made up."""

    num_threads: int | None = Field(default=None, ge=1, le=1024)
    """CPU threads of one forward pass. Unset: OMP_NUM_THREADS, or else one, all cores but one, or all, as measured
    before serving."""

    max_context_tokens: int | None = Field(default=None, ge=1)
    """Longest sequence that is served, prompt and output together. Unset: as long as the model was made for. The KV
    cache may hold less."""

    kv_cache_bytes: int | None = Field(default=None, ge=1)
    """Size of the KV cache, with --tensor-parallel of each process. Unset: chosen by the model and the memory there
    is."""

    gpu_memory_utilization: float | None = Field(default=None, gt=0.0, le=1.0)
    """Share of a GPU's whole memory that this process may take: weights, KV cache and working memory. Give it where
    processes share a GPU: what each takes then does not depend on which starts first. --kv-cache-bytes wins over it.
    Unset: nearly all that is free once the weights are loaded."""

    kv_tier_url: OptionalTierUrl = ""
    """Redis of its own (maxmemory-policy allkeys-lru) in which KV of committed tokens is kept beyond this process, for
    sessions that come to a replica that does not hold it: fetched where that is faster than computing it again, as
    measured. Unset: none."""

    max_gamma: int = Field(default=16, ge=1, le=256)
    """Most draft tokens a round."""

    max_step_tokens: int = Field(default=2048, ge=1)
    """Most tokens that one forward pass runs, all sessions together."""

    prefill_budget_ms: float = Field(default=50.0, gt=0.0)
    """By how much prompts may lengthen a forward pass that other sessions are in or may have to wait for, as predicted
    from measured times; a block of 16 tokens always runs. Less keeps running streams even, more shortens the time to
    the first token."""

    registry_ttl_s: float = Field(default=10.0, ge=0.1, le=DAY_S)
    """How long the replica registry remembers this process after its last heartbeat; it beats three times as often."""

    @model_validator(mode="after")
    def _keep_sessions_from_eviction(self) -> Self:
        if self.kv_tier_url and _server_of(self.kv_tier_url) == _server_of(self.redis_url):
            raise ValueError("--kv-tier-url is the Redis of --redis-url: what evicts KV would evict sessions")
        return self


SettingsT = TypeVar("SettingsT", bound=ServiceSettings)


def parse_settings(settings_type: type[SettingsT], *, prog: str, argv: Sequence[str]) -> SettingsT:
    """Reads a service's settings: flag > environment > `--config` file > default.

    Ends the process: `--help` with exit code 0, a usage error with one line on stderr and exit code 2.
    """
    try:
        flags = _flags(settings_type, prog, argv)
        environment = _environment(settings_type)
        path = flags.get("config") or environment.get("config")
        file_values = _file(settings_type, str(path)) if path else {}
        return settings_type(**{**file_values, **environment, **flags})
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        flag = f"--{first['loc'][0]}: ".replace("_", "-") if first["loc"] else ""
        _refuse(flag + first["msg"].removeprefix("Value error, "))
    except (SettingsError, ValueError) as error:
        _refuse(str(error).removeprefix("error parsing CLI: "))


def _refuse(message: str) -> NoReturn:
    print(f"error: {' '.join(message.split())}", file=sys.stderr)
    raise SystemExit(2)


def _flags(settings_type: type[ServiceSettings], prog: str, argv: Sequence[str]) -> dict[str, Any]:
    source: CliSettingsSource[Any] = CliSettingsSource(
        settings_type,
        root_parser=_Parser(
            prog=prog,
            description=settings_type.__doc__,
            epilog=f"Every flag is also an environment variable: --log-format is {_prefix(settings_type)}LOG_FORMAT.",
            allow_abbrev=False,
        ),
        cli_parse_args=list(argv),
        cli_kebab_case=True,
        cli_implicit_flags=True,
        cli_hide_none_type=True,
        cli_avoid_json=True,
        cli_parse_none_str="none",
        add_argument_method=_add_argument,
    )
    return source()


def _add_argument(parser: Any, *names: str, **options: Any) -> Any:
    """As argparse does, in words: values are not called by their Python types, and no default is not one."""
    if "metavar" in options:
        ending = next((end for end in _VALUE_NAMES if names[-1].endswith(end)), "")
        options["metavar"] = _VALUE_NAMES.get(ending) or _TYPE_NAMES.get(options["metavar"], options["metavar"])
    if "help" in options:
        options["help"] = re.sub(r" \(default: (none|\(\))?\)$", "", options["help"])
    return parser.add_argument(*names, **options)


class _Parser(argparse.ArgumentParser):
    """argparse, but a usage error is an exception instead of two lines and an exit."""

    def error(self, message: str) -> NoReturn:
        raise SettingsError(message)


def _environment(settings_type: type[ServiceSettings]) -> dict[str, Any]:
    prefix = _prefix(settings_type)
    for name in os.environ:
        if name.upper().startswith(prefix) and name.upper()[len(prefix) :].lower() not in settings_type.model_fields:
            raise ValueError(f"environment variable {name} is not a setting; see --help")
    return EnvSettingsSource(settings_type, env_parse_none_str="none")()


def _prefix(settings_type: type[ServiceSettings]) -> str:
    return settings_type.model_config.get("env_prefix", "").upper()


def _file(settings_type: type[ServiceSettings], path: str) -> dict[str, Any]:
    try:
        values = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"--config: cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise ValueError(f"--config: {path} is not valid TOML: {error}") from error
    for key in values:
        if key not in settings_type.model_fields:
            raise ValueError(f"--config: {path}: {key!r} is not a setting; see --help")
    return values
