"""Audit of a round: compare what was emitted with a target-only pass over the same tokens.

The pass runs the round's draft tokens again and reports p at the same ids, with the same draws. So p must be equal to
the live one, and so must the tail token, up to rounding. In rejection and block mode, what was accepted must be
possible, and over many rounds it must have the mean sum(min(p, q)) of tokens that were drawn from q (docs/protocol.md
section 9); `specdec.observability.audit` keeps those sums.

In greedy and coupled rounds the emitted tokens must be the choices of the pass. If they differ, the probabilities of
the two tokens tell a tie from a fault: greedy compares their logits after penalties, coupled mode their log
probabilities plus the keyed noise (docs/protocol.md section 3).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from coordinator.audit.audited_round import AuditedAcceptance, AuditedRound, Result, Verdict
from coordinator.audit.expected_acceptance import acceptance_probabilities, expected_acceptance
from coordinator.audit.target_pass import TargetPass, Tolerance, nudged_filters
from specdec.contract.types import (
    MAX_SUPPORT,
    WEIGHT_TOTAL,
    DistributionRow,
    DrawRule,
    SamplingFilters,
    TokenIds,
    Verification,
)
from specdec.core.packed import pack_supports
from specdec.core.random import gumbel_noise


class DistributionCheck:
    """The check of one round."""

    def __init__(self, audited: AuditedRound, target_pass: TargetPass, tolerance: Tolerance) -> None:
        self._audited = audited
        self._outcome = audited.outcome
        self._pass = target_pass
        self._tolerance = tolerance
        self._draft_token_ids: list[int] = audited.outcome.draft_token_ids.tolist()
        self._filters = audited.setting.filters
        self._nudged_filters = nudged_filters(self._filters, tolerance)

    async def run(self) -> Verdict:
        """Return the verdict on the round. Raises as `TargetPass.verify`."""
        fresh = await self._replay(self._filters)
        acceptance = self._acceptance(fresh)
        rows = await self._check_rows(fresh)
        if rows.result is not Result.MISMATCH and self._is_impossible(fresh):
            rows = Verdict(Result.MISMATCH, self._final_position, "acceptance")
        if rows.result is not Result.MISMATCH:
            final = await self._check_final_token(fresh)
            rows = rows if final.result is Result.EQUAL else final
        return rows._replace(acceptance=acceptance)

    @property
    def _final_position(self) -> int:
        """Session position of the round's last emitted token."""
        return len(self._audited.token_ids) + self._outcome.num_accepted

    async def _replay(self, filters: SamplingFilters) -> Verification:
        supports = pack_supports(self._draft_token_ids, self._outcome.supports)
        return await self._pass.verify(self._audited.token_ids, self._draft_token_ids, supports.ids, filters=filters)

    async def _check_rows(self, fresh: Verification) -> Verdict:
        """Compare p at the draft positions."""
        live, most = self._outcome.verification.rows, self._tolerance.mass
        for index in range(len(self._draft_token_ids)):
            if _distance(live[index], fresh.rows[index]) <= most:
                continue
            is_tie = await self._is_at_the_cut(index, live[index])
            result = Result.TIE if is_tie else Result.MISMATCH
            return Verdict(result, len(self._audited.token_ids) + index, "distribution")
        return Verdict(Result.EQUAL)

    async def _is_at_the_cut(self, index: int, live: DistributionRow) -> bool:
        """Return whether the live row lies between those of a slightly narrower and a slightly wider cut."""
        if not self._nudged_filters:
            return False
        narrower, wider = [(await self._replay(filters)).rows[index] for filters in self._nudged_filters]
        return _distance(live, narrower) <= _distance(narrower, wider) + self._tolerance.mass

    def _acceptance(self, fresh: Verification) -> AuditedAcceptance | None:
        if not self._draft_token_ids:
            return None
        num_accepted, mode = self._outcome.num_accepted, self._audited.setting.mode
        expected = expected_acceptance(mode, num_accepted, self._draft_token_ids, self._outcome.supports, fresh.rows)
        return AuditedAcceptance(num_accepted, *expected)

    def _is_impossible(self, fresh: Verification) -> bool:
        """Return whether no draw could have accepted this number of tokens."""
        if not self._draft_token_ids:
            return False
        count, almost = self._outcome.num_accepted, 1.0 - self._tolerance.mass
        return not (self._probabilities(fresh)[count] or self._probabilities(fresh, almost)[count])

    def _probabilities(self, fresh: Verification, scale: float = 1.0) -> np.ndarray:
        mode = self._audited.setting.mode
        return acceptance_probabilities(mode, self._draft_token_ids, self._outcome.supports, fresh.rows, scale)

    async def _check_final_token(self, fresh: Verification) -> Verdict:
        """Compare the final token with the pass's tail token, if it was drawn outside the support."""
        index, token_id = self._outcome.num_accepted, self._outcome.token_ids[-1]
        if index < len(self._draft_token_ids) and token_id in self._outcome.supports[index].token_ids:
            return Verdict(Result.EQUAL)
        if fresh.rows[index].tail_token_id == token_id:
            return Verdict(Result.EQUAL)
        for filters in (self._filters, *self._nudged_filters):
            tail = (fresh if filters is self._filters else await self._replay(filters)).rows[index].tail_token_id
            if tail == token_id or (tail >= 0 and await self._are_neighbours(index, token_id, tail, filters)):
                return Verdict(Result.TIE, self._final_position, "final_token")
        return Verdict(Result.MISMATCH, self._final_position, "final_token")

    async def _are_neighbours(self, index: int, token_id: int, tail: int, filters: SamplingFilters) -> bool:
        """Return whether rounding may move the draw from one tail token to the other: both are possible, and in the
        order of ids hardly any mass lies between them."""
        ids = np.arange(min(token_id, tail), max(token_id, tail) + 1, dtype=np.uint32)
        if index < len(self._draft_token_ids):
            ids = np.setdiff1d(ids, self._outcome.supports[index].token_ids)
        masses = await self._masses(index, ids, filters)
        is_possible = masses[0] > 0.0 and masses[-1] > 0.0
        return is_possible and float(masses[1:-1].sum()) <= self._tolerance.mass

    async def _masses(self, index: int, ids: TokenIds, filters: SamplingFilters) -> np.ndarray:
        """Return p of these ids after the first `index` draft tokens."""
        drafted = np.array(self._draft_token_ids[:index], dtype=np.uint32)
        token_ids = np.append(self._audited.token_ids, drafted)
        weights = []
        for part in _parts(ids):
            answer = await self._pass.verify(token_ids, part[:1], [part], filters=filters)
            weights.append(answer.rows[0].weights[:-1])
        return np.concatenate(weights) / WEIGHT_TOTAL


