"""What a client without a tokenizer reads from a coordinator: text of ids, bytes of tokens, rendered chats, advice."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from specdec.checkpoints.token_bytes import byte_level_spelling
from specdec.client import AsyncClient, ChatMessage, Client, TokenDetail
from specdec.contract.errors import InvalidRequest
from specdec.rpc.status_mapping import from_rpc_error
from specdec.v1 import coordinator_pb2 as pb
from tests.support.coordinator_rig import Coordinator, Rig
from tests.support.gateway_rig import running_gateway
from tests.support.table_services import EOS, VOCABULARY

#: The text "é€" takes five tokens, each a part of a character.
PIECES = [b"<pad>", b"</s>", *(bytes([byte]) for byte in "abcdef !é€".encode())]
PIECES += [b"filler%d" % token_id for token_id in range(len(PIECES), VOCABULARY)]
TEMPLATE = (
    "{% for message in messages %}"
    "{% for call in message.tool_calls or [] %}{{ call.function.name }}{% endfor %}"
    "{{ message.content or '' }}{{ message.name or '' }}"
    "{% endfor %}{% if loud %}!{% endif %}"
)
RECOMMENDED = {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "repetition_penalty": 1.05, "max_new_tokens": 2048}


_FALLBACK: list[Any] = [decoders.ByteFallback(), decoders.Fuse()]
#: Decoders under which a token may be a part of a character, and whether tokens are spelled as byte-level BPE does.
DECODERS: dict[str, tuple[Any, bool]] = {
    "byte level": (decoders.ByteLevel(), True),
    "byte level with another step": (decoders.Sequence([decoders.ByteLevel(), decoders.Strip("|", 0, 0)]), True),
    "byte fallback": (decoders.Sequence([decoders.Replace("▁", " "), *_FALLBACK]), False),
    "byte fallback alone": (decoders.Sequence(_FALLBACK), False),
}


def _fallback_spelling(piece: bytes) -> str:
    return f"<0x{piece[0]:02X}>" if len(piece) == 1 and piece[0] >= 0x80 else piece.decode()


def write_byte_level_checkpoint(directory: Path, kind: str = "byte level") -> None:
    decoder, is_byte_level = DECODERS[kind]
    spelling = byte_level_spelling if is_byte_level else _fallback_spelling
    vocabulary = {spelling(piece): token_id for token_id, piece in enumerate(PIECES)}
    backend = Tokenizer(models.BPE(vocabulary, [], byte_fallback=not is_byte_level))
    if is_byte_level:
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoder
    backend.add_special_tokens([AddedToken("</s>", special=True)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>", chat_template=TEMPLATE)
    tokenizer.save_pretrained(directory)
    advice = RECOMMENDED | {"do_sample": False, "eos_token_id": EOS, "min_p": 7}
    (directory / "generation_config.json").write_text(json.dumps(advice))


@asynccontextmanager
async def serving(kind: str = "byte level") -> AsyncIterator[tuple[Coordinator, AsyncClient]]:
    async with Rig(drafts=0, write_checkpoint=partial(write_byte_level_checkpoint, kind=kind)) as rig:
        coordinator = await rig.coordinator()
        async with AsyncClient(coordinator.server.address) as client:
            yield coordinator, client


async def test_token_ids_become_the_text_that_they_were_made_from() -> None:
    async with serving() as (coordinator, client):
        token_ids = await client.tokenize("a é€")
        assert await client.detokenize(token_ids) == "a é€"
        assert await client.detokenize([EOS, *token_ids]) == "a é€"
        assert await client.detokenize([EOS, *token_ids], skip_special_tokens=False) == "</s>a é€"
        assert await client.detokenize([]) == ""
        with Client(coordinator.server.address) as blocking:
            assert await asyncio.to_thread(blocking.detokenize, token_ids) == "a é€"


async def test_token_ids_without_a_text_are_refused_by_name() -> None:
    async with serving() as (_, client):
        with pytest.raises(InvalidRequest, match=f"below the vocabulary size {VOCABULARY}, got {VOCABULARY}") as caught:
            await client.detokenize([2, VOCABULARY])
        assert (caught.value.reason, caught.value.field) == ("INVALID_REQUEST", "token_ids")
        with pytest.raises(InvalidRequest, match="at most the 512 tokens of the context, got 513") as caught:
            await client.detokenize([2] * 513)
        assert (caught.value.reason, caught.value.field) == ("CONTEXT_TOO_LONG", "token_ids")


@pytest.mark.parametrize("kind", DECODERS)
async def test_bytes_of_tokens_that_are_parts_of_characters_join_to_the_text(kind: str) -> None:
    async with serving(kind) as (_, client):

        async def forced(token_id: int, logprobs: int | None) -> TokenDetail:
            answer = await client.generate(
                "a",
                logit_bias={token_id: 1000.0},
                temperature=0,
                max_new_tokens=1,
                logprobs=logprobs,
                provenance=True,
            )
            assert answer.token_ids == (token_id,)
            return answer.details[0]

        parts = await client.tokenize("é€")
        assert len(parts) == 5
        details = [await forced(token_id, 20) for token_id in parts]
        assert b"".join(detail.token_bytes for detail in details).decode() == "é€"
        assert len(details[0].top_logprobs) == 20
        for top in details[0].top_logprobs:
            assert top.token_bytes == PIECES[top.token_id]
            assert tuple(top[:2]) == (top.token_id, top.logprob)
        end = await forced(EOS, 0)
        assert (end.text, end.token_bytes) == ("", b"</s>")
        assert (await forced(parts[0], None)).token_bytes == b""


@pytest.mark.parametrize("kind", DECODERS)
async def test_http_answers_have_the_bytes_of_tokens_that_are_parts_of_characters(kind: str) -> None:
    async with serving(kind) as (coordinator, client), running_gateway(coordinator.server.address) as running:

        async def forced(token_id: int, path: str, **body: Any) -> Any:
            options = {"temperature": 0, "logit_bias": {str(token_id): 1000}, "store": False}
            return (await running.http.post(path, json=body | options)).json()

        for token_id, byte in zip(await client.tokenize("é€"), "é€".encode(), strict=True):
            post = partial(forced, token_id)
            limits = {"logprobs": True, "top_logprobs": 20, "max_tokens": 1}
            chat = await post("/v1/chat/completions", messages=[{"role": "user", "content": "a"}], **limits)
            response = await post("/v1/responses", input="a", top_logprobs=20, max_output_tokens=1)
            entries = [
                chat["choices"][0]["logprobs"]["content"][0],
                response["output"][0]["content"][0]["logprobs"][0],
            ]
            for entry in entries:
                assert entry["bytes"] == [byte]
                likeliest = {bytes(top["bytes"]) for top in entry["top_logprobs"]}
                assert len(likeliest) == 20
                assert likeliest <= set(PIECES)
            completion = (await post("/v1/completions", prompt="a", logprobs=20, max_tokens=1))["choices"][0][
                "logprobs"
            ]
            assert completion["tokens"] == [rf"bytes:\x{byte:02x}"]
            # Every token has a name of its own, so that none of the likeliest ones is lost.
            assert len(completion["top_logprobs"][0]) == 20 + (bytes([byte]) not in likeliest)
            assert completion["top_logprobs"][0][completion["tokens"][0]] == completion["token_logprobs"][0]


async def test_a_template_renders_the_further_fields_of_messages_and_its_arguments() -> None:
    messages: list[ChatMessage] = [
        {"role": "user", "content": "abc", "name": "d"},
        {"role": "assistant", "tool_calls": [{"type": "function", "function": {"name": "fe", "arguments": "{}"}}]},
        {"role": "tool", "content": "é", "tool_call_id": "c1"},
    ]
    async with serving() as (_, client):
        assert await client.detokenize(await client.tokenize(messages=messages)) == "abcdfeé"
        token_ids = await client.tokenize(messages=messages, chat_template_kwargs={"loud": True})
        assert await client.detokenize(token_ids) == "abcdfeé!"
        options = {"session_id": "s", "max_new_tokens": 2, "ignore_eos": True}
        answer = await client.generate(messages, chat_template_kwargs={"loud": True, "unread": 1}, **options)
        held = await client.get_session("s", include_token_ids=True)
        assert held.token_ids == (*token_ids, *answer.token_ids)


async def test_fields_that_no_template_may_be_given_are_refused_by_name() -> None:
    async with serving() as (coordinator, client):
        for name in ("tools", "eos_token"):
            with pytest.raises(InvalidRequest, match=f"must not hold {name}, which the server sets") as caught:
                await client.tokenize(messages=[{"role": "user", "content": "a"}], chat_template_kwargs={name: []})
            assert caught.value.field == "messages.template_arguments_json"
        bad = pb.ChatMessages(messages=[pb.ChatMessage(role="user", content="a", extra_json='{"refusal": 1}')])
        for call in (
            coordinator.stub.Tokenize(pb.TokenizeRequest(messages=bad)),
            coordinator.generate(pb.GenerateRequest(messages=bad)),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await call
            assert from_rpc_error(refused.value).field == "messages[0].extra_json"


async def test_the_sampling_that_a_model_recommends_is_reported() -> None:
    async with serving() as (_, client):
        assert (await client.info()).default_sampling == RECOMMENDED  # without min_p, which is out of range
