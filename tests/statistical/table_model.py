"""Table models, and the exact distribution of one round over a pair of them.

A table model answers random logits for every context, so the joint distribution of a few tokens can be computed in
full. Distributions, supports and integer rows come from the torch functions of the services, acceptance and residual
from `specdec.core`. The target's joint distribution, which a round must equal, comes from the numpy reference alone.
This module draws nothing; test_sampled_distributions.py samples. Called by the tests beside it.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from specdec.contract.types import WEIGHT_TOTAL, DistributionRow, SamplingFilters, Support
from specdec.core import block, rejection
from specdec.core.coupling import verify_choices
from specdec.core.reference import filtered_distribution
from specdec.engine.logits.filters import filtered_distributions
from specdec.engine.logits.penalties import FilterContext
from specdec.engine.logits.rows import cut_supports, distribution_rows
from specdec.structured.matcher import Mask

Path = tuple[int, ...]

#: Distribution of what a round emits: probability by emitted tokens.
EmittedDistribution = dict[Path, float]

#: A prompt and one committed output token of the turn; penalties see both.
HISTORY = (1, 2, 1, 0)
OUTPUT_START = 3

NO_IDS = np.empty(0, dtype=np.uint32)


@dataclass(frozen=True)
class TableModel:
    """Logits that depend on the whole context; models that differ only in `noise` are similar."""

    vocabulary_size: int
    seed: int
    noise: float = 0.0

    def logits(self, path: Path) -> np.ndarray:
        """float32 [V] after HISTORY and `path`."""
        shared = np.random.default_rng([self.seed, *path]).normal(size=self.vocabulary_size) * 1.5
        own = np.random.default_rng([self.seed, 1 << 20, *path]).normal(size=self.vocabulary_size) * self.noise
        return (shared + own).astype(np.float32)


@dataclass(frozen=True)
class RoundTables:
    """The tables of one round on a pair of table models, by drafted prefix of length 0..gamma."""

    filters: SamplingFilters
    gamma: int
    vocabulary_size: int = 6
    seed: int = 0
    s_max: int = 4
    coverage: float = 0.99
    change_p: Callable[[torch.Tensor], torch.Tensor] | None = None
    """Change of p by a negative control, before rows are made."""

    @cached_property
    def paths(self) -> list[Path]:
        tokens = range(self.vocabulary_size)
        return [path for length in range(self.gamma + 1) for path in itertools.product(tokens, repeat=length)]

    def _distributions(self, model: TableModel, mask_after: Callable[[Path], Mask | None]) -> torch.Tensor:
        logits = torch.tensor(np.stack([model.logits(path) for path in self.paths]))
        return filtered_distributions(
            logits,
            [FilterContext(self.filters, self.history(path), OUTPUT_START, mask_after(path)) for path in self.paths],
        )

    def target_mask_after(self, path: Path) -> Mask | None:
        """Return the mask that the target applies to p after a path."""
        return None

    def draft_mask_after(self, path: Path) -> Mask | None:
        """Return the mask that the draft applies to q after a path."""
        return None

    def legal_after(self, path: Path) -> np.ndarray | None:
        """Return the legal tokens after a path, for the reference: bool [V]."""
        return None

    def history(self, path: Path) -> Path:
        """Return the tokens that penalties see before the token after `path`, with the draft tokens."""
        return HISTORY + path

    @cached_property
    def p(self) -> dict[Path, np.ndarray]:
        distributions = self._distributions(TableModel(self.vocabulary_size, self.seed), self.target_mask_after)
        return dict(
            zip(self.paths, (self.change_p(distributions) if self.change_p else distributions).numpy(), strict=True)
        )

    @cached_property
    def full_q(self) -> dict[Path, np.ndarray]:
        """The draft's distributions before they are cut."""
        draft = TableModel(self.vocabulary_size, self.seed, noise=1.0)
        distributions = self._distributions(draft, self.draft_mask_after)
        return dict(zip(self.paths, distributions.numpy(), strict=True))

    @cached_property
    def supports(self) -> dict[Path, Support]:
        cuts = cut_supports(torch.tensor(np.stack(list(self.full_q.values()))), self.s_max, self.coverage)
        return {path: support for path, (support, _) in zip(self.paths, cuts, strict=True)}

    def support_ids(self, path: Path) -> np.ndarray:
        return self.supports[path].token_ids if len(path) < self.gamma else NO_IDS

    @cached_property
    def rows(self) -> dict[Path, DistributionRow]:
        """Rows over the supports, and over nothing at the bonus position. Their tail tokens come from one arbitrary
        uniform."""
        ids = [self.support_ids(path) for path in self.paths]
        rows = distribution_rows(torch.tensor(np.stack(list(self.p.values()))), ids, [0.5] * len(ids))
        return dict(zip(self.paths, rows, strict=True))

    def drafting_distribution(self, path: Path) -> dict[int, float]:
        """Return q as it travels, from which the draft token after `path` is drawn."""
        support = self.supports[path]
        shares = support.weights / support.weights.sum(dtype=np.int64)
        return dict(zip(support.token_ids.tolist(), shares.tolist(), strict=True))

    def drafts(self, length: int) -> Iterator[tuple[Path, float]]:
        """Return every path of this length that can be drafted, with its probability."""
        if length == 0:
            yield (), 1.0
            return
        for path, mass in self.drafts(length - 1):
            for token_id, share in self.drafting_distribution(path).items():
                yield (*path, token_id), mass * share

    def final_distribution(self, path: Path, weights: np.ndarray) -> np.ndarray:
        """Distribution of a round's last token, after `path`: float64 [V].

        Args:
            path: the accepted tokens.
            weights: over the support and the rest, which stands for z: a draw of p outside the support.
        """
        ids = self.support_ids(path)
        shares = weights / weights.sum()
        final = np.zeros(self.vocabulary_size)
        if shares[-1] > 0:
            final += self.p[path]
            final[ids] = 0.0
            final *= shares[-1] / final.sum()
        final[ids] = shares[:-1]
        return final

    @cached_property
    def _target_distributions_onward(self) -> dict[Path, np.ndarray]:
        """The target's joint distribution of the tokens from a path on to gamma + 1 in all, by the numpy reference."""
        target = TableModel(self.vocabulary_size, self.seed)
        onward: dict[Path, np.ndarray] = {}
        for path in reversed(self.paths):
            distribution = filtered_distribution(
                target.logits(path), self.filters, HISTORY + path, OUTPUT_START, self.legal_after(path)
            )
            if len(path) < self.gamma:
                distribution = np.stack(
                    [share * onward[(*path, token_id)] for token_id, share in enumerate(distribution)]
                )
            onward[path] = distribution
        return onward

    def target_distribution(self) -> np.ndarray:
        """The target's joint distribution of its first gamma + 1 tokens: float64 [V] * (gamma + 1)."""
        return self._target_distributions_onward[()]

    def distance(self, emitted: EmittedDistribution) -> float:
        """Total variation between the target's distribution of gamma + 1 tokens and that of a round followed by the
        target."""
        joint = np.zeros((self.vocabulary_size,) * (self.gamma + 1))
        for path, mass in emitted.items():
            joint[path] += mass * self._target_distributions_onward.get(path, 1.0)
        return float(np.abs(joint - self.target_distribution()).sum() / 2)


