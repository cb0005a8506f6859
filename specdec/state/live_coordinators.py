"""The coordinators that clients may call, as the replica registry lists them.

A coordinator that uses a registry publishes itself under a role of its own, which replica pools do not read. A gateway
that is given no address finds its coordinators here.
"""

from __future__ import annotations

from specdec.contract.engine_api import EngineInfo
from specdec.contract.version import build_of
from specdec.state.store import ReplicaRegistry

#: Role under which coordinators register.
COORDINATOR = "coordinator"


def coordinator_info(
    coordinator_id: str,
    *,
    version: str,
    model: str,
    vocabulary_fingerprint: str,
    num_running: int,
    draining: bool = False,
) -> EngineInfo:
    """Return the description of a coordinator for its record. A coordinator holds no model, so it states no KV cache.

    Args:
        coordinator_id: unique id of the process.
        version: version of specdec.
        model: tokenizer that the coordinator was started with.
        vocabulary_fingerprint: fingerprint of the tokenizer's vocabulary.
        num_running: number of generations that run now.
        draining: whether it refuses new requests.
    """
    return EngineInfo(
        version=version,
        role=COORDINATOR,
        pool="",
        replica_id=coordinator_id,
        model=model,
        model_fingerprint="",
        vocabulary_fingerprint=vocabulary_fingerprint,
        vocabulary_size=0,
        max_context_tokens=0,
        eos_token_ids=(),
        max_gamma=0,
        num_kv_blocks=0,
        kv_block_tokens=0,
        kv_usage=0.0,
        num_sessions=num_running,
        draining=draining,
        dtype="",
        device="",
        num_running=num_running,
        build=build_of("coordinator"),
    )


async def live_coordinators(registry: ReplicaRegistry) -> list[str]:
    """Return HOST:PORT of every coordinator that sent a heartbeat lately and does not drain, in order.

    Raises:
        Unavailable: the registry cannot be reached.
    """
    records = await registry.replicas(COORDINATOR)
    return sorted({record.address for record in records if not record.engine.draining})
