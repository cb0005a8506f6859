"""Settings of the target service: its own flags on top of the common ones."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import AfterValidator, BeforeValidator, model_validator
from pydantic_settings import NoDecode, SettingsConfigDict

from specdec.settings.base import Address, ReplicaSettings, split_commas
from specdec.settings.draft_specs import parse_local_drafts


def _checked(texts: tuple[str, ...]) -> tuple[str, ...]:
    parse_local_drafts(texts)
    return texts


InTargetDraftSource = Annotated[tuple[str, ...], NoDecode, BeforeValidator(split_commas), AfterValidator(_checked)]


class TargetSettings(ReplicaSettings):
    """The target service: verifies draft tokens with the model whose output is wanted, in one pass a round."""

    model_config = SettingsConfigDict(env_prefix="SPECDEC_TARGET__")

    listen: Address = "127.0.0.1:50071"
    """HOST:PORT to serve gRPC on. Port 0 takes a free one, which the log line "listening" names."""

    local_draft: InTargetDraftSource = ()
    """What this replica drafts with by itself, in the same call in which it verifies: early-exit:N (its first N layers
    with its own norm and head) or early-exit:N:PATH (with an adapter). Each is a draft pool, called by its kind or by
    what stands before "=", as in NAME=early-exit:3; repeatable. In one process, and not in compiled steps."""

    @model_validator(mode="after")
    def _check_local_drafts(self) -> Self:
        if self.local_draft and self.tensor_parallel > 1:
            raise ValueError("--local-draft does not go with --tensor-parallel: ranks do not draft")
        return self
