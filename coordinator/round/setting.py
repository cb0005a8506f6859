"""What all rounds of one request have in common. Not here: what changes from round to round (`session_calls`)."""

from __future__ import annotations

from dataclasses import dataclass, field

from specdec.tenant import DEFAULT_TENANT
from specdec.types import DrawRule, Mode, SamplingFilters, carries_distributions


@dataclass(frozen=True, slots=True)
class RoundSetting:
    """Fixed when the request begins or is resumed."""

    session_id: str
    epoch: int
    turn: int
    output_start: int
    filters: SamplingFilters
    seed: int
    mode: Mode
    num_logprobs: int | None
    vocabulary_size: int
    """The target's."""
    draft_timeout_s: float | None
    """The longest that a round waits for its draft; None: until the draft answers or dies."""
    tenant: str = DEFAULT_TENANT
    is_timed: bool = False
    """Whether it is noted when what was done."""

    draw_rule: DrawRule = field(init=False)
    answers_choices: bool = field(init=False)
    """Whether the target answers with token choices instead of distributions."""

    def __post_init__(self) -> None:
        draw_rule = DrawRule.COUPLED if self.mode in (Mode.COUPLED, Mode.OFF) else DrawRule.DISTRIBUTION
        object.__setattr__(self, "draw_rule", draw_rule)
        object.__setattr__(self, "answers_choices", not carries_distributions(self.filters, draw_rule))
