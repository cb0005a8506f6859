"""Text decoded token by token equals the text of decoding all tokens at once, for every kind of tokenizer.

Outputs begin a text, or continue the text of a prompt.

The tokenizers are built here, with hand-made vocabularies whose tokens split characters, words and clean-ups badly.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from coordinator.text.detokenizer import IncrementalDetokenizer
from coordinator.text.tokenizer import ServedTokenizer
from specdec.checkpoints.token_bytes import BYTE_TOKEN

SPECIAL = "<|end|>"
KINDS = (
    "byte_level",
    "byte_level_in_sequence",
    "byte_level_replaced",
    "metaspace",
    "byte_fallback",
    "byte_fallback_strip",
    "word_piece_cleaned",
    "word_piece",
    "word_level",
    "word_level_cleaned",
    "bpe_suffix",
    "bpe_cleaned_all_the_same",
)
#: Pieces that complete or split characters, clean-ups, stop strings and first-token rules.
PIECES = ("a", "b", "ab", "n", "'", "t", "s", "re", "ve", ".", "!", ",", "?", "n't", "'s", "é", "€", "\ufffd")


def _byte_character(byte: int) -> str:
    """Return a byte as byte-level BPE spells it."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    if byte in printable:
        return chr(byte)
    return chr(0x100 + sum(other not in printable for other in range(byte)))


def _byte_level_tokens() -> list[str]:
    single = [_byte_character(byte) for byte in (*b"ab '.!\n", *"é€😀".encode(), 0xFF, 0xC0, 0xED, 0xA0)]
    split = [
        "😀".encode()[2:] + "😀".encode()[:2],
        "€".encode()[1:] + b"a",
        b"a" + "é".encode()[:1],
        b" a",
        b" '",
        b"ab",
    ]
    words = ["".join(map(_byte_character, part)) for part in split]
    # Added tokens are spelt in plain characters, which are not in the byte-level alphabet.
    return [*dict.fromkeys([*single, *words, "日本", "a日"])]


