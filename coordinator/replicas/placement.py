"""Which replicas serve a session, and how many of its tokens each of them agrees on.

Sticky: a session stays where its KV is while that replica lives, also where another coordinator left it there.
Otherwise the less loaded of two takes it, or one that holds its first tokens already (`prefix_rule`). Not here:
connections and liveness (`pool`), rounds. Called by `generation/generation_factory` and by a round's calls
(`round/draft_calls`, `round/target_calls`).
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from coordinator.replicas.pool import ReplicaPools
from coordinator.replicas.prefix_rule import PrefixRule
from coordinator.replicas.replica import DraftReplica, LinkT, Replica, TargetReplica
from specdec.errors import Unavailable
from specdec.state.store import KvLocation

#: Sessions remembered between their turns. A forgotten one costs one KV_MISS per replica, nothing else.
MAX_REMEMBERED_SESSIONS = 65536


def choose_replica(session_id: str, replicas: Sequence[Replica[LinkT]]) -> Replica[LinkT] | None:
    """The less loaded of two replicas picked by the session's hash; None when nobody takes new sessions."""
    open_replicas = [replica for replica in replicas if replica.takes_sessions]
    if len(open_replicas) <= 1:
        return open_replicas[0] if open_replicas else None
    picks = hashlib.blake2b(session_id.encode(), digest_size=16).digest()
    first = int.from_bytes(picks[:8]) % len(open_replicas)
    step = 1 + int.from_bytes(picks[8:]) % (len(open_replicas) - 1)
    second = (first + step) % len(open_replicas)
    return min(open_replicas[first], open_replicas[second], key=lambda replica: replica.load)


