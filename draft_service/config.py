"""Settings of the draft service: its own flags on top of the common ones."""

from __future__ import annotations

from typing import Literal

from pydantic import Field
from pydantic_settings import SettingsConfigDict

from specdec.config import Address, ReplicaSettings
from specdec.core.sparse import MAX_SUPPORT


class DraftSettings(ReplicaSettings):
    """The draft service: proposes candidate tokens, from a small model, for a target service to verify."""

    model_config = SettingsConfigDict(env_prefix="SPECDEC_DRAFT__")

    listen: Address = "127.0.0.1:50061"
    """HOST:PORT to serve gRPC on. Port 0 takes a free one, which the log line "listening" names."""

    max_support: int | None = Field(default=None, ge=1, le=MAX_SUPPORT)
    """Most entries of a draft position's support. Unset: 64 for vocabularies above 32k, else the whole vocabulary."""

    prefill_budget_ms: float = Field(default=10.0, gt=0.0)
    """By how much prompts may lengthen a forward pass that other sessions are in or may have to wait for, as predicted
    from measured times; a block of 16 tokens always runs. A draft takes several passes, each that much longer."""

    predraft: Literal["on", "off", "auto"] = "off"
    """Drafting the next round, for its likeliest outcomes, before it is asked for. New, so off unless switched
    on. on: whenever no call is waiting; auto: as long as that makes rounds shorter."""

    support_coverage: float = Field(default=0.99, gt=0.0, le=1.0)
    """Share of the draft's distribution that a support covers before it is cut."""
