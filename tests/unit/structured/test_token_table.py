"""The identity of a constraint says everything that its masks depend on, and tokenizers without bytes are refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders
from tokenizers.models import Unigram, WordLevel, WordPiece
from transformers import PreTrainedTokenizerFast

from specdec.checkpoints.vocabulary import load_tokenizer
from specdec.contract.constraint import CONSTRAINT_ID_BYTES, Constraint, ConstraintKind
from specdec.contract.errors import Unsupported
from specdec.structured.matcher import Matcher
from specdec.structured.token_table import TokenTable
from tests.support.byte_tokenizer import EOS, MARK, VOCABULARY, byte_table
from tests.support.other_tokenizers import save_byte_level_vocabulary, save_piece_vocabulary

CONSTRAINT = Constraint(ConstraintKind.REGEX, '["a"]')
OTHERS = {
    "kind": Constraint(ConstraintKind.CHOICE, '["a"]'),
    "text": Constraint(ConstraintKind.REGEX, '["b"]'),
    "option": Constraint(ConstraintKind.REGEX, '["a"]', is_lenient=True),
}
TOKENS = ["<|end|>", "<|mark|>", "a", "b"]


def vocabulary_table(folder: Path, tokens: list[str] = TOKENS, **special_tokens: str) -> TokenTable:
    save_byte_level_vocabulary(folder, tokens, [], **special_tokens)
    return TokenTable(load_tokenizer(folder), (tokens.index("<|end|>"),), len(tokens))


@pytest.mark.parametrize("name", OTHERS)
def test_the_identity_depends_on_kind_text_and_options(name: str, table: TokenTable) -> None:
    assert table.identity_of(OTHERS[name]) != table.identity_of(CONSTRAINT)


def test_the_identity_depends_on_end_tokens_special_tokens_and_spellings(tmp_path: Path) -> None:
    tables = {
        "base": vocabulary_table(tmp_path / "base"),
        "special": vocabulary_table(tmp_path / "special", pad_token="<|mark|>"),
        "order": vocabulary_table(tmp_path / "order", ["<|end|>", "<|mark|>", "b", "a"]),
        "size": vocabulary_table(tmp_path / "size", [*TOKENS, "c"]),
        "ends": TokenTable(load_tokenizer(tmp_path / "base"), (0, 1), len(TOKENS)),
    }
    identities = {table.identity_of(CONSTRAINT) for table in tables.values()}
    assert len(identities) == len(tables)


def test_the_identity_is_the_same_in_every_process_that_knows_the_tokenizer(
    table: TokenTable, tokenizer_directory: Path
) -> None:
    """A target has more rows of logits than the tokenizer has tokens, and may name its end tokens in another order."""
    target = TokenTable(load_tokenizer(tokenizer_directory), (EOS,), VOCABULARY + 8)
    assert target.identity_of(CONSTRAINT) == table.identity_of(CONSTRAINT)
    assert len(table.identity_of(CONSTRAINT)) == CONSTRAINT_ID_BYTES
    orders = [byte_table(tokenizer_directory, ends).identity_of(CONSTRAINT) for ends in ((EOS, MARK), (MARK, EOS))]
    assert orders[0] == orders[1]


def test_rows_of_logits_without_a_token_are_not_legal(tokenizer_directory: Path) -> None:
    table = TokenTable(load_tokenizer(tokenizer_directory), (EOS,), VOCABULARY + 8)
    mask = Matcher(table, Constraint.regex("(?s:.)*")).mask((EOS,))
    assert len(mask) == (VOCABULARY + 8) // 8
    assert not np.unpackbits(mask, bitorder="little")[VOCABULARY:].any()


def word_piece() -> Tokenizer:
    backend = Tokenizer(WordPiece({"[UNK]": 0, "</s>": 1, "a": 2, "##b": 3}, unk_token="[UNK]"))
    backend.decoder = decoders.WordPiece()
    return backend


def unigram() -> Tokenizer:
    backend = Tokenizer(Unigram([("<unk>", 0.0), ("</s>", 0.0), ("▁", -1.0), ("a", -1.0)], 0, False))
    backend.decoder = decoders.Metaspace()
    return backend


def word_level() -> Tokenizer:
    backend = Tokenizer(WordLevel({"w": 0, "</s>": 1}, unk_token="w"))
    backend.decoder = decoders.Fuse()
    return backend


@pytest.mark.parametrize(
    ("backend", "name"), [(word_piece(), "WordPiece"), (unigram(), "Unigram"), (word_level(), "WordLevel")]
)
def test_a_tokenizer_without_bytes_is_refused_by_name(backend: Tokenizer, name: str) -> None:
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>")
    with pytest.raises(Unsupported, match=rf"constraint: a tokenizer of the type {name} without byte tokens") as at:
        TokenTable(tokenizer, (1,), 4)
    assert at.value.field == "constraint"


def test_a_model_without_an_end_token_is_refused_by_name(tokenizer_directory: Path) -> None:
    with pytest.raises(Unsupported, match="the model has no end token"):
        TokenTable(load_tokenizer(tokenizer_directory), (), VOCABULARY)


def test_pieces_with_byte_fallback_follow_a_constraint(tmp_path: Path) -> None:
    """`▁` is a blank, and a character without a token is spelled in byte tokens."""
    pieces = ["<unk>", "</s>", "▁", "a", "▁a", *(f"<0x{byte:02X}>" for byte in range(256))]
    save_piece_vocabulary(tmp_path, pieces, [("▁", "a")])
    table = TokenTable(load_tokenizer(tmp_path), (1,), len(pieces))
    matcher = Matcher(table, Constraint.choice([" aé", "é"]))

    def legal() -> set[str]:
        ids = np.flatnonzero(np.unpackbits(matcher.mask((1,)), count=len(pieces), bitorder="little"))
        return {pieces[token_id] for token_id in ids}

    assert legal() == {"▁", "▁a", "<0x20>", "<0xC3>"}
    matcher.align(np.array([pieces.index("▁a"), pieces.index("<0xC3>")], dtype=np.uint32))
    assert legal() == {"<0xA9>"}
    matcher.align(np.array([pieces.index(token) for token in ("▁a", "<0xC3>", "<0xA9>")], dtype=np.uint32))
    assert legal() == {"</s>"}
