"""One draft or target replica as a coordinator sees it: its link, its description, and whether it answers in time.

`pool` holds the replicas and polls them; `placement` decides which session goes to which one. The deadlines themselves
are in `round/draft_deadline`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

from coordinator.replicas.turn_ends import TurnEnds
from specdec.contract.engine_api import EngineInfo
from specdec.contract.errors import Internal, SpecdecError, Unsupported, VocabularyMismatch
from specdec.core.limits import check_description
from specdec.rpc.client import DraftLink, TargetLink
from specdec.settings.pool_names import check_pool_name

DRAFT = "draft"
TARGET = "target"

#: Longest time that a replica may take to describe itself before it counts as dead.
DESCRIBE_TIMEOUT_S = 5.0

#: Largest number of local drafts of one target; real targets have a few.
MAX_LOCAL_DRAFTS = 64

#: Longest incarnation that is accepted; real ones have 16 characters.
MAX_INCARNATION_CHARS = 64

#: Pause before a replica that missed its deadline is called again, by one session; each failed trial doubles it.
FIRST_PAUSE_S = 1.0
MAX_PAUSE_S = 60.0

#: Largest factor on the deadlines of a replica that was slow. It doubles each time, until the replica meets one.
MAX_SLACK = 64.0

LinkT = TypeVar("LinkT", DraftLink, TargetLink)

_log = logging.getLogger(__name__)


class ReplicaHealth:
    """The record of one replica's deadlines. A missed one takes it out of use until it is heard of again.

    A replica that answers other calls meanwhile is busy rather than hung, and stays in use. All times are those of one
    monotonic clock, the event loop's. `round/draft_calls` reports calls and deadlines.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.slack = 1.0
        """Factor on the replica's deadlines."""
        self._clock = clock
        self._marked_at: float | None = None
        self._call_again_at = 0.0
        self._pause_s = FIRST_PAUSE_S

    def is_out(self, heard_at: float) -> bool:
        """Return whether the replica must not be called now.

        Args:
            heard_at: time of the last answer on its stream, late ones included.
        """
        if self._marked_at is None:
            return False
        if heard_at > self._marked_at:
            self._marked_at = None
            self._double_slack()
            return False
        return self._clock() < self._call_again_at

    @property
    def is_marked(self) -> bool:
        """True if the replica missed a deadline and has not been heard of since. A call to it is then a trial."""
        return self._marked_at is not None

    def note_called(self) -> None:
        """Note that a call is about to be sent. Only one trial may run at a time."""
        if self.is_marked:
            self._call_again_at = self._clock() + self._pause_s

    def note_late(self, called_at: float, heard_at: float) -> bool:
        """Note that a call sent at `called_at` missed its deadline; return whether that marks the replica."""
        if heard_at > called_at:
            self._double_slack()
            return False
        now = self._clock()
        if self._marked_at is None or called_at > self._marked_at:  # else the mark counts this call already
            self._pause_s = FIRST_PAUSE_S if self._marked_at is None else min(2 * self._pause_s, MAX_PAUSE_S)
            self._marked_at = now
            self._call_again_at = now + self._pause_s
        return True

    def note_stalled(self) -> None:
        """Note that no call was answered for longer than any call may take."""
        self.note_late(self._clock(), heard_at=float("-inf"))

    def reset(self) -> None:
        """Forget missed deadlines: the replica has met one, or its process was started again."""
        self.slack = 1.0
        self._marked_at = None
        self._pause_s = FIRST_PAUSE_S

    def _double_slack(self) -> None:
        self.slack = min(2 * self.slack, MAX_SLACK)