class SessionReplicas:
    """One session's replicas. Used by one generation at a time.

    Attributes:
        draft_pool: name of the draft pool the session is routed to, or "" when there is none.
        target_fingerprint: of the only model that may serve as its target.
    """

    def __init__(self, session_id: str, pools: ReplicaPools, rule: PrefixRule | None = None) -> None:
        """`rule`: shared by the sessions of a coordinator."""
        self.draft_pool = ""
        self.target_fingerprint = ""
        self._session_id = session_id
        self._pools = pools
        self._rule = rule or PrefixRule()
        self._prefix_tokens: Mapping[str, int] = {}
        """Leading tokens of the session that replicas were said to hold when its turn began, by incarnation."""
        self._target: TargetReplica | None = None
        self._draft: DraftReplica | None = None
        self._agreed_len: dict[str, int] = {}
        self._assumed_len = 0

    def choose_target(self, excluded: Collection[TargetReplica] = ()) -> TargetReplica:
        """The session's target replica: the one it has while that fits, else one that takes it now and counts it.

        Raises:
            Unavailable: no target replica of the session's model lives outside `excluded`.
        """
        if self._target is None or not self._fits(self._target, excluded):
            self._target = self._choose([replica for replica in self._pools.targets() if self._fits(replica, excluded)])
            if self._target is None:
                raise Unavailable("no target replica that serves the session's model can be reached")
            self._target.note_new_session()
        return self._target

    def _choose(self, replicas: Sequence[Replica[LinkT]]) -> Replica[LinkT] | None:
        usual = choose_replica(self._session_id, replicas)
        if usual is None or not self._prefix_tokens:
            return usual
        open_replicas = [replica for replica in replicas if replica.takes_sessions]
        return self._rule.choose(usual, open_replicas, self._prefix_tokens)

    def has_target(self, excluded: Collection[TargetReplica]) -> bool:
        """Whether `choose_target` would find one."""
        return any(replica.takes_sessions and self._fits(replica, excluded) for replica in self._pools.targets())

    def _fits(self, replica: TargetReplica, excluded: Collection[TargetReplica]) -> bool:
        return (
            replica.is_alive
            and replica.info is not None
            and replica.info.model_fingerprint == self.target_fingerprint
            and replica not in excluded
        )

    def choose_draft(self) -> DraftReplica | None:
        """The session's draft replica, as `choose_target`; None when its pool has none alive, or none that keeps its
        deadlines."""
        if self._draft is not None and self._draft.is_in_use and self._draft.pool == self.draft_pool:
            return self._draft
        self._draft = self._choose(self._pools.drafts(self.draft_pool))
        if self._draft is not None:
            self._draft.note_new_session()
        return self._draft

    def forget_draft(self) -> None:
        """Lets the next round choose its draft replica afresh."""
        self._draft = None

    def start_for(self, replica: Replica[Any], committed_len: int) -> int:
        """Position from which `replica` must be sent tokens; below `committed_len`, so that it gets at least one."""
        return min(self._agreed_len.get(replica.address, self._assumed_len), committed_len - 1)

    def learn(self, replica: Replica[Any], agreed_len: int) -> None:
        """Notes how many of the session's tokens a replica holds KV for."""
        self._agreed_len[replica.address] = agreed_len

    def truncate_to(self, length: int, *, assumed_len: int = 0) -> None:
        """Notes that only the first `length` tokens are the session's: what replicas hold beyond is not agreed.

        Args:
            assumed_len: what a replica that nothing is known of is assumed to hold. A wrong guess costs a KV_MISS; 0
                costs sending everything.
        """
        self._assumed_len = assumed_len
        for address, agreed_len in self._agreed_len.items():
            self._agreed_len[address] = min(agreed_len, length)

    def begin_turn(self, agreed_len: int, homes: Sequence[KvLocation], prefix_tokens: Mapping[str, int]) -> None:
        """Notes what the store and the directory say when a turn begins, once pool and model are set.

        Args:
            agreed_len: as `truncate_to` was told.
            homes: where the session's KV was left last, by whichever coordinator; those that still live get it back.
            prefix_tokens: leading tokens of the session by the incarnation that holds them.
        """
        self._prefix_tokens = prefix_tokens
        lengths = {home.incarnation: min(home.num_tokens, agreed_len) for home in homes}
        if not lengths:
            return
        self._assumed_len = 0  # nobody else holds any of it
        for target in self._pools.targets():
            if target.incarnation in lengths and target.takes_sessions:
                self._target = self._take_back(target, self._target, lengths)
        for draft in self._pools.drafts(self.draft_pool):
            if draft.incarnation in lengths and draft.takes_sessions:
                self._draft = self._take_back(draft, self._draft, lengths)

    def _take_back(
        self, replica: Replica[LinkT], before: Replica[LinkT] | None, lengths: Mapping[str, int]
    ) -> Replica[LinkT]:
        if replica is not before:
            replica.note_new_session()
        self.learn(replica, lengths[replica.incarnation])
        return replica

    def end_turn(self, num_rows: int | None) -> None:
        """A request of the session has ended, well after so many rows of the target, its prompt's left out."""
        self._prefix_tokens = {}
        if num_rows is not None:
            self._rule.note_request(num_rows)

    @property
    def num_held(self) -> dict[str, int]:
        """Leading tokens of the session that its replicas hold, by incarnation."""
        counts = {
            replica.incarnation: self._agreed_len.get(replica.address, 0)
            for replica in (self._target, self._draft)
            if replica is not None and replica.incarnation
        }
        return {incarnation: count for incarnation, count in counts.items() if count}

    @property
    def homes(self) -> list[KvLocation]:
        """Where the session's KV is now."""
        return [KvLocation(incarnation, count) for incarnation, count in self.num_held.items()]


class Placement:
    """The replicas of every session this coordinator has served lately."""

    def __init__(self, pools: ReplicaPools, *, capacity: int = MAX_REMEMBERED_SESSIONS) -> None:
        self._pools = pools
        self._capacity = capacity
        self.rule = PrefixRule()
        self._sessions: OrderedDict[str, SessionReplicas] = OrderedDict()

    def session(self, session_id: str) -> SessionReplicas:
        """A session's replicas; new ones for a session not seen before."""
        replicas = self._sessions.pop(session_id, None) or SessionReplicas(session_id, self._pools, self.rule)
        self._sessions[session_id] = replicas
        while len(self._sessions) > self._capacity:
            self._sessions.popitem(last=False)
        return replicas

    def forget(self, session_id: str) -> None:
        self._sessions.pop(session_id, None)
