"""Audit of greedy and coupled rounds: the emitted tokens must be the choices of a target-only pass.

Where they differ, the probabilities of the two tokens tell a tie from a fault: greedy compares their logits after
penalties, coupled mode their log probabilities plus the keyed noise (docs/protocol.md section 3).
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from coordinator.audit.audited_round import AuditedRound, Result, Verdict
from coordinator.audit.target_pass import TargetPass
from coordinator.audit.tolerance import Tolerance, nudged_filters
from specdec.contract.types import DrawRule, TokenIds
from specdec.core.random import gumbel_noise


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
