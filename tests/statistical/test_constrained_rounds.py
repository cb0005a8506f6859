"""The distribution of one constrained round, enumerated, is that of the masked target, whatever the draft may say.

Masks come from the matcher as targets get them: along a draft, up to its first illegal token. The reference masks with
a fresh matcher after every path. Drafts of four kinds: drawn from q without the mask, drawn from masked q, one named
token, none. Nothing is sampled: the false-alarm rate is 0. Bound as in `test_round_distributions.py`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import pytest

from specdec.checkpoints.vocabulary import load_tokenizer
from specdec.contract.constraint import Constraint
from specdec.contract.types import WEIGHT_TOTAL, SamplingFilters, Support
from specdec.core import rejection
from specdec.structured.matcher import Mask, Matcher, is_legal
from specdec.structured.token_table import TokenTable
from target_service.backends.contract import RowsRequest
from target_service.backends.filtered_distributions import distributions_of
from tests.statistical.table_model import (
    HISTORY,
    OUTPUT_START,
    EmittedDistribution,
    Path,
    RoundTables,
    TableModel,
    block_distribution,
    choices_distribution,
    rejection_distribution,
)
from tests.support.other_tokenizers import save_byte_level_vocabulary
from tests.support.round_driver import make_round

TOLERANCE = 1e-7

#: The output of HISTORY is "a".
TOKENS = ("a", "b", "ab", "c", "bc", "<|end|>")
END = TOKENS.index("<|end|>")
#: After an output that each begins, some tokens are legal and some are not; the texts of the second are forced at
#: places; the third may end at once and never must.
CONSTRAINTS = {
    "finite": Constraint.regex("a(c|bc)(ab|a)?b?"),
    "forced": Constraint.choice(["aabcab", "abcb", "ac"]),
    "endless": Constraint.regex("(a|bc)+"),
}
FILTERS = {
    "T=1": {},
    "T=0.8, top_p": {"temperature": 0.8, "top_p": 0.9},
    "top_k": {"top_k": 2},
    "min_p": {"min_p": 0.15},
    "penalties": {"repetition_penalty": 1.4, "presence_penalty": 0.3, "frequency_penalty": 0.6},
    "logit bias": {"logit_bias": {0: 2.0, 3: -1.5, END: 1.0}},
    "min_new_tokens": {"min_new_tokens": 3},
    "greedy": {"temperature": 0.0},
}
LAWS = {name: SamplingFilters(**values, end_token_ids=(END,)) for name, values in FILTERS.items()}

MODES: dict[str, Callable[[RoundTables], EmittedDistribution]] = {
    "rejection": rejection_distribution,
    "block": block_distribution,
    "choices": choices_distribution,
}


@dataclass(frozen=True, kw_only=True)
class ConstrainedTables(RoundTables):
    """A round whose p is masked, and whose draft does not know of the constraint."""

    table: TokenTable
    constraint: Constraint

    @cached_property
    def _target_masks(self) -> dict[Path, Mask | None]:
        matcher = Matcher(self.table, self.constraint)
        matcher.align(output_of(()))
        found: dict[Path, Mask | None] = {}
        for path in self.paths:
            masks = matcher.legal_along(self.seen_by_the_matcher(path), (END,)).masks
            found[path] = masks[-1] if len(masks) == len(self.seen_by_the_matcher(path)) + 1 else None
        return found

    def seen_by_the_matcher(self, path: Path) -> Path:
        return path

    def target_mask_after(self, path: Path) -> Mask | None:
        return self._target_masks[path]

    @cached_property
    def _fresh_masks(self) -> dict[Path, Mask | None]:
        """The mask of a fresh matcher after each path that a constrained output may have."""
        found: dict[Path, Mask | None] = {}
        for path in self.paths:  # shorter ones first
            before = found[path[:-1]] if path else None
            if path and (before is None or path[-1] == END or not is_legal(before, path[-1])):
                found[path] = None
                continue
            matcher = Matcher(self.table, self.constraint)
            matcher.align(output_of(path))
            found[path] = matcher.mask((END,))
        return found

    def legal_after(self, path: Path) -> np.ndarray | None:
        mask = self._fresh_masks[path]
        return None if mask is None else np.unpackbits(mask, count=len(TOKENS), bitorder="little").astype(bool)

    @cached_property
    def illegal_share(self) -> float:
        """Probability that the first draft token is illegal."""
        legal = self.legal_after(())
        assert legal is not None
        return sum(share for token_id, share in self.drafting_distribution(()).items() if not legal[token_id])


def output_of(path: Path) -> np.ndarray:
    return np.array([*HISTORY[OUTPUT_START:], *path], dtype=np.uint32)


class MaskedDrafts(ConstrainedTables):
    """The draft masks q as the target masks p."""

    def draft_mask_after(self, path: Path) -> Mask | None:
        return self.target_mask_after(path)


class NamedTokens(ConstrainedTables):
    """A draft that names a single token, legal or not."""

    @cached_property
    def supports(self) -> dict[Path, Support]:
        return {
            path: Support(np.array([sum(path) % self.vocabulary_size], np.uint32), np.ones(1, np.uint16))
            for path in self.paths
        }


class WholeRows(ConstrainedTables):
    """The target is a backend that knows whole rows of logits, as llama.cpp does."""

    @cached_property
    def p(self) -> dict[Path, np.ndarray]:
        target = TableModel(self.vocabulary_size, self.seed)
        found: dict[Path, np.ndarray] = {}
        for path in self.paths:
            tokens, mask = np.array(self.history(path), np.uint32), self.target_mask_after(path)
            position = make_round(HISTORY, filters=self.filters, output_start=OUTPUT_START)
            masks = [] if mask is None else [mask]
            (answer,) = distributions_of(target.logits(path)[None], RowsRequest(position, tokens, 1), masks)
            found[path] = np.zeros(self.vocabulary_size)
            found[path][answer.token_ids] = answer.probabilities
        return found


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> TokenTable:
    folder = tmp_path_factory.mktemp("few-tokens")
    save_byte_level_vocabulary(folder, TOKENS, [("a", "b"), ("b", "c")])
    return TokenTable(load_tokenizer(folder), (END,), len(TOKENS))


@pytest.mark.parametrize("constraint", CONSTRAINTS)
@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("kind", [ConstrainedTables, MaskedDrafts, NamedTokens])
def test_a_constrained_round_of_every_mode_follows_the_masked_target(
    kind: type[ConstrainedTables], law: str, constraint: str, table: TokenTable
) -> None:
    tables = kind(LAWS[law], 2, len(TOKENS), table=table, constraint=CONSTRAINTS[constraint])
    for round_distribution in MODES.values():
        emitted = round_distribution(tables)
        assert sum(emitted.values()) == pytest.approx(1.0, abs=1e-12)
        assert tables.distance(emitted) < TOLERANCE


@pytest.mark.parametrize("constraint", CONSTRAINTS)
@pytest.mark.parametrize("law", LAWS)
def test_a_constrained_round_without_a_draft_follows_the_masked_target(
    law: str, constraint: str, table: TokenTable
) -> None:
    tables = ConstrainedTables(LAWS[law], 0, len(TOKENS), table=table, constraint=CONSTRAINTS[constraint])
    for round_distribution in MODES.values():
        assert tables.distance(round_distribution(tables)) < TOLERANCE


@pytest.mark.parametrize("law", LAWS)
def test_a_constrained_round_of_a_target_with_whole_rows_follows_the_masked_target(law: str, table: TokenTable) -> None:
    for constraint in CONSTRAINTS.values():
        tables = WholeRows(LAWS[law], 2, len(TOKENS), table=table, constraint=constraint)
        for round_distribution in MODES.values():
            assert tables.distance(round_distribution(tables)) < TOLERANCE


@pytest.mark.parametrize("kind", [ConstrainedTables, MaskedDrafts, NamedTokens])
def test_a_longer_constrained_round_follows_the_masked_target(kind: type[ConstrainedTables], table: TokenTable) -> None:
    for constraint in CONSTRAINTS.values():
        tables = kind(LAWS["T=0.8, top_p"], 3, len(TOKENS), table=table, constraint=constraint)
        for round_distribution in MODES.values():
            assert tables.distance(round_distribution(tables)) < TOLERANCE


def dropping_illegal_drafts(tables: ConstrainedTables) -> EmittedDistribution:
    """Cut a drawn draft before its first illegal token, and draw the next token from p.

    An engine that does so emits too little of what the draft prefers.
    """
    emitted: EmittedDistribution = defaultdict(float)
    reached: dict[Path, float] = {(): 1.0}

    def add(path: Path, mass: float, weights: np.ndarray) -> None:
        for token_id, share in enumerate(tables.final_distribution(path, weights)):
            if share > 0:
                emitted[(*path, token_id)] += mass * share

    for path in tables.paths:
        mass = reached.get(path, 0.0)
        if mass == 0.0:
            continue
        row = tables.rows[path]
        if len(path) == tables.gamma:
            add(path, mass, row.weights)
            continue
        support, legal = tables.supports[path], tables.legal_after(path)
        for token_id, share in tables.drafting_distribution(path).items():
            if legal is not None and not legal[token_id]:
                add(path, mass * share, row.weights)
                continue
            entry = rejection.entry_of(token_id, support)
            accepted = rejection.acceptance_bound(entry, support, row) / WEIGHT_TOTAL
            reached[(*path, token_id)] = mass * share * accepted
            add(path, mass * share * (1.0 - accepted), rejection.residual_weights(support, row))
    return emitted


def test_illegal_drafts_that_are_dropped_and_drawn_again_from_p_are_detected(table: TokenTable) -> None:
    """Negative control."""
    for constraint in CONSTRAINTS.values():
        tables = ConstrainedTables(LAWS["T=1"], 2, len(TOKENS), table=table, constraint=constraint)
        assert tables.illegal_share > 0.05
        assert tables.distance(rejection_distribution(tables)) < TOLERANCE
        assert tables.distance(dropping_illegal_drafts(tables)) > 0.01


@pytest.mark.parametrize("kind", [ConstrainedTables, WholeRows])
def test_a_mask_that_is_one_token_behind_is_detected(kind: type[ConstrainedTables], table: TokenTable) -> None:
    """Negative control."""

    class Behind(kind):  # type: ignore[misc, valid-type]
        def seen_by_the_matcher(self, path: Path) -> Path:
            return path[:-1]

    tables = Behind(LAWS["T=1"], 2, len(TOKENS), table=table, constraint=CONSTRAINTS["finite"])
    for round_distribution in MODES.values():
        assert tables.distance(round_distribution(tables)) > 0.01
