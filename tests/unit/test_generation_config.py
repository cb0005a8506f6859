"""Sampling that a model recommends, read from the file beside its tokenizer."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from specdec.checkpoints.generation_config import recommended_sampling


def recommended(directory: Path, content: str) -> dict[str, float | int]:
    (directory / "generation_config.json").write_text(content)
    return recommended_sampling(directory)


def test_only_the_sampling_keys_are_read_whatever_do_sample_says(tmp_path: Path) -> None:
    values = {"temperature": 0, "top_k": 0, "top_p": 1, "min_p": 0.05, "repetition_penalty": 1.1, "max_new_tokens": 9}
    for do_sample in (True, False):
        others = {"do_sample": do_sample, "eos_token_id": [1, 2], "typical_p": 0.5}
        assert recommended(tmp_path, json.dumps(values | others)) == values


def test_a_model_without_the_file_or_without_the_keys_recommends_nothing(tmp_path: Path) -> None:
    assert recommended_sampling(tmp_path) == {}
    assert recommended(tmp_path, '{"eos_token_id": 2}') == {}
    assert recommended(tmp_path, '{"temperature": null, "top_k": -1}') == {}


@pytest.mark.parametrize(
    "value",
    [
        '"temperature": -1', '"temperature": NaN', '"temperature": 1e999', '"temperature": "hot"', '"top_p": 0',
        '"top_p": true', '"min_p": 1', '"top_k": 5.5', '"top_k": 4294967296', '"repetition_penalty": 0',
        '"max_new_tokens": 0',
    ],
)  # fmt: skip
def test_a_value_that_no_request_could_use_is_left_out_with_a_warning(
    tmp_path: Path, value: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        assert recommended(tmp_path, f'{{{value}, "presence": 1}}') == {}
    assert "ignoring a value of generation_config.json" in caplog.text


@pytest.mark.parametrize("content", ["", "[1]", "{", "\xff", "[" * 100_000])
def test_an_unreadable_file_recommends_nothing(tmp_path: Path, content: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert recommended(tmp_path, content) == {}
    assert "generation_config.json" in caplog.text
