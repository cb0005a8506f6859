"""The served tokenizer: special tokens, chat templates and refusals, without torch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from coordinator.text.detokenizer import IncrementalDetokenizer
from coordinator.text.tokenizer import ServedTokenizer
from specdec.checkpoints.vocabulary import load_vocabulary, vocabulary_fingerprint
from specdec.contract.errors import InvalidRequest, Unavailable
from tests.support.open_files import no_more_files

TEMPLATE = (
    "{% for message in messages %}{% if message['role'] == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
    "{{ message['role'] + ' ' + message['content'] + ' ' }}{% endfor %}"
    "{% if add_generation_prompt %}assistant{% endif %}"
)
WORDS = ("<s>", "[UNK]", "user", "assistant", "hello", "world")


def save(directory: Path, *, chat_template: str | None = TEMPLATE, words: tuple[str, ...] = WORDS) -> Path:
    backend = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.add_special_tokens([AddedToken("<s>", special=True)])
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", chat_template=chat_template)
    tokenizer.save_pretrained(directory)
    return directory


def test_special_tokens_are_added_on_request_only_and_never_decoded_as_text(tmp_path: Path) -> None:
    tokenizer = ServedTokenizer(save(tmp_path))
    assert tokenizer.encode("hello world", add_special_tokens=True) == [0, 4, 5]
    assert tokenizer.encode("hello world", add_special_tokens=False) == [4, 5]
    assert tokenizer.encode("", add_special_tokens=False) == []
    assert tokenizer.decode([0, 4, 0, 5]) == "hello world"


def test_an_encoded_conversation_ends_with_the_opening_of_the_assistants_turn(tmp_path: Path) -> None:
    tokenizer = ServedTokenizer(save(tmp_path))
    assert tokenizer.has_chat_template
    conversation = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "world"}]
    assert tokenizer.encode_chat(conversation) == [2, 4, 3, 5, 3]


def test_a_model_without_a_chat_template_refuses_messages(tmp_path: Path) -> None:
    tokenizer = ServedTokenizer(save(tmp_path, chat_template=None))
    assert not tokenizer.has_chat_template
    with pytest.raises(InvalidRequest) as refusal:
        tokenizer.encode_chat([{"role": "user", "content": "hello"}])
    assert (refusal.value.reason, refusal.value.field) == ("NO_CHAT_TEMPLATE", "messages")


def test_a_conversation_for_which_no_process_can_be_started_may_be_retried(tmp_path: Path) -> None:
    tokenizer = ServedTokenizer(save(tmp_path))
    with no_more_files(), pytest.raises(Unavailable, match="cannot be started: Too many open files"):
        tokenizer.encode_chat([{"role": "user", "content": "hello"}])
    assert tokenizer.encode_chat([{"role": "user", "content": "hello"}])


def test_a_template_that_refuses_a_role_is_an_invalid_request(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="no tools here") as refusal:
        ServedTokenizer(save(tmp_path)).encode_chat([{"role": "tool", "content": "hello"}])
    assert refusal.value.field == "messages"


def test_size_and_fingerprint_are_those_of_the_vocabulary(tmp_path: Path) -> None:
    tokenizer = ServedTokenizer(save(tmp_path))
    assert tokenizer.vocabulary_size == len(WORDS)
    assert tokenizer.fingerprint == vocabulary_fingerprint(load_vocabulary(tmp_path))


def test_two_vocabularies_with_two_tokens_exchanged_differ(tmp_path: Path) -> None:
    exchanged = (*WORDS[:-2], WORDS[-1], WORDS[-2])
    ours, theirs = save(tmp_path / "a"), save(tmp_path / "b", words=exchanged)
    assert ServedTokenizer(ours).fingerprint != ServedTokenizer(theirs).fingerprint


def test_the_fingerprint_does_not_depend_on_the_order_of_the_map() -> None:
    assert vocabulary_fingerprint({"a": 0, "b": 1}) == vocabulary_fingerprint({"b": 1, "a": 0})
    assert vocabulary_fingerprint({"ab": 0, "c": 1}) != vocabulary_fingerprint({"a": 0, "bc": 1})


@pytest.mark.parametrize("name", ["/no/such/model", "./nowhere", "a/b/c", "", "not a hub id"])
def test_a_bad_model_name_gives_a_one_line_error(name: str) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        ServedTokenizer(name)
    assert name in refusal.value.message
    assert "\n" not in refusal.value.message


@pytest.mark.parametrize("content", [None, "", '{"model": ', '{"model": {"type": "Nonsense"}}'])
def test_a_directory_without_a_readable_tokenizer_gives_a_one_line_error(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(InvalidRequest) as refusal:
        ServedTokenizer(tmp_path)
    assert str(tmp_path) in refusal.value.message
    assert "\n" not in refusal.value.message


def test_encoding_chatting_and_streaming_text_load_no_torch(tmp_path: Path) -> None:
    program = f"""
import sys
from coordinator.text.detokenizer import IncrementalDetokenizer
from coordinator.text.tokenizer import ServedTokenizer
tokenizer = ServedTokenizer({str(save(tmp_path))!r})
token_ids = tokenizer.encode_chat([dict(role="user", content="hello world")])
detokenizer = IncrementalDetokenizer(tokenizer, ("nothing",))
print("".join(map(detokenizer.push_token, token_ids)) + detokenizer.finish())
print(sorted({{"torch", "ray"}} & set(sys.modules)))
"""
    output = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert output.splitlines() == ["user hello world assistant", "[]"]


class _CountingTokenizer(ServedTokenizer):
    """The real tokenizer, which also counts the token ids that it decodes."""

    num_decoded = 0

    def decode_uncleaned(self, token_ids: list[int]) -> str:  # type: ignore[override]
        self.num_decoded += len(token_ids)
        return super().decode_uncleaned(token_ids)


def test_the_work_to_decode_an_output_is_proportional_to_its_length(tmp_path: Path) -> None:
    tokenizer = _CountingTokenizer(save(tmp_path))
    detokenizer = IncrementalDetokenizer(tokenizer, ("nothing",))
    output = [4, 5] * 1000
    text = "".join(detokenizer.push_token(token_id) for token_id in output) + detokenizer.finish()
    assert text == tokenizer.decode(output)
    assert tokenizer.num_decoded <= 4 * len(output)


def test_a_metaspace_output_begins_without_a_space(tmp_path: Path) -> None:
    backend = Tokenizer(models.WordLevel({"▁a": 0, "b": 1}, unk_token="b"))
    backend.decoder = decoders.Metaspace()
    PreTrainedTokenizerFast(tokenizer_object=backend).save_pretrained(tmp_path)
    detokenizer = IncrementalDetokenizer(ServedTokenizer(tmp_path))
    assert [detokenizer.push_token(token_id) for token_id in (0, 1, 0)] == ["a", "b", " a"]