def _parts(ids: TokenIds) -> Sequence[TokenIds]:
    """Divide ids into supports that a target accepts."""
    return np.split(ids, range(MAX_SUPPORT, len(ids), MAX_SUPPORT))


def _distance(one: DistributionRow, other: DistributionRow) -> float:
    """Return the total variation between two rows over the same support."""
    return float(np.abs(one.weights.astype(np.int64) - other.weights.astype(np.int64)).sum()) / (2 * WEIGHT_TOTAL)


async def check_choices(audited: AuditedRound, target_pass: TargetPass, tolerance: Tolerance) -> Verdict:
    """Compare the emitted tokens of a round with the target's own choices. Raises as `TargetPass.verify`."""
    emitted = audited.outcome.token_ids
    fresh = await target_pass.verify(audited.token_ids, emitted[:-1])
    for index, choice in enumerate(fresh.choice_token_ids.tolist()):
        if emitted[index] == choice:
            continue
        token_ids = np.append(audited.token_ids, np.array(emitted[:index], dtype=np.uint32))
        is_tie = await _is_tie(audited, target_pass, tolerance, token_ids, emitted[index], choice)
        return Verdict(Result.TIE if is_tie else Result.MISMATCH, len(token_ids), "choice")
    return Verdict(Result.EQUAL)


async def _is_tie(
    audited: AuditedRound,
    target_pass: TargetPass,
    tolerance: Tolerance,
    token_ids: TokenIds,
    emitted: int,
    choice: int,
) -> bool:
    """Return whether rounding explains that `emitted` was chosen after `token_ids` instead of `choice`."""
    setting = audited.setting
    filters, noise = setting.filters, np.zeros(2)
    pair = np.array(sorted((emitted, choice)), dtype=np.uint32)
    if filters.is_greedy:
        filters = replace(filters, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0)
    else:
        noise = gumbel_noise(setting.seed, setting.turn, len(token_ids), pair)
    for tried in (filters, *nudged_filters(filters, tolerance)):
        answer = await target_pass.verify(token_ids, [emitted], [pair], filters=tried, draw_rule=DrawRule.DISTRIBUTION)
        weights = answer.rows[0].weights[:2].astype(np.float64)
        scores = np.log(weights, where=weights > 0.0, out=np.full(2, -np.inf)) + noise
        here, there = scores if pair[0] == emitted else scores[::-1]
        if here > -np.inf and here >= there - tolerance.gap:
            return True
    return False