def _build(kind: str) -> PreTrainedTokenizerFast:
    bytes_ = [f"<0x{byte:02X}>" for byte in (0x0A, 0x41, 0xC3, 0xA9, 0xE2, 0x82, 0xAC, 0xF0, 0x9F, 0x98, 0x80, 0xFF)]
    spaced = ["▁", "▁▁", "▁a", "▁.", "▁'", "▁'▁", "▁n't", "a▁b", "<0xE2", *PIECES]
    cleans_up, insists = "cleaned" in kind, kind == "bpe_cleaned_all_the_same"
    if kind.startswith("byte_level"):
        tokens: list[str] = _byte_level_tokens()
        decoder = decoders.ByteLevel()
        if kind == "byte_level_in_sequence":
            decoder = decoders.Sequence([decoders.Sequence([decoders.ByteLevel()])])
        elif kind == "byte_level_replaced":
            decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Replace("a", "A")])
    elif kind == "metaspace":
        tokens, decoder = spaced, decoders.Metaspace()
    elif kind == "byte_fallback":
        parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
        tokens, decoder = spaced + bytes_, decoders.Sequence(parts)
    elif kind == "byte_fallback_strip":
        # "~" decodes to an empty text, so it cannot serve as context for the tokens after it.
        parts = [decoders.Replace("~", ""), decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
        tokens, decoder = [*spaced, *bytes_, "~"], decoders.Sequence([*parts, decoders.Strip(" ", 1, 0)])
    elif kind.startswith("word_piece"):
        tokens, decoder = [*PIECES, "##a", "##'", "##t", "##", "## ", "##."], decoders.WordPiece(cleanup=cleans_up)
    elif kind == "bpe_suffix":
        tokens, decoder = [*PIECES, "a</w>", "b</w>", ".</w>", "</w>"], decoders.BPEDecoder()
    elif insists:
        tokens, decoder = spaced, decoders.Metaspace()
    else:
        tokens, decoder = [*PIECES, " ", "  "], None
    vocabulary = {token: token_id for token_id, token in enumerate([*dict.fromkeys([*tokens, "[UNK]"])])}
    is_bpe = kind.startswith("b") or insists
    model = models.BPE(vocabulary, []) if is_bpe else models.WordLevel(vocabulary, unk_token="[UNK]")
    backend = Tokenizer(model)
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    if decoder is not None:
        backend.decoder = decoder
    backend.add_special_tokens([AddedToken(SPECIAL, special=True)])
    backend.add_tokens([AddedToken("日", special=False), AddedToken(" x", special=False)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, clean_up_tokenization_spaces=cleans_up)
    if insists:
        tokenizer.clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output = True
        tokenizer.init_kwargs["clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output"] = True
    return tokenizer


@cache
def served(kind: str) -> tuple[ServedTokenizer, PreTrainedTokenizerFast]:
    """Return our tokenizer, and Hugging Face's as the oracle, both read from one directory."""
    directory = Path(mkdtemp(prefix=f"specdec-{kind}-"))
    _build(kind).save_pretrained(directory)
    return ServedTokenizer(directory), PreTrainedTokenizerFast.from_pretrained(directory)


def whole_text(kind: str, token_ids: Sequence[int]) -> str:
    return served(kind)[1].decode(list(token_ids), skip_special_tokens=True)


def outputs(kind: str) -> st.SearchStrategy[list[int]]:
    # Includes one id beyond the vocabulary: models pad their embeddings, so such an id can be drawn.
    return st.lists(st.integers(0, served(kind)[0].vocabulary_size), max_size=24)


def outputs_after(kind: str, prompt: Sequence[int]) -> st.SearchStrategy[list[int]]:
    """Outputs without byte tokens if the prompt ends in one: transformers decodes such a run anew, as a whole."""
    spelled = [served(kind)[0].token(token_id) or "" for token_id in prompt]
    splits_run = served(kind)[0].rules.has_byte_tokens and any(map(BYTE_TOKEN.fullmatch, spelled[-1:]))
    if not splits_run:
        return outputs(kind)
    return outputs(kind).map(lambda ids: [t for t in ids if not BYTE_TOKEN.fullmatch(served(kind)[0].token(t) or "")])


def text_after(kind: str, prompt: Sequence[int], output: Sequence[int]) -> str:
    """Return the text with which an output continues its prompt's.

    The output may complete a character of the prompt, or remove its last space in a clean-up. Its text then begins with
    the first change.
    """
    before, whole = whole_text(kind, prompt), whole_text(kind, [*prompt, *output])
    num_common = next(
        (place for place, (one, two) in enumerate(zip(before, whole, strict=False)) if one != two), len(before)
    )
    return whole[num_common:]


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=80, deadline=None)
@given(st.data())
def test_the_joined_text_equals_the_decoded_output(kind: str, data: st.DataObject) -> None:
    token_ids = data.draw(outputs(kind))
    detokenizer = IncrementalDetokenizer(served(kind)[0])
    texts = [detokenizer.push_token(token_id) for token_id in token_ids]
    assert "".join(texts) + detokenizer.finish() == whole_text(kind, token_ids)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=40, deadline=None)
@given(st.data())
def test_text_after_n_tokens_is_a_function_of_those_tokens(kind: str, data: st.DataObject) -> None:
    prompt = data.draw(outputs(kind))
    token_ids = data.draw(outputs(kind))
    stop = tuple(data.draw(st.lists(st.sampled_from(["ab", "a.", "a b", "€", "\n"]), max_size=2)))
    tokenizer = served(kind)[0]
    whole = IncrementalDetokenizer(tokenizer, stop, prompt)
    after = [""]
    for token_id in token_ids:
        after.append(after[-1] + whole.push_token(token_id))
    for num_tokens in range(len(token_ids) + 1):
        shorter = IncrementalDetokenizer(tokenizer, stop, prompt)
        assert "".join(map(shorter.push_token, token_ids[:num_tokens])) == after[num_tokens]


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=80, deadline=None)
@given(st.data())
def test_prompt_and_output_join_to_what_their_tokens_decode_to(kind: str, data: st.DataObject) -> None:
    prompt = data.draw(outputs(kind))
    token_ids = data.draw(outputs_after(kind, prompt))
    detokenizer = IncrementalDetokenizer(served(kind)[0], before=prompt)
    texts = [detokenizer.push_token(token_id) for token_id in token_ids]
    assert "".join(texts) + detokenizer.finish() == text_after(kind, prompt, token_ids)


