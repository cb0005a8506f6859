"""One draft or target replica as a coordinator sees it: its link, what it said it is, whether it lives.

Not here: which replicas there are and when they are looked at (`pool`), which session goes where (`placement`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Generic, TypeVar

from coordinator.replicas.replica_health import ReplicaHealth
from specdec.errors import SpecdecError, Unsupported, VocabularyMismatch
from specdec.rpc.client import DraftLink, TargetLink
from specdec.settings.pool_names import check_pool_name
from specdec.types import EngineInfo

DRAFT = "draft"
TARGET = "target"

#: How long a replica may take to describe itself before it counts as dead.
DESCRIBE_TIMEOUT_S = 5.0

#: Kinds of drafts that one target makes by itself; ours have some few.
MAX_LOCAL_DRAFTS = 64

#: Of a process's name for itself; ours have 16.
MAX_INCARNATION_CHARS = 64

LinkT = TypeVar("LinkT", DraftLink, TargetLink)

_log = logging.getLogger(__name__)


class Replica(Generic[LinkT]):
    """One replica at one address, whichever process listens there."""

    def __init__(self, role: str, address: str, link: LinkT) -> None:
        self.role = role
        self.address = address
        self.link: LinkT = link
        self.info: EngineInfo | None = None
        self.is_alive = False
        self.replica_health = ReplicaHealth()
        self._stood_still = False
        """Whether what it missed last was no deadline, but all bounds while it said that it is well."""
        self._new_sessions = 0
        self._complaint = ""
        """What was last logged against it since it last fitted."""
        self.on_doubt: Callable[[], None] = lambda: None
        """Called when it may be another one than it said it is."""
        link.on_handshake = self._shake_hands

    @property
    def pool(self) -> str:
        return self.info.pool if self.info else ""

    @property
    def model(self) -> str:
        """Fingerprint of the model it said it serves; no other one may answer our calls."""
        return self.info.model_fingerprint if self.info else ""

    @property
    def incarnation(self) -> str:
        """Of the process that described itself, as a name; "" where it gave none that is one."""
        name = self.info.incarnation if self.info else ""
        return name if name.isascii() and name.isalnum() and len(name) <= MAX_INCARNATION_CHARS else ""

    @property
    def takes_sessions(self) -> bool:
        return self.is_in_use and self.info is not None and not self.info.draining

    @property
    def is_in_use(self) -> bool:
        """Whether it lives and is not left alone for its lateness."""
        return self.is_alive and not self.replica_health.is_out(self.link.heard_at)

    @property
    def load(self) -> tuple[int, int]:
        """Sessions that call it, and those it holds, those we sent since it last told included. In this order: one that
        holds many sessions from long ago has less to do than one that serves a few."""
        return self.num_running, (self.info.num_sessions if self.info else 0) + self._new_sessions

    @property
    def num_running(self) -> int:
        """Sessions that call it, those we sent since it last told included."""
        return (self.info.num_running if self.info else 0) + self._new_sessions

    def note_new_session(self) -> None:
        self._new_sessions += 1

    def fail(self, error: BaseException) -> None:
        """Takes the replica out of use until it answers again."""
        if self.is_alive:
            _log.warning("%s replica %s failed: %s", self.role, self.address, str(error) or type(error).__name__)
            self.on_doubt()
        elif self.info is None and not self._complaint:
            self._complaint = str(error) or type(error).__name__
            _log.warning("%s replica %s does not answer yet: %s", self.role, self.address, self._complaint)
        self.is_alive = False

    def stand_still(self, error: SpecdecError) -> None:
        """Takes the replica out of use though it says what it is: for longer each time, until it answers a call."""
        self._stood_still = True
        self.replica_health.note_stood_still()
        self.fail(error)

    def refuse(self, error: SpecdecError) -> None:
        """Leaves the replica out until it describes itself as one that fits; says so once, not at every poll."""
        self.is_alive = False
        self.info = None
        if error.message != self._complaint:
            self._complaint = error.message
            _log.error(
                "refused: %s",
                error.message,
                extra={"refused": self.address, "code": error.code, "reason": error.reason},
            )

    def _shake_hands(self, incarnation: str) -> None:
        """A stream to it has opened."""
        if self.info is not None and incarnation != self.info.incarnation:
            _log.info("%s replica %s is another process than before", self.role, self.address)
            self.on_doubt()

    async def describe(self, vocabulary_fingerprint: str) -> None:
        """Asks the replica what it is; afterwards it is alive.

        Raises:
            VocabularyMismatch: its vocabulary is not ours.
            Unsupported: it is no service of this role, or says of itself what none can be.
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
        if not self.is_alive:
            _log.info("%s replica %s at %s connected, pool %s", self.role, info.replica_id, self.address, info.pool)
            self._stood_still = (
                self._stood_still and self.replica_health.is_marked and info.incarnation == self.incarnation
            )
            if not self._stood_still:
                self.replica_health.reset()
        if self.info is not None and info.model_fingerprint != self.model:
            _log.warning(
                "%s replica %s serves model %s now, %s before",
                self.role,
                self.address,
                info.model_fingerprint,
                self.model,
            )
        self.info = info
        self.link.transports.unix_socket = info.unix_socket
        self.link.transports.device_thread_socket = info.device_thread_socket
        self.is_alive = True
        self._new_sessions = 0
        self._complaint = ""

    def _check(self, info: EngineInfo) -> None:
        """Raises Unsupported: what it allows would stop everybody, or its pools have names that none may have."""
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
