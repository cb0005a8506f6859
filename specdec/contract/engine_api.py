"""The engine contract: what a service warms up, serves, watches and closes, and how it describes itself.

It lives beside `types` because its two sides may not import each other: `specdec.engine` implements it without grpc,
and `specdec.rpc` and `specdec.service` serve any implementation without an engine. A round goes from a servicer through
`propose` or `verify` into the engine's gate (`specdec.engine.sessions.calls`). The parts of an engine are described in
`specdec.engine.base`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple, Protocol

from specdec.contract.types import (
    Proposal,
    ProposeRequest,
    Score,
    ScoreRequest,
    SessionPosition,
    Verification,
    VerifyRequest,
)

#: Largest number of adapters of one target.
MAX_ADAPTERS = 64

_ADAPTER_NAME = re.compile(r"[!-~]{1,128}")


def is_adapter_name(name: str) -> bool:
    """Return whether a text can be the name of an adapter: 1 to 128 printable ASCII characters without spaces."""
    return _ADAPTER_NAME.fullmatch(name) is not None


#: Fields of `EngineInfo` that have another name in the proto and in the registry.
WIRE_NAMES = MappingProxyType({"unix_socket": "lane"})


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """Description of a replica: the proto's `EngineInfo`, field by field, but for `WIRE_NAMES`."""

    version: str
    role: str  # draft | target
    pool: str
    replica_id: str
    model: str
    model_fingerprint: str
    vocabulary_fingerprint: str
    vocabulary_size: int
    max_context_tokens: int
    eos_token_ids: tuple[int, ...]
    max_gamma: int
    num_kv_blocks: int
    kv_block_tokens: int
    kv_usage: float  # share of KV blocks of sessions with a call now or within the last second, 0..1
    num_sessions: int
    draining: bool
    dtype: str
    device: str
    incarnation: str = ""
    """Identifies the process: it differs after every start, even for the same replica id. "" before it is served."""
    num_running: int = 0  # sessions with a call in work now or within the last second
    local_drafts: tuple[str, ...] = ()  # names of a target's local drafts
    shadow: bool = False
    """Set for a draft that is scored, and used only by requests that name its pool or that it is promoted to."""
    local_gammas: tuple[int, ...] = ()
    """Longest draft of each local draft; 0: no limit. (): none has a limit, or an older release did not state it."""
    num_steps: int = 0  # steps that have ended since the process began
    step_limit_s: float = 0.0
    """Longest predicted time, in seconds, for which a call waits now for a running step to end; 0: not known."""
    unix_socket: str = ""
    """Name of an abstract Unix socket on the replica's machine that takes the same frames as gRPC; "": none."""
    backend: str = ""
    """Backend of a target whose model runs in another engine, as --backend names it; "": our own engine."""
    unsupported_fields: tuple[str, ...] = ()
    """Request fields, such as sampling.logit_bias, that the backend cannot serve exactly unless they have their
    defaults."""
    max_run: int = 0
    """Largest number of tokens that a target's run may be ahead of the committed ones; 0: it makes no runs."""
    supports_constraints: bool = False
    """True for a target that masks p by `SamplingFilters.constraint_id`. Older targets would ignore it."""
    adapter_names: tuple[str, ...] = ()
    """Adapters that a target passes to its engine's server, by the names under which requests select them."""
    adapter_fingerprints: tuple[str, ...] = ()
    """Fingerprints of the models that the adapters make of the base model, in the order of `adapter_names`."""
    build: str = ""
    """Build of the service (`specdec.contract.version.build_of`); "": an older release, which states none."""
    num_states: int = 0
    """Number of slots for recurrent states of a hybrid, of which a session takes two; 0: the model has none."""

    def serves(self, fingerprint: str) -> bool:
        """Return whether this is the fingerprint of the replica's model, or of that model with an adapter."""
        return fingerprint == self.model_fingerprint or fingerprint in self.adapter_fingerprints

    @property
    def models(self) -> dict[str, str]:
        """Names of the adapters by the fingerprints of the served models; "" is that of the base model."""
        adapters = dict(zip(self.adapter_fingerprints, self.adapter_names, strict=False))
        return {self.model_fingerprint: "", **adapters}


