"""The tokens of a turn after those that the session holds, and the limit of its output."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest

from coordinator.requests import ChatTurn, GenerationRequest, SpeculationChoice
from coordinator.text.prompt import Prompt, encode_prompt, resolve_sampling
from coordinator.text.tokenizer import ServedTokenizer
from specdec.contract.errors import InvalidRequest
from specdec.contract.types import Mode, SamplingParams
from tests.support.table_services import write_tokenizer
from tests.support.tool_models import write_family

CHAT_TEMPLATE = "{% for m in messages %}{{ m['role'] }} {{ m['content'] }} {% endfor %}w2"
NOTHING = np.empty(0, np.uint32)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> ServedTokenizer:
    directory: Path = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(directory, CHAT_TEMPLATE)
    return ServedTokenizer(directory)


def ask(*, max_new_tokens: int = 0, seed: int | None = None, **input_: object) -> GenerationRequest:
    return GenerationRequest(
        session_id="s",
        request_id="r",
        sampling=SamplingParams(max_new_tokens=max_new_tokens, seed=seed or 0),
        is_seeded=seed is not None,
        speculation=SpeculationChoice(Mode.REJECTION, None, ""),
        **input_,
    )


def chat(*contents: str) -> tuple[ChatTurn, ...]:
    return tuple(ChatTurn(f"w{10 + index}", content) for index, content in enumerate(contents))


def test_text_and_ids_are_appended_to_the_session(tokenizer: ServedTokenizer) -> None:
    held = np.array([7, 8], np.uint32)
    for asked in (ask(text="w5 w6"), ask(token_ids=np.array([5, 6], np.uint32))):
        prompt = encode_prompt(asked, held, tokenizer)
        assert (prompt.keep, prompt.new_token_ids.tolist()) == (2, [5, 6])


def test_a_conversation_keeps_its_longest_common_prefix_with_the_session(tokenizer: ServedTokenizer) -> None:
    first = encode_prompt(ask(messages=chat("w5")), NOTHING, tokenizer)
    assert (first.keep, first.new_token_ids.tolist()) == (0, [10, 5, 2])
    held = np.array([10, 5, 2, 9, 9], np.uint32)
    edited = encode_prompt(ask(messages=chat("w5", "w6")), held, tokenizer)
    assert (edited.keep, edited.new_token_ids.tolist()) == (2, [11, 6, 2])
    same = encode_prompt(ask(messages=chat("w5")), held, tokenizer)
    assert (same.keep, same.new_token_ids.tolist()) == (3, [])


def test_text_without_a_token_is_an_empty_prompt(tokenizer: ServedTokenizer) -> None:
    with pytest.raises(InvalidRequest, match="prompt must not be empty"):
        encode_prompt(ask(text="  "), NOTHING, tokenizer)


def prompt_of(num_tokens: int) -> Prompt:
    return Prompt(0, np.zeros(num_tokens, np.uint32), "prompt")


def test_the_default_output_limit_is_clipped_to_the_context_and_an_explicit_one_is_not() -> None:
    assert resolve_sampling(ask(), prompt_of(10), 1000).max_new_tokens == 256
    assert resolve_sampling(ask(), prompt_of(10), 40).max_new_tokens == 30
    assert resolve_sampling(ask(max_new_tokens=30), prompt_of(10), 40).max_new_tokens == 30
    with pytest.raises(InvalidRequest, match=r"sampling.max_new_tokens must be at most 30 .* 40, got 31") as caught:
        resolve_sampling(ask(max_new_tokens=31), prompt_of(10), 40)
    assert (caught.value.reason, caught.value.field) == ("CONTEXT_TOO_LONG", "sampling.max_new_tokens")


def test_a_prompt_that_fills_the_context_is_refused_with_its_field() -> None:
    assert resolve_sampling(ask(), prompt_of(39), 40).max_new_tokens == 1
    with pytest.raises(InvalidRequest, match="prompt must leave room") as caught:
        resolve_sampling(ask(), prompt_of(40), 40)
    assert (caught.value.reason, caught.value.field) == ("CONTEXT_TOO_LONG", "prompt")


def test_a_seed_is_kept_or_drawn() -> None:
    assert resolve_sampling(ask(seed=0), prompt_of(1), 40).seed == 0
    drawn = {resolve_sampling(ask(), prompt_of(1), 40).seed for _ in range(8)}
    assert len(drawn) == 8


@pytest.fixture(scope="module")
def bytes_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> ServedTokenizer:
    """The tokenizer of the built-in pair, with a marker."""
    template = "{% for m in messages %}<|user|>{{ m['content'] }}<|eos|>{% endfor %}"
    return ServedTokenizer(str(write_family(tmp_path_factory.mktemp("bytes"), "target", template, ["<tool_call>"])))


def of_chat(tokenizer: ServedTokenizer, *contents: str) -> list[int]:
    return tokenizer.encode_chat([turn.as_dict() for turn in chat(*contents)])


def split_tokens(tokenizer: ServedTokenizer, text: str) -> list[int]:
    """Return the tokens of single characters."""
    return [token for letter in text for token in tokenizer.encode(letter, add_special_tokens=False)]


def test_a_conversation_keeps_tokens_that_spell_its_text_otherwise(bytes_tokenizer: ServedTokenizer) -> None:
    canonical = of_chat(bytes_tokenizer, "return value é 🗼")
    for start, end in ((0, 16), (3, 9), (7, 16)):
        text = "return value é 🗼"
        spelled = [
            *bytes_tokenizer.encode(text[:start], add_special_tokens=False),
            *split_tokens(bytes_tokenizer, text[start:end]),
            *bytes_tokenizer.encode(text[end:], add_special_tokens=False),
        ]
        held = np.array([canonical[0], *spelled, canonical[-1]], np.uint32)
        prompt = encode_prompt(ask(messages=chat("return value é 🗼", "next")), held, bytes_tokenizer)
        assert prompt.keep == len(held)
        whole = of_chat(bytes_tokenizer, "return value é 🗼", "next")
        assert prompt.new_token_ids.tolist() == whole[len(canonical) :]


def test_tokens_are_kept_up_to_the_last_place_at_which_both_spellings_meet(bytes_tokenizer: ServedTokenizer) -> None:
    whole = of_chat(bytes_tokenizer, "return value")
    held = [whole[0], *split_tokens(bytes_tokenizer, "return vague")]
    prompt = encode_prompt(ask(messages=chat("return value")), np.array(held, np.uint32), bytes_tokenizer)
    tokens = [*held[: prompt.keep], *prompt.new_token_ids.tolist()]
    assert bytes_tokenizer.decode(tokens) == "return value"
    assert prompt.keep > 1


def test_every_spelling_of_a_conversation_is_kept(bytes_tokenizer: ServedTokenizer) -> None:
    draw = random.Random(44)
    text = 'def café(x):\n    return {"a": "🗼 <b>", "n": -1.5}  # done\n\n'
    whole = of_chat(bytes_tokenizer, text)
    for _ in range(40):
        cuts = sorted(draw.sample(range(1, len(text)), draw.randint(1, 12)))
        pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, None], strict=True)]
        spelled = [token for piece in pieces for token in bytes_tokenizer.encode(piece, add_special_tokens=False)]
        held = np.array([whole[0], *spelled, whole[-1]], np.uint32)
        prompt = encode_prompt(ask(messages=chat(text)), held, bytes_tokenizer)
        assert (prompt.keep, prompt.new_token_ids.tolist()) == (len(held), [])


def test_a_special_token_is_not_its_name_in_other_tokens(bytes_tokenizer: ServedTokenizer) -> None:
    whole = of_chat(bytes_tokenizer, "a<tool_call>b")
    held = [whole[0], *split_tokens(bytes_tokenizer, "a<tool_call>b"), whole[-1]]
    prompt = encode_prompt(ask(messages=chat("a<tool_call>b")), np.array(held, np.uint32), bytes_tokenizer)
    assert prompt.keep == 2
    assert prompt.new_token_ids.tolist() == whole[2:]
