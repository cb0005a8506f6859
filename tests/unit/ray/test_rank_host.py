"""The actor that keeps a rank: starts, relays and ends a real process, without Ray."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Mapping
from pathlib import Path

import pytest

from specdec.service.ray.rank_host import CALLER_VARIABLES, RankHost, only

TELLS = "import json, os, sys\nprint(json.dumps([sys.argv[1:], dict(os.environ)]))\nsys.exit(3)\n"
WAITS = "import os, signal\nprint(os.getpid(), flush=True)\nsignal.sigwait([signal.SIGTERM])\n"


@pytest.fixture
def environ(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Mapping[str, str]:
    """A node's, in which modules written to `tmp_path` can be run."""
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "RAY_JOB_ID", "AWS_SECRET_ACCESS_KEY", "SPECDEC_TARGET__DTYPE"):
        monkeypatch.setenv(name, "of the node")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return only(os.environ | {"OMP_NUM_THREADS": "2", "LD_PRELOAD": "x", "HF_HOME": "/hub"}, CALLER_VARIABLES)


def test_a_rank_gets_only_the_variables_that_are_meant_for_it(tmp_path: Path, environ: Mapping[str, str]) -> None:
    (tmp_path / "some_rank.py").write_text(TELLS)
    (told, _), ending = RankHost().run("some_rank", ["--model", "m"], environ)
    arguments, seen = json.loads(told)
    assert arguments == ["--model", "m"]
    assert (seen["CUDA_VISIBLE_DEVICES"], seen["OMP_NUM_THREADS"], seen["HF_HOME"]) == ("5", "2", "/hub")
    foreign = {"RANK", "WORLD_SIZE", "MASTER_ADDR", "RAY_JOB_ID", "AWS_SECRET_ACCESS_KEY", "LD_PRELOAD"}
    assert not foreign & seen.keys()
    assert ending == ("exit code 3", True)


def test_a_rank_that_is_asked_to_stop_before_it_starts_stops(tmp_path: Path, environ: Mapping[str, str]) -> None:
    (tmp_path / "some_rank.py").write_text(WAITS)
    host = RankHost()
    host.ask_to_stop()
    *_, ending = host.run("some_rank", [], environ)
    assert ending == ("signal 15", True)


def test_a_rank_that_stands_still_is_ended(tmp_path: Path, environ: Mapping[str, str]) -> None:
    (tmp_path / "some_rank.py").write_text(WAITS)
    host = RankHost()
    lines = host.run("some_rank", [], environ)
    os.kill(int(next(lines)[0]), signal.SIGSTOP)
    ending = threading.Thread(target=host.end)
    ending.start()
    assert list(lines) == [("signal 9", True)]
    ending.join()
