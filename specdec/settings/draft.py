"""Settings of the draft service, in addition to those that draft and target services share."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator
from pydantic_settings import SettingsConfigDict

from specdec.contract.types import SIMULATED_PREFIX
from specdec.settings.engine_servers import EngineServerSettings
from specdec.settings.shared import Address


class DraftSettings(EngineServerSettings):
    """The draft service: proposes candidate tokens, from a small model, for a target service to verify."""

    model_config = SettingsConfigDict(env_prefix="SPECDEC_DRAFT__")

    listen: Address = "127.0.0.1:50061"
    """HOST:PORT to serve gRPC on. Port 0 selects a free one, which the log line "listening" names."""

    backend: Literal["own", "server"] = "own"
    """Engine that runs the draft model: own (in this process), or an OpenAI-style server that accepts and returns token
    ids, whose greedy tokens are the draft. --model then names the checkpoint whose tokenizer the server uses."""

    shadow: Literal["on", "off"] = "off"
    """on: score what other pools draft while requests are routed. Requests use this pool only if they name it, or after
    `specdec promote`."""

    for_tokenizer: str = ""
    """The target, or the files of its tokenizer, if it has another tokenizer than --model. This replica then drafts in
    the target's tokens and serves the target's vocabulary. Unset: both have the same tokenizer."""

    prefill_budget_ms: float = Field(default=10.0, gt=0.0)
    """Time by which prompts may lengthen a forward pass that other sessions share or wait for, as predicted from
    measured times. One block of 16 tokens always runs. A draft has several passes, each of which may be this much
    longer."""

    predraft: Literal["on", "off", "auto"] = "off"
    """Draft the next round for its most probable outcomes before the coordinator asks. Experimental. on: whenever no
    call waits; auto: while that makes rounds shorter; off: never."""

    @model_validator(mode="after")
    def _refuse_what_needs_draft_vocabulary_tokens(self) -> Self:
        if self.for_tokenizer and self.predraft != "off":
            raise ValueError("--for-tokenizer does not go with --predraft, which drafts in the model's own tokens")
        if self.for_tokenizer and self.model.startswith(SIMULATED_PREFIX):
            raise ValueError("--for-tokenizer: simulated models have no tokenizer")
        return self

    @model_validator(mode="after")
    def _check_backend(self) -> Self:
        own = {"--for-tokenizer": bool(self.for_tokenizer), "--predraft": self.predraft != "off"}
        self._check_engine(self.backend, servers=("server",), own=own)
        return self
