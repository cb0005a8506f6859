"""The text of an output after a prompt, with tokenizers that treat the first token of a text differently.

Prompt and output join to what their tokens decode to together; the answer in a conversation begins a text of its own.
Real coordinators over gRPC; transformers' tokenizer is the oracle.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from coordinator.text.tokenizer import ServedTokenizer
from specdec.client import AsyncClient
from specdec.v1 import coordinator_pb2 as pb
from tests.support.coordinator_rig import Coordinator, Rig
from tests.support.table_services import VOCABULARY

WORDS = ["<unk>", "</s>", "▁", "a", "b", "c", "d", "▁a", "ab", "▁ab", "▁c", "cd", "▁cd", "[/INST]"]
MERGES = [("▁", "a"), ("a", "b"), ("▁a", "b"), ("c", "d"), ("▁c", "d"), ("▁", "c"), ("▁", "cd")]
CD = WORDS.index("▁cd")
TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}[/INST]"

_SENTENCEPIECE = [decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
_SPACES = normalizers.Replace(" ", "▁")
#: Normalizer, pre-tokenizer and decoder of each kind.
KINDS: dict[str, tuple[Any, Any, Any]] = {
    "Metaspace": (
        None,
        pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="first", split=False),
        decoders.Sequence(_SENTENCEPIECE),
    ),
    "Metaspace everywhere": (
        None,
        pre_tokenizers.Sequence([pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="always")]),
        decoders.Metaspace(),
    ),
    "Prepend": (
        normalizers.Sequence([normalizers.Prepend("▁"), _SPACES]),
        None,
        decoders.Sequence(_SENTENCEPIECE),
    ),
    "Strip": (
        normalizers.Sequence([normalizers.Strip(), normalizers.Prepend("▁"), _SPACES]),
        None,
        decoders.Sequence(_SENTENCEPIECE),
    ),
}


def checkpoint_writer(kind: str) -> Callable[[Path], None]:
    def write(directory: Path) -> None:
        words = WORDS + [f"filler{token_id}" for token_id in range(len(WORDS), VOCABULARY)]
        vocabulary = {word: token_id for token_id, word in enumerate(words)}
        backend = Tokenizer(models.BPE(vocabulary, MERGES, unk_token="<unk>"))
        normalizer, pre_tokenizer, decoder = KINDS[kind]
        if normalizer is not None:
            backend.normalizer = normalizer
        if pre_tokenizer is not None:
            backend.pre_tokenizer = pre_tokenizer
        backend.decoder = decoder
        backend.add_special_tokens([AddedToken("</s>", special=True), AddedToken("[/INST]", special=True)])
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>", chat_template=TEMPLATE)
        tokenizer.save_pretrained(directory)

    return write


@asynccontextmanager
async def serving(kind: str) -> AsyncIterator[tuple[Rig, Coordinator, AsyncClient, Any]]:
    """Give a rig, one of its coordinators with a client, and transformers' tokenizer."""
    async with Rig(drafts=0, write_checkpoint=checkpoint_writer(kind)) as rig:
        coordinator = await rig.coordinator()
        async with AsyncClient(coordinator.server.address) as client:
            yield rig, coordinator, client, PreTrainedTokenizerFast.from_pretrained(rig.directory)


def forced(token_id: int = CD, **options: Any) -> dict[str, Any]:
    return {"temperature": 0, "logit_bias": {token_id: 1000.0}, "max_new_tokens": 3, **options}


@pytest.mark.parametrize("kind", KINDS)
async def test_prompt_and_output_join_to_what_their_tokens_decode_to(kind: str) -> None:
    async with serving(kind) as (_, _, client, tokenizer):
        prompt_ids = tokenizer.encode("ab")
        right = tokenizer.decode([*prompt_ids, CD, CD, CD], skip_special_tokens=True)
        assert right == "ab cd cd cd"
        for options in ({"prompt": "ab"}, {"prompt_token_ids": prompt_ids}):
            answer = await client.generate(**options, **forced(logprobs=0))
            assert answer.token_ids == (CD, CD, CD)
            assert "ab" + answer.text == right
            assert "".join(detail.text for detail in answer.details) == answer.text
            assert b"".join(detail.token_bytes for detail in answer.details).decode() == answer.text
            async with client.generate(**options, **forced(), stream=True) as stream:
                assert "".join([chunk.text async for chunk in stream]) == answer.text


async def test_the_answer_in_a_conversation_begins_a_text() -> None:
    async with serving("Prepend") as (_, _, client, tokenizer):
        answer = await client.generate([{"role": "user", "content": "ab"}], **forced())
        assert answer.text == tokenizer.decode([CD, CD, CD], skip_special_tokens=True) == "cd cd cd"


async def test_a_special_token_at_the_end_of_a_prompt_does_not_begin_the_text_anew() -> None:
    async with serving("Prepend") as (_, _, client, tokenizer):
        prompt_ids = tokenizer.encode("ab[/INST]")
        assert "ab" + (await client.generate(prompt_token_ids=prompt_ids, **forced())).text == "ab cd cd cd"
        only_special = tokenizer.encode("[/INST]", add_special_tokens=False)
        assert (await client.generate(prompt_token_ids=only_special[-1:], **forced())).text == "cd cd cd"


async def test_a_stop_string_that_begins_with_a_space_ends_an_output_at_its_first_token() -> None:
    async with serving("Metaspace") as (_, _, client, _):
        answer = await client.generate("ab", **forced(stop=[" cd"]))
        assert (answer.text, answer.finish_reason, len(answer.token_ids)) == ("", "stop_string", 1)


@pytest.mark.parametrize("is_chat", [False, True])
async def test_another_coordinator_replays_the_same_text(is_chat: bool) -> None:
    async with serving("Metaspace") as (rig, _, client, _):
        given: Any = [{"role": "user", "content": "ab"}] if is_chat else "ab"
        answer = await client.generate(given, **forced(session_id="s"))
        assert answer.text == ("cd cd cd" if is_chat else " cd cd cd")
        other = await rig.coordinator()
        replay = await other.generate(pb.GenerateRequest(session_id="s", resume_from=0))
        assert replay.text == answer.text
        rest = await other.generate(pb.GenerateRequest(session_id="s", resume_from=1))
        assert rest.text == " cd cd"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("prompt", ["cd", " cd", "  cd ab"])
async def test_the_next_prompt_of_a_session_is_appended_as_it_is(kind: str, prompt: str) -> None:
    async with serving(kind) as (_, _, client, tokenizer):
        ab = WORDS.index("ab")
        await client.generate("ab", **forced(ab, session_id="s", max_new_tokens=1))
        answer = await client.generate(prompt, **forced(session_id="s", max_new_tokens=1))
        held = (await client.get_session("s", include_token_ids=True)).token_ids
        assert tokenizer.decode(list(held), skip_special_tokens=True) == "abab" + prompt + answer.text
        assert answer.text == " cd"


def test_a_long_text_is_appended_with_the_tokens_of_a_short_one(tmp_path: Path) -> None:
    checkpoint_writer("Prepend")(tmp_path)
    tokenizer = ServedTokenizer(tmp_path)
    short = tokenizer.encode("cd", add_special_tokens=False, continues=True)
    assert short == [WORDS.index("cd")]
    # Texts above 131,072 characters are encoded in another process.
    assert tokenizer.encode("cd" * 70_000, add_special_tokens=False, continues=True) == short * 70_000
