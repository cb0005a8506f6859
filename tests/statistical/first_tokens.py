"""Running systems, and the comparison of their first sampled tokens with the target's own joint distribution.

A system is made of real services. Its target answers for few tokens, or for few that are likely, so that the joint
distribution of three can be computed from logits that the target gives alone: those of Hugging Face, of the engine
without services if weights or arithmetic are rounded, of the table model, or of the other engine.
`test_first_tokens.py` declares the rows that are compared.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from draft_service.cross_vocabulary.translating_proposer import CrossVocabularyProposer
from draft_service.proposer import Proposer
from specdec.client import AsyncClient, Completion
from specdec.contract.types import SamplingFilters
from specdec.core.reference import filtered_distribution
from specdec.engine.base import Worker
from specdec.engine.loader import load_worker
from specdec.engine.options import CompileOptions, LoadRequest
from specdec.settings.draft_specs import LocalDraftSpec
from target_service.verifier import Verifier
from tests.support.cross_vocabulary_rig import cross_vocabulary_stack
from tests.support.expectation import chi_square_p_value
from tests.support.head_checkpoints import (
    as_speculators,
    eagle3_config,
    eagle3_tensors,
    medusa_tensors,
    write_eagle3,
    write_medusa,
)
from tests.support.model_stack import ModelStack
from tests.support.mtp_checkpoints import build_mtp_checkpoint
from tests.support.other_tokenizers import build_model, save_byte_level_vocabulary, save_piece_vocabulary
from tests.support.target_alone import TargetAlone
from tests.support.tiny_models import build_tiny_model, build_tiny_pair, save_tokenizer

Tokens = tuple[int, ...]
LogitsAfter = Callable[[Sequence[int]], np.ndarray]

NUM_TOKENS = 3
GAMMA = 2
VOCABULARY = 6
NUM_LAYERS = 3
#: A block and one token: every session but the first finds the block, so a target drafts from its first round on.
PROMPT = (2, 3, 4, 5, 3, 2, 5, 4, 4, 3, 2, 5, 5, 2, 3, 4, 3)
#: Outcomes that are expected less often are counted as one.
LEAST_EXPECTED = 5.0

HEADS = ("medusa", "eagle3", "mtp")
#: A target and a draft with recurrent layers.
HYBRID = "model, hybrid"
#: Tokens of drafts whose tokenizer is not the target's: all in common with it, or some that are drafted as text.
OTHER_TOKENS = {
    "other tokenizer": ["<|end|>", "Ġ", "a", "Ã©", "Ġa", "aÃ©"],
    "other tokenizer, as text": ["<|end|>", "Ġ", "a", "Ã", "©", "Ã©", "Ġa", "aa"],
}


@dataclass(frozen=True)
class Row:
    """What is served, and how its tokens are sampled."""

    draft: str
    backend: str
    """Backend of the target: a way in which our own engine computes, or the name of another engine."""
    mode: str
    sampling: dict[str, Any] = field(hash=False)
    num_samples: int
    false_alarm_rate: float = 1e-6
    """Probability that another choice of seeds fails the row of a correct system. Seeds are fixed."""

    def __str__(self) -> str:
        sampling = ",".join(f"{name}={value}" for name, value in self.sampling.items())
        return f"{self.draft}-{self.backend}-{self.mode}-{sampling}-{self.num_samples}"


@dataclass(frozen=True)
class System:
    """A system that runs, and what its models compute alone."""

    client: AsyncClient
    logits_after: LogitsAfter
    """float32 [V] that the target gives after tokens."""
    draft_logits_after: LogitsAfter | None = None
    prompt: Sequence[int] = PROMPT
    num_at_once: int = 64
    num_of_kind: Callable[[], float] | None = None
    """Number of drafts of the kind that the row is about, if others are used as well."""
    least_of_kind: float = GAMMA
    """Number of such drafts for each output, or of draft tokens, below which a row would prove nothing."""


class JointDistribution:
    """The distribution of the first tokens after a prompt, computed where it is asked for."""

    def __init__(self, logits_after: LogitsAfter, prompt: Sequence[int], sampling: dict[str, Any]) -> None:
        self._logits_after, self._prompt, self._filters = logits_after, list(prompt), SamplingFilters(**sampling)
        self._distributions: dict[Tokens, np.ndarray] = {}

    def after(self, tokens: Tokens) -> np.ndarray:
        """float64 [V]: the distribution of the token after the prompt and `tokens`."""
        if tokens not in self._distributions:
            prefix = [*self._prompt, *tokens]
            logits = self._logits_after(prefix)
            self._distributions[tokens] = filtered_distribution(logits, self._filters, prefix, len(self._prompt))
        return self._distributions[tokens]

    def probability(self, tokens: Tokens) -> float:
        return float(np.prod([self.after(tokens[:index])[token_id] for index, token_id in enumerate(tokens)]))

    def outcomes(self, least: float) -> dict[Tokens, float]:
        """Return every outcome that has at least this probability."""
        reached: dict[Tokens, float] = {(): 1.0}
        for _ in range(NUM_TOKENS):
            reached = {
                (*tokens, int(token_id)): mass * float(distribution[token_id])
                for tokens, mass in reached.items()
                for distribution in [self.after(tokens)]
                for token_id in np.flatnonzero(mass * distribution >= least)
            }
        return reached


def p_value(counts: Counter[Tokens], joint: JointDistribution) -> float:
    """Return the p-value of a chi-square test: 0 for an excluded outcome, 1 if there is only one outcome."""
    if any(joint.probability(outcome) == 0.0 for outcome in counts):
        return 0.0
    common = joint.outcomes(LEAST_EXPECTED / counts.total())
    observed = [*(counts[outcome] for outcome in common), 0]
    expected = [*(mass * counts.total() for mass in common.values()), 0.0]
    observed[-1], expected[-1] = counts.total() - sum(observed), counts.total() - sum(expected)
    if expected[-1] < LEAST_EXPECTED:
        observed[-2:], expected[-2:] = [sum(observed[-2:])], [sum(expected[-2:])]
    return chi_square_p_value(observed, expected) if len(expected) > 1 else 1.0


async def sample(system: System, row: Row) -> Counter[Tokens]:
    """Return the first tokens of many seeds, counted; fail if the drafts of the row had too small a part in them."""
    gate = asyncio.Semaphore(system.num_at_once)

    async def draw(seed: int) -> Completion:
        async with gate:
            completion = await system.client.generate(
                prompt_token_ids=list(system.prompt), max_new_tokens=NUM_TOKENS, seed=seed, ignore_eos=True,
                gamma=GAMMA, mode=row.mode, **row.sampling,
            )  # fmt: skip
            await system.client.delete_session(completion.session_id)
            return completion

    await draw(0)
    completions = await asyncio.gather(*(draw(seed) for seed in range(row.num_samples)))
    num_drafted = sum(completion.stats.num_draft_tokens for completion in completions)
    num_of_kind = system.num_of_kind() if system.num_of_kind else num_drafted
    print(f"{row}: {num_drafted} draft tokens, {num_of_kind:.0f} of the kind")
    if row.mode == "off":
        assert num_drafted == 0
    else:
        assert num_of_kind >= system.least_of_kind * row.num_samples
    return Counter(completion.token_ids for completion in completions)


# ---- systems -----------------------------------------------------------------------------------------------------


def serve(row: Row, fixture: Callable[[str], Any], fault: type | None = None) -> AbstractAsyncContextManager[System]:
    """Run a row's system.

    Args:
        row: what is served.
        fixture: gives a fixture of the test by its name: checkpoints, redis_url or vllm.
        fault: class that a negative control puts in the place of the draft's engine, or the target's if it drafts.
    """
    if row.backend == "table over networks that cut":
        return _table_over_cut_networks()
    if row.backend in ("server", "vllm"):
        return _table_backend(row.backend)
    if row.backend == "real llama-cpp":
        return _real_llama(fixture("tmp_path"))
    if row.backend.startswith("real "):
        return _real_vllm(row.backend.removeprefix("real "), fixture("vllm"))
    folder: Path = fixture("checkpoints")(row.draft)
    if row.draft in OTHER_TOKENS:
        return _other_tokenizer(row, folder, fault or CrossVocabularyProposer)
    if row.draft.startswith("model"):
        return _draft_model(row, folder, fixture("redis_url"), fault or Proposer)
    return _drafting_target(row, folder, fault or Verifier)


def build(draft: str, folder: Path) -> None:
    """Write the checkpoints of a kind of draft: the target and what drafts for it, unless that is in the target."""
    sizes: dict[str, Any] = {"vocabulary_size": VOCABULARY, "logit_spread": 1.5}
    if draft in OTHER_TOKENS:
        _build_other_tokenizer(OTHER_TOKENS[draft], folder)
    elif draft.startswith("model"):
        build_tiny_pair("qwen3_5" if draft == HYBRID else "llama", folder, perturb=0.15, **sizes)
    elif draft in HEADS:
        build_target_with_head(draft, folder, VOCABULARY, VOCABULARY - 2)
    else:
        build_tiny_model("llama", folder / "target", num_layers=NUM_LAYERS, **sizes)


def build_target_with_head(kind: str, folder: Path, vocabulary_size: int, num_draft_tokens: int) -> None:
    """Write a target and a head of random weights, unless the target's own checkpoint has one.

    An EAGLE-3 head has a smaller vocabulary, of `num_draft_tokens`.
    """
    if kind == "mtp":
        build_mtp_checkpoint("mellum", folder / "target", vocab_size=vocabulary_size)
        save_tokenizer(folder / "target", vocabulary_size)
        return
    build_tiny_model(
        "llama", folder / "target", vocabulary_size=vocabulary_size, logit_spread=1.5, num_layers=NUM_LAYERS
    )
    width = 64
    if kind == "medusa":
        write_medusa(folder / "head", medusa_tensors(width, vocabulary_size))
    else:
        config = eagle3_config(width, vocabulary_size, num_draft_tokens)
        write_eagle3(folder / "head", as_speculators(config, [1, 2, 3]), eagle3_tensors(config))


def local_draft(kind: str, folder: Path) -> LocalDraftSpec:
    """Return what a target is started with to draft by itself, with checkpoints of `build`."""
    if kind == "early exit":
        return LocalDraftSpec("early-exit", "early-exit", NUM_LAYERS - 1)
    return LocalDraftSpec(kind, kind, path="" if kind == "mtp" else str(folder / "head"))


def load(checkpoint: Path, backend: str = "auto", local_drafts: tuple[LocalDraftSpec, ...] = ()) -> Worker:
    """Load a checkpoint in float32, or in the arithmetic that the backend is named for."""
    dtype = backend if backend in ("int8", "bfloat16") else "float32"
    compiling = CompileOptions(backend if backend in ("native", "eager") else "auto")
    return load_worker(
        LoadRequest(
            str(checkpoint), device="cpu", dtype=dtype, num_kv_blocks=512, num_threads=1, compiling=compiling,
            local_drafts=local_drafts,
        )
    )  # fmt: skip


def _build_other_tokenizer(tokens: list[str], folder: Path) -> None:
    pieces = ["<unk>", "</s>", "▁", "a", "é", "▁a", "aé"]
    save_piece_vocabulary(folder / "pieces", pieces, [("▁", "a"), ("a", "é")])
    build_model(folder / "pieces", folder / "target", logit_spread=1.0)
    merges = [("Ġ", "a"), *((("Ã", "©"), ("a", "a")) if "aa" in tokens else ())]
    save_byte_level_vocabulary(folder / "bytes", tokens, merges)
    build_model(folder / "bytes", folder / "draft", logit_spread=1.0, seed=5)


def _alone(checkpoint: Path, backend: str = "auto") -> LogitsAfter:
    alone = TargetAlone(checkpoint, backend if backend in ("int8", "bfloat16") else "float32")
    return lambda token_ids: alone.logits(token_ids)[-1]


@asynccontextmanager
async def _draft_model(row: Row, folder: Path, redis_url: str, proposer_type: type[Proposer]) -> AsyncIterator[System]:
    target, draft = folder / "target", folder / "draft"
    is_ahead = row.draft == "model, ahead"
    async with ModelStack(
        target, load(target, row.backend), {"default": load(draft, row.backend)}, redis_url=redis_url,
        proposer_type=proposer_type, predrafting=("default",) if is_ahead else (), patience=GAMMA + 1,
    ) as stack:  # fmt: skip
        hits = partial(stack.num_predrafted, "default", "hit", "extended")
        yield System(
            stack.client, _alone(target, row.backend), _alone(draft, row.backend), prompt=PROMPT[:4],
            # Few enough that the draft service drafts ahead for all of them, or that all have recurrent states.
            num_at_once=8 if is_ahead or row.draft == HYBRID else 64, num_of_kind=hits if is_ahead else None,
            least_of_kind=0.2 if is_ahead else GAMMA,
        )  # fmt: skip


@asynccontextmanager
async def _drafting_target(row: Row, folder: Path, verifier_type: type[Verifier]) -> AsyncIterator[System]:
    target = folder / "target"
    worker = load(target, row.backend, (local_draft(row.draft, folder),))
    async with ModelStack(target, worker, {}, verifier_type=verifier_type) as stack:
        yield System(stack.client, _alone(target))


@asynccontextmanager
async def _other_tokenizer(
    row: Row, folder: Path, proposer_type: type[CrossVocabularyProposer]
) -> AsyncIterator[System]:
    async with cross_vocabulary_stack(folder / "target", folder / "draft", proposer_type=proposer_type) as run:
        kind = "num_point_masses" if row.draft.endswith("as text") else "num_drawn"
        # After the first four tokens, much of what a draft would say is outside of what both have.
        yield System(
            run.stack.client,
            _alone(folder / "target"),
            prompt=PROMPT[:4],
            num_of_kind=None if row.mode == "coupled" else lambda: getattr(run, kind),
            least_of_kind=0.25,
        )


@asynccontextmanager
async def _table_backend(backend: str) -> AsyncIterator[System]:
    from tests.support.backend_rig import backend_system, table_model

    async with backend_system(backend) as running, AsyncClient(running.coordinator.server.address) as client:
        yield System(client, table_model().logits_after, num_at_once=16)


@asynccontextmanager
async def _table_over_cut_networks() -> AsyncIterator[System]:
    from tests.failure.test_cut_networks import cut_client
    from tests.support.coordinator_rig import Rig

    async with Rig() as rig, cut_client(rig) as (client, proxies):
        yield System(client, rig.target.worker.logits_after, num_at_once=16, least_of_kind=0.5)
        assert all(proxy.num_cuts for proxy in proxies)


@asynccontextmanager
async def _real_vllm(backend: str, vllm: Any) -> AsyncIterator[System]:
    from tests.engines.conftest import DEMO

    def logits_after(token_ids: Sequence[int]) -> np.ndarray:
        """The logarithms of the server's 20 top probabilities; the other tokens share the rest equally."""
        row = vllm.logprobs_after(list(token_ids))
        rest = max(1.0 - np.exp(list(row.values())).sum(), 1e-9)
        logits = np.full(2048, np.log(rest / (2048 - len(row))))
        logits[list(row)] = list(row.values())
        return logits

    async with _real_system(DEMO / "target", backend, vllm.url) as (client, prompt):
        yield System(client, logits_after, prompt=prompt, num_at_once=8)


@asynccontextmanager
async def _real_llama(folder: Path) -> AsyncIterator[System]:
    from bench.systems.gguf_writing import write_gguf
    from tests.engines.conftest import DEMO
    from tests.engines.rig import Llama

    path = write_gguf(DEMO / "target", folder / "target.gguf", "F32")
    alone = Llama(path)
    async with _real_system(path, "llama-cpp") as (client, prompt):
        yield System(client, lambda token_ids: alone.logits_after(list(token_ids)), prompt=prompt, num_at_once=8)


@asynccontextmanager
async def _real_system(target: Path, backend: str, url: str = "") -> AsyncIterator[tuple[AsyncClient, list[int]]]:
    from tests.engines.conftest import DEMO
    from tests.engines.rig import PATIENT, system, token_ids_of

    running = system(target, DEMO / "draft", backend, url)
    with running:
        async with AsyncClient(running.endpoint, budgets=PATIENT) as client:
            yield client, token_ids_of(DEMO / "target", "def add(a, b):\n    return a")
