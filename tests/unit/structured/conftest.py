"""The table of the byte-level tokenizer that tests of constraints share."""

from __future__ import annotations

from pathlib import Path

import pytest

from specdec.structured.token_table import TokenTable
from tests.support.byte_tokenizer import byte_table, write_byte_tokenizer


@pytest.fixture(scope="session")
def tokenizer_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("byte-tokenizer")
    write_byte_tokenizer(directory)
    return directory


@pytest.fixture(scope="session")
def table(tokenizer_directory: Path) -> TokenTable:
    return byte_table(tokenizer_directory)
