"""Prepares the turn that a generation runs: takes the lease, and writes the new prompt or reads the unfinished turn.

A new turn's prompt is encoded by `text/prompt`, its session is leased by `lease_keeper`, and its request is written as
`request_log` encodes it. `generation_service` decides whether a request starts or resumes a turn; the prepared turn
goes to `generation_factory`.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from coordinator.generation.removal import SessionRemoval
from coordinator.generation.request_log import (
    LoggedRequest,
    check_expected,
    check_held,
    check_known,
    check_left,
    check_sealed,
    decode_parameters,
    encode_stats,
    read_logged_request,
    record_of,
)
from coordinator.generation.session_leases import Leases
from coordinator.generation.turn import PreparedTurn, Turn
from coordinator.replicas.pool import ReplicaPools
from coordinator.replicas.prefixes import Prefixes
from coordinator.replicas.target_models import TargetModels
from coordinator.replicas.target_wait import wait_for_any_target
from coordinator.requests import GenerationIdentity, GenerationRequest, RequestParameters, RequestStats
from coordinator.round.session_tokens import SessionTokens
from coordinator.text.output import OutputWriter
from coordinator.text.output_parts import parts_of
from coordinator.text.prompt import Prompt, encode_prompt, resolve_sampling
from coordinator.text.text_process import in_thread
from coordinator.text.tokenizer import ServedTokenizer
from specdec.contract.errors import InvalidRequest, NotFound, SessionBusy, SessionLost, SpecdecError
from specdec.contract.payer import Payer
from specdec.contract.tenant import SessionKey
from specdec.contract.types import SamplingParams, TokenIds
from specdec.observability.series import served_name
from specdec.state.store import Lease, SessionRecord, SessionStore

_log = logging.getLogger(__name__)


class TargetChoice(NamedTuple):
    """The target model of a turn."""

    fingerprint: str
    adapter: str
    """Name of its adapter; "" for none."""
    is_changed: bool
    """True if the session's previous turn used another target model."""


