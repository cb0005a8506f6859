"""Titles of pull requests are imperatives of at most 72 characters."""

from __future__ import annotations

import pytest

from tools.title_check import main, problem_of


@pytest.mark.parametrize(
    "title", ["Add a draft source for servers", "Process frames in order", "Merge two files into one", "A" + "b" * 71]
)
def test_an_imperative_is_accepted(title: str) -> None:
    assert problem_of(title) is None


@pytest.mark.parametrize(
    ("title", "problem"),
    [
        ("", "is empty"),
        (" Add a file", "spaces around it"),
        ("Add\nfiles", "a line end in it"),
        ("A" + "b" * 72, "73 characters"),
        ("add a file", "a capital letter"),
        ("Added a file", "an imperative"),
        ("Adding a file", "an imperative"),
        ("Fixes a file", "an imperative"),
        ("fix: a file", "the label 'fix'"),
        ("Docs(api): a file", "the label 'Docs'"),
        ("Add a file.", "a full stop"),
        ("Merge branch 'main'", "of a merge"),
    ],
)
def test_another_title_is_refused_with_the_reason(title: str, problem: str) -> None:
    assert problem in (problem_of(title) or "")


def test_the_command_ends_with_one_for_a_refused_title(capsys: pytest.CaptureFixture[str]) -> None:
    assert main("Add a file") == 0
    assert main("Added a file") == 1
    assert capsys.readouterr().err.startswith("error: title 'Added a file': ")
