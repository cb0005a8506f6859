"""The engine of a draft replica with another tokenizer than its target (`--for-tokenizer`).

    propose ─▶ the session in draft-vocabulary tokens ─▶ a call in them ─▶ draft tokens of the target
               (sessions)                                                (drafting)

Callers send and receive the target's ids alone, and `info` shows the target's vocabulary. KV, blocks and the cold tier
use draft-vocabulary tokens alone. Pre-drafting is refused with this engine.
"""

from __future__ import annotations

import hashlib
from dataclasses import replace
from itertools import count

import numpy as np
import torch

from draft_service.cross_vocabulary.translated_sessions import CrossVocabularySessions
from draft_service.cross_vocabulary.translating_program import CrossVocabularyProgram, CrossVocabularyRequest
from draft_service.drafting import DraftProgram
from draft_service.proposer import DraftOptions, no_draft
from specdec.checkpoints.cross_vocabulary.pair import TokenizerPair
from specdec.contract.constraint import Constraint
from specdec.contract.engine_api import EngineInfo
from specdec.contract.errors import InvalidRequest
from specdec.contract.types import (
    SCORED_GAMMA,
    Proposal,
    ProposeRequest,
    SamplingFilters,
    Score,
    ScoreRequest,
    SessionPosition,
    TokenIds,
)
from specdec.core.sparse import default_s_max
from specdec.engine.base import StepObserver, Worker
from specdec.engine.loop.replica_engine import LOCAL_REPLICA, ReplicaEngine, ReplicaOptions
from specdec.engine.sessions.calls import Call, identity_of
from specdec.structured.known_constraints import KnownConstraints

_NO_TOKENS = np.empty(0, dtype=np.uint32)


