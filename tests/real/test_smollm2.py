"""SmolLM2-135M-Instruct in conversations: what `generate()` answers, token for token."""

from __future__ import annotations

import pytest
from transformers import AutoTokenizer

from bench.harness.workload import chat_prompts
from specdec.checkpoints.vocabulary import load_tokenizer
from specdec.client import ChatMessage
from specdec.contract.types import TokenSource
from tests.support.served_files import ODD_TEXTS, Served

NUM_TOKENS = 48


@pytest.mark.parametrize("question", chat_prompts())
def test_an_answer_in_a_chat_is_that_of_generate(smol: Served, question: str) -> None:
    messages: list[ChatMessage] = [{"role": "user", "content": question}]
    answer = smol.client.generate(messages=messages, temperature=0, max_new_tokens=NUM_TOKENS, gamma=3, provenance=True)
    smol.assert_greedy(smol.client.tokenize(messages=messages), answer.token_ids, NUM_TOKENS)
    assert TokenSource.ACCEPTED in [detail.source for detail in answer.details]


def test_turns_of_one_session_are_those_of_the_whole_conversation(smol: Served) -> None:
    messages: list[ChatMessage] = []
    for question in ("What is rain? 🌧️", "And snow?", "Say both words again."):
        messages.append({"role": "user", "content": question})
        answer = smol.client.generate(
            messages=messages, session_id="turns", temperature=0, max_new_tokens=NUM_TOKENS, gamma=3
        )
        smol.assert_greedy(smol.client.tokenize(messages=messages), answer.token_ids, NUM_TOKENS)
        messages.append({"role": "assistant", "content": answer.text})
    smol.client.delete_session("turns")


def test_texts_are_encoded_as_transformers_encodes_them(smol: Served) -> None:
    theirs = AutoTokenizer.from_pretrained(smol.path.parent, gguf_file=smol.path.name)
    ours = load_tokenizer(smol.path)
    assert [ours.encode(text) for text in ODD_TEXTS] == [theirs.encode(text) for text in ODD_TEXTS]
    assert [ours.decode(ours.encode(text)) for text in ODD_TEXTS] == ODD_TEXTS


def test_texts_are_encoded_as_llama_cpp_encodes_them(smol: Served) -> None:
    llama_cpp = pytest.importorskip("llama_cpp")
    theirs = llama_cpp.Llama(str(smol.path), vocab_only=True, verbose=False)
    ours = load_tokenizer(smol.path)
    texts = [*ODD_TEXTS, "x  12 3\n\n4", "hello 123  456", "\t7"]
    assert [ours.encode(text) for text in texts] == [
        theirs.tokenize(text.encode(), add_bos=False, special=True) for text in texts
    ]
