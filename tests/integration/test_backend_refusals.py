"""Servers that cannot be a target, or only for some requests: each refusal names what to change."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import grpc
import pytest

from specdec.contract.errors import InvalidSetting, Unavailable
from tests.support.backend_rig import backend_system, settings_of, start_backend, table_model, write_checkpoint
from tests.support.coordinator_rig import request
from tests.support.engine_server import EngineOptions, EngineServer

LORAS = EngineOptions(adapters={"sql": table_model(salt=7), "served-too": table_model(salt=8)})

REFUSALS = [
    ("server", LORAS, {"adapter": ("law=/adapters/law",)}, "lists no adapter /adapters/law; it has sql, served-too"),
    (
        "vllm",
        EngineOptions(),
        {"adapter": ("law",)},
        "it has none. Start vLLM with --enable-lora --lora-modules law=PATH",
    ),
    ("vllm", LORAS, {"adapter": ("law=served",)}, "adapter: served is the model of .* itself"),
    (
        "server",
        LORAS,
        {"adapter": ("served=sql",)},
        "adapter: served is the name of the model itself: give the adapter",
    ),
    ("vllm", replace(LORAS, checks_names=False), {}, "answers requests for any model name with one model"),
    (
        "server",
        replace(LORAS, adapters={f"a{number}": table_model() for number in range(65)}),
        {},
        "more than 64 adapters",
    ),
    ("server", EngineOptions(owner="specdec"), {}, "is a gateway of specdec"),
    ("server", EngineOptions(returns_token_ids=False), {}, "returns no token ids"),
    ("server", EngineOptions(text="other words"), {}, "model: .* writes 'other words' where the tokenizer of --model"),
    ("vllm", EngineOptions(text="other words"), {}, "model: .* writes 'other words' where the tokenizer of --model"),
    ("server", EngineOptions(), {"backend_model": "other"}, "backend_model: .* serves served, not 'other'"),
    ("server", EngineOptions(key="right"), {"backend_key": "env:KEY"}, "backend_key: the environment variable KEY"),
    ("vllm", EngineOptions(key="right"), {}, "backend_key: .* refuses the key"),
    ("vllm", EngineOptions(has_scale_out=False), {}, "start vLLM with --enable-scale-out"),
    ("vllm", EngineOptions(reports_cached_tokens=False), {}, "--enable-prompt-tokens-details"),
    ("vllm", EngineOptions(caches_prefixes=False), {}, "start vLLM with --enable-prefix-caching"),
    ("vllm", EngineOptions(speculates=True), {}, "start vLLM without --speculative-config"),
    ("vllm", EngineOptions(max_logprobs=0), {}, "start vLLM with --max-logprobs 20"),
]


@pytest.mark.parametrize(("backend", "options", "settings", "message"), REFUSALS, ids=lambda value: str(value)[:40])
async def test_a_server_that_cannot_be_a_target_is_refused_with_what_to_change(
    tmp_path: Path, backend: str, options: EngineOptions, settings: dict[str, str], message: str
) -> None:
    write_checkpoint(tmp_path)
    async with EngineServer(table_model(), options) as server:
        with pytest.raises(InvalidSetting, match=message):
            await start_backend(server.url, tmp_path, backend, **settings)


@pytest.mark.parametrize("backend", ["server", "vllm"])
async def test_an_address_without_a_server_is_refused_as_unavailable(tmp_path: Path, backend: str) -> None:
    write_checkpoint(tmp_path)
    with pytest.raises(Unavailable, match="cannot be reached"):
        await start_backend("http://127.0.0.1:9", tmp_path, backend)


@pytest.mark.parametrize(
    ("ignored", "field"),
    [("top_k", "sampling.top_k"), ("min_p", "sampling.min_p"), ("min_tokens", "sampling.min_new_tokens")],
)
async def test_a_field_that_the_server_ignores_is_refused(ignored: str, field: str) -> None:
    asked = {"sampling.top_k": {"top_k": 3}, "sampling.min_p": {"min_p": 0.1}}.get(field, {"min_new_tokens": 6})
    async with backend_system("server", EngineOptions(ignored=(ignored,))) as system:
        with pytest.raises(grpc.aio.AioRpcError, match=f"{field} cannot be served exactly"):
            await system.coordinator.generate(request(temperature=0.8, **asked))


async def test_a_seed_that_the_server_ignores_is_refused_where_it_decides(caplog: pytest.LogCaptureFixture) -> None:
    async with backend_system("server", EngineOptions(ignored=("seed",))) as system:
        assert "ignores seeds: sampled requests with a seed are refused" in caplog.text
        with pytest.raises(grpc.aio.AioRpcError, match=r"sampling\.seed cannot be served exactly"):
            await system.coordinator.generate(request(temperature=0.8, seed=7))
        for served in ({"temperature": 0.0, "seed": 7}, {"temperature": 0.8}):
            assert (await system.coordinator.generate(request(**served))).token_ids
    caplog.clear()
    async with backend_system("server") as system:
        assert "ignores seeds" not in caplog.text
        asked = [request(temperature=0.8, seed=7, mode=0, gamma=gamma) for gamma in (0, 3)]
        outputs = [await system.coordinator.generate(each) for each in asked]
        assert outputs[0].token_ids == outputs[1].token_ids


async def test_an_endless_answer_is_given_up(tmp_path: Path) -> None:
    """Nothing of such an answer is kept; the replica does not fill its memory."""
    write_checkpoint(tmp_path)
    async with EngineServer(table_model(), EngineOptions(text="x" * (65 << 20))) as server:
        with pytest.raises(InvalidSetting, match="answered more than 64 MiB"):
            await start_backend(server.url, tmp_path, "server")


def test_a_url_with_a_password_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="--backend vllm needs --backend-url"):
        settings_of("http://user:secret@127.0.0.1:8000", tmp_path, "vllm")
