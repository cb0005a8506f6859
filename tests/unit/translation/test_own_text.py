"""Translation of committed target tokens to draft-vocabulary tokens, and of drafted text to target tokens."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from specdec.checkpoints.cross_vocabulary.draft_vocabulary_text import DraftVocabularyText
from specdec.checkpoints.cross_vocabulary.pair import TokenizerPair
from specdec.checkpoints.cross_vocabulary.retokenizer import retokenise
from specdec.checkpoints.vocabulary import load_tokenizer
from tests.support.other_tokenizers import CORPUS, TEXTS, load_pair, save_byte_level, save_pieces

LONG_TEXT = " ".join(CORPUS + TEXTS) * 3


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("tokenizers")
    return save_byte_level(folder / "bytes"), save_pieces(folder / "pieces")


@pytest.fixture(scope="module", params=["pieces for bytes", "bytes for pieces"])
def pair(request: pytest.FixtureRequest, directories: tuple[Path, Path]) -> TokenizerPair:
    draft, target = directories if request.param == "bytes for pieces" else directories[::-1]
    return load_pair(draft, target)


def draft_vocabulary_text(pair: TokenizerPair, committed: list[int]) -> DraftVocabularyText:
    text = DraftVocabularyText(pair)
    text.append(committed)
    return text


def own_bytes(pair: TokenizerPair, text: DraftVocabularyText) -> bytes:
    return b"".join(pair.draft.token_bytes[draft_vocab_id] for draft_vocab_id in text.draft_vocab_ids)


@pytest.mark.parametrize("text", [*TEXTS, LONG_TEXT], ids=[*(t[:8] for t in TEXTS), "long"])
@pytest.mark.parametrize("reverse", [False, True], ids=["bytes for pieces", "pieces for bytes"])
def test_draft_vocabulary_tokens_equal_the_tokens_of_the_whole_text(
    directories: tuple[Path, Path], text: str, reverse: bool
) -> None:
    draft, target = directories[::-1] if reverse else directories
    committed = load_tokenizer(target).encode(text)
    own = draft_vocabulary_text(load_pair(draft, target), committed)
    assert list(own.draft_vocab_ids) == load_tokenizer(draft).encode(text)


def test_draft_vocabulary_tokens_do_not_depend_on_how_tokens_were_appended(pair: TokenizerPair) -> None:
    chance = random.Random(1)
    for _ in range(20):
        # Random tokens include special ones, incomplete characters and invalid bytes.
        committed = [chance.randrange(pair.target_size) for _ in range(200)]
        whole = draft_vocabulary_text(pair, committed)
        grown = DraftVocabularyText(pair)
        while len(grown) < len(committed):
            if chance.random() < 0.3:  # add tokens that are removed again
                kept = len(grown) - chance.randrange(min(len(grown), 4) + 1)
                grown.append([chance.randrange(pair.target_size) for _ in range(chance.randrange(1, 30))])
                grown.truncate(kept)
            grown.append(committed[len(grown) : len(grown) + chance.randrange(1, 9)])
        assert list(grown.draft_vocab_ids) == list(whole.draft_vocab_ids)
        assert grown.open_piece == whole.open_piece


def test_a_truncated_session_equals_a_session_of_the_shorter_length(pair: TokenizerPair) -> None:
    committed = pair.target.encode(LONG_TEXT[:600].encode())
    grown, (other,) = draft_vocabulary_text(pair, committed), pair.target.encode(b"x")
    for length in range(len(committed), -1, -1):
        grown.truncate(length)
        assert list(grown.draft_vocab_ids) == list(draft_vocabulary_text(pair, committed[:length]).draft_vocab_ids)
        # The remaining text can be continued with another token.
        grown.append([other])
        assert list(grown.draft_vocab_ids) == list(
            draft_vocabulary_text(pair, [*committed[:length], other]).draft_vocab_ids
        )
        assert grown.open_piece == draft_vocabulary_text(pair, [*committed[:length], other]).open_piece


def test_an_incomplete_character_is_read_as_bytes_until_it_is_complete(directories: tuple[Path, Path]) -> None:
    for draft, target in (directories, directories[::-1]):
        pair = load_pair(draft, target)
        committed = load_tokenizer(target).encode("ab 🐎")  # neither vocabulary has a token for the horse
        text = DraftVocabularyText(pair)
        for token_id in committed:
            text.append([token_id])
        assert own_bytes(pair, text).removeprefix(b" ") == "ab 🐎".encode()
        assert list(text.draft_vocab_ids) == load_tokenizer(draft).encode("ab 🐎")
        half = draft_vocabulary_text(pair, committed[:-1])
        assert own_bytes(pair, half).removeprefix(b" ") == "ab 🐎".encode()[:-1]


def test_a_sequence_has_one_begin_token(directories: tuple[Path, Path]) -> None:
    byte_level, pieces = directories
    begin = load_tokenizer(pieces).bos_token_id
    for_bytes = draft_vocabulary_text(load_pair(pieces, byte_level), load_tokenizer(byte_level).encode("The fox"))
    assert list(for_bytes.draft_vocab_ids).count(begin) == 1
    assert for_bytes.draft_vocab_ids[0] == begin
    from_pieces = draft_vocabulary_text(load_pair(pieces, pieces), load_tokenizer(pieces).encode("The fox"))
    assert list(from_pieces.draft_vocab_ids) == load_tokenizer(pieces).encode("The fox")
    for_pieces = draft_vocabulary_text(load_pair(byte_level, pieces), load_tokenizer(pieces).encode("The fox"))
    assert list(for_pieces.draft_vocab_ids) == load_tokenizer(byte_level).encode("The fox")


def test_text_without_a_good_place_to_cut_is_still_cut(pair: TokenizerPair) -> None:
    text = DraftVocabularyText(pair)
    for _ in range(30):
        text.append(pair.target.encode(("今天" * 40).encode()))
        assert len(text.open_piece) <= 512 + 32
    assert own_bytes(pair, text).removeprefix(b" ") == ("今天" * 1200).encode()


@pytest.mark.parametrize("text", TEXTS, ids=[text[:8] for text in TEXTS])
def test_drafted_text_becomes_the_tokens_of_the_targets_own_continuation(pair: TokenizerPair, text: str) -> None:
    whole = pair.target.encode(text.encode())
    for split in range(1, len(whole)):
        before = b"".join(pair.target.token_bytes[token_id] for token_id in whole[:split])
        drafted = text.encode()[len(before) :]
        assert retokenise(pair.target, before, drafted) == whole[split:]


def test_drafted_text_is_tokenised_in_the_context_of_the_committed_text(directories: tuple[Path, Path]) -> None:
    """A tokenizer may merge across a newline, so the drafted text is tokenised after the committed text."""
    pair = load_pair(directories[0], directories[1])
    alone = retokenise(pair.target, b"", b"\n    return")
    assert retokenise(pair.target, b"x:", b"\n    return") == alone
    # The committed text ends within a word: no token may start before the drafted text does.
    token_ids = retokenise(pair.target, b" Brue", b"cke; 1")
    assert b"".join(pair.target.token_bytes[token_id] for token_id in token_ids) == b"cke; 1"


def test_an_incomplete_drafted_character_is_left_out(pair: TokenizerPair) -> None:
    token_ids = retokenise(pair.target, b"ab", "c 🐎".encode()[:-1])
    assert b"".join(pair.target.token_bytes[token_id] for token_id in token_ids) == b"c "


def test_the_share_of_text_without_a_common_token_is_reported(directories: tuple[Path, Path]) -> None:
    pair = load_pair(directories[0], directories[1])
    unmapped = [t for t, own in enumerate(pair.tokens.draft_vocab_of) if own < 0 and pair.target.token_bytes[t]]
    mapped = [t for t, own in enumerate(pair.tokens.draft_vocab_of) if own >= 0 and pair.target.token_bytes[t]]
    assert draft_vocabulary_text(pair, mapped[-48:] + unmapped[:16]).unmapped_share(64, 16) == 0.25
    assert draft_vocabulary_text(pair, mapped[-48:] + unmapped[:1] * 64).unmapped_share(64, 16) == 1.0
    # Special tokens are skipped.
    assert (
        draft_vocabulary_text(pair, [pair.target_end_id] * 8 + mapped[-24:] + unmapped[:8]).unmapped_share(64, 16)
        == 0.25
    )
    assert draft_vocabulary_text(pair, unmapped[:1]).unmapped_share(64, 16) == 1 / 16
