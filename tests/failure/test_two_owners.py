"""Coordinators that each believe to own one session, in any order of their calls, on a real Redis.

A lease may vanish under its owner at any time (the owner stood still, or Redis lost it), and the owner does not know.
It goes on to write, to repeat, to renew and to begin turns. The store must have one writer a token and no epoch twice.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from specdec.contract.errors import LeaseLost, SessionBusy
from specdec.state.connection import RedisConnection
from specdec.state.key_names import session_keys
from specdec.state.redis_store import open_store
from specdec.state.store import Commit, Lease
from tests.support.redis_fixture import redis_server, redis_url
from tests.support.store_sessions import LONG_TTL_S, REQUEST, a_round, tokens

__all__ = ["redis_server", "redis_url"]

OWNERS = st.sampled_from("abc")
TOKENS = st.lists(st.integers(0, 1 << 20), max_size=4)

_session_numbers = itertools.count()


@dataclass
class Owner:
    """What one coordinator believes."""

    lease: Lease
    log: list[int]
    round_id: int
    last: Commit | None = None


class Connected:
    """A store and its raw keys, for machines that have no event loop of their own."""

    def __init__(self, url: str) -> None:
        self._runner = asyncio.Runner()
        self.store = self.run(self._opened(url))
        self.raw = RedisConnection(url)

    async def _opened(self, url: str) -> Any:
        return open_store(url)

    def run(self, call: Coroutine[Any, Any, Any]) -> Any:
        return self._runner.run(call)

    def close(self) -> None:
        self.run(self.store.close())
        self.run(self.raw.close())
        self._runner.close()


class TwoOwners(RuleBasedStateMachine):
    """The model: the log, who holds the lease, and what every owner believes."""

    connected: Connected

    def __init__(self) -> None:
        super().__init__()
        self.session = f"owned-{next(_session_numbers)}"
        self.log: list[int] = []
        self.holder = ""
        self.epochs: list[int] = []
        self.owners: dict[str, Owner] = {}

    def run(self, call: Coroutine[Any, Any, Any]) -> Any:
        return self.connected.run(call)

    def may_write(self, name: str) -> bool:
        """Return whether an owner is the only one that the store may listen to."""
        return self.holder == name and self.owners[name].lease.epoch == self.epochs[-1]

    def attempt(self, name: str, call: Coroutine[Any, Any, None], *, succeeds: bool) -> None:
        """Make a call that must succeed or be fenced."""
        if succeeds:
            self.run(call)
        else:
            with pytest.raises(LeaseLost):
                self.run(call)

    @rule(name=OWNERS)
    def take(self, name: str) -> None:
        """Acquire the lease and take the session over, as a coordinator does before it commits."""
        store = self.connected.store
        taking = store.acquire(self.session, owner=name, ttl_s=LONG_TTL_S, create=True)
        if self.holder not in ("", name):
            with pytest.raises(SessionBusy):
                self.run(taking)
            return
        lease = self.run(taking)
        assert all(lease.epoch > epoch for epoch in self.epochs)
        self.epochs.append(lease.epoch)
        self.holder = name
        self.run(store.begin_request(lease, REQUEST, keep=len(self.log), token_ids=tokens()))
        record = self.run(store.load(self.session))
        self.owners[name] = Owner(lease, list(self.log), record.round_id)

    @rule()
    def lose_the_lease(self) -> None:
        """The lease ends, and its owner does not know."""
        self.run(self.connected.raw.run_command("DEL", session_keys("default", self.session)[2]))
        self.holder = ""

    @rule(name=OWNERS, token_ids=TOKENS)
    def commit(self, name: str, token_ids: list[int]) -> None:
        if owner := self.owners.get(name):
            commit = a_round(owner.round_id, len(owner.log), *token_ids)
            may_write = self.may_write(name)
            self.attempt(name, self.connected.store.commit(owner.lease, commit), succeeds=may_write)
            if may_write:
                owner.log += token_ids
                self.log += token_ids
                owner.round_id += 1
                owner.last = commit

    @rule(name=OWNERS)
    def repeat(self, name: str) -> None:
        """Send the last commit again, as after a lost answer."""
        owner = self.owners.get(name)
        if owner and owner.last:
            self.attempt(name, self.connected.store.commit(owner.lease, owner.last), succeeds=self.may_write(name))

    @rule(name=OWNERS, token_ids=TOKENS)
    def contradict(self, name: str, token_ids: list[int]) -> None:
        """Send other tokens for a round that is committed."""
        owner = self.owners.get(name)
        if owner and owner.last and token_ids != owner.last.token_ids.tolist():
            other = a_round(owner.last.round_id, owner.last.base_len, *token_ids)
            self.attempt(name, self.connected.store.commit(owner.lease, other), succeeds=False)

    @rule(name=OWNERS, token_ids=TOKENS)
    def begin_a_turn(self, name: str, token_ids: list[int]) -> None:
        if owner := self.owners.get(name):
            may_write = self.may_write(name)
            begin = self.connected.store.begin_request(
                owner.lease, REQUEST, keep=len(owner.log), token_ids=tokens(*token_ids)
            )
            self.attempt(name, begin, succeeds=may_write)
            if may_write:
                owner.log += token_ids
                self.log += token_ids
                owner.last = None

    @rule(name=OWNERS)
    def renew(self, name: str) -> None:
        if owner := self.owners.get(name):
            self.attempt(name, self.connected.store.renew(owner.lease), succeeds=self.may_write(name))

    @rule(name=OWNERS)
    def release(self, name: str) -> None:
        """Only the holder's release has an effect."""
        if owner := self.owners.get(name):
            if self.may_write(name):
                self.holder = ""
            self.run(self.connected.store.release(owner.lease))

    @rule(name=OWNERS)
    def repair(self, name: str) -> None:
        """Write the end of the log again, as after a Redis that lost writes; a former owner must not."""
        if owner := self.owners.get(name):
            end = tokens(*owner.log[len(owner.log) // 2 :])
            may_write = self.may_write(name)
            repair = self.connected.store.begin_request(owner.lease, REQUEST, keep=len(owner.log) // 2, token_ids=end)
            self.attempt(name, repair, succeeds=may_write)
            if may_write:
                owner.last = None

    @invariant()
    def the_log_has_what_its_holders_wrote(self) -> None:
        assert self.run(self.connected.store.read_tokens(self.session)).tolist() == self.log

    def teardown(self) -> None:
        self.run(self.connected.store.delete(self.session))


def run_machine(
    url: str,
    num_runs: int,
    num_steps: int,
    wrap: Callable[[Connected], Any] | None = None,
    phases: Sequence[Phase] = tuple(Phase),
) -> None:
    """Run the machine; `wrap` replaces its store."""
    TwoOwners.connected = Connected(url)
    if wrap is not None:
        TwoOwners.connected.store = wrap(TwoOwners.connected)
    try:
        run_state_machine_as_test(
            TwoOwners,
            settings=settings(
                max_examples=num_runs, stateful_step_count=num_steps, deadline=None, database=None, phases=phases
            ),
        )
    finally:
        TwoOwners.connected.close()


class Unfenced:
    """A store that takes the tokens of every owner."""

    def __init__(self, connected: Connected) -> None:
        self._store, self._raw = connected.store, connected.raw

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    async def commit(self, lease: Lease, commit: Commit) -> None:
        try:
            await self._store.commit(lease, commit)
        except LeaseLost:
            await self._raw.run_command(
                "APPEND", session_keys("default", lease.session_id)[1], commit.token_ids.tobytes()
            )


def test_a_store_that_fences_nobody_is_found(redis_url: str) -> None:
    """Negative control of the other tests."""
    with pytest.raises(BaseException, match=r"LeaseLost|assert"):
        run_machine(redis_url, num_runs=200, num_steps=25, wrap=Unfenced, phases=[Phase.generate])


def test_a_session_has_one_writer_a_token_whatever_its_owners_believe(redis_url: str) -> None:
    run_machine(redis_url, num_runs=30, num_steps=25)


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_a_session_has_one_writer_a_token_in_2000_runs(redis_url: str) -> None:
    run_machine(redis_url, num_runs=2000, num_steps=40)
