"""Settings of the target service, in addition to those that draft and target services share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, model_validator
from pydantic_settings import NoDecode, SettingsConfigDict

from specdec.settings.adapter_specs import parse_adapters
from specdec.settings.draft_specs import parse_local_drafts
from specdec.settings.engine_servers import EngineServerSettings
from specdec.settings.shared import DAY_S, Address, split_commas


def _checked(texts: tuple[str, ...]) -> tuple[str, ...]:
    parse_local_drafts(texts)
    return texts


def _checked_adapters(texts: tuple[str, ...]) -> tuple[str, ...]:
    parse_adapters(texts)
    return texts


def _refuse_removed(backend: object) -> object:
    """Raise ValueError for a backend that was removed. The message says what replaces it."""
    if backend == "sglang":
        raise ValueError("sglang was removed: use server, which speaks to any OpenAI-style server, SGLang included")
    return backend


AdapterNames = Annotated[tuple[str, ...], NoDecode, BeforeValidator(split_commas), AfterValidator(_checked_adapters)]

InTargetDraftSource = Annotated[tuple[str, ...], NoDecode, BeforeValidator(split_commas), AfterValidator(_checked)]


#: Backends whose server chooses an adapter by the name of the model in a request.
_ADAPTER_BACKENDS = ("server", "vllm")

#: What serves a model with an adapter in place of the other backends.
_WITHOUT_ADAPTERS = {
    "own": "serve it in vLLM (--enable-lora --lora-modules NAME=PATH) and give --backend vllm, or merge it into the "
    "checkpoint (merge_and_unload of PEFT) and name that as the model",
    "llama-cpp": "merge it into the file (llama-export-lora of llama.cpp) and name that as the model, or serve the "
    "checkpoint in vLLM (--enable-lora --lora-modules NAME=PATH) and give --backend vllm",
}


def check_adapters(adapters: Sequence[str], backend: str) -> None:
    """Raise ValueError for adapters of a backend that loads none; the message says what serves them."""
    if adapters and backend not in _ADAPTER_BACKENDS:
        raise ValueError(
            f"--adapter {adapters[0]} does not go with --backend {backend}, which loads no adapters: "
            + _WITHOUT_ADAPTERS[backend]
        )


class TargetSettings(EngineServerSettings):
    """The target service: verifies draft tokens with the model whose output is wanted, in one pass per round."""

    model_config = SettingsConfigDict(env_prefix="SPECDEC_TARGET__")

    listen: Address = "127.0.0.1:50071"
    """HOST:PORT to serve gRPC on. Port 0 selects a free one, which the log line "listening" names."""

    backend: Annotated[Literal["own", "server", "vllm", "llama-cpp"], BeforeValidator(_refuse_removed)] = "own"
    """Engine that runs the target model: own, llama-cpp (llama.cpp in this process, with a GGUF file as --model), or a
    server that runs already. vllm asks a vLLM server for the top tokens of each position. server lets any OpenAI-style
    server that accepts and returns token ids, SGLang included, sample a token at each position. --model then names the
    checkpoint whose tokenizer the server uses."""

    adapter: AdapterNames = ()
    """Adapter, such as a LoRA, of the server of --backend: requests select it by NAME as their model, and the server
    lists it by its id or by the path that it was loaded from. Repeatable. Unset: every adapter that the server lists,
    by its id, also one that is loaded later."""

    local_draft: InTargetDraftSource = ()
    """In-target draft: this replica drafts in the call in which it verifies. early-exit:N (its first N layers with its
    own norm and head), early-exit:N:PATH (with an adapter), medusa:PATH, eagle3:PATH or mtp (heads). Each is a draft
    pool that requests select by its kind, or by NAME in NAME=early-exit:3; repeatable. Works in one process, without
    torch.compile."""

    max_run: int = Field(default=64, ge=1, le=1024)
    """Most tokens that this replica may make ahead of the committed ones while no draft is wanted. Coordinators mostly
    ask for fewer. 1: it waits for a call after every token."""

    max_waiting: int = Field(default=64, ge=0)
    """Number of new requests that may wait for KV blocks; a further one is refused with KV_EXHAUSTED before its first
    token. Requests that have output are never refused. 0: a request that does not get its blocks at once is refused."""

    max_wait_s: float = Field(default=5.0, ge=0.0, le=DAY_S)
    """Longest time that a new request waits for KV blocks, or behind other prompts, in seconds. One that would wait
    longer, as predicted from the last requests, is refused at once and told when to try again."""

    model_grace_s: float = Field(default=300.0, ge=0.0, le=DAY_S)
    """Time that this replica, after SIGTERM, still answers the turns of its model that have not ended, if no other
    registered replica serves the model. It accepts no new sessions meanwhile. An interrupted turn counts until it
    ends, or this time has passed since its last call. 0: it ends at once, and such turns cannot be continued."""

    @property
    def end_grace_s(self) -> float:
        return self.model_grace_s + self.drain_grace_s

    @model_validator(mode="after")
    def _check_local_drafts(self) -> Self:
        if self.local_draft and self.tensor_parallel > 1:
            raise ValueError("--local-draft does not go with --tensor-parallel: ranks do not draft")
        return self

    @model_validator(mode="after")
    def _check_adapters(self) -> Self:
        check_adapters(self.adapter, self.backend)
        return self

    @model_validator(mode="after")
    def _check_backend(self) -> Self:
        self._check_engine(self.backend, servers=("server", "vllm"), own={"--local-draft": bool(self.local_draft)})
        return self
