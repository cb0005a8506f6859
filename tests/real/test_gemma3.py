"""Gemma 3 270M, which answers no chat: a vocabulary of 262,144 tokens and a sliding window of 512."""

from __future__ import annotations

import pytest
from transformers import AutoTokenizer

from specdec.checkpoints.vocabulary import load_tokenizer, load_vocabulary
from specdec.contract.errors import SpecdecError
from tests.support.served_files import ODD_TEXTS, Served

NUM_TOKENS = 24
WINDOW = 512
PROMPTS = ["The capital of France is", "def fibonacci(n):\n    ", "Die Kinder gingen in den Wald und 🌲", "1, 2, 3, 4,"]


@pytest.mark.parametrize("prompt", PROMPTS)
def test_a_completion_is_that_of_generate(gemma: Served, prompt: str) -> None:
    completion = gemma.client.generate(prompt, temperature=0, max_new_tokens=NUM_TOKENS, gamma=3)
    gemma.assert_greedy(gemma.client.tokenize(prompt), completion.token_ids, NUM_TOKENS)


def test_every_token_of_the_large_vocabulary_is_served(gemma: Served) -> None:
    assert len(load_vocabulary(gemma.path)) == gemma.reference.config.vocab_size == 262_144
    rare = (262_143, 255_999, 131_071, 3, 2)
    completion = gemma.client.generate(prompt_token_ids=(2, *rare), temperature=0, max_new_tokens=4, gamma=2)
    gemma.assert_greedy((2, *rare), completion.token_ids, 4)


@pytest.mark.parametrize("length", [WINDOW - 8, WINDOW + 100])
def test_a_text_that_grows_past_the_sliding_window_is_that_of_generate(gemma: Served, length: int) -> None:
    """The first begins within the window and ends beyond it."""
    story = " ".join(f"On day {day} the ship passed island number {day * 7 % 31}." for day in range(1, 60))
    prompt = gemma.client.tokenize(story)[:length]
    assert len(prompt) == length
    completion = gemma.client.generate(prompt_token_ids=prompt, temperature=0, max_new_tokens=NUM_TOKENS, gamma=3)
    gemma.assert_greedy(prompt, completion.token_ids, NUM_TOKENS)


def test_a_model_without_a_template_refuses_messages_by_name(gemma: Served) -> None:
    with pytest.raises(SpecdecError, match="chat template"):
        gemma.client.generate(messages=[{"role": "user", "content": "hi"}], max_new_tokens=1)


def test_texts_are_encoded_as_transformers_encodes_them(gemma: Served) -> None:
    theirs = AutoTokenizer.from_pretrained(gemma.path.parent, gguf_file=gemma.path.name)
    ours = load_tokenizer(gemma.path)
    assert [ours.encode(text) for text in ODD_TEXTS] == [theirs.encode(text) for text in ODD_TEXTS]


def test_texts_are_encoded_as_llama_cpp_encodes_them(gemma: Served) -> None:
    """But for the character that stands for a blank within tokens, which it takes for itself beside a blank."""
    llama_cpp = pytest.importorskip("llama_cpp")
    theirs = llama_cpp.Llama(str(gemma.path), vocab_only=True, verbose=False)
    ours = load_tokenizer(gemma.path)
    texts = [text for text in ODD_TEXTS if "\u2581" not in text]
    assert [ours.encode(text) for text in texts] == [theirs.tokenize(text.encode(), special=True) for text in texts]
