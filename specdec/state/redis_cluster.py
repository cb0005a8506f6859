"""Runs scripts and commands on a Redis Cluster: each goes to the node that owns the slot of its first key.

    batch of scripts ─▶ by owner of the slot ─▶ one pipeline a node (`script_runner`) ─▶ MOVED, ASK, TRYAGAIN: again

All keys of a script have one hash tag (`key_names`), so a script runs on one node. A node that did not answer in time
is taken for down for a second, in which its own scripts fail at once and delay no others. Used by `connection`;
docs/adr/0038-redis-in-production says why this is not redis-py's cluster client.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, TypeGuard

from redis.crc import key_slot
from redis.exceptions import (
    AskError,
    BusyLoadingError,
    ClusterDownError,
    ConnectionError,
    MovedError,
    ReadOnlyError,
    RedisError,
    ResponseError,
    TimeoutError,
    TryAgainError,
)

from specdec.settings.addresses import join_address
from specdec.settings.redis_url import RedisUrl
from specdec.state.clients import cancellation_kept, check_tls_files, open_node
from specdec.state.script_runner import ScriptCall, ScriptRunner, script_text

NUM_SLOTS = 16384

#: Pauses before a script that met a moving slot or a lost connection is sent again.
PAUSES_S = (0.0, 0.02, 0.05, 0.1, 0.2)
#: Time after which a call is not sent again, and after which no further node is asked for the owners of the slots.
RETRY_S = 2.0
#: Time for which a node that did not answer in time is taken for down.
DOWN_S = 1.0

Address = tuple[str, int]

#: Errors that may pass when the call is sent again, perhaps to another node.
_PASSING = (
    MovedError,
    AskError,
    TryAgainError,
    ClusterDownError,
    ReadOnlyError,
    ConnectionError,
    TimeoutError,
    BusyLoadingError,
    OSError,
)
#: Those of them after which the owners of the slots are read again.
_STALE = (ClusterDownError, ReadOnlyError, ConnectionError, TimeoutError, OSError)


class NotACluster(RedisError):
    """A server of the URL is not a node of a Redis Cluster."""


class _Node:
    """One node of the cluster."""

    def __init__(self, url: RedisUrl, address: Address) -> None:
        self.address = address
        self.client: Any = open_node(url, *address)
        self.scripts = ScriptRunner(self.client)
        self.down_until_s = float("-inf")
        self.failure: Exception | None = None

    @property
    def is_down(self) -> bool:
        return time.monotonic() < self.down_until_s

    def note(self, error: Exception) -> None:
        if isinstance(error, TimeoutError):
            self.down_until_s, self.failure = time.monotonic() + DOWN_S, error

    async def close(self) -> None:
        await self.scripts.close()
        await self.client.aclose()


class ClusterRunner:
    """Runs scripts as `ScriptRunner` does, and single commands."""

    def __init__(self, url: RedisUrl) -> None:
        """Open no connection yet. Raises InvalidSetting for TLS files that cannot be used."""
        check_tls_files(url)
        self._url = url
        self._nodes: dict[Address, _Node] = {}
        self._owners: list[Address | None] = []
        """Owner of each slot; empty until they are read."""
        self._reading: asyncio.Task[None] | None = None

    async def run(self, name: str, calls: Sequence[ScriptCall]) -> list[Any]:
        """Return the script's answer for each call, or the exception of that call.

        Raises redis-py's error if no node can be reached.
        """
        slots = [key_slot(keys[0].encode()) for keys, _ in calls]
        answers: list[Any] = [None] * len(calls)
        todo = list(range(len(calls)))
        ends_s = time.monotonic() + RETRY_S
        for pause_s in (*PAUSES_S, None):
            if not self._owners:
                await self._read_owners()
            await self._send(name, calls, slots, todo, answers)
            todo = [index for index in todo if isinstance(answers[index], _PASSING)]
            if not todo or pause_s is None or time.monotonic() > ends_s:
                break
            await self._prepare_retry([(slots[index], answers[index]) for index in todo], pause_s)
        return answers

    async def run_command(self, *parts: Any) -> Any:
        """Run a command whose first argument is its key, or raise redis-py's error.

        One without arguments runs on any node.
        """
        slot = key_slot(str(parts[1]).encode()) if len(parts) > 1 else 0
        error: Exception = ConnectionError("no node was reached")
        ends_s = time.monotonic() + RETRY_S
        for pause_s in (*PAUSES_S, None):
            if not self._owners:
                await self._read_owners()
            node = self._owner(slot)
            try:
                return await self._run_at(node, parts)
            except _PASSING as failure:
                error = failure
            if _is_asked(error):
                try:
                    return await self._ask(error, node, parts)
                except _PASSING as failure:
                    error = failure
            if pause_s is None or time.monotonic() > ends_s:
                break
            await self._prepare_retry([(slot, error)], pause_s)
        raise error

    async def ping(self) -> None:
        """Raise redis-py's error unless a node answers and takes the cluster for whole, as far as it requires that."""
        await self._read_owners()
        owners = (self._node(owner) for owner in dict.fromkeys(self._owners) if owner is not None)
        node = next((owner for owner in owners if not owner.is_down), None)
        if node is None:
            raise ConnectionError("no node owns a slot")
        information = await node.client.execute_command("CLUSTER", "INFO")
        text = information.decode() if isinstance(information, bytes) else str(information)
        if "cluster_state:ok" not in text:
            raise ConnectionError("the cluster is down: cluster_state is not ok")

    async def close(self) -> None:
        """Close every connection; running scripts fail. Idempotent."""
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.wait([self._reading])
        for node in self._nodes.values():
            await node.close()
        self._nodes.clear()
        self._owners = []

    # ---- sending -----------------------------------------------------------------------------------------------

    async def _send(
        self,
        name: str,
        calls: Sequence[ScriptCall],
        slots: Sequence[int],
        todo: Sequence[int],
        answers: list[Any],
    ) -> None:
        """Send the calls of `todo`, those of each node in one pipeline, and store their answers."""
        by_owner: dict[Address | None, list[int]] = {}
        for index in todo:
            by_owner.setdefault(self._owners[slots[index]], []).append(index)
        sending = [self._send_to(owner, name, calls, indices, answers) for owner, indices in by_owner.items()]
        if len(sending) == 1:
            await sending[0]
        else:
            await asyncio.gather(*sending)

    async def _send_to(
        self,
        owner: Address | None,
        name: str,
        calls: Sequence[ScriptCall],
        indices: Sequence[int],
        answers: list[Any],
    ) -> None:
        node = None if owner is None else self._node(owner)
        if node is None or node.is_down:
            found: list[Any] = [_failure_of(node)] * len(indices)
        else:
            try:
                found = await node.scripts.run(name, [calls[index] for index in indices])
            except (RedisError, OSError) as error:
                node.note(error)
                found = [error] * len(indices)
        for index, answer in zip(indices, found, strict=True):
            if _is_asked(answer):
                keys, args = calls[index]
                answer = await self._answer_of_asked(answer, node, ("EVAL", script_text(name), len(keys), *keys, *args))
            answers[index] = answer

    async def _run_at(self, node: _Node | None, parts: Sequence[Any]) -> Any:
        if node is None or node.is_down:
            raise _failure_of(node)
        try:
            return await node.client.execute_command(*parts)
        except (RedisError, OSError) as error:
            node.note(error)
            raise

    async def _answer_of_asked(self, asked: AskError, node: _Node | None, parts: Sequence[Any]) -> Any:
        try:
            return await self._ask(asked, node, parts)
        except (RedisError, OSError) as error:
            return error

    async def _ask(self, asked: AskError, node: _Node | None, parts: Sequence[Any]) -> Any:
        """Run a command at the node that receives a slot; ASKING and the command need one connection."""
        receiver = self._node(_target(asked, node))
        async with receiver.client.pipeline(transaction=False) as pipeline:
            pipeline.execute_command("ASKING")
            pipeline.execute_command(*parts)
            with cancellation_kept():
                _, answer = await pipeline.execute(raise_on_error=False)
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def _prepare_retry(self, failures: Sequence[tuple[int, Exception]], pause_s: float) -> None:
        """Note what the failures tell about the owners of slots, and wait."""
        for slot, error in failures:
            if isinstance(error, MovedError):
                self._owners[slot] = _target(error, self._owner(slot))
        await asyncio.sleep(pause_s)
        if any(isinstance(error, _STALE) for _, error in failures):
            with suppress(RedisError, OSError):  # the known owners are tried once more then
                await self._read_owners()

    # ---- owners ------------------------------------------------------------------------------------------------

    def _owner(self, slot: int) -> _Node | None:
        address = self._owners[slot]
        return None if address is None else self._node(address)

    def _node(self, address: Address) -> _Node:
        if address not in self._nodes:
            self._nodes[address] = _Node(self._url, address)
        return self._nodes[address]

    async def _read_owners(self) -> None:
        """Read the owners of all slots; callers at the same time share one reading."""
        if self._reading is None or self._reading.done():
            self._reading = asyncio.create_task(self._read_from_any(), name="cluster slots")
        await asyncio.shield(self._reading)

    async def _read_from_any(self) -> None:
        known = [self._node(address) for address in dict.fromkeys([*self._nodes, *self._url.addresses])]
        known.sort(key=lambda node: node.is_down)
        failures: list[Exception] = []
        ends_s = time.monotonic() + RETRY_S
        for node in known:
            if failures and time.monotonic() > ends_s:
                break
            try:
                answer = await node.client.execute_command("CLUSTER", "SLOTS")
            except (RedisError, OSError) as error:
                node.note(error)
                if isinstance(error, ResponseError) and "cluster support disabled" in str(error):
                    raise NotACluster(f"{join_address(*node.address)} is not a node of a Redis Cluster") from error
                failures.append(error)
                continue
            self._owners = _owners(answer, node.address[0])
            await self._forget_nodes()
            return
        raise failures[-1]

    async def _forget_nodes(self) -> None:
        """Close the connections to nodes that own no slot any more."""
        current = {*self._owners, *self._url.addresses}
        for address in [each for each in self._nodes if each not in current]:
            await self._nodes.pop(address).close()


def _owners(answer: Any, host: str) -> list[Address | None]:
    """Return the owner of each slot from an answer of CLUSTER SLOTS.

    Args:
        answer: [[first slot, last slot, [host, port, ...], ...], ...].
        host: the node that answered; a host that it does not state is its own.
    """
    owners: list[Address | None] = [None] * NUM_SLOTS
    for first, last, (name, port, *_), *_ in answer:
        text = name.decode() if isinstance(name, bytes) else name
        owners[first : last + 1] = [(text or host, int(port))] * (last + 1 - first)
    return owners


def _is_asked(answer: Any) -> TypeGuard[AskError]:
    """Return whether another node must be asked this once. redis-py's MovedError is an AskError too."""
    return isinstance(answer, AskError) and not isinstance(answer, MovedError)


def _target(error: AskError, node: _Node | None) -> Address:
    """Return the address that a redirection names; without a host it is another port of the same one."""
    return (error.host or (node.address[0] if node else ""), error.port)


def _failure_of(node: _Node | None) -> Exception:
    if node is None or node.failure is None:
        return ClusterDownError("CLUSTERDOWN no node serves the slot")
    return node.failure