def rejection_distribution(
    tables: RoundTables,
    bound: Callable[[int, Support, DistributionRow], int] = rejection.acceptance_bound,
    residual: Callable[[Support, DistributionRow], np.ndarray] = rejection.residual_weights,
) -> EmittedDistribution:
    """Distribution of what a token-wise round emits; `bound` and `residual` are the shipped ones but in negative
    controls."""
    emitted: EmittedDistribution = defaultdict(float)
    reached: dict[Path, float] = {(): 1.0}
    for path in tables.paths:  # shorter ones first
        mass = reached.get(path, 0.0)
        if mass == 0.0:
            continue
        row = tables.rows[path]
        if len(path) == tables.gamma:
            _add(emitted, path, mass * tables.final_distribution(path, row.weights))
            continue
        support, rejected = tables.supports[path], 0.0
        for token_id, share in tables.drafting_distribution(path).items():
            accepted = bound(rejection.entry_of(token_id, support), support, row) / WEIGHT_TOTAL
            reached[(*path, token_id)] = mass * share * accepted
            rejected += mass * share * (1.0 - accepted)
        _add(emitted, path, rejected * tables.final_distribution(path, residual(support, row)))
    return emitted


def block_distribution(tables: RoundTables) -> EmittedDistribution:
    """Distribution of what a block round emits."""
    emitted: EmittedDistribution = defaultdict(float)
    for draft, draft_mass in tables.drafts(tables.gamma):
        supports = [tables.supports[draft[:index]] for index in range(tables.gamma)]
        rows = [tables.rows[draft[:index]] for index in range(tables.gamma + 1)]
        shares, levels = block.acceptance_levels(draft, supports, rows)
        mass = draft_mass  # that no longer prefix is accepted
        for num_accepted in range(tables.gamma, -1, -1):
            level = levels[num_accepted - 1] if num_accepted else 1.0
            path = draft[:num_accepted]
            if num_accepted == tables.gamma:
                weights = rows[-1].weights
            else:
                weights = block.block_residual_weights(shares[num_accepted], supports[num_accepted], rows[num_accepted])
            if mass * level > 0.0:
                _add(emitted, path, mass * level * tables.final_distribution(path, weights))
            mass *= 1.0 - level
    return emitted


def choices_distribution(tables: RoundTables) -> EmittedDistribution:
    """Distribution of what a coupled or greedy round emits, over every draft and every first disagreement with it.

    The target's choice at a position has distribution p there (see test_sampled_distributions.py),
    for any draft.
    """
    emitted: EmittedDistribution = defaultdict(float)
    for draft, draft_mass in tables.drafts(tables.gamma):
        agreed = draft_mass
        for index in range(tables.gamma + 1):
            p = tables.p[draft[:index]]
            for choice in np.flatnonzero(p):
                if index < tables.gamma and choice == draft[index]:
                    continue
                # Choices after the first disagreement belong to a path that is not taken.
                choices = [*draft[:index], int(choice), *([0] * (tables.gamma - index))]
                decision = verify_choices(draft, choices, [1.0] * len(choices))
                emitted[decision.token_ids] += agreed * p[choice]
            if index < tables.gamma:
                agreed *= p[draft[index]]
    return emitted


def _add(emitted: EmittedDistribution, path: Path, final: np.ndarray) -> None:
    for token_id in np.flatnonzero(final):
        emitted[(*path, int(token_id))] += float(final[token_id])