class CrossVocabularyProposer(ReplicaEngine):
    """The draft service's engine (`DraftEngine`) on a worker with another vocabulary than the target's."""

    role = "draft"

    def __init__(
        self,
        worker: Worker,
        pair: TokenizerPair,
        options: ReplicaOptions = LOCAL_REPLICA,
        drafting: DraftOptions | None = None,
        *,
        observer: StepObserver | None = None,
        constraints: KnownConstraints | None = None,
    ) -> None:
        """Start the device thread, which alone uses `worker` from now on.

        Args:
            worker: the draft model.
            pair: its tokenizer beside the target's.
            options: identity and limits.
            drafting: limits of supports.
            observer: receives every step.
            constraints: constraints on the target's tokens, by which q is masked; None: q ignores them.
        """
        shape, drafting = worker.shape, drafting or DraftOptions()
        tokens = pair.tokens.of_model(shape.vocabulary_size, shape.eos_token_ids, pair.target_end_id)
        pair = replace(pair, tokens=tokens)
        s_max = default_s_max(pair.target_size) if drafting.max_support is None else drafting.max_support
        program = DraftProgram(s_max=s_max, coverage=drafting.support_coverage, num_tokens=pair.target_size)
        device = torch.device(shape.device)
        super().__init__(
            worker,
            CrossVocabularyProgram(program, pair, device),
            options,
            observer=observer,
            constraints=constraints,
        )
        self._pair = pair
        self._sessions = CrossVocabularySessions(pair)
        self._score_ids = count()
        self._model_fingerprint = hashlib.blake2b(
            f"{shape.model_fingerprint} {pair.target_fingerprint}".encode(), digest_size=16
        ).hexdigest()

    def info(self) -> EngineInfo:
        """Return the identity of this replica, with the target's vocabulary."""
        target_of = self._pair.tokens.target_of
        ends = {
            int(target_of[draft_vocab_id])
            for draft_vocab_id in self._shape.eos_token_ids
            if draft_vocab_id < len(target_of)
        } - {-1}
        return replace(
            super().info(),
            model_fingerprint=self._model_fingerprint,
            vocabulary_fingerprint=self._pair.target_fingerprint,
            vocabulary_size=self._pair.target_size,
            eos_token_ids=tuple(sorted(ends)),
        )

    async def propose(self, request: ProposeRequest) -> Proposal:
        """Draft up to gamma tokens of the target; see `DraftEngine.propose`.

        The draft is shorter if the draft model's context ends, after an end token, or if drafted text gives fewer.
        """
        position = request.position
        constraint = await self._constraint_of(position)
        translated = await self._sessions.align(position)
        num_own = len(translated.draft_vocab_ids)
        room = self._shape.max_context_tokens - num_own
        # A tokenizer may have tokens without a row in its model.
        if room <= 0 or num_own == 0 or translated.draft_vocab_ids.max() >= self._shape.vocabulary_size:
            return no_draft(kv_len=position.committed_len)
        gamma = min(request.gamma, room)
        max_steps = min(2 * gamma + 1, room)  # drafted text may need more draft-vocabulary tokens than it gives
        own_position = replace(position, start=0, prefix_hash=b"", token_ids=translated.draft_vocab_ids)
        own_request = CrossVocabularyRequest(own_position, gamma, replace(request, gamma=gamma), translated, max_steps)
        call = Call(
            request=own_request,
            identity=identity_of(request),
            draft_token_ids=_NO_TOKENS,
            num_logit_rows=1,
            max_kv_len=num_own + max_steps - 1,  # the last one does not run
            constraint=constraint,
        )
        proposal: Proposal = await self._engine_loop.call(call)
        return proposal

    async def score(self, request: ScoreRequest) -> Score:
        """Draft rounds along the committed tokens, each where the previous one would have ended; see
        `DraftEngine.score`."""
        position = request.position
        constraint = await self._constraint_of(position)
        token_ids = np.concatenate([position.token_ids, request.token_ids])
        # A private session, so that the scored one keeps its KV. Braces: no caller can have such an id.
        own = replace(position, session_id=f"{{score-{next(self._score_ids)}}}")
        rounds: list[Score] = []
        num_scored = 0
        try:
            while num_scored < len(request.token_ids):
                first = position.committed_len + num_scored
                round_position = replace(own, round_id=num_scored, token_ids=token_ids[:first])
                scored_ids = token_ids[first : first + SCORED_GAMMA]
                rounds.append(await self._score_round(round_position, scored_ids, constraint))
                num_scored += len(rounds[-1].q)
        finally:
            self._sessions.release([own.session_id])
        return Score(
            q=tuple(q for scored in rounds for q in scored.q),
            forward_s=rounds[0].forward_s,
            step_s=self._engine_loop.usual_step_s(len(token_ids)),
        )

    async def _score_round(
        self, position: SessionPosition, token_ids: TokenIds, constraint: Constraint | None
    ) -> Score:
        """Score the first tokens, up to one that the round would certainly not have passed."""
        translated = await self._sessions.align(position)
        num_own, num_tokens = len(translated.draft_vocab_ids), len(token_ids)
        max_steps = 2 * num_tokens + 1
        if num_own + max_steps > self._shape.max_context_tokens:
            raise InvalidRequest(
                f"{num_own} of the draft's own tokens, its context is {self._shape.max_context_tokens}",
                reason="CONTEXT_TOO_LONG",
                field="round.token_ids",
            )
        if num_own == 0 or translated.draft_vocab_ids.max() >= self._shape.vocabulary_size:
            return Score((0.0,), forward_s=0.0)  # it would draft nothing
        own_position = replace(position, start=0, prefix_hash=b"", token_ids=translated.draft_vocab_ids)
        target_request = ScoreRequest(position, token_ids)
        call = Call(
            request=CrossVocabularyRequest(own_position, num_tokens, target_request, translated, max_steps),
            identity=(),  # this call is never repeated
            draft_token_ids=_NO_TOKENS,
            num_logit_rows=1,
            max_kv_len=num_own + max_steps - 1,
            constraint=constraint,
            preemptible=True,
        )
        score: Score = await self._engine_loop.call(call)
        return score

    async def release(self, session_ids: list[str]) -> None:
        """Forget sessions and free their KV. Idempotent; unknown ids are ignored."""
        self._sessions.release(session_ids)
        await super().release(session_ids)

    async def warm_up(self) -> None:
        """Draft in a session that is then forgotten, so that the first real call runs warm code."""
        for round_id, temperature in enumerate((0.0, 1.0)):
            position = self._of_text(self._warm_up_round(round_id, SamplingFilters(temperature=temperature)))
            await self.propose(ProposeRequest(position, gamma=min(2, self._options.max_gamma)))
        for prompt in self._warm_up_prompts():
            await self.propose(ProposeRequest(self._of_text(prompt), gamma=1))
        await self._release_warm_up()

    def _of_text(self, position: SessionPosition) -> SessionPosition:
        """Return the session position with as many tokens that are text."""
        text = np.flatnonzero(self._pair.tokens.draft_vocab_of >= 0).astype(np.uint32)
        return replace(position, token_ids=np.resize(text[:16], len(position.token_ids)))
