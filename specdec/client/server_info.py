"""Description of what a coordinator serves: frozen dataclasses with the proto's field names, and their readers.

The results of generations and sessions are in `results`.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from specdec.rpc.plain_fields import read_fields
from specdec.v1 import coordinator_pb2 as pb


@dataclass(frozen=True, slots=True)
class Replica:
    replica_id: str
    address: str
    draining: bool
    num_sessions: int
    kv_usage: float
    """Share of the KV blocks that sessions with a call now or within the last second hold, 0 to 1."""


@dataclass(frozen=True, slots=True)
class Route:
    """Statistics of a draft pool for one class of requests."""

    request_class: str
    """Task label or kind of prompt, mode and temperature: `code/rejection/greedy`."""
    alpha: float | None
    """Acceptance that the pool has, or would have had, on recently committed tokens; None before the first."""
    goodput: float | None
    """Predicted tokens per second of a stream; None until there is enough data."""
    weight: float
    """Routing weight among the pools of the class, 0 to 1."""
    share: float
    """Share of the class's recent rounds, 0 to 1."""
    is_chosen: bool
    """True if new requests of the class get their drafts from this pool."""
    num_tested: float = 0.0
    """Number of draft tokens that alpha was measured on, older ones weighted less."""


@dataclass(frozen=True, slots=True)
class Pool:
    name: str
    role: str
    """Role of the replicas: draft | target."""
    model: str
    replicas: tuple[Replica, ...]
    alpha: float | None = None
    """Draft pools: accepted share of the draft tokens tested recently; None before the first."""
    gamma: float | None = None
    """Draft pools: draft tokens requested per round recently, near 0 while drafting gives no speedup; None before the
    first round whose gamma the server chose."""
    routes: tuple[Route, ...] = ()
    """Draft pools of a system with request routing: statistics by class of requests."""
    dtype: str = ""
    """Type of the weights: float32 | bfloat16 | float16 | int8; "" for drafts found in the text."""
    shadow: bool = False
    """Draft pools: True if the pool is scored, and used only by requests that name it or by promotion."""


@dataclass(frozen=True, slots=True)
class Promotion:
    """Draft pool that a share of the sessions gets instead of its own."""

    draft_pool: str
    share: float
    """Share of the sessions now, 0 to 1."""
    most: float
    """Largest share, as requested."""
    status: str
    """State: running | done | rolled_back, because the pool gave fewer tokens per second."""


@dataclass(frozen=True, slots=True)
class TargetModel:
    """A model that target replicas serve."""

    fingerprint: str
    model: str
    num_replicas: int
    """Number of replicas that take sessions."""
    share: float
    """Share of the new sessions that get this model, 0 to 1."""


@dataclass(frozen=True, slots=True)
class Adapter:
    """An adapter that target replicas serve; `generate` selects it by its name."""

    name: str
    fingerprint: str
    """Fingerprint of the model that it makes of its base model; two of one name during an update."""
    model: str
    """Base model."""
    num_replicas: int
    """Number of replicas that take sessions."""
    share: float
    """Share of the adapter's new sessions, 0 to 1."""
    alpha: float | None = None
    """Recently accepted share of the draft tokens of the pool that drafts for it most; None before the first."""
    gamma: float | None = None
    """Draft tokens requested of that pool per round recently, near 0 while drafting gives no speedup; None before the
    first."""


@dataclass(frozen=True, slots=True)
class LostReplica:
    """A replica that the coordinator has an address of and does not call."""

    role: str
    pool: str
    """Pool of the replica; "" before its first description."""
    address: str
    state: str
    """State: down | refused."""
    reason: str
    """The coordinator's last words about it."""


@dataclass(frozen=True, slots=True)
class Drained:
    """The rest on a replica, or on a coordinator, that takes no new sessions."""

    replica_id: str
    role: str
    """Role: draft | target | coordinator."""
    pool: str
    address: str
    num_streams: int
    """Turns that still run there."""
    num_sessions: int
    """Sessions whose KV lies there; they continue elsewhere at their next turn."""
    is_last: bool
    """True if no other one is known that takes its sessions. A target then goes on with new turns."""


@dataclass(frozen=True, slots=True)
class ServerInfo:
    version: str
    target_model: str
    vocabulary_fingerprint: str
    vocabulary_size: int
    max_context_tokens: int
    max_gamma: int
    pools: tuple[Pool, ...]
    promotion: Promotion | None = None
    default_sampling: Mapping[str, float | int] = field(default_factory=dict)
    """Sampling parameters that the model recommends, by option name. The server does not apply them by itself."""
    admin_address: str = ""
    """HOST:PORT of the coordinator for operator calls; "" for clients that may not make them."""
    target_models: tuple[TargetModel, ...] = ()
    """Served target models by fingerprint; several during an update, or beside a canary."""
    adapters: tuple[Adapter, ...] = ()
    """Served adapters of the target models, by name and fingerprint."""
    coordinator_id: str = ""
    """Id of the coordinator's process; "" for clients that may not make operator calls."""
    build: str = ""
    """Build of the coordinator: hashes of its sources; "": an older release, which states none."""
    is_registered: bool = False
    """True if the registry of replicas lists the coordinator; False with static endpoints."""
    lost_replicas: tuple[LostReplica, ...] = ()
    """Replicas that the coordinator has an address of and does not call, for operators."""
    lost_draft_pools: tuple[str, ...] = ()
    """Pools of draft replicas that have had one and have none in use now, for operators."""
    max_running: int = 0
    """Number of requests that the coordinator runs at once now; 0: an older release, which does not state it."""


def read_server_info(message: pb.GetInfoResponse) -> ServerInfo:
    return read_fields(
        ServerInfo,
        message,
        pools=tuple(map(_read_pool, message.pools)),
        promotion=read_promotion(message.promotion) if message.HasField("promotion") else None,
        default_sampling=_read_default_sampling(message.default_sampling),
        target_models=read_target_models(message.target_models),
        adapters=tuple(read_fields(Adapter, each) for each in message.adapters),
        lost_replicas=tuple(read_fields(LostReplica, each) for each in message.lost_replicas),
        lost_draft_pools=tuple(message.lost_draft_pools),
    )


def _read_default_sampling(message: pb.SamplingParams) -> Mapping[str, float | int]:
    """Return the numbers that are set, by field name, floats as short as they were written."""
    numbers = ((entry.name, value) for entry, value in message.ListFields() if isinstance(value, int | float))
    return {name: _as_written(value) for name, value in numbers}


def _as_written(value: float | int) -> float | int:
    """Return the shortest number that the proto's 32-bit float stands for: 0.6 for 0.60000002384."""
    if isinstance(value, int):
        return value
    shortened = (float(f"{value:.{num_digits}g}") for num_digits in range(6, 9))
    return next((short for short in shortened if struct.pack("f", short) == struct.pack("f", value)), value)


def read_target_models(messages: Iterable[pb.TargetModelInfo]) -> tuple[TargetModel, ...]:
    return tuple(read_fields(TargetModel, each) for each in messages)


def read_promotion(message: pb.PromotionInfo) -> Promotion:
    return read_fields(Promotion, message)


def read_drained(message: pb.DrainResponse) -> Drained:
    return read_fields(Drained, message)


def _read_pool(message: pb.PoolInfo) -> Pool:
    replicas = tuple(read_fields(Replica, each) for each in message.replicas)
    return read_fields(
        Pool, message, replicas=replicas, routes=tuple(read_fields(Route, each) for each in message.routes)
    )