class TurnPreparer:
    """Prepares turns. A session is used by one admission at a time.

    Preparing that fails or is cancelled leaves no lease behind, and no session that was created for the request.
    """

    def __init__(
        self,
        store: SessionStore,
        leases: Leases,
        pools: ReplicaPools,
        target_models: TargetModels,
        tokenizer: ServedTokenizer,
        removal: SessionRemoval,
        prefixes: Prefixes,
        *,
        routes_drafts: bool,
    ) -> None:
        """
        Args:
            store: session store of all tenants.
            leases: takes the leases of sessions.
            pools: replicas, for the limits of prompts.
            target_models: chooses the target model of a turn.
            tokenizer: tokenizer of the target model.
            removal: removes sessions that were created for a request that fails.
            prefixes: finds the replicas that hold a session's first tokens.
            routes_drafts: a request that names no draft pool is routed among the draft models while it runs.
        """
        self._store = store
        self._leases = leases
        self._pools = pools
        self._target_models = target_models
        self._tokenizer = tokenizer
        self._removal = removal
        self._prefixes = prefixes
        self._routes_drafts = routes_drafts

    async def of_new_turn(
        self,
        record: SessionRecord | None,
        request: GenerationRequest,
        began: float,
        begin_tokens: Callable[[int, int], None],
    ) -> PreparedTurn:
        """Prepare a new turn: take the lease and write the prompt into the log.

        Args:
            record: record of the session as just loaded; None if the session does not exist.
            request: a request with a session id.
            began: `time.perf_counter()` at admission.
            begin_tokens: called with the numbers of prompt tokens and of output tokens at most; raises an error if
                they are more than the tenant may have.

        Raises:
            InvalidRequest: CONTEXT_TOO_LONG, NO_CHAT_TEMPLATE, an empty input, or the adapter of another session.
            NotFound: the draft pool or the adapter does not exist (POOL_NOT_FOUND, MODEL_NOT_FOUND), or the session
                was deleted in the meantime.
            ResourceExhausted: what `begin_tokens` raises (QUOTA_EXCEEDED).
            SessionBusy: another coordinator has changed the session in the meantime.
            SessionLost: the session does not hold what the caller expects, or not what was committed.
            Unavailable: no target replica or no store can be reached.
        """
        key, session_id = request.key, request.session_id
        store = self._store.of_tenant(key.tenant)
        await wait_for_any_target(self._pools)
        draft_pool = self._pools.route_draft(request.speculation.draft_pool, is_settled=not self._routes_drafts)
        last = _last_parameters(record)
        adapter = _adapter_of(request, last)
        fingerprint = self._target_models.choose(request.session_id, _fingerprint_of(last), adapter)
        held = np.empty(0, np.uint32)
        if record is not None:
            held = (await store.read_tokens(session_id))[: record.num_tokens]
            check_sealed(record, held.tolist())
            check_known(session_id, held.tolist(), self._tokenizer.vocabulary_size)
        check_expected(request.expected_session_tokens, session_id, len(held) if record else None)
        check_left(request, record)
        max_context_tokens = self._pools.max_context_tokens
        prompt = await in_thread(encode_prompt, request, held, self._tokenizer, max_context_tokens)
        sampling = resolve_sampling(request, prompt, max_context_tokens)
        begin_tokens(prompt.num_tokens, sampling.max_new_tokens)
        target = TargetChoice(fingerprint, adapter, last is not None and last.target_fingerprint != fingerprint)
        identity = self._identity(record, request, sampling, draft_pool, prompt, target)
        token_ids = [*held[: prompt.keep].tolist(), *prompt.new_token_ids.tolist()]
        tokens = SessionTokens(token_ids)

        # Sent in the same turn of the event loop as the lease's call, so that both take one round trip.
        of_adapter = identity.parameters.adapter_fingerprint
        looking_up = self._prefixes.look_up(key.tenant, len(tokens), tokens.prefix_hash, of_adapter)
        lease = await self._leases.acquire(key, create=record is None or record.request is None)
        is_new = False
        try:
            fresh = await store.load(session_id)
            # Another coordinator may have created, used and left the session since `record` was loaded.
            is_new = fresh is not None and fresh.request is None
            if fresh is None or not _is_unchanged(fresh, record, held):
                raise SessionBusy(f"session {session_id} has just been changed by another request")
            await self._store.begin_request(
                lease, record_of(identity), keep=prompt.keep, token_ids=prompt.new_token_ids
            )
            before = () if identity.parameters.is_chat else token_ids
            parts = parts_of(identity, self._tokenizer)
            eos_token_ids = self._pools.model_info(fingerprint).eos_token_ids
            writer = OutputWriter(self._tokenizer, sampling, eos_token_ids, before, parts)
            return PreparedTurn(
                Turn(identity, lease, tokens, writer, fresh.round_id),
                stats=RequestStats(),
                began=began,
                agreed_len=prompt.keep,
                is_new_session=is_new,
                kv_locations=fresh.locations,
                prefix_tokens=await self._prefixes.answer(looking_up),
            )
        except BaseException as error:
            await self._give_up_after(error, lease, is_new=is_new)
            raise

    async def of_unfinished_turn(
        self, key: SessionKey, request_id: str, num_held: int, began: float
    ) -> PreparedTurn | LoggedRequest:
        """Take over the session's last request. Wait as long as the lease of a dead owner may still live.

        Args:
            key: the session.
            request_id: id of its last request.
            num_held: number of output tokens that the caller already holds.
            began: `time.perf_counter()` at admission.

        Returns:
            The turn to continue; or the request as logged, if its owner has finished it in the meantime.

        Raises:
            SessionBusy: the owner of the session lives.
            InvalidRequest: its owner has finished the request with fewer tokens than the caller holds.
            SessionLost: the log is shorter than what the caller holds, or belongs to a later request.
            NotFound: the session is gone.
            Unavailable: no target replica or no store can be reached.
        """
        await wait_for_any_target(self._pools)
        lease = await self._leases.take_over(key)
        try:
            logged = await self.read_log(key, request_id)
            check_held(num_held, len(logged.output.token_ids), has_finished=logged.finish_reason is not None)
            if logged.finish_reason is not None:
                await self._store.release(lease)
                return logged
            identity = self._with_served_model(logged)
            request = replace(record_of(identity), stats_json=encode_stats(logged.stats))
            no_tokens = np.empty(0, np.uint32)
            await self._store.begin_request(lease, request, keep=len(logged.token_ids), token_ids=no_tokens)
            tokens = SessionTokens(logged.token_ids)
            of_adapter = identity.parameters.adapter_fingerprint
            looking_up = self._prefixes.look_up(key.tenant, len(tokens), tokens.prefix_hash, of_adapter)
            prefix_tokens = await self._prefixes.answer(looking_up)
        except BaseException as error:
            await self._give_up_after(error, lease, is_new=False)
            raise
        return PreparedTurn(
            Turn(identity, lease, tokens, logged.writer, logged.round_id),
            stats=logged.stats,
            began=began,
            agreed_len=len(logged.token_ids),
            replayed=logged.output,
            kv_locations=logged.kv_locations,
            prefix_tokens=prefix_tokens,
        )

    async def give_up(self, prepared: PreparedTurn) -> NotFound | None:
        """Undo a prepared turn that no generation starts from. Where the store cannot be reached, the lease expires.

        Returns:
            The error for the caller if the session was deleted in the meantime.
        """
        return await self._give_up(prepared.turn.lease, is_new=prepared.is_new_session)

    async def read_log(self, key: SessionKey, request_id: str) -> LoggedRequest:
        """Return a request from the log that was just seen to be the session's last one.

        Raises as `read_logged_request`, and SessionLost if the session's last request is now another one.
        """
        store = self._store.of_tenant(key.tenant)
        logged = await read_logged_request(
            store, key.session_id, self._tokenizer, lambda model: self._pools.model_info(model).eos_token_ids
        )
        if logged.identity.request_id != request_id:
            raise SessionLost(
                f"session {key.session_id} has gone on from request {request_id!r} to another one", field="request_id"
            )
        return logged

    def _identity(
        self,
        record: SessionRecord | None,
        request: GenerationRequest,
        sampling: SamplingParams,
        draft_pool: str,
        prompt: Prompt,
        target: TargetChoice,
    ) -> GenerationIdentity:
        last = record.request if record else None
        speculation = replace(request.speculation, draft_pool=draft_pool)
        return GenerationIdentity(
            session_id=request.session_id,
            request_id=request.request_id or f"r-{secrets.token_hex(12)}",
            digest=request.digest,
            turn=last.turn + 1 if last else 0,
            output_start=prompt.num_tokens,
            parameters=RequestParameters(
                sampling,
                speculation,
                target.fingerprint,
                target.is_changed,
                is_chat=request.messages is not None,
                constraint_warnings=request.constraint_warnings,
                output_form=request.output_form,
                adapter=target.adapter,
            ),
            payer=Payer(request.key_id, self._name_of(target.fingerprint, target.adapter)),
        )

    def _with_served_model(self, logged: LoggedRequest) -> GenerationIdentity:
        """Return the identity of a resumed request, moved to a served model if no token of it was shown yet.

        A request that has shown a token keeps its target model, also if that model is no longer served.
        """
        parameters = logged.identity.parameters
        if logged.output.token_ids or self._pools.serves(parameters.target_fingerprint):
            return logged.identity
        parameters = replace(
            parameters,
            target_fingerprint=self._target_models.choose(logged.identity.session_id, adapter=parameters.adapter),
            target_changed=logged.identity.turn > 0,
        )
        model = self._name_of(parameters.target_fingerprint, parameters.adapter)
        return replace(logged.identity, parameters=parameters, payer=logged.identity.payer._replace(model=model))

    def _name_of(self, fingerprint: str, adapter: str) -> str:
        """Return the name of a model in usage records: of its adapter, or the last part of its path."""
        return adapter or served_name(self._pools.model_info(fingerprint).model)

    async def _give_up_after(self, error: BaseException, lease: Lease, *, is_new: bool) -> None:
        """Undo what `error` interrupted. Raises NotFound instead of `error` if the session has been deleted."""
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
            _log.warning("undoing an admission failed: session=%s: %s", lease.session_id, error)
        return None


def _last_parameters(record: SessionRecord | None) -> RequestParameters | None:
    """Return the parameters of a session's last request; None if there is none."""
    if record is None or record.request is None:
        return None
    return decode_parameters(record.request.parameters_json)


def _fingerprint_of(last: RequestParameters | None) -> str:
    """Return the fingerprint of the model of a session's last request; "" if there is none."""
    return "" if last is None else last.target_fingerprint


def _adapter_of(request: GenerationRequest, last: RequestParameters | None) -> str:
    """Return the name of a turn's adapter: the session's, if it has one.

    Raises:
        InvalidRequest: the request names another one than the session has.
    """
    if last is None or request.adapter in (None, last.adapter):
        return (request.adapter or "") if last is None else last.adapter
    has, wants = (f"adapter {name!r}" if name else "no adapter" for name in (last.adapter, request.adapter))
    raise InvalidRequest(
        f"adapter: session {request.session_id} runs with {has}, the request asks for {wants}; begin another session",
        field="adapter",
    )


def _is_unchanged(fresh: SessionRecord, record: SessionRecord | None, held: TokenIds) -> bool:
    """Return whether a session still has the last request and the tokens that a prompt was encoded for."""
    return fresh.request == (record.request if record else None) and fresh.num_tokens == len(held)
