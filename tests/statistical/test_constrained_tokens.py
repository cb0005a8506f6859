"""The joint distribution of constrained tokens, through running services, is the masked target's in every mode.

Real draft and target services of table models. Every second request is drafted by a draft that knows nothing of the
constraint, so that about half of its first tokens are illegal; the others by the target itself, which masks its drafts.
Seeds are fixed: a pass stays a pass. Each test has a false-alarm rate of 6e-5 (4 sigma) for another choice of seeds,
and negative controls: the samples follow neither the target at half the temperature nor the masked draft.
`test_constrained_rounds.py` enumerates single rounds, with an engine that drops illegal drafts as the control.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import pytest

from specdec.contract.constraint import Constraint
from specdec.v1 import coordinator_pb2 as pb
from tests.support.coordinator_rig import PROMPT, Coordinator, Rig, request
from tests.support.expectation import chi_square_p_value
from tests.support.masked_target import MaskedTarget

MODES = {
    "rejection": pb.SPECULATION_MODE_REJECTION,
    "block": pb.SPECULATION_MODE_BLOCK,
    "coupled": pb.SPECULATION_MODE_COUPLED,
}
SAMPLINGS: dict[str, dict[str, Any]] = {"T=1": {"temperature": 1.0}, "T=0.8, top_p": {"temperature": 0.8, "top_p": 0.9}}
CONSTRAINT = Constraint.regex("(a|bc?|12)[c,]?")
NUM_TOKENS = 3
FALSE_ALARM_RATE = 6e-5
#: Outcomes that are expected less often are counted as one.
LEAST_EXPECTED = 5.0

Outcome = tuple[int, ...]


async def sample(coordinator: Coordinator, num_samples: int, **options: Any) -> Counter[Outcome]:
    gate = asyncio.Semaphore(16)

    async def draw(seed: int) -> Outcome:
        async with gate:
            session_id = f"{options['mode']}-{seed}"
            asked = request(
                constraint=CONSTRAINT, session_id=session_id, seed=seed, max_new_tokens=NUM_TOKENS, gamma=2,
                draft_pool=("default", "early-exit")[seed % 2], **options,
            )  # fmt: skip
            output = await coordinator.generate(asked)
            await coordinator.stub.DeleteSession(pb.DeleteSessionRequest(session_id=session_id))
            return tuple(output.token_ids)

    return Counter(await asyncio.gather(*(draw(seed) for seed in range(num_samples))))


def p_value(counts: Counter[Outcome], expected: dict[Outcome, float]) -> float:
    """Return the p-value of a chi-square test: 0 for an excluded outcome."""
    if any(expected.get(outcome, 0.0) == 0.0 for outcome in counts):
        return 0.0
    total = counts.total()
    common = [outcome for outcome, mass in expected.items() if mass * total >= LEAST_EXPECTED]
    observed = [counts[outcome] for outcome in common]
    wanted = [expected[outcome] * total for outcome in common]
    rest = total - sum(wanted)
    if rest >= LEAST_EXPECTED:
        return chi_square_p_value([*observed, total - sum(observed)], [*wanted, rest])
    observed[-1], wanted[-1] = total - sum(observed[:-1]), total - sum(wanted[:-1])
    return chi_square_p_value(observed, wanted)


@pytest.mark.parametrize("num_samples", [180, pytest.param(6000, marks=[pytest.mark.full, pytest.mark.timeout(1800)])])
@pytest.mark.parametrize("sampling", SAMPLINGS)
async def test_constrained_tokens_follow_the_masked_targets_joint_distribution(sampling: str, num_samples: int) -> None:
    options = SAMPLINGS[sampling]
    async with Rig(constrained=True, local_drafts={"early-exit": 1}) as rig:
        coordinator = await rig.coordinator()
        worker, cooler = rig.target.worker, {**options, "temperature": options["temperature"] / 2}
        expected = MaskedTarget(worker, rig.directory, CONSTRAINT, PROMPT, **options).outcomes(NUM_TOKENS)
        at_half = MaskedTarget(worker, rig.directory, CONSTRAINT, PROMPT, **cooler).outcomes(NUM_TOKENS)
        drafts = MaskedTarget(rig.draft.worker, rig.directory, CONSTRAINT, PROMPT, **options).outcomes(NUM_TOKENS)
        for mode, value in MODES.items():
            counts = await sample(coordinator, num_samples, mode=value, **options)
            p = p_value(counts, expected)
            print(f"{mode}: p = {p:.3g}, {len(counts)} outcomes")
            assert p > FALSE_ALARM_RATE, mode
            assert p_value(counts, at_half) < FALSE_ALARM_RATE
            assert p_value(counts, drafts) < FALSE_ALARM_RATE
