"""What a generation begins with: the prompt of a new turn, or an unfinished turn as the log holds it; and the lease.

From here a beginning goes to `factory`. Not here: which of the two a request means, and whether it may run at all
(`admission`), taking the lease itself (`leases`), the log's encoding (`request_log`).
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from coordinator.generation.leases import Leases
from coordinator.generation.removal import SessionRemoval
from coordinator.generation.request_log import (
    LoggedRequest,
    check_expected,
    check_held,
    check_left,
    read_logged_request,
    record_of,
)
from coordinator.generation.served_model import on_a_served_model, target_after
from coordinator.replicas.pool import ReplicaPools
from coordinator.replicas.prefixes import Prefixes
from coordinator.requests import GenerationIdentity, GenerationRequest, RequestParameters, RequestStats
from coordinator.round.tokens import SessionTokens
from coordinator.text.output import OutputStep, OutputWriter
from coordinator.text.prompt import Prompt, encode_prompt, resolve_sampling
from coordinator.text.text_process import in_thread
from coordinator.text.tokenizer import ServedTokenizer
from specdec.errors import NotFound, SessionBusy, SessionLost, SpecdecError, Unavailable
from specdec.state.store import KvLocation, Lease, SessionRecord, SessionStore
from specdec.types import SamplingParams, TokenIds

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class PreparedTurn:
    """State that a generation starts from, new or resumed. Whoever has it owns the lease."""

    identity: GenerationIdentity
    lease: Lease
    tokens: SessionTokens
    writer: OutputWriter
    round_id: int
    stats: RequestStats
    began: float
    """`time.perf_counter()` at admission."""
    agreed_len: int
    """Tokens of the session that replicas may hold."""
    is_new_session: bool = False
    replayed: OutputStep | None = None
    """What of the output the log already holds."""
    homes: tuple[KvLocation, ...] = ()
    """Where the session's KV was left."""
    prefix_tokens: Mapping[str, int] = field(default_factory=dict)
    """Leading tokens of the session that replicas are said to hold, by incarnation."""


