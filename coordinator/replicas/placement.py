"""Placement: the replicas that serve a session, and how many of the session's tokens each of them holds.

Placement is sticky: a session stays where its KV is while that replica lives, also where another coordinator left it.
Otherwise the less loaded of two replicas takes it, or one that holds the session's first tokens already (`PrefixRule`).
`generation/generation_factory` and the calls of a round (`round/draft_calls`, `round/target_calls`) use it; `pool`
holds the replicas.
"""

from __future__ import annotations

import hashlib
import time
from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from coordinator.replicas.pool import ReplicaPools
from coordinator.replicas.replica import DraftReplica, LinkT, Replica, TargetReplica
from coordinator.replicas.target_wait import none_serves, wait_for_target
from specdec.contract.errors import Unavailable
from specdec.contract.tenant import SessionKey
from specdec.core.forward_time import RunningMean
from specdec.state.store import KvLocation

#: Number of sessions remembered between their turns, as many as `log_repair` remembers. The store knows where it left
#: the KV of the others.
MAX_REMEMBERED_SESSIONS = 4096

#: Assumed rows of a request before the first one has ended: about a hundred tokens, at five rows for four of them.
FIRST_REQUEST_ROWS = 128.0


class PrefixRule:
    """Decides whether a session goes to a busier replica because that one holds a prefix of its tokens.

    Gain and cost are both counted in rows, the tokens that a forward pass runs, so that the time of a row cancels out:

        gain(replica) = prefix_tokens - num_running * request_rows

    `prefix_tokens` is the number of leading tokens of the session that the replica holds and need not run.
    `num_running` is the number of sessions that call it now. Each of them shares this session's steps while it runs,
    and adds `request_rows` to them: the measured rows that a request has lately needed after its prompt. The replica
    with the largest gain is chosen; of equal ones, the replica that would be chosen without prefixes. So a replica may
    be busier by one session for every `request_rows` tokens that it saves, and a prefix that all sessions share spreads
    to as many replicas as the sessions need.

    One rule serves all sessions of a coordinator.
    """

    def __init__(self) -> None:
        self._request_rows = RunningMean()
        self._is_measured = False

    @property
    def request_rows(self) -> float:
        """Number of rows that a request adds to a replica's steps after its prompt."""
        return self._request_rows.value if self._is_measured else FIRST_REQUEST_ROWS

    def note_request(self, num_rows: int) -> None:
        """Learn from a request that has ended after `num_rows` rows of the target, its prompt's excluded."""
        self._is_measured = True
        self._request_rows.observe(num_rows)

    def choose(
        self, usual: Replica[LinkT], candidates: Sequence[Replica[LinkT]], prefix_tokens: Mapping[str, int]
    ) -> Replica[LinkT]:
        """Return the replica for a session.

        Args:
            usual: replica that the session would get without prefixes.
            candidates: replicas that may take the session.
            prefix_tokens: leading tokens of the session by the incarnation that holds them.
        """
        best, best_gain = usual, self._gain(usual, prefix_tokens)
        for replica in candidates:
            gain = self._gain(replica, prefix_tokens)
            if replica.incarnation in prefix_tokens and gain > best_gain:
                best, best_gain = replica, gain
        return best

    def _gain(self, replica: Replica[Any], prefix_tokens: Mapping[str, int]) -> float:
        return prefix_tokens.get(replica.incarnation, 0) - replica.num_running * self.request_rows


def choose_replica(session_id: str, replicas: Sequence[Replica[LinkT]]) -> Replica[LinkT] | None:
    """Return the less loaded of two replicas that the session's hash picks; None if none takes new sessions."""
    open_replicas = [replica for replica in replicas if replica.takes_sessions]
    if len(open_replicas) <= 1:
        return open_replicas[0] if open_replicas else None
    picks = hashlib.blake2b(session_id.encode(), digest_size=16).digest()
    first = int.from_bytes(picks[:8]) % len(open_replicas)
    step = 1 + int.from_bytes(picks[8:]) % (len(open_replicas) - 1)
    second = (first + step) % len(open_replicas)
    return min(open_replicas[first], open_replicas[second], key=lambda replica: replica.load)


