"""A target and drafts that speak other tokens, behind real services in one process. Called by tests of such drafts."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from draft_service.cross_vocabulary.translating_proposer import CrossVocabularyProposer
from draft_service.proposer import DraftOptions
from specdec.checkpoints.cross_vocabulary.pair import TokenizerPair
from specdec.contract.types import Proposal, ProposeRequest
from specdec.engine.base import StepObserver, Worker
from specdec.engine.loader import load_worker
from specdec.engine.loop.replica_engine import ReplicaOptions
from specdec.engine.options import LoadRequest
from specdec.structured.known_constraints import KnownConstraints
from target_service.verifier import Verifier
from tests.support.model_stack import ModelStack
from tests.support.other_tokenizers import load_pair


@dataclass
class CrossVocabulary:
    """The services, and every draft that was proposed."""

    stack: ModelStack
    proposals: list[Proposal] = field(default_factory=list)

    @property
    def num_drawn(self) -> int:
        """Draft tokens with a distribution of more than one token."""
        return sum(len(support.token_ids) > 1 for proposal in self.proposals for support in proposal.supports)

    @property
    def num_point_masses(self) -> int:
        """Draft tokens that are point masses, as those of drafted text are."""
        return sum(len(support.token_ids) == 1 for proposal in self.proposals for support in proposal.supports)


def load(checkpoint: Path, num_kv_blocks: int = 256) -> Worker:
    return load_worker(
        LoadRequest(str(checkpoint), device="cpu", dtype="float32", num_kv_blocks=num_kv_blocks, num_threads=1)
    )


@asynccontextmanager
async def cross_vocabulary_stack(
    target: Path,
    draft: Path,
    *,
    pair: TokenizerPair | None = None,
    proposer_type: type[CrossVocabularyProposer] = CrossVocabularyProposer,
    masks_drafts: bool = True,
    **options: Any,
) -> AsyncIterator[CrossVocabulary]:
    """Runs them. The target follows constraints.

    Args:
        target: a checkpoint.
        draft: another one, with another tokenizer.
        pair: their tokenizers.
        proposer_type: what negative controls replace.
        masks_drafts: whether drafts follow constraints, too.
        options: of `ModelStack`.
    """
    pair = pair or load_pair(draft, target)
    proposals: list[Proposal] = []
    of_target = load(target)
    ends, num_tokens = of_target.shape.eos_token_ids, of_target.shape.vocabulary_size
    of_drafts = KnownConstraints(str(target), ends, pair.target_size, is_authority=False) if masks_drafts else None

    class Noted(proposer_type):  # type: ignore[misc, valid-type]
        def __init__(
            self, worker: Worker, options: ReplicaOptions, drafting: DraftOptions, *, observer: StepObserver
        ) -> None:
            super().__init__(worker, pair, options, drafting, observer=observer, constraints=of_drafts)

        async def propose(self, request: ProposeRequest) -> Proposal:
            proposals.append(await super().propose(request))
            return proposals[-1]

    verifier_type = partial(Verifier, constraints=KnownConstraints(str(target), ends, num_tokens))
    stack = ModelStack(
        target, of_target, {"default": load(draft)}, proposer_type=Noted, verifier_type=verifier_type, **options
    )
    async with stack:
        yield CrossVocabulary(stack, proposals)