@dataclass(frozen=True, slots=True)
class EngineStats:
    """What an engine is doing now, and what it has counted since it began. Read when metrics are scraped."""

    num_waiting_calls: int = 0
    """Number of calls that no step has taken yet."""
    num_running_calls: int = 0
    """Number of calls that a step has taken and that have no answer yet."""
    num_backlog_tokens: int = 0
    """Number of tokens of admitted prompts that have not run."""
    num_kv_blocks: int = 0
    num_active_kv_blocks: int = 0
    """Number of KV blocks of sessions with a call now or within the last second."""
    num_held_kv_blocks: int = 0
    """Number of KV blocks of sessions, idle ones included."""
    num_free_kv_blocks: int = 0
    """Number of KV blocks without contents."""
    num_kv_exhausted: int = 0
    """Number of calls that were refused because the KV blocks, or the slots for the recurrent states of a hybrid, were
    reserved for other turns, or too few."""
    num_preemptions: int = 0
    """Number of admitted calls that gave up their KV and ran it again."""
    num_replayed_tokens: int = 0
    """Number of tokens of hybrids that ran again, from the newest recurrent state before them."""
    num_withdrawn_snapshots: int = 0
    """Number of snapshots of hybrids that are no longer used, because a session that began at one failed."""
    session_state_bytes: int = 0
    """Bytes of the recurrent states of sessions."""
    snapshot_state_bytes: int = 0
    """Bytes of the recurrent states that are kept for other sessions and later turns."""
    is_stalled: bool = False


class EndedTurn(NamedTuple):
    """A turn that will not call again."""

    session_id: str
    """Id of the session on the replica (`specdec.contract.tenant.session_on_replica`)."""
    epoch: int
    """Epoch under which the turn ran. Turns of other epochs go on."""


class Engine(Protocol):
    """The part of the contract that does not depend on the role.

    Any number of calls may be made at once, from any number of asyncio event loops.
    """

    async def warm_up(self) -> None:
        """Run the code paths that would be slow in the first real call, and keep no result."""
        ...

    async def score(self, request: ScoreRequest) -> Score:
        """Return the probabilities with which the draft would have drawn committed tokens.

        The call keeps no state and is preempted by every other call.

        Raises:
            InvalidRequest: the request can never run.
            ResourceExhausted: other calls are served, or are expected to be before this one would end (REPLICA_BUSY).
            Unavailable: draining (DRAINING), or the device hangs (REPLICA_UNAVAILABLE).
            Unsupported: the engine has no draft of its own.
        """
        ...

    async def release(self, session_ids: list[str]) -> None:
        """Free the KV of sessions; their calls in flight miss. Idempotent; unknown ids are allowed."""
        ...

    async def end_turns(self, turns: list[EndedTurn]) -> None:
        """Abandon the calls of turns and give back the KV blocks reserved for them, within one step.

        The sessions' KV stays until others need its blocks. Idempotent; unknown sessions are allowed.
        """
        ...

    def info(self) -> EngineInfo:
        """Return the replica's description with its current load."""
        ...

    def stats(self) -> EngineStats:
        """Return the engine's state and counts; any thread may call this."""
        ...

    @property
    def is_stalled(self) -> bool:
        """Return whether the device hangs: calls fail with Unavailable (REPLICA_UNAVAILABLE) until its step ends."""
        ...

    async def wait_ended(self) -> None:
        """Return once the engine has been closed.

        Raises:
            Internal: the engine failed, or its device failed permanently; no call will be answered any more.
        """
        ...

    async def close(self) -> None:
        """Finish the calls in flight, then free all resources. Idempotent."""
        ...


class DraftEngine(Engine, Protocol):
    """The engine of a draft service."""

    async def propose(self, request: ProposeRequest) -> Proposal:
        """Draft up to gamma tokens. Idempotent by (session, epoch, round) and the request's digest.

        A cancelled call is abandoned without an answer; the session's KV stays consistent.

        Raises:
            InvalidRequest: the request can never run; no part of it is kept.
            KvMiss: the replica needs earlier tokens.
            StaleEpoch: an older epoch, or a round older than the newest seen.
            ResourceExhausted: the KV blocks that the turn needs are reserved for others (KV_EXHAUSTED); only the first
                call of a turn is refused, and a draft's call that has no reservation.
            Unavailable: draining (DRAINING), or the device hangs (REPLICA_UNAVAILABLE).
        """
        ...


class TargetEngine(Engine, Protocol):
    """The engine of a target service. The guarantees are those of `DraftEngine`."""

    async def verify(
        self, request: VerifyRequest, on_step: Callable[[Verification], None] | None = None
    ) -> Verification:
        """Run the draft tokens through the model in one pass and return p. Idempotent; raises as `propose` does.

        Args:
            request: what to verify, or a run.
            on_step: called in the caller's event loop with each step of a run but the last, which is returned. None: a
                run ends after its first step.
        """
        ...

    def renew(self, position: SessionPosition, until: int, committed_len: int) -> None:
        """Raise the limit of a run; no effect on one that has ended, or that a newer call has ended.

        Args:
            position: position of the run's request.
            until: see `RunLimit.until`; a smaller one than before has no effect.
            committed_len: number of tokens of the session that are committed now.
        """
        ...
