"""Models and in-target drafts that `specdec up` serves, from its command line."""

from __future__ import annotations

from pathlib import Path

import pytest

from specdec.cli import up_flags
from specdec.cli.__main__ import build_parser
from specdec.cli.launching import Launcher
from specdec.settings.draft import DraftSettings
from specdec.settings.draft_specs import parse_local_drafts
from specdec.settings.reading import parse_settings
from specdec.settings.target import TargetSettings

DRAFTS = ("eagle3:heads", "exit=early-exit:3:heads/adapter.safetensors", "medusa:some/hub-id", "mtp")


def served(*flags: str) -> up_flags.Models:
    drafts = [word for draft in DRAFTS for word in ("--draft", draft)]
    return up_flags.models(build_parser({}).parse_args(["up", "--target", "some/model", *drafts, *flags]))


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current directory, with heads in it."""
    (tmp_path / "heads").mkdir()
    (tmp_path / "heads" / "adapter.safetensors").touch()
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_paths_of_heads_and_adapters_hold_on_the_machines_of_a_ray_cluster(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Replicas run in other directories there, so paths become absolute; hub ids stay as they are."""
    local_drafts = served("--ray-address", "127.0.0.1:1", "--insecure").local_drafts
    monkeypatch.chdir("/")
    specs = parse_local_drafts(local_drafts)
    assert [(spec.name, spec.kind, spec.num_layers, spec.path) for spec in specs] == [
        ("eagle3", "eagle3", 0, str(here / "heads")),
        ("exit", "early-exit", 3, str(here / "heads" / "adapter.safetensors")),
        ("medusa", "medusa", 0, "some/hub-id"),
        ("mtp", "mtp", 0, ""),
    ]


def test_on_this_machine_they_are_handed_on_as_they_were_given() -> None:
    assert served().local_drafts == DRAFTS


@pytest.mark.parametrize("flag", ["--deterministic", "--no-deterministic"])
def test_every_replica_is_started_as_deterministic_as_the_system_is(flag: str) -> None:
    given = [flag] if flag == "--deterministic" else []
    args = build_parser({}).parse_args(["up", *given])
    launcher = Launcher(args, up_flags.models(args), endpoint="127.0.0.1:1", redis_url="memory://", metrics={},
                        environ={})  # fmt: skip
    for name, settings_type in (("target-0", TargetSettings), ("draft-0", DraftSettings)):
        started = launcher.replica_arguments(name)
        settings = parse_settings(settings_type, prog=name, argv=started)
        assert settings.deterministic == (flag == "--deterministic")


def drafts_of(*flags: str) -> tuple[list[str], list[str], str]:
    """Return the pools of draft models, the kinds of in-target drafts and the routing of `specdec up` with flags."""
    args = build_parser({}).parse_args(["up", *flags])
    models = up_flags.models(args)
    words = Launcher(args, models, endpoint="h:1", redis_url="", metrics={}, environ={}).coordinator_arguments()
    kinds = [spec.kind for spec in parse_local_drafts(models.local_drafts)]
    route = words[words.index("--route") + 1] if "--route" in words else "none"
    return [pool.name for pool in models.drafts], kinds, route


@pytest.mark.parametrize(
    ("flags", "drafts"),
    [
        ([], (["default"], ["eagle3"], "auto")),
        (["--replicas-draft", "2"], (["default"], ["eagle3"], "auto")),
        (["--route", "none"], (["default"], ["eagle3"], "none")),
        (["--tensor-parallel", "2"], (["default"], [], "auto")),
        (["--replicas-draft", "0"], ([], [], "none")),
        (["--draft", "suffix"], ([], [], "none")),
        (["--draft", "medusa:heads"], ([], ["medusa"], "none")),
        (["--draft", "code=some/model"], (["code"], [], "none")),
        (["--target", "some/model"], ([], [], "none")),
    ],
)  # fmt: skip
def test_only_the_demo_pair_with_its_own_drafts_gets_a_head_and_routes_between_them(
    flags: list[str], drafts: tuple[list[str], list[str], str]
) -> None:
    assert drafts_of(*flags) == drafts