class SessionReplicas:
    """The replicas of one session. Only one generation may use it at a time.

    Attributes:
        draft_pool: name of the draft pool that the session is routed to, or "" for none.
        target_fingerprint: fingerprint of the only model that may serve as its target.
        adapter: name of that model's adapter, or "" for none.
    """

    def __init__(self, session_id: str, pools: ReplicaPools, rule: PrefixRule | None = None) -> None:
        """`rule` is shared by all sessions of a coordinator."""
        self.draft_pool = ""
        self.target_fingerprint = self.adapter = ""
        self._session_id = session_id
        self._pools = pools
        self._rule = rule or PrefixRule()
        self._prefix_tokens: Mapping[str, int] = {}
        """Leading tokens of the session by the incarnation that held them when the turn began."""
        self._target: TargetReplica | None = None
        self._draft: DraftReplica | None = None
        self._agreed_len: dict[str, int] = {}
        self._assumed_len = 0
        self._called: set[Replica[Any]] = set()
        """Replicas that were chosen in the running turn."""

    def choose_target(self, excluded: Collection[TargetReplica] = ()) -> TargetReplica:
        """Return the session's target replica, or a new one if that does not fit.

        Raises:
            Unavailable: no target replica of the session's model lives outside `excluded`.
        """
        if self._target is None or not self._fits(self._target, excluded):
            fitting = [replica for replica in self._pools.targets() if self._fits(replica, excluded)]
            # A replica that drains answers the turns of its model until they end.
            draining = next((replica for replica in fitting if replica.takes_turns), None)
            self._target = self._choose(fitting) or draining
            if self._target is None:
                raise Unavailable(none_serves(self.adapter))
            self._target.note_new_session()
        self._called.add(self._target)
        return self._target

    def _choose(self, replicas: Sequence[Replica[LinkT]]) -> Replica[LinkT] | None:
        usual = choose_replica(self._session_id, replicas)
        if usual is None or not self._prefix_tokens:
            return usual
        open_replicas = [replica for replica in replicas if replica.takes_sessions]
        return self._rule.choose(usual, open_replicas, self._prefix_tokens)

    def targets(self) -> list[TargetReplica]:
        """Return all target replicas, of any model."""
        return self._pools.targets()

    def has_target(self, excluded: Collection[TargetReplica]) -> bool:
        """Return whether `choose_target` would find a replica."""
        return any(replica.takes_turns and self._fits(replica, excluded) for replica in self._pools.targets())

    def may_wait(self, lost_at_s: float) -> bool:
        """Return whether the session has no target replica, and may still wait for the one it lost at `lost_at_s`."""
        return time.monotonic() - lost_at_s < self._pools.target_wait_s and not self.has_target(())

    @property
    def target_wait_s(self) -> float:
        """Seconds that a request waits for a target replica."""
        return self._pools.target_wait_s

    async def wait_for_target(self, lost_at_s: float) -> None:
        """Wait for a target replica. Raises Unavailable, as `target_wait.wait_for_target` does."""
        await wait_for_target(
            self._pools, lambda: self.has_target(()), self.target_fingerprint, lost_at_s, adapter=self.adapter
        )

    def _fits(self, replica: TargetReplica, excluded: Collection[TargetReplica]) -> bool:
        return replica.is_alive and replica.serves(self.target_fingerprint) and replica not in excluded

    def choose_draft(self) -> DraftReplica | None:
        """Return the session's draft replica, or a new one if that does not fit; None if the pool has none that
        lives and meets its deadlines."""
        if self._draft is not None and self._draft.is_in_use and self._draft.pool == self.draft_pool:
            return self._draft
        self._draft = self._choose(self._pools.drafts(self.draft_pool))
        if self._draft is not None:
            self._draft.note_new_session()
            self._called.add(self._draft)
        return self._draft

    def forget_draft(self) -> None:
        """Make the next round choose its draft replica anew."""
        self._draft = None

    def start_for(self, replica: Replica[Any], committed_len: int) -> int:
        """Return the position from which `replica` must be sent tokens; below `committed_len`, so at least one is."""
        return min(self._agreed_len.get(replica.address, self._assumed_len), committed_len - 1)

    def learn(self, replica: Replica[Any], agreed_len: int) -> None:
        """Note for how many of the session's tokens a replica holds KV."""
        self._agreed_len[replica.address] = agreed_len

    def truncate_to(self, length: int, *, assumed_len: int = 0) -> None:
        """Note that only the first `length` tokens are the session's; KV beyond them is of other tokens.

        Args:
            length: number of tokens of the session.
            assumed_len: number of tokens that a replica is assumed to hold if nothing is known about it. A wrong guess
                costs a KV_MISS; 0 costs sending all tokens.
        """
        self._assumed_len = assumed_len
        for address, agreed_len in self._agreed_len.items():
            self._agreed_len[address] = min(agreed_len, length)

    def begin_turn(self, agreed_len: int, locations: Sequence[KvLocation], prefix_tokens: Mapping[str, int]) -> None:
        """Note what the store and the prefix directory say when a turn begins, once pool and model are set.

        Args:
            agreed_len: number of tokens of the session, as given to `truncate_to`.
            locations: replicas where a coordinator last left the session's KV. Those that still live get it back.
            prefix_tokens: leading tokens of the session by the incarnation that holds them.
        """
        self._prefix_tokens = prefix_tokens
        if self._target is not None and self._target.is_draining:
            self._target = None  # another one takes over, if there is one
        if self._draft is not None and self._draft.is_draining:
            self._draft = None
        lengths = {location.incarnation: min(location.num_tokens, agreed_len) for location in locations}
        if not lengths:
            return
        self._assumed_len = 0  # no other replica holds any of the session
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
        self._called.add(replica)
        self.learn(replica, lengths[replica.incarnation])
        return replica

    def give_back(self, key: SessionKey, epoch: int, *, may_resume: bool) -> None:
        """Tell the replicas that the turn makes no further call: they give back the KV blocks reserved for it.

        Args:
            key: the session.
            epoch: epoch of its turn.
            may_resume: whether the turn has ended before its last token and may be resumed.
        """
        for replica in self._called:
            if replica.is_alive:
                replica.turn_ends.note(key, epoch, may_resume=may_resume)
        self._called.clear()

    def end_turn(self, num_rows: int | None) -> None:
        """Note that a request has ended; `num_rows`: target rows after its prompt, None if it failed."""
        self._prefix_tokens = {}
        if num_rows is not None:
            self._rule.note_request(num_rows)

    @property
    def num_held(self) -> dict[str, int]:
        """Number of leading tokens that the session's replicas hold, by incarnation."""
        counts = {
            replica.incarnation: self._agreed_len.get(replica.address, 0)
            for replica in (self._target, self._draft)
            if replica is not None and replica.incarnation
        }
        return {incarnation: count for incarnation, count in counts.items() if count}

    @property
    def locations(self) -> list[KvLocation]:
        """Replicas that hold the session's KV now."""
        return [KvLocation(incarnation, count) for incarnation, count in self.num_held.items()]


class Placement:
    """The replicas of every session that this coordinator has served lately."""

    def __init__(self, pools: ReplicaPools) -> None:
        self._pools = pools
        self.rule = PrefixRule()
        self._sessions: OrderedDict[SessionKey, SessionReplicas] = OrderedDict()

    def session(self, key: SessionKey) -> SessionReplicas:
        """Return a session's replicas; new ones for an unknown session."""
        replicas = self._sessions.pop(key, None) or SessionReplicas(key.session_id, self._pools, self.rule)
        self._sessions[key] = replicas
        while len(self._sessions) > MAX_REMEMBERED_SESSIONS:
            self._sessions.popitem(last=False)
        return replicas

    def knows(self, key: SessionKey) -> bool:
        """Return whether a session was served lately, so that replicas probably hold its KV."""
        return key in self._sessions

    def forget(self, key: SessionKey) -> None:
        self._sessions.pop(key, None)
