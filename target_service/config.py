"""Settings of the target service: its own flags on top of the common ones."""

from __future__ import annotations

from pydantic_settings import SettingsConfigDict

from specdec.config import Address, ReplicaSettings


class TargetSettings(ReplicaSettings):
    """The target service: verifies draft tokens with the model whose output is wanted, in one pass a round."""

    model_config = SettingsConfigDict(env_prefix="SPECDEC_TARGET__")

    listen: Address = "127.0.0.1:50071"
    """HOST:PORT to serve gRPC on. Port 0 takes a free one, which the log line "listening" names."""