@pytest.mark.parametrize("ends", [1, 2, 3])
def test_a_character_that_begins_in_the_prompt_is_completed_by_the_output(ends: int) -> None:
    tokenizer, fast = served("byte_fallback_strip")
    vocabulary = fast.get_vocab()
    text = "€A"
    token_ids = [vocabulary["▁a"], *(vocabulary[f"<0x{byte:02X}>"] for byte in text.encode()), vocabulary["▁a"]]
    detokenizer = IncrementalDetokenizer(tokenizer, before=token_ids[: 1 + ends])
    texts = [detokenizer.push_token(token_id) for token_id in token_ids[1 + ends :]]
    assert "".join(texts) + detokenizer.finish() == ("A a" if ends == 3 else "€A a")


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=80, deadline=None)
@given(st.data())
def test_an_output_stops_at_the_first_token_whose_text_holds_a_stop_string(kind: str, data: st.DataObject) -> None:
    prompt = data.draw(outputs(kind))
    token_ids = data.draw(outputs_after(kind, prompt))
    text = text_after(kind, prompt, token_ids)
    start = data.draw(st.integers(0, len(text)))
    inside = text[start : start + data.draw(st.integers(1, 6))]
    stops = [inside, *data.draw(st.lists(st.text("ab .'n\ufffd", min_size=1, max_size=4), max_size=2))]
    stops = [stop for stop in stops if stop]
    expected_text, expected_kept = text, len(token_ids)
    for length in range(1, len(token_ids) + 1):
        so_far = text_after(kind, prompt, token_ids[:length])
        starts = [so_far.find(stop) for stop in stops if stop in so_far]
        if starts:
            expected_text, expected_kept = so_far[: min(starts)], length
            break

    detokenizer = IncrementalDetokenizer(served(kind)[0], stops, prompt)
    texts: list[str] = []
    for token_id in token_ids:
        if detokenizer.has_ended:
            break
        texts.append(detokenizer.push_token(token_id))
    assert "".join(texts) + detokenizer.finish() == expected_text
    assert len(texts) == expected_kept


def test_a_token_after_one_without_text_is_not_decoded_as_the_first() -> None:
    tokenizer = served("byte_fallback_strip")[0]
    vocabulary = served("byte_fallback_strip")[1].get_vocab()
    token_ids = [vocabulary[token] for token in ("a", "~", "▁a")]
    detokenizer = IncrementalDetokenizer(tokenizer)
    assert [detokenizer.push_token(token_id) for token_id in token_ids] == ["a", "", " a"]


@settings(max_examples=100, deadline=None)
@given(st.text(max_size=12))
def test_a_valid_text_never_shows_a_broken_character(text: str) -> None:
    tokenizer = _all_bytes()
    detokenizer = IncrementalDetokenizer(tokenizer)
    shown = ""
    for byte in text.encode():
        shown += detokenizer.push_token(byte)
        assert text.startswith(shown)
    assert shown == text


@cache
def _all_bytes() -> ServedTokenizer:
    backend = Tokenizer(models.BPE({_byte_character(byte): byte for byte in range(256)}, []))
    backend.decoder = decoders.ByteLevel()
    directory = mkdtemp(prefix="specdec-bytes-")
    PreTrainedTokenizerFast(tokenizer_object=backend).save_pretrained(directory)
    return ServedTokenizer(directory)


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=16))
def test_arbitrary_bytes_give_the_text_of_decoding_them_at_once(data: bytes) -> None:
    tokenizer = _all_bytes()
    detokenizer = IncrementalDetokenizer(tokenizer)
    texts = [detokenizer.push_token(byte) for byte in data]
    assert "".join(texts) + detokenizer.finish() == tokenizer.decode(list(data))