class Replica(Generic[LinkT]):
    """One replica, known by its address. The process at that address may change."""

    def __init__(self, role: str, address: str, link: LinkT) -> None:
        self.role = role
        self.address = address
        self.link: LinkT = link
        self.info: EngineInfo | None = None
        self.is_alive = False
        self.lost_at_s = 0.0
        """Time at which the replica was last taken out of use, by `time.monotonic`."""
        self.health = ReplicaHealth()
        self.turn_ends = TurnEnds(link)
        self._has_stalled = False
        """True if the replica last failed by exceeding its own step limit although it described itself."""
        self._is_refused = False
        """True while the replica answers and does not fit."""
        self._is_refusing = False
        """True once the replica, which drains, has refused a call for that."""
        self._new_sessions = 0
        self._last_warning = ""
        """Last message logged about the replica since it last fitted."""
        self.last_fault = ""
        """Reason for which it is not in use; "" if it is, or if it has not been asked yet."""
        self.on_doubt: Callable[[], None] = lambda: None
        """Called when the replica may differ from its last description."""
        self.prepare_for: Callable[[EngineInfo], Awaitable[None]] | None = None
        """Awaited with the first description of each process, before the process is used."""
        self.num_faults: Counter[tuple[str, str]] = Counter()
        """Faults by role and pool, shared by all replicas of a coordinator."""
        link.on_handshake = self._shake_hands

    @property
    def pool(self) -> str:
        return self.info.pool if self.info else ""

    @property
    def model(self) -> str:
        """Fingerprint of the model that the replica serves without an adapter. Calls name the one that is meant, so
        that no other model answers them."""
        return self.info.model_fingerprint if self.info else ""

    @property
    def models(self) -> dict[str, str]:
        """Names of the adapters by the fingerprints of the models that the replica serves; "" is the base model's."""
        return self.info.models if self.info else {}

    def serves(self, fingerprint: str) -> bool:
        """Return whether the replica serves the model with this fingerprint, with or without an adapter."""
        return self.info is not None and self.info.serves(fingerprint)

    @property
    def follows_constraints(self) -> bool:
        """Return whether a target masks p by the constraint of a request."""
        return self.info is not None and self.info.supports_constraints

    @property
    def is_shadow(self) -> bool:
        """True for a draft whose pool requests get only by its name or by a promotion."""
        return self.info is not None and self.info.shadow

    @property
    def incarnation(self) -> str:
        """Name of the process that described itself; "" if it gave no valid one."""
        name = self.info.incarnation if self.info else ""
        return name if name.isascii() and name.isalnum() and len(name) <= MAX_INCARNATION_CHARS else ""

    @property
    def is_draining(self) -> bool:
        return self.info is not None and self.info.draining

    @property
    def takes_sessions(self) -> bool:
        return self.is_in_use and self.info is not None and not self.info.draining

    @property
    def takes_turns(self) -> bool:
        """True while the replica answers the calls of turns that have begun: also while it drains, until it refuses."""
        return self.is_in_use and self.info is not None and not (self.info.draining and self._is_refusing)

    @property
    def is_in_use(self) -> bool:
        """True while the replica lives and meets its deadlines."""
        return self.is_alive and not self.health.is_out(self.link.heard_at)

    @property
    def state(self) -> str:
        """State for operators: up, late (missed a deadline and not heard of since), draining, down, or refused (its
        vocabulary or its description does not fit)."""
        if self.info is None or not self.is_alive:
            return "refused" if self._is_refused else "down"
        if self.info.draining:
            return "draining"
        return "late" if self.health.is_marked else "up"

    @property
    def load(self) -> tuple[int, int]:
        """Number of sessions that call the replica, and number that it holds; both include those sent to it since it
        last described itself. The first one counts more: old sessions that are only held cost nothing."""
        return self.num_running, (self.info.num_sessions if self.info else 0) + self._new_sessions

    @property
    def num_running(self) -> int:
        """Number of sessions that call the replica, those sent to it since it last described itself included."""
        return (self.info.num_running if self.info else 0) + self._new_sessions

    def can_draft(self, pool: str) -> bool:
        """Return whether a target drafts in `pool` by itself."""
        return self.info is not None and pool in self.info.local_drafts

    def note_draining(self) -> None:
        """Note that the replica refuses calls because it drains."""
        self._is_refusing = True

    def note_failure(self, error: SpecdecError) -> None:
        """Count a failed call of a round if the replica is at fault: its answer was invalid, or it said INTERNAL."""
        if isinstance(error, Internal):
            self.num_faults[self.role, self.pool] += 1

    def note_new_session(self) -> None:
        self._new_sessions += 1

    async def close(self) -> None:
        """Close the link. Idempotent."""
        await self.turn_ends.close()
        await self.link.close()

    def fail(self, error: BaseException) -> None:
        """Take the replica out of use until it answers again."""
        self.last_fault = str(error) or ("no answer in time" if isinstance(error, TimeoutError) else repr(error))
        if self.is_alive:
            _log.warning("%s replica %s failed: %s", self.role, self.address, self.last_fault)
            self.on_doubt()
        elif self.info is None and not self._last_warning:
            self._last_warning = self.last_fault
            _log.warning("%s replica %s does not answer yet: %s", self.role, self.address, self._last_warning)
        self._is_refused = False
        self._take_out()

    def stall(self, error: SpecdecError) -> None:
        """Take the replica out of use although it describes itself: longer each time, until it answers a call."""
        self._has_stalled = True
        self.health.note_stalled()
        self.fail(error)

    def refuse(self, error: SpecdecError) -> None:
        """Leave the replica out until its description fits; log the reason once, not at every poll."""
        self._take_out()
        self.info = None
        self._is_refused = True
        self.last_fault = error.message
        if error.message != self._last_warning:
            self._last_warning = error.message
            _log.error(
                "refused: %s",
                error.message,
                extra={"refused": self.address, "code": error.code, "reason": error.reason},
            )

    def _take_out(self) -> None:
        if self.is_alive:
            self.lost_at_s = time.monotonic()
        self.is_alive = False

    def _shake_hands(self, incarnation: str) -> None:
        """Handle the opening of a stream to the replica."""
        if self.info is not None and incarnation != self.info.incarnation:
            _log.info("%s replica %s is a new process", self.role, self.address)
            self.on_doubt()

    async def describe(self, vocabulary_fingerprint: str) -> None:
        """Request the replica's description; afterwards it is alive.

        Raises:
            VocabularyMismatch: its vocabulary is not the tokenizer's.
            Unsupported: it is not a service of this role, or its description is invalid.
            SpecdecError, TimeoutError: it did not answer.
        """
        try:
            async with asyncio.timeout(DESCRIBE_TIMEOUT_S):
                info = await self.link.info()
        except Unsupported as error:
            raise Unsupported(f"{self.address} is not a {self.role} service: {error.message}") from error
        if info.role != self.role:
            raise Unsupported(f"{self.address} is not a {self.role} service but a {info.role} service")
        self._check(info)
        if info.vocabulary_fingerprint != vocabulary_fingerprint:
            raise VocabularyMismatch(
                f"{self.role} replica {info.replica_id} at {self.address} has vocabulary fingerprint "
                f"{info.vocabulary_fingerprint}, the tokenizer has {vocabulary_fingerprint}"
            )
        is_new = self.info is None or self.info.incarnation != info.incarnation
        if is_new and self.prepare_for is not None:
            await self.prepare_for(info)
        if not self.is_alive:
            _log.info("%s replica %s at %s connected, pool %s", self.role, info.replica_id, self.address, info.pool)
            self._has_stalled = self._has_stalled and self.health.is_marked and info.incarnation == self.incarnation
            if not self._has_stalled:
                self.health.reset()
        if self.info is not None and info.model_fingerprint != self.model:
            _log.warning(
                "%s replica %s serves model %s now, %s before",
                self.role,
                self.address,
                info.model_fingerprint,
                self.model,
            )
        self._is_refusing = self._is_refusing and info.draining and info.incarnation == self.incarnation
        self.info = info
        self.link.transports.unix_socket = info.unix_socket
        self.link.leave_models(info.models)
        self.is_alive = True
        self._is_refused = False
        self._new_sessions = 0
        self._last_warning = self.last_fault = ""

    def _check(self, info: EngineInfo) -> None:
        """Raise Unsupported if a value of the description is out of range or a name of a pool is invalid."""
        try:
            check_description(info)
        except ValueError as error:
            raise Unsupported(f"{self.role} replica at {self.address}: {error}") from error
        if not (info.max_gamma and info.max_context_tokens):
            raise Unsupported(
                f"{self.role} replica at {self.address} allows {info.max_gamma} draft tokens and "
                f"{info.max_context_tokens} tokens in all; one of each is the least"
            )
        if len(info.local_drafts) > MAX_LOCAL_DRAFTS:
            raise Unsupported(
                f"{self.role} replica at {self.address} names {len(info.local_drafts)} local drafts; the limit is "
                f"{MAX_LOCAL_DRAFTS}"
            )
        for name in (info.pool, *info.local_drafts):
            try:
                check_pool_name(name)
            except ValueError as error:
                raise Unsupported(f"{self.role} replica at {self.address}: {error}") from error


DraftReplica = Replica[DraftLink]
TargetReplica = Replica[TargetLink]
