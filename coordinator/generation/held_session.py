"""The session that a running generation holds: its lease, its place on the replicas, and how both are given up.

`generation` holds the session while it runs and releases it in the end, also after an error, because a lease that is
left behind blocks the session until it expires.
"""

from __future__ import annotations

import logging

from coordinator.generation.removal import SessionRemoval
from coordinator.generation.session_leases import LeaseKeeper
from coordinator.generation.turn import Turn
from coordinator.replicas.placement import SessionReplicas
from coordinator.replicas.prefixes import Prefixes
from specdec.contract.errors import NotFound, SessionLost, SpecdecError
from specdec.state.store import SessionStore

_log = logging.getLogger(__name__)


class HeldSession:
    """The session of one turn. Used by the turn's generation alone."""

    def __init__(
        self,
        turn: Turn,
        replicas: SessionReplicas,
        *,
        store: SessionStore,
        lease_keeper: LeaseKeeper,
        removal: SessionRemoval,
        prefixes: Prefixes,
        is_new: bool,
    ) -> None:
        """`is_new`: the session was created for this turn, so it is of no use if the turn fails without a token."""
        self.replicas = replicas
        self._turn = turn
        self._store = store
        self._lease_keeper = lease_keeper
        self._removal = removal
        self._prefixes = prefixes
        self._is_new = is_new

    def keep(self) -> None:
        """Renew the lease until `end_turn`."""
        self._lease_keeper.keep(self._turn.lease)

    async def raise_epoch(self, above: int) -> int:
        """Raise the lease's epoch above one that a replica has seen; return the new one. Raises as the store does."""
        turn = self._turn
        _log.warning(
            "a replica has seen epoch %d, the store gave %d: session=%s", above, turn.lease.epoch, turn.lease.session_id
        )
        raised = await self._store.raise_epoch(turn.lease, above=above)
        self._lease_keeper.drop(turn.lease)
        turn.lease = raised
        self.keep()
        return raised.epoch

    def note_prefixes(self) -> None:
        """Tell the prefix directory which replicas hold the session's tokens, as far as it is known now."""
        tokens = self._turn.tokens
        held = {holder: min(count, len(tokens)) for holder, count in self.replicas.num_held.items()}
        adapter = self._turn.identity.parameters.adapter_fingerprint
        self._prefixes.note(self._turn.lease.tenant, tokens.prefix_hash, held, adapter)

    def give_back(self, *, may_resume: bool) -> None:
        """End the turn on the replicas; no call of the turn may follow.

        `may_resume`: the turn has ended before its last token, so a client may resume it.
        """
        self.replicas.give_back(self._turn.lease.key, self._turn.lease.epoch, may_resume=may_resume)

    def end_turn(self, num_rows: int | None) -> None:
        """Stop renewing the lease, and note the end of the turn.

        Args:
            num_rows: rows that the target computed for the output of a turn that is complete; else None.
        """
        self._lease_keeper.drop(self._turn.lease)
        self.replicas.end_turn(num_rows)

    async def release(self, error: SpecdecError | None, *, num_shown: int, is_cancelled: bool) -> SpecdecError | None:
        """Give the lease back after `end_turn`. Errors of the store are logged; the lease then expires by itself.

        Args:
            error: what ended the turn early; None after a complete turn.
            num_shown: number of output tokens that readers may have seen.
            is_cancelled: the turn was cancelled, so that `error` is the reason that its readers get.

        Returns:
            The error for the readers: `error`, or NotFound if the session was deleted in the meantime.
        """
        try:
            if error is not None and not (is_cancelled and isinstance(error, NotFound)):
                is_useless = self._is_new and num_shown == 0 and not is_cancelled
                await self._removal.after_failure(self._turn.lease, is_useless=is_useless)
            self.note_prefixes()
            # After SessionLost the log lacks tokens that were shown, so that the session is not left in order.
            is_in_order = not isinstance(error, SessionLost)
            num_tokens = self._turn.identity.output_start + num_shown
            await self._store.release(
                self._turn.lease, left=is_in_order, num_tokens=num_tokens, locations=self.replicas.locations
            )
        except NotFound as deletion:
            return deletion
        except SpecdecError as failure:
            _log.warning("generation clean-up failed: %s", failure)
        return error
