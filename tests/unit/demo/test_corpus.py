"""The demo pair's text: deterministic, nothing lost, held-out files never learned."""

import importlib.util
import random
import sys
from pathlib import Path
from types import ModuleType

import pytest

DEMO = Path(__file__).resolve().parents[3] / "models" / "demo"

SOURCE = '''"""A module."""

import os

# About the first function.
@staticmethod
def first(value):
    """Return the value
    unchanged.

    At length.
    """
    return value


class Thing:
    def second(self, name):
        """Say hello."""
        text = "hello " + name

        return text

    def undocumented(self):
        return 1
'''


def load(name: str) -> ModuleType:
    """A script of models/demo as a module; the folder is no package."""
    spec = importlib.util.spec_from_file_location(f"demo_{name}", DEMO / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


corpus, evaluate = load("corpus"), load("evaluate")


@pytest.fixture
def library(tmp_path: Path) -> list:
    """A small library of forty files, a test folder and a broken file."""
    for index in range(40):
        (tmp_path / f"module{index}.py").write_text(SOURCE.replace("first", f"first{index}"))
    (tmp_path / "test").mkdir()
    (tmp_path / "test" / "test_it.py").write_text("never = 1\n")
    (tmp_path / "broken.py").write_text("def (:\n")
    return corpus.standard_library_files(tmp_path)


def test_test_folders_are_left_out_and_broken_files_are_kept_whole(library: list) -> None:
    names = [file.name for file in library]
    assert "test/test_it.py" not in names
    broken = next(file for file in library if file.name == "broken.py")
    assert list(corpus.stretches(broken, random.Random(1))) == [broken.text]


def test_stretches_of_a_file_join_to_the_file_and_keep_decorators_with_their_function(library: list) -> None:
    for seed in range(200):
        pieces = list(corpus.stretches(library[1], random.Random(seed)))
        assert "".join(pieces) == library[1].text
        assert not any(piece.startswith("def first") for piece in pieces)


def test_a_docstring_asks_and_its_function_answers_without_it(library: list) -> None:
    text = "".join(corpus.conversations(library[1], random.Random(1)))
    assert "<|user|>Return the value unchanged.<|assistant|>def first" in text
    assert (
        '<|user|>Say hello.<|assistant|>def second(self, name):\n    text = "hello " + name\n\n    return text\n'
        in text
    )
    assert "undocumented" not in text
    assert "At length" not in text
    assert '"""' not in text


def test_the_same_seed_gives_the_same_documents_and_another_seed_does_not(library: list) -> None:
    assert corpus.documents(library, 1) == corpus.documents(library, 1)
    assert corpus.documents(library, 1) != corpus.documents(library, 2)


@pytest.mark.full
def test_a_small_share_of_the_real_library_is_held_out_and_gives_prompts() -> None:
    files = corpus.standard_library_files()
    share = sum(file.held_out for file in files) / len(files)
    assert 0.03 < share < 0.12
    prompts = corpus.prompts(files)
    # 20 of Python 3.11's, which bench/prompts has; another version's files may give fewer.
    assert 15 <= len(prompts) == len(set(prompts)) <= corpus.NUM_PROMPTS
    assert all(len(prompt) <= corpus.PROMPT_CHARACTERS for prompt in prompts)


def test_greedy_alpha_counts_only_what_a_round_tests() -> None:
    agrees = [True, True, False, True, True, True, True, True, False]
    # gamma 4: [T T F] tests 3; then [T T T T] tests 4 and the next token is the bonus; then [F] tests 1.
    assert evaluate.greedy_alpha(agrees, 4) == (6, 8)
    assert evaluate.greedy_alpha([True] * 5, 4) == (4, 4)
    assert evaluate.greedy_alpha([False] * 3, 4) == (0, 3)
