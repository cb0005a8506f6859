"""Settings of the draft service: its own flags on top of the common ones."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator
from pydantic_settings import SettingsConfigDict

from specdec.settings.base import Address, ReplicaSettings
from specdec.types import MAX_SUPPORT, SIMULATED_PREFIX


class DraftSettings(ReplicaSettings):
    """The draft service: proposes candidate tokens, from a small model, for a target service to verify."""

    model_config = SettingsConfigDict(env_prefix="SPECDEC_DRAFT__")

    listen: Address = "127.0.0.1:50061"
    """HOST:PORT to serve gRPC on. Port 0 takes a free one, which the log line "listening" names."""

    shadow: Literal["on", "off"] = "off"
    """on: what others draft is scored here where requests are routed, and a request gets this pool only if it names it,
    or by `specdec promote`."""

    max_support: int | None = Field(default=None, ge=1, le=MAX_SUPPORT)
    """Most entries of a draft position's support. Unset: 64 for vocabularies above 32k, else the whole vocabulary."""

    for_tokenizer: str = ""
    """The target, or its tokenizer's files, where that has another tokenizer than --model: drafts are then made in its
    tokens, and this replica serves its vocabulary. Unset: the target has the model's own."""

    prefill_budget_ms: float = Field(default=10.0, gt=0.0)
    """By how much prompts may lengthen a forward pass that other sessions are in or may have to wait for, as predicted
    from measured times; a block of 16 tokens always runs. A draft takes several passes, each that much longer."""

    predraft: Literal["on", "off", "auto"] = "off"
    """Drafting the next round, for its likeliest outcomes, before it is asked for. New, so off unless switched
    on. on: whenever no call is waiting; auto: as long as that makes rounds shorter."""

    support_coverage: float = Field(default=0.99, gt=0.0, le=1.0)
    """Share of the draft's distribution that a support covers before it is cut."""

    @model_validator(mode="after")
    def _refuse_what_needs_draft_vocabulary_tokens(self) -> Self:
        if self.for_tokenizer and self.predraft != "off":
            raise ValueError("--for-tokenizer does not go with --predraft, which grows branches in the model's tokens")
        if self.for_tokenizer and self.model.startswith(SIMULATED_PREFIX):
            raise ValueError("--for-tokenizer: simulated models have no tokenizer")
        return self
