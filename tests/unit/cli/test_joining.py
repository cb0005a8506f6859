"""Draft models that join a running `specdec up`: which may, and what it takes until they get requests."""

from __future__ import annotations

from pathlib import Path

import pytest

from specdec.cli.__main__ import build_parser, run
from specdec.cli.draft_pools import DraftPoolSpec
from specdec.cli.launching import Launcher
from specdec.cli.up_flags import Models
from specdec.contract.errors import InvalidRequest, Unsupported
from specdec.v1 import coordinator_pb2 as pb
from tests.unit.cli.conftest import Serve, answer


def launcher(*flags: str) -> Launcher:
    served = Models("target", (DraftPoolSpec("default", "draft", "draft"),))
    args = build_parser({}).parse_args(["up", *flags])
    return Launcher(args, served, endpoint="127.0.0.1:1", redis_url="", metrics={}, environ={})


def test_a_draft_joins_where_requests_are_routed_alone() -> None:
    with pytest.raises(Unsupported, match="runs without --route auto"):
        launcher().join("new", "/m")
    routed = launcher("--route", "auto")
    assert routed.join("new", "/m") == "draft-new"
    assert routed.roles == ("target", "draft", "draft-new")
    assert routed.replica_arguments("draft-new-0")[:6] == ["--model", "/m", "--pool", "new", "--shadow", "on"]
    assert "--shadow" not in routed.replica_arguments("draft-0")
    routed.forget("draft-new")
    assert routed.roles == ("target", "draft")
    assert routed.join("new", "/other") == "draft-new"


@pytest.mark.parametrize("name", ["default", "suffix", "", "a b", "../x", "x" * 65, "-x"])
def test_a_name_that_is_taken_or_none_is_refused(name: str) -> None:
    with pytest.raises(InvalidRequest):
        launcher("--route", "auto").join(name, "/m")


def pool(name: str, *, is_chosen: bool, **classes: tuple[float, float]) -> pb.PoolInfo:
    """Return a pool with the acceptance rate of each class and the number of tokens that were tested."""
    routes = [
        pb.RouteInfo(request_class=of_class, alpha=alpha, num_tested=num_tested, is_chosen=is_chosen)
        for of_class, (alpha, num_tested) in classes.items()
    ]
    return pb.PoolInfo(name=name, role="draft", routes=routes)


@pytest.mark.parametrize(
    ("scores", "exit_code", "said"),
    [
        ({"code": (0.7, 400)}, 0, "nothing is promoted"),
        ({"code": (0.6, 400)}, 0, "nothing is promoted"),
        ({"code": (0.47, 400)}, 0, "nothing is promoted"),  # 0.6 of 50 tokens may be as little
        ({"code": (0.42, 400)}, 1, "new: its score for code is 0.420, the pool in use has 0.600"),
        ({"code": (0.7, 400), "prose": (0.1, 400)}, 1, "new: its score for prose is 0.100, the pool in use has 0.500"),
        ({"code": (0.7, 400), "prose": (0.1, 20)}, 0, "nothing is promoted"),
    ],
)
def test_a_pool_is_promoted_on_its_score_in_every_class_that_is_known(
    scores: dict[str, tuple[float, float]], exit_code: int, said: str, coordinator: Serve,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    servicer, environ = coordinator(answer)
    old = pool("old", is_chosen=True, code=(0.6, 50), prose=(0.5, 500))
    servicer.served = pb.GetInfoResponse(pools=[old, pool("new", is_chosen=False, **scores)])
    assert run(["promote", "new", "--on-score"], environ) == exit_code
    assert said in "".join(capsys.readouterr())
    assert servicer.promoted == ([] if exit_code else ["new"])


def test_promoting_an_unknown_pool_fails_at_once(coordinator: Serve, capsys: pytest.CaptureFixture[str]) -> None:
    _, environ = coordinator(answer)
    assert run(["promote", "new", "--on-score"], environ) == 1
    assert "error: this system has no draft pool called new (POOL_NOT_FOUND)" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--minutes", "0"], "--minutes must be above 0"),
        (["--share", "1.5"], "--share must be above 0 and at most 1"),
        (["--threads", "0"], "--threads must be at least 1"),
        (["--max-steps", "0"], "--max-steps must be at least 1"),
        (["--learning-rate", "nan"], "--learning-rate must be"),
        (["--tenant", "a/b"], "--tenant"),
        (["--target-model", "t"], "--target-model is for drafts inside the target"),
        (["--draft", "eagle3:h"], "--draft eagle3:h is trained together with its target: name it by --target-model"),
        (["--draft", "early-exit:x", "--target-model", "t"], "--draft: 'early-exit:x': early-exit takes a number"),
        (
            ["--draft", "medusa:h", "--target-model", "t", "--join", "p"],
            "a target loads its medusa draft when it starts",
        ),
    ],
)
def test_impossible_training_flags_are_a_usage_error(
    flags: list[str], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["--log", str(tmp_path), "--draft", "d", "--out", str(tmp_path / "new")]
    assert run(["distill", *given, *flags], {}) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith("(INVALID_REQUEST)")
    assert words in line
