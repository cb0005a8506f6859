"""The commands bench and promote against a scripted coordinator."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from specdec.cli.__main__ import run
from specdec.v1 import coordinator_pb2 as pb
from tests.support.scripted_coordinator import finished, started, tokens
from tests.unit.cli.conftest import Serve, answer


def drafted(request: pb.GenerateRequest) -> list[pb.GenerateResponse]:
    """Two tokens that two pools drafted; target-only, none."""
    is_alone = request.speculation.mode == pb.SPECULATION_MODE_OFF
    chunk = tokens(0, [1, 2, 3], "ttt" if is_alone else "aaa")
    for detail, pool in zip(chunk.tokens.details, ("code", "head", "head"), strict=True):
        detail.draft_pool = "" if is_alone else pool
    return [started(request), chunk, finished(3)]


def test_bench_warms_up_and_runs_every_prompt_with_and_without_speculation_and_deletes_its_sessions(
    coordinator: Serve, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    servicer, environ = coordinator(drafted)
    (tmp_path / "prompts.txt").write_text("one\n\ntwo\n")
    flags = ["--prompts", str(tmp_path / "prompts.txt"), "--repeats", "2", "--gamma", "3", "--json"]
    assert run(["bench", *flags], environ) == 0
    captured = capsys.readouterr()
    assert captured.err.splitlines() == [f"{number} of 4 pairs" for number in (1, 2, 3, 4)]
    shown = json.loads(captured.out)
    assert (shown["speedup"], shown["num_pairs"]) == (1.0, 4)
    assert shown["speculative"]["acceptance"] == 0.5
    assert shown["by_prompt"] == {"one": 1.0, "two": 1.0}
    assert shown["reason"].startswith("no gain: a round emits ")
    warm_up, requests = servicer.requests[:2], servicer.requests[2:]
    modes = [request.speculation.mode for request in requests]
    assert modes.count(pb.SPECULATION_MODE_OFF) == 4
    assert modes[:4] == [0, pb.SPECULATION_MODE_OFF, pb.SPECULATION_MODE_OFF, 0]
    assert [request.prompt for request in requests] == ["one"] * 2 + ["two"] * 2 + ["one"] * 2 + ["two"] * 2
    assert [request.speculation.mode for request in warm_up] == [0, pb.SPECULATION_MODE_OFF]
    assert len(servicer.deleted) == 10


def test_bench_names_the_pools_whose_draft_tokens_were_kept(
    coordinator: Serve, capsys: pytest.CaptureFixture[str]
) -> None:
    _, environ = coordinator(drafted)
    assert run(["bench", "--repeats", "1"], environ) == 0
    assert "draft tokens kept: 6 of head, 3 of code\n" in capsys.readouterr().out
    assert run(["bench", "--repeats", "1", "--json"], environ) == 0
    assert json.loads(capsys.readouterr().out)["kept_draft_tokens"] == {"head": 6, "code": 3}


@pytest.mark.parametrize(("flags", "temperature"), [([], 0.0), (["--temperature", "0.5"], 0.5)])
def test_bench_is_greedy_unless_told_otherwise(
    flags: list[str], temperature: float, coordinator: Serve, capsys: pytest.CaptureFixture[str]
) -> None:
    servicer, environ = coordinator(drafted)
    assert run(["bench", "--repeats", "1", *flags], environ) == 0
    assert {request.sampling.temperature for request in servicer.requests} == {temperature}
    assert all(request.sampling.HasField("temperature") for request in servicer.requests)


def test_bench_refuses_a_file_without_prompts(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "empty.txt").write_text("\n")
    assert run(["bench", "--prompts", str(tmp_path / "empty.txt")], {}) == 1
    assert "holds no prompt" in capsys.readouterr().err


def test_promote_json_is_one_object(coordinator: Serve, capsys: pytest.CaptureFixture[str]) -> None:
    _, environ = coordinator(answer)
    assert run(["promote", "default", "--json"], environ) == 0
    assert json.loads(capsys.readouterr().out) == {"promotion": None}


TARGET_MODELS = [
    pb.TargetModelInfo(fingerprint="abc1", model="/models/old", num_replicas=1, share=0.25),
    pb.TargetModelInfo(fingerprint="abd2", model="/models/new", num_replicas=3, share=0.75),
]


def test_a_target_model_is_promoted_by_the_first_characters_of_its_fingerprint(
    coordinator: Serve, capsys: pytest.CaptureFixture[str]
) -> None:
    servicer, environ = coordinator(answer)
    servicer.served.target_models.extend(TARGET_MODELS)
    assert run(["promote", "--target", "abd", "0.5"], environ) == 0
    assert capsys.readouterr().out.splitlines() == [
        "abc1 old: 1 replica, 25% of the new sessions",
        "abd2 new: 3 replicas, 75% of the new sessions",
    ]
    assert run(["promote", "--target", "abc1", "auto", "--json"], environ) == 0
    shown = json.loads(capsys.readouterr().out)["target_models"]
    assert [(model["fingerprint"], model["share"]) for model in shown] == [("abc1", 0.25), ("abd2", 0.75)]
    assert servicer.target_shares == [("abd2", 0.5), ("", 0.0)]
    assert run(["status"], environ) == 0
    assert "abd2 new: 3 replicas, 75% of the new sessions" in capsys.readouterr().out


def test_a_version_of_an_adapter_is_promoted_likewise_and_status_lists_adapters(
    coordinator: Serve, capsys: pytest.CaptureFixture[str]
) -> None:
    servicer, environ = coordinator(answer)
    servicer.served.target_models.extend(TARGET_MODELS)
    versions = [("acc3", 0.5, 0.25), ("acd4", 0.5, None)]
    servicer.served.adapters.extend(
        pb.AdapterInfo(
            name="sql", fingerprint=fingerprint, model="/models/old", num_replicas=1, share=share, alpha=alpha
        )
        for fingerprint, share, alpha in versions
    )
    assert run(["promote", "--target", "acd", "0.5"], environ) == 0
    assert capsys.readouterr().out.splitlines()[2:] == [
        "acc3 adapter sql: 1 replica, 50% of its new sessions",
        "acd4 adapter sql: 1 replica, 50% of its new sessions",
    ]
    assert servicer.target_shares == [("acd4", 0.5)]
    assert run(["status"], environ) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines() if line.startswith("sql")]
    assert rows[0] == ["sql", "old", "acc3", "1", "25%", "measured", "not", "known", "yet"]
    assert rows[1][3:] == ["1", *["not", "known", "yet"] * 2]


@pytest.mark.parametrize(
    ("args", "code", "message"),
    [
        ([], 2, "promote needs one of POOL and --target FINGERPRINT SHARE"),
        (["pool", "--target", "abc1", "0.5"], 2, "promote needs one of POOL and --target FINGERPRINT SHARE"),
        (["--target", "abc1", "1.5"], 2, "SHARE must be 0 to 1 or auto, got '1.5'"),
        (["--target", "abc1", "nan"], 2, "SHARE must be 0 to 1 or auto, got 'nan'"),
        (["--target", "ab", "1"], 1, "2 target models have a fingerprint that begins with 'ab'; there are abc1 (old)"),
        (["--target", "x", "1"], 1, "no target model has a fingerprint that begins with 'x'; there are abc1 (old)"),
    ],
)
def test_a_promotion_that_names_no_single_model_or_no_share_is_refused_in_one_line(
    args: list[str], code: int, message: str, coordinator: Serve, capsys: pytest.CaptureFixture[str]
) -> None:
    servicer, environ = coordinator(answer)
    servicer.served.target_models.extend(TARGET_MODELS)
    assert run(["promote", *args], environ) == code
    assert message in capsys.readouterr().err.splitlines()[0]
    assert servicer.target_shares == []