class TurnPreparer:
    """Makes beginnings from the store and the prompt. A session is used by one admission at a time.

    Cancelling or failing leaves no lease behind, and no session that was made for the request.
    """

    def __init__(
        self,
        store: SessionStore,
        leases: Leases,
        pools: ReplicaPools,
        tokenizer: ServedTokenizer,
        removal: SessionRemoval,
        prefixes: Prefixes,
        *,
        routes_drafts: bool,
    ) -> None:
        """`routes_drafts`: a request that names no draft pool is routed among them while it runs."""
        self._store = store
        self._leases = leases
        self._pools = pools
        self._tokenizer = tokenizer
        self._removal = removal
        self._prefixes = prefixes
        self._routes_drafts = routes_drafts

    async def of_new_turn(self, record: SessionRecord | None, request: GenerationRequest, began: float) -> PreparedTurn:
        """Writes a new turn's prompt into the log.

        Args:
            record: of the session as it was just loaded; None where there is none.
            request: with a session id.
            began: `time.perf_counter()` at admission.

        Raises:
            InvalidRequest: CONTEXT_TOO_LONG, NO_CHAT_TEMPLATE, or an empty input.
            NotFound: no such draft pool (POOL_NOT_FOUND), or the session was deleted meanwhile.
            SessionBusy: another coordinator has changed the session meanwhile.
            SessionLost: the session is not what the caller builds on.
            Unavailable: no target replica, or no store.
        """
        session_id = request.session_id
        self._check_serving()
        asked_pool = request.speculation.draft_pool
        draft_pool = self._pools.route_draft(asked_pool, is_settled=not self._routes_drafts)
        held = await self._store.read_tokens(session_id) if record else np.empty(0, np.uint32)
        check_expected(request.expected_session_tokens, session_id, len(held) if record else None)
        check_left(request, record)
        max_context_tokens = self._pools.max_context_tokens
        prompt = await in_thread(encode_prompt, request, held, self._tokenizer, max_context_tokens)
        sampling = resolve_sampling(request, prompt, max_context_tokens)
        identity = self._identity(record, request, sampling, draft_pool, prompt)
        tokens = SessionTokens([*held[: prompt.keep].tolist(), *prompt.new_token_ids.tolist()])

        # Asked for in the same turn of the event loop as the lease, and so in the same round trip.
        looking_up = self._prefixes.look_up(len(tokens), tokens.prefix_hash)
        lease = await self._leases.acquire(session_id, create=record is None or record.request is None)
        is_new = False
        try:
            fresh = await self._store.load(session_id)
            # Another coordinator may have made, run and left the session since it was looked up.
            is_new = fresh is not None and fresh.request is None
            if fresh is None or not _is_unchanged(fresh, record, held):
                raise SessionBusy(f"session {session_id} has just been changed by another request")
            await self._store.begin_request(
                lease, record_of(identity), keep=prompt.keep, token_ids=prompt.new_token_ids
            )
            return PreparedTurn(
                identity=identity,
                lease=lease,
                tokens=tokens,
                writer=OutputWriter(self._tokenizer, sampling, self._pools.target_info.eos_token_ids),
                round_id=fresh.round_id,
                stats=RequestStats(),
                began=began,
                agreed_len=prompt.keep,
                is_new_session=is_new,
                homes=fresh.locations,
                prefix_tokens=await self._prefixes.answer(looking_up),
            )
        except BaseException as error:
            await self._give_up_after(error, lease, is_new=is_new)
            raise

    async def of_unfinished_turn(
        self, session_id: str, request_id: str, num_held: int, began: float
    ) -> PreparedTurn | LoggedRequest:
        """Takes the session's last request over, waiting as long as a dead owner's lease may still live.

        Args:
            session_id: of the session.
            request_id: of that request.
            num_held: output tokens that the caller already holds.
            began: `time.perf_counter()` at admission.

        Returns:
            Where to go on; or the request as logged, when its owner has finished it meanwhile.

        Raises:
            SessionBusy: its owner lives.
            InvalidRequest: its owner has finished it with fewer tokens than the caller holds.
            SessionLost: the log is shorter than what the caller holds, or of another request by now.
            NotFound: it is gone.
            Unavailable: no target replica, or no store.
        """
        self._check_serving()
        lease = await self._leases.take_over(session_id)
        try:
            logged = await self.read_log(session_id, request_id)
            check_held(num_held, len(logged.output.token_ids), has_finished=logged.finish_reason is not None)
            if logged.finish_reason is not None:
                await self._store.release(lease)
                return logged
            logged = await on_a_served_model(logged, lease, self._store, self._pools)
            tokens = SessionTokens(logged.token_ids)
            looking_up = self._prefixes.look_up(len(tokens), tokens.prefix_hash)
            prefix_tokens = await self._prefixes.answer(looking_up)
        except BaseException as error:
            await self._give_up_after(error, lease, is_new=False)
            raise
        return PreparedTurn(
            identity=logged.identity,
            lease=lease,
            tokens=tokens,
            writer=logged.writer,
            round_id=logged.round_id,
            stats=logged.stats,
            began=began,
            agreed_len=len(logged.token_ids),
            replayed=logged.output,
            homes=logged.homes,
            prefix_tokens=prefix_tokens,
        )

    async def give_up(self, beginning: PreparedTurn) -> NotFound | None:
        """Undoes a beginning that no generation starts from. What cannot be undone now expires by itself.

        Returns:
            What the caller is to be told where the session was deleted meanwhile.
        """
        return await self._give_up(beginning.lease, is_new=beginning.is_new_session)

    async def read_log(self, session_id: str, request_id: str) -> LoggedRequest:
        """A request that was the session's last a moment ago, from the log.

        Raises as `read_logged_request`, and SessionLost where another one is the last by now.
        """
        eos_token_ids = self._pools.target_info.eos_token_ids
        logged = await read_logged_request(self._store, session_id, self._tokenizer, eos_token_ids)
        if logged.identity.request_id != request_id:
            raise SessionLost(
                f"session {session_id} has gone on from request {request_id!r} to another one", field="request_id"
            )
        return logged

    def _check_serving(self) -> None:
        if not self._pools.is_ready:
            raise Unavailable("no target replica can be reached")

    def _identity(
        self,
        record: SessionRecord | None,
        request: GenerationRequest,
        sampling: SamplingParams,
        draft_pool: str,
        prompt: Prompt,
    ) -> GenerationIdentity:
        last = record.request if record else None
        return GenerationIdentity(
            session_id=request.session_id,
            request_id=request.request_id or f"r-{secrets.token_hex(12)}",
            digest=request.digest,
            turn=last.turn + 1 if last else 0,
            output_start=prompt.num_tokens,
            parameters=RequestParameters(
                sampling, replace(request.speculation, draft_pool=draft_pool), *target_after(last, self._pools)
            ),
        )

    async def _give_up_after(self, error: BaseException, lease: Lease, *, is_new: bool) -> None:
        """Undoes what `error` ended. Raises NotFound where that is what the caller is to be told instead of it."""
        deletion = await asyncio.shield(self._give_up(lease, is_new=is_new))
        if deletion is not None and isinstance(error, SpecdecError):
            raise deletion from error

    async def _give_up(self, lease: Lease, *, is_new: bool) -> NotFound | None:
        try:
            await self._removal.after_failure(lease, is_useless=is_new)
            await self._store.release(lease, left=lease.was_left)
        except NotFound as deletion:
            return deletion
        except SpecdecError as error:
            _log.warning("undoing an admission on session %s failed: %s", lease.session_id, error)
        return None


def _is_unchanged(fresh: SessionRecord, record: SessionRecord | None, held: TokenIds) -> bool:
    """Whether a session is still what a prompt was made for: its last request, and the tokens it held."""
    return fresh.request == (record.request if record else None) and fresh.num_tokens == len(held)
