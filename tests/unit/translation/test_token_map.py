"""The map between the tokens of two tokenizers, by their bytes."""

from __future__ import annotations

from pathlib import Path

import pytest

from specdec.checkpoints.cross_vocabulary.pair import TokenizerPair
from specdec.checkpoints.vocabulary import load_tokenizer
from specdec.contract.errors import Unsupported, VocabularyMismatch
from tests.support.other_tokenizers import (
    TEXTS,
    load_pair,
    save_byte_level,
    save_byte_level_vocabulary,
    save_piece_vocabulary,
    save_pieces,
)
from tests.support.tiny_models import save_tokenizer


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("tokenizers")
    return save_byte_level(folder / "bytes"), save_pieces(folder / "pieces")


@pytest.fixture(scope="module", params=["pieces for bytes", "bytes for pieces"])
def pair(request: pytest.FixtureRequest, directories: tuple[Path, Path]) -> TokenizerPair:
    draft, target = directories if request.param == "bytes for pieces" else directories[::-1]
    return load_pair(draft, target)


def test_shared_tokens_have_the_same_bytes(pair: TokenizerPair) -> None:
    shared = [(own, target) for own, target in enumerate(pair.tokens.target_of.tolist()) if target >= 0]
    text = [(own, target) for own, target in shared if pair.draft.token_bytes[own]]
    assert len(text) > 250
    assert all(pair.draft.token_bytes[own] == pair.target.token_bytes[target] for own, target in text)


def test_tokens_with_different_spellings_and_equal_bytes_are_shared(directories: tuple[Path, Path]) -> None:
    pair = load_pair(*directories)
    byte_level, pieces = map(load_tokenizer, directories)
    for spelled_in_bytes, spelled_in_pieces in (("Ġthe", "▁the"), ("Ã©", "é"), ("ĠB", "▁B"), ("Ċ", "\n")):
        own, target = (t.get_vocab()[s] for t, s in ((byte_level, spelled_in_bytes), (pieces, spelled_in_pieces)))
        assert pair.tokens.target_of[own] == target
        assert pair.tokens.draft_vocab_of[target] == own


def test_a_byte_token_with_the_bytes_of_another_token_is_read_but_never_drafted(
    directories: tuple[Path, Path],
) -> None:
    pair = load_pair(*directories)
    byte_level, pieces = (load_tokenizer(directory).get_vocab() for directory in directories)
    assert pair.tokens.target_of[byte_level["a"]] == pieces["a"]
    assert pair.tokens.draft_vocab_of[pieces["<0x61>"]] == byte_level["a"]
    assert pieces["<0x61>"] not in pair.tokens.target_of


def test_end_tokens_are_mapped_by_role_but_begin_and_padding_tokens_are_not(directories: tuple[Path, Path]) -> None:
    pair = load_pair(*directories)
    byte_level, pieces = (load_tokenizer(directory).get_vocab() for directory in directories)
    assert pair.tokens.target_of[byte_level["<|end|>"]] == pieces["</s>"]
    assert pair.tokens.target_of[byte_level["<pad>"]] == -1
    assert not {pieces["<s>"], pieces["<unk>"]} & set(pair.tokens.target_of.tolist())


def test_the_bytes_of_encoded_tokens_join_to_the_text(directories: tuple[Path, Path]) -> None:
    pair = load_pair(*directories)
    for encoder in (pair.draft, pair.target):
        for text in TEXTS:
            pieces = [encoder.token_bytes[token_id] for token_id in encoder.encode(text.encode())]
            assert b"".join(pieces) == text.encode()


def test_a_map_by_spelling_would_miss_non_ascii_tokens(directories: tuple[Path, Path]) -> None:
    """Negative control: comparing spellings finds fewer shared tokens than comparing bytes."""
    byte_level, pieces = (load_tokenizer(directory).get_vocab() for directory in directories)
    spelled = {byte_level[token] for token in set(byte_level) & set(pieces)}
    pair = load_pair(*directories)
    text = " über die Brücke; 今天".encode()
    draft_vocab_ids = set(pair.draft.encode(text))
    assert all(
        pair.tokens.target_of[own] >= 0 for own in draft_vocab_ids if pair.draft.token_bytes[own] in (b" ", b"\xc3\xbc")
    )
    assert sum(pair.tokens.target_of[own] >= 0 for own in draft_vocab_ids) >= 2 * len(draft_vocab_ids & spelled)


def test_tokenizers_without_a_common_token_are_refused_with_both_fingerprints(tmp_path: Path) -> None:
    draft = save_byte_level_vocabulary(tmp_path / "draft", ["<|end|>", "a", "b"], [])
    target = save_piece_vocabulary(tmp_path / "target", ["<unk>", "</s>", "c", "<0x64>"], [])
    with pytest.raises(VocabularyMismatch, match=r"no token in common: the draft has fingerprint .* and the target"):
        load_pair(draft, target)


def test_a_tokenizer_without_fixed_token_bytes_is_refused_by_name(tmp_path: Path) -> None:
    save_tokenizer(tmp_path / "words", 20)
    pieces = save_piece_vocabulary(tmp_path / "pieces", ["<unk>", "</s>", "c"], [])
    with pytest.raises(Unsupported, match=r"model '.*words': tokens decoded by Fuse have no fixed bytes"):
        load_pair(tmp_path / "words", pieces)


def test_end_tokens_of_the_model_that_its_tokenizer_lacks_are_mapped_to_the_targets_end(
    directories: tuple[Path, Path],
) -> None:
    pair = load_pair(*directories)
    pad = load_tokenizer(directories[0]).get_vocab()["<pad>"]
    tokens = pair.tokens.of_model(len(pair.tokens.target_of), [pad], pair.target_end_id)
    assert tokens.target_of[pad] == pair.target_end_id
    assert pair.tokens.target_of[pad] == -1


def test_tokens_that_the_model_lacks_are_neither_drafted_nor_read(directories: tuple[Path, Path]) -> None:
    pair = load_pair(*directories)
    tokens = pair.tokens.of_model(300, [], pair.target_end_id)
    assert len(tokens.target_of) == 300
    assert tokens.draft_vocab_of.max() < 300
    assert (tokens.draft_vocab_of[tokens.target_of[tokens.target_of >= 0]] >= 0).all()
