"""Sampling that a model recommends, read from the file beside its tokenizer."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from specdec.checkpoints.generation_config import end_token_ids, recommended_sampling
from specdec.contract.errors import InvalidRequest
from specdec.engine.remote.remote_model import read_model_files
from tests.support.tiny_models import build_tiny_model


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
        '"max_new_tokens": 0', '"top_p": 1e-60', '"min_p": 0.9999999999', '"repetition_penalty": 1e-60',
        '"temperature": 1e-60',
    ],
)  # fmt: skip
def test_a_value_that_no_request_could_use_is_left_out_with_a_warning(
    tmp_path: Path, value: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        assert recommended(tmp_path, f'{{{value}, "presence": 1}}') == {}
    assert "ignoring a value of generation_config.json" in caplog.text


def test_whole_numbers_with_a_decimal_point_are_counts(tmp_path: Path) -> None:
    found = recommended(tmp_path, '{"top_k": 50.0, "max_new_tokens": 1e3, "temperature": 1}')
    assert json.dumps(found) == '{"temperature": 1, "top_k": 50, "max_new_tokens": 1000}'


def ends(directory: Path, value: object, default: object = None) -> tuple[int, ...]:
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": value}))
    return end_token_ids(directory, 24, default)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (3, (3,)), ([3, 7, 3], (3, 7)), (2.0, (2,)), ([], ()), ([3, None], (3,)), ([-1, 23], (23,)), (24, ()),
        ([151645, 5, 24], (5,)), (10**30, ()),
    ],
)  # fmt: skip
def test_end_tokens_are_ids_of_the_vocabulary_each_once(
    value: object, expected: tuple[int, ...], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        assert ends(tmp_path, value) == expected
    beyond = [id_ for id_ in (value if isinstance(value, list) else [value]) if id_ is not None and not 0 <= id_ < 24]
    assert [record.message.rsplit("id=")[1] for record in caplog.records] == [str(id_) for id_ in beyond]


def test_the_configurations_end_token_holds_if_the_generation_config_has_none(tmp_path: Path) -> None:
    assert end_token_ids(tmp_path, 24, [1, 99]) == (1,)
    assert ends(tmp_path, None, default=4) == (4,)
    assert ends(tmp_path, [], default=4) == ()
    assert end_token_ids(tmp_path / "none", 24, None) == ()


@pytest.mark.parametrize("value", ["</s>", "3", [3, "</s>"], 2.5, True, {}, [[3]], float("nan")])
def test_an_end_token_that_is_no_id_is_refused(value: object, tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match=r"generation_config\.json: eos_token_id must be a token id or a list of"):
        ends(tmp_path, value)
    with pytest.raises(InvalidRequest, match=r"config\.json: eos_token_id must be"):
        end_token_ids(tmp_path / "none", 24, value)


def test_files_beside_a_remote_engine_are_read_as_our_own_engine_reads_them(tmp_path: Path) -> None:
    build_tiny_model("llama", tmp_path, vocabulary_size=24, num_layers=1)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [3, 151645]}')
    config = json.loads((tmp_path / "config.json").read_text())
    for changes, context in (
        ({}, 512),
        ({"text_config": None, "max_position_embeddings": 96.0}, 96),
        ({"max_position_embeddings": "many"}, None),
        ({"text_config": {"max_position_embeddings": 64}}, 64),
    ):
        (tmp_path / "config.json").write_text(json.dumps(config | changes))
        files = read_model_files(str(tmp_path))
        assert (files.eos_token_ids, files.max_context_tokens) == ((3,), context)


@pytest.mark.parametrize("content", ["", "[1]", "{", "\xff", "[" * 100_000])
def test_an_unreadable_file_recommends_nothing(tmp_path: Path, content: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert recommended(tmp_path, content) == {}
    assert "generation_config.json" in caplog.text
