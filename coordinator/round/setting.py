"""The parameters that all rounds of one request share."""

from __future__ import annotations

from dataclasses import dataclass, field

from specdec.contract.constraint import Constraint
from specdec.contract.tenant import DEFAULT_TENANT
from specdec.contract.types import DrawRule, Mode, SamplingFilters, carries_distributions


@dataclass(frozen=True, slots=True)
class RoundSetting:
    """Set when the request begins or is resumed, and constant from then on."""

    session_id: str
    epoch: int
    turn: int
    output_start: int
    filters: SamplingFilters
    seed: int
    mode: Mode
    num_logprobs: int | None
    vocabulary_size: int
    """Number of token ids of the target."""
    draft_timeout_s: float | None
    """Longest time that a round waits for its draft; None: until the draft answers or dies."""
    max_session_tokens: int = 0
    """Largest number of tokens that the session can hold when the turn ends; 0: not known."""
    kv_wait_s: float = 0.0
    """Longest time that a request without output waits for KV blocks of a target."""
    tenant: str = DEFAULT_TENANT
    end_token_ids: frozenset[int] = frozenset()
    """Tokens that end the output."""
    constraint: Constraint | None = None
    """Form of the output; its identity is `filters.constraint_id`."""
    is_timed: bool = False
    """True if each round records a timeline."""
    adapter: str = ""
    """Name of the target's adapter; "" for none."""
    adapter_fingerprint: str = ""
    """Fingerprint of the target model with that adapter. What is learned about drafts is kept apart for each."""

    draw_rule: DrawRule = field(init=False)
    answers_choices: bool = field(init=False)
    """True if the target answers with token choices instead of distributions."""

    def __post_init__(self) -> None:
        draw_rule = DrawRule.COUPLED if self.mode in (Mode.COUPLED, Mode.OFF) else DrawRule.DISTRIBUTION
        object.__setattr__(self, "draw_rule", draw_rule)
        object.__setattr__(self, "answers_choices", not carries_distributions(self.filters, draw_rule))
