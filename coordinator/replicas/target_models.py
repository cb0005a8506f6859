"""The target model of a session, if replicas serve several: during a rolling update, or beside a canary.

A session keeps its model while a replica that takes sessions serves it. A new session gets a model by weight: the
number of its replicas that take sessions, or the share that an operator gave it (`specdec promote --target`). So an
update moves new sessions to the new model in proportion to its replicas, whatever their addresses are.

An adapter is a model too, chosen by its name among the replicas that serve it. Two fingerprints of one name are two
versions of the adapter, or the same one on two base models, and share its sessions in the same way.

The draw is a weighted rendezvous of the session's id: every coordinator draws the same model, and a changed weight
moves no more sessions than it must.

Source: Schindelhauer and Schomaker 2005, "Weighted distributed hash tables".
"""

from __future__ import annotations

import hashlib
import logging
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from math import inf, log

from coordinator.replicas.pool import ReplicaPools
from coordinator.replicas.store_watch import StoreWatch
from specdec.contract.engine_api import EngineInfo
from specdec.contract.errors import NotFound
from specdec.state.store import TargetShare, TargetShares

#: Most models that an error names.
_MAX_LISTED = 8

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model that target replicas serve."""

    fingerprint: str
    adapter: str
    """Name of its adapter; "" for a base model."""
    info: EngineInfo
    """Description of one of its replicas."""
    num_replicas: int
    """Number of its replicas that take sessions."""
    share: float
    """Share of the new sessions that get it, 0 to 1; of an adapter, of those that name it."""


class TargetModels:
    """Chooses the target models of one coordinator's sessions. Used from one event loop."""

    def __init__(self, pools: ReplicaPools, store: TargetShares) -> None:
        """
        Args:
            pools: replicas of the coordinator.
            store: keeps the decision of an operator, which all coordinators follow.
        """
        self._pools, self._store = pools, store
        self._given: TargetShare | None = None
        self._watch = StoreWatch("target share", self.sync_with_store)

    def start(self) -> None:
        """Start to follow the store in the background."""
        self._watch.start(self._pools.activity)

    async def close(self) -> None:
        """Stop following the store. Idempotent."""
        await self._watch.close()

    async def sync_with_store(self) -> None:
        """Read the decision of an operator. Raises Unavailable if the store cannot be reached."""
        given = await self._store.read()
        if given != self._given:
            words = "as many as their replicas" if given is None else f"{given.fingerprint}: {given.share:.0%}"
            _log.warning("share of new sessions by target model: %s", words)
        self._given = given

    async def give(self, fingerprint: str, share: float) -> None:
        """Give a model a share of the new sessions, 0 to 1; the others divide the rest by their replicas.

        For an adapter, those are the new sessions that name it, and the others are its other versions.

        Args:
            fingerprint: fingerprint of the model; "": the replicas of all models are counted again.
            share: its share.

        Raises:
            NotFound: no replica serves the model (MODEL_NOT_FOUND).
            Unavailable: the store cannot be reached.
        """
        served = {fingerprint for replica in self._pools.targets() for fingerprint in replica.models}
        if fingerprint and fingerprint not in served:
            raise NotFound(
                f"target_fingerprint {fingerprint[:64]!r} is not served; there are "
                f"{', '.join(sorted(served)[:_MAX_LISTED]) or 'none'}",
                reason="MODEL_NOT_FOUND",
                field="target_fingerprint",
            )
        await self._store.put(TargetShare(fingerprint, share) if fingerprint else None)
        await self.sync_with_store()

    def models(self) -> list[ServedModel]:
        """Return the served base models by fingerprint, those included of which no replica takes sessions."""
        return self._served("")

    def adapters(self) -> list[ServedModel]:
        """Return the served adapters by name and fingerprint, likewise."""
        return [model for name in self._adapter_names() for model in self._served(name)]

    def choose(self, session_id: str, last_fingerprint: str = "", adapter: str = "") -> str:
        """Return the fingerprint of the model for a session's next turn.

        Args:
            session_id: id of the session.
            last_fingerprint: fingerprint of the model of its previous turn; "" for a new session.
            adapter: name of the adapter; "" for the base model.

        Raises:
            NotFound: no target replica has the adapter (MODEL_NOT_FOUND).
            Unavailable: no target replica has been connected yet.
        """
        counts = self._num_replicas(adapter)
        if last_fingerprint in counts or (not counts and self._pools.serves(last_fingerprint)):
            return last_fingerprint
        if not counts:
            return self._away(adapter)
        weights = self._weights(counts)
        return min(weights, key=lambda model: _distance(session_id, model, weights[model]))

    def _served(self, adapter: str) -> list[ServedModel]:
        infos = {
            fingerprint: replica.info
            for replica in self._pools.targets()
            if replica.is_alive
            for fingerprint, name in replica.models.items()
            if name == adapter
        }
        counts = self._num_replicas(adapter)
        weights = self._weights(counts)
        total = sum(weights.values())
        return [
            ServedModel(
                fingerprint, adapter, info, counts[fingerprint], weights.get(fingerprint, 0.0) / total if total else 0.0
            )
            for fingerprint, info in sorted(infos.items())
            if info is not None
        ]

    def _adapter_names(self) -> list[str]:
        return sorted({name for replica in self._pools.targets() for name in replica.models.values() if name})

    def _away(self, adapter: str) -> str:
        """Return the fingerprint of a model of which no replica takes sessions now."""
        if not adapter:
            return self._pools.target_info.model_fingerprint
        for replica in self._pools.targets():
            for fingerprint, name in replica.models.items():
                if name == adapter:
                    return fingerprint
        listed = ", ".join(self._adapter_names())
        there_are = f"there are {listed}" if listed else "targets with --backend vllm or server serve their server's"
        raise NotFound(
            f"adapter {adapter[:128]!r} is not served; {there_are}", reason="MODEL_NOT_FOUND", field="adapter"
        )

    def _num_replicas(self, adapter: str) -> Counter[str]:
        """Return how many replicas take sessions of each model with an adapter."""
        return Counter(
            fingerprint
            for replica in self._pools.targets()
            if replica.takes_sessions
            for fingerprint, name in replica.models.items()
            if name == adapter
        )

    def _weights(self, counts: Mapping[str, int]) -> dict[str, float]:
        """Return the weight of each model that takes sessions."""
        given = self._given
        num_others = sum(count for model, count in counts.items() if given is not None and model != given.fingerprint)
        if given is None or given.fingerprint not in counts or not num_others:
            return {model: float(count) for model, count in counts.items()}
        rest = (1.0 - given.share) / num_others
        return {model: given.share if model == given.fingerprint else rest * count for model, count in counts.items()}


def _distance(session_id: str, model: str, weight: float) -> float:
    """Return the distance of a session from a model: exponentially distributed, with the weight as its rate."""
    drawn = hashlib.blake2b(f"{model}\0{session_id}".encode(), digest_size=8).digest()
    uniform = (int.from_bytes(drawn) + 0.5) / 2.0**64
    return -log(uniform) / weight if weight > 0.0 else inf
