"""`specdec advise` on the demo pair, with and without a running system that has measured acceptance."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from specdec.checkpoints.model_size import model_size
from specdec.cli.__main__ import run
from specdec.cli.advise import speedup
from specdec.v1 import coordinator_pb2 as pb
from tests.support.scripted_coordinator import pool
from tests.unit.cli.conftest import Serve, answer

DEMO = Path(__file__).resolve().parents[3] / "models" / "demo"
NOWHERE = ["--endpoint", "127.0.0.1:1"]


def advise(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, dict[str, object]]:
    assert run(["advise", "--json", *words], {}) == 0
    return {Path(each["draft"]).name: each for each in json.loads(capsys.readouterr().out)["drafts"]}


def test_models_beside_the_target_and_drafts_without_a_model_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    drafts = advise(capsys, "--target", str(DEMO / "target"), *NOWHERE)
    assert set(drafts) == {"draft", "prose", "suffix", "early-exit:2"}
    assert drafts["suffix"]["memory_bytes"] == 0
    assert {draft["basis"] for draft in drafts.values()} == {"assumed"}


def test_the_memory_of_a_draft_is_its_parameters_times_the_bytes_of_the_dtype(
    capsys: pytest.CaptureFixture[str],
) -> None:
    num_parameters = model_size(str(DEMO / "draft")).num_parameters
    for dtype, num_bytes in (("float32", 4), ("int8", 1)):
        drafts = advise(capsys, "--target", str(DEMO / "target"), "--dtype", dtype, *NOWHERE)
        assert drafts["draft"]["memory_bytes"] == num_bytes * num_parameters


def test_a_running_system_replaces_assumed_acceptance_by_its_measured_one(
    coordinator: Serve, capsys: pytest.CaptureFixture[str]
) -> None:
    servicer, environ = coordinator(answer)
    draft = pool("draft", alpha=0.5)
    draft.model = str(DEMO / "draft")
    servicer.served = pb.GetInfoResponse(pools=[draft])
    drafts = advise(capsys, "--target", str(DEMO / "target"), "--endpoint", environ["SPECDEC_ENDPOINT"])
    assert drafts["draft"]["basis"] == "measured"
    assert list(drafts["draft"]["gains"]) == ["0.50"]  # type: ignore[call-overload]
    assert drafts["prose"]["basis"] == "assumed"


def test_the_table_says_that_the_speed_is_calculated(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["advise", "--target", str(DEMO / "target"), *NOWHERE], {}) == 0
    shown = capsys.readouterr().out
    assert "target target: 4.9 million parameters, 6 layers" in shown
    assert "at 60%" in shown
    assert "calculated" in shown


@pytest.mark.parametrize(
    ("alpha", "cost", "expected"),
    [(0.0, 0.1, 1.0), (1.0, 0.0, 9.0), (0.5, 0.0, 2.0 - 0.5**8), (0.5, 0.5, 1.0)],
)
def test_the_speedup_is_that_of_the_best_draft_length(alpha: float, cost: float, expected: float) -> None:
    assert speedup(alpha, cost) == pytest.approx(expected)


def test_a_draft_that_does_not_fit_is_refused_when_it_is_named(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert run(["advise", "--target", str(DEMO / "target"), "--draft", str(tmp_path), *NOWHERE], {}) == 1
    assert capsys.readouterr().err.startswith("error: --draft: model ")


def test_parameters_are_estimated_from_the_configuration_without_weights(tmp_path: Path) -> None:
    for file in (DEMO / "target").iterdir():
        if file.suffix != ".safetensors":
            shutil.copy(file, tmp_path)
    counted, estimated = model_size(str(DEMO / "target")), model_size(str(tmp_path))
    assert (counted.is_estimate, estimated.is_estimate) == (False, True)
    assert estimated.num_parameters == pytest.approx(counted.num_parameters, rel=0.01)


@pytest.mark.parametrize(
    ("name", "value"),
    [("num_hidden_layers", "4"), ("num_hidden_layers", True), ("hidden_size", -1), ("num_attention_heads", 0),
     ("vocab_size", 1e9), ("intermediate_size", [128, -1])],
)  # fmt: skip
def test_an_impossible_size_in_a_configuration_is_refused_by_name_and_value(
    name: str, value: object, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(DEMO / "target", tmp_path, dirs_exist_ok=True)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {name: value}))
    assert run(["plan", str(tmp_path), "--gpu", "h100", "--rate", "5"], {}) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"has {name} {value!r}, which must be a whole number from " in line


def test_a_draft_as_large_as_its_target_is_advised_against(capsys: pytest.CaptureFixture[str]) -> None:
    target = str(DEMO / "target")
    drafts = advise(capsys, "--target", target, "--draft", target, *NOWHERE)
    assert str(drafts["target"]["note"]).startswith("do not use this draft: it costs more than it gains")
    assert "do not use" not in str(drafts["draft"]["note"])


def test_a_hybrid_target_is_not_advised_to_make_drafts_itself(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "target"
    shutil.copytree(DEMO / "target", target)
    config = {
        "model_type": "qwen3_5_text", "architectures": ["Qwen3_5ForCausalLM"], "vocab_size": 2048, "hidden_size": 64,
        "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 96,
        "head_dim": 16, "layer_types": ["linear_attention", "full_attention"] * 2, "max_position_embeddings": 512,
        "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    }  # fmt: skip
    (target / "config.json").write_text(json.dumps(config))
    assert set(advise(capsys, "--target", str(target), *NOWHERE)) == {"suffix"}
