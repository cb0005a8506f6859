"""One turn of a session as its generation owns it, and the state that a generation starts from.

`turn_preparer` makes a `PreparedTurn`; `generation_factory` starts a generation from it, which changes the `Turn` round
by round.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from coordinator.requests import GenerationIdentity, RequestStats
from coordinator.round.session_tokens import SessionTokens
from coordinator.text.output import OutputStep, OutputWriter
from specdec.state.store import KvLocation, Lease


@dataclass(slots=True)
class Turn:
    """The lease, the tokens and the output of one request. A turn has one owner at a time, which owns the lease."""

    identity: GenerationIdentity
    lease: Lease
    tokens: SessionTokens
    """Tokens of the session, those of rounds that are not committed yet included."""
    writer: OutputWriter
    round_id: int
    """Id of the next round."""


@dataclass(frozen=True, slots=True)
class PreparedTurn:
    """A turn that no generation runs yet, new or resumed."""

    turn: Turn
    stats: RequestStats
    began: float
    """`time.perf_counter()` at admission."""
    agreed_len: int
    """Number of leading tokens that replicas may already hold."""
    is_new_session: bool = False
    replayed: OutputStep | None = None
    """The part of the output that the log already holds."""
    kv_locations: tuple[KvLocation, ...] = ()
    """Replicas that held the session's KV after its previous turn."""
    prefix_tokens: Mapping[str, int] = field(default_factory=dict)
    """Number of leading tokens that each replica incarnation holds, as the prefix directory says."""
