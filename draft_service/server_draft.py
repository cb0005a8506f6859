"""A draft replica in front of an OpenAI-style server of completions: its greedy tokens are the draft.

A draft token of such a server is a distribution with one token, since the server does not state the others. Rejection
sampling with it is exact for every sampler: the token is accepted with the target's probability of it. The most
probable token is therefore the best draft at any temperature. Called by the draft service's servicer.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import cast

import numpy as np

from specdec.contract.engine_api import EngineInfo
from specdec.contract.errors import InvalidRequest, Unsupported
from specdec.contract.types import BLOCK_TOKENS, Proposal, ProposeRequest, Score, ScoreRequest, Support, TokenIds
from specdec.contract.version import __version__
from specdec.engine.remote.completions import CompletionServer, open_completions
from specdec.engine.remote.http_connection import open_remote
from specdec.engine.remote.remote_replica import NUM_BLOCKS, RemoteJob, RemoteReplica
from specdec.engine.sessions.calls import Call, identity_of
from specdec.observability.engine_metrics import EngineMetrics
from specdec.settings.draft import DraftSettings

_GREEDY = {"temperature": 0.0, "ignore_eos": True}
_WEIGHT = np.ones(1, dtype=np.uint16)
_NO_TOKENS: TokenIds = np.empty(0, dtype=np.uint32)


class ServerDraft(RemoteReplica[Proposal]):
    """A `specdec.contract.engine_api.DraftEngine` in front of a server. Use from one event loop."""

    def __init__(
        self, server: CompletionServer, settings: DraftSettings, replica_id: str, metrics: EngineMetrics
    ) -> None:
        """`metrics` receives every answered call as a step."""
        super().__init__(
            EngineInfo(
                version=__version__,
                role="draft",
                pool=settings.pool,
                replica_id=replica_id,
                model=settings.model,
                model_fingerprint=server.model.fingerprint,
                vocabulary_fingerprint=server.files.vocabulary_fingerprint,
                vocabulary_size=server.files.vocabulary_size,
                max_context_tokens=server.max_context_tokens,
                eos_token_ids=server.files.eos_token_ids,
                max_gamma=settings.max_gamma,
                num_kv_blocks=NUM_BLOCKS,
                kv_block_tokens=BLOCK_TOKENS,
                kv_usage=0.0,
                num_sessions=0,
                draining=False,
                dtype="engine",
                device=f"server {server.model.connection.url}",
                shadow=settings.shadow == "on",
                backend="server",
            )
        )
        self._server = server
        self._metrics = metrics

    async def propose(self, request: ProposeRequest) -> Proposal:
        """Draft up to gamma tokens; see `DraftEngine.propose`.

        Raises:
            InvalidRequest: the session fills the context; nothing of the request is stored.
        """
        position = request.position
        if position.committed_len >= self._info.max_context_tokens:
            raise InvalidRequest(
                f"{position.committed_len} tokens, the context is {self._info.max_context_tokens}",
                reason="CONTEXT_TOO_LONG",
                field="round.token_ids",
            )
        call = Call(
            request,
            identity_of(request),
            _NO_TOKENS,
            num_logit_rows=1,
            max_kv_len=position.committed_len + request.gamma - 1,
        )
        return cast(Proposal, await self._gate.call(call))

    async def score(self, request: ScoreRequest) -> Score:
        """Raise Unsupported: the server does not state probabilities of given tokens."""
        raise Unsupported("a draft of a server cannot score tokens")

    async def _ask(self, job: RemoteJob) -> Proposal:
        request, began_s = cast(ProposeRequest, job.call.request), time.monotonic()
        committed = job.sequence.token_ids.tolist()
        gamma = min(request.gamma, self._info.max_context_tokens - len(committed))
        (answer,) = await self._server.complete([committed], _GREEDY, max_tokens=gamma)
        drafted = [token_id for token_id in answer[:gamma] if token_id < self._info.vocabulary_size]
        token_ids = np.array(drafted, dtype=np.uint32)
        forward_s = time.monotonic() - began_s
        self._metrics.observe_queue(max(0.0, began_s - job.arrival_s))
        self._metrics.observe_step(num_sequences=1, num_tokens=len(token_ids), seconds=forward_s)
        job.sequence.append(token_ids[:-1])
        supports = [Support(token_ids[index : index + 1], _WEIGHT) for index in range(len(token_ids))]
        carries = request.position.carries_distributions
        return Proposal(
            draft_token_ids=token_ids,
            supports=supports if carries else (),
            lost_mass=(0.0,) * len(token_ids) if carries else (),
            kv_len=0,
            num_cached_tokens=job.num_cached_tokens,
            forward_s=forward_s,
        )

    async def _wait_changed(self) -> None:
        await self._server.model.wait_changed()

    async def _close_engine(self) -> None:
        await self._server.model.connection.close()


async def open_server_draft(
    settings: DraftSettings, replica_id: str, metrics: EngineMetrics, environ: Mapping[str, str]
) -> ServerDraft:
    """Connect to the server that the settings name, check it, and return a draft replica in front of it.

    Raises:
        InvalidRequest: a setting does not fit the server; the message names the flag to change.
        Unavailable: the server cannot be reached.
    """
    server = await open_remote(settings, environ, open_completions)
    return ServerDraft(server, settings, replica_id, metrics)
