"""Settings of services through `specdec up`: which reach a service, which are refused, and with which words."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from specdec.cli import Usage, up_flags
from specdec.cli.__main__ import build_parser, run
from specdec.cli.launching import Launcher
from specdec.cli.service_settings import SETTINGS_TYPES
from specdec.settings.draft import DraftSettings
from specdec.settings.reading import parse_settings
from tests.support.certificates import Authority

#: Settings that `specdec up` chooses for every service.
CHOSEN = {"listen", "model", "for_tokenizer", "pool", "local_draft", "lookup", "shadow", "metrics", "redis_url",
          "cluster", "log_format", "config", "service_key", "replica_id", "draft_endpoint", "target_endpoint",
          "coordinator", "tls_cert", "tls_key", "tls_ca", "tls_server_name", "insecure", "loopback"}  # fmt: skip


def settings_of(*flags: str) -> dict[str, Any]:
    """Return the settings that each service of `specdec up` with these flags reads from its command line."""
    args = build_parser({}).parse_args(["up", *flags])
    up_flags.check(args)
    launcher = Launcher(
        args, up_flags.models(args), endpoint="127.0.0.1:1", redis_url="redis://h:1", metrics={}, environ={}
    )
    arguments = {
        "target": launcher.replica_arguments("target-0"),
        "draft": launcher.replica_arguments("draft-0"),
        "coordinator": launcher.coordinator_arguments(),
    }
    return {name: parse_settings(SETTINGS_TYPES[name], prog=name, argv=words) for name, words in arguments.items()}


def test_set_reaches_the_service_that_it_names_and_no_other() -> None:
    flags = ["--set", "draft.predraft=on", "--set", "target.max-gamma=8", "--set", "coordinator.default_mode=block"]
    settings = settings_of(*flags, "--set", "coordinator.draft_timeout_s=none")
    draft, target, coordinator = settings["draft"], settings["target"], settings["coordinator"]
    assert (draft.predraft, draft.max_gamma, target.max_gamma) == ("on", 16, 8)
    assert (coordinator.default_mode, coordinator.draft_timeout_s) == ("block", None)


def test_set_wins_over_a_flag_for_both_services() -> None:
    settings = settings_of("--set", "draft.dtype=int8", "--dtype", "float32")
    assert [settings[role].dtype for role in ("target", "draft")] == ["float32", "int8"]


def test_every_flag_that_is_a_setting_reaches_its_services() -> None:
    flags = "--device cpu --dtype float16 --compile-backend eager --self-check off --deterministic"
    flags += " --max-context-tokens 99 --kv-tier-url redis://tier:1 --tensor-parallel 2 --tensor-parallel-draft 3"
    flags += " --kv-cache-bytes-target 11 --kv-cache-bytes-draft 12 --num-threads-target 4 --num-threads-draft 5"
    flags += " --gpu-memory-utilization-target 0.5 --gpu-memory-utilization-draft 0.25 --route auto --tenant t"
    flags += " --learning-log logs --tokenizer tok"
    settings = settings_of(*flags.split())
    for role, of_role in (("target", (2, 11, 4, 0.5)), ("draft", (3, 12, 5, 0.25))):
        found = settings[role]
        assert (found.device, found.dtype, found.compile_backend, found.self_check) == (
            "cpu",
            "float16",
            "eager",
            "off",
        )
        assert (found.deterministic, found.max_context_tokens, found.kv_tier_url) == (True, 99, "redis://tier:1")
        assert (found.tensor_parallel, found.kv_cache_bytes, found.num_threads, found.gpu_memory_utilization) == of_role
    coordinator = settings["coordinator"]
    assert (coordinator.route, coordinator.tenant, coordinator.tokenizer) == ("auto", "t", "tok")
    assert str(coordinator.learning_log) == "logs"


def test_every_adapter_of_a_repeated_flag_reaches_the_target() -> None:
    flags = "--target some/model --draft other --backend vllm --backend-url http://127.0.0.1:1"
    assert settings_of(*flags.split(), "--adapter", "sql=PATH", "--adapter", "tone")["target"].adapter == (
        "sql=PATH",
        "tone",
    )


def test_an_adapter_of_our_own_engine_is_refused_before_anything_starts() -> None:
    with pytest.raises(Usage, match="--adapter sql=PATH does not go with --backend own, which loads no adapters"):
        settings_of("--target", "some/model", "--adapter", "sql=PATH")


def test_replicas_get_the_files_of_tls_only_where_the_coordinator_connects_with_tls(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    own = authority.issue("service")
    files = ["--tls-cert", own.cert, "--tls-key", own.key]
    settings = settings_of(*files)
    assert settings["coordinator"].server_tls is not None
    assert {settings[role].server_tls for role in ("draft", "target")} == {None}
    settings = settings_of(*files, "--tls-ca", authority.path, "--tls-server-name", "specdec")
    assert settings["coordinator"].channel_tls.server_name == "specdec"
    assert all(settings[role].server_tls.ca == authority.path for role in ("draft", "target"))


def test_without_flags_services_get_only_what_up_chooses() -> None:
    settings = settings_of()
    assert settings["coordinator"].listen == "127.0.0.1:1"
    assert settings["coordinator"].tokenizer == settings["target"].model
    assert {each.redis_url for each in settings.values()} == {"redis://h:1"}
    assert {each.drain_grace_s for each in settings.values()} == {3.0}
    assert settings["draft"].dtype == DraftSettings.model_fields["dtype"].default


@pytest.mark.parametrize("service", SETTINGS_TYPES)
def test_every_setting_can_be_set_or_says_what_to_use_instead(service: str, capsys: pytest.CaptureFixture[str]) -> None:
    for name, info in SETTINGS_TYPES[service].model_fields.items():
        if name in CHOSEN:
            assert run(["up", "--set", f"{service}.{name}=x"], {}) == 2
            assert f"--set {service}.{name}: specdec up chooses this setting; " in capsys.readouterr().err
        elif not info.is_required():
            text = "none" if info.default is None else "" if info.default == () else str(info.default)
            args = build_parser({}).parse_args(["up", "--set", f"{service}.{name}={text}"])
            assert args.settings.value(service, name) == info.default


@pytest.mark.parametrize(
    ("assignment", "sentence"),
    [
        ("draft.predraf=on", "the draft service has no such setting; did you mean draft.predraft?"),
        ("target.max_gama=2", "the target service has no such setting; did you mean target.max_gamma?"),
        ("drafts.predraft=on", "takes SERVICE.FIELD=VALUE with target, draft, coordinator or gateway as SERVICE, not"),
        ("predraft=on", "takes SERVICE.FIELD=VALUE"),
        ("draft.predraft", "takes SERVICE.FIELD=VALUE"),
        ("draft.predraft=perhaps", "--set draft.predraft must be 'on', 'off' or 'auto'"),
        ("target.max_gamma=0", "--set target.max_gamma must be greater than or equal to 1"),
        ("target.listen=h:1", "replicas listen on free ports"),
        ("coordinator.listen=h:1", "use --listen"),
        ("gateway.listen=h:1", "use --http"),
    ],
)
def test_a_setting_that_is_refused_is_one_line(
    assignment: str, sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["up", "--set", assignment], {}) == 2
    captured = capsys.readouterr()
    assert sentence in captured.err
    assert captured.err.count("\n") == 1


def test_serve_is_up_with_the_target_that_it_names() -> None:
    served = build_parser({}).parse_args(["serve", "some/model", "--dtype", "float32", "--draft", "other/model"])
    up = build_parser({}).parse_args(["up", "--target", "some/model", "--dtype", "float32", "--draft", "other/model"])
    assert vars(served) | {"command": "up", "default_http": ""} == vars(up)  # serve starts a gateway by itself


@pytest.mark.parametrize(
    ("flags", "warned"),
    [
        (["--draft", "early-exit:3"], ["--draft early-exit:3 has no trained adapter"]),
        (["--draft", "early-exit:3:adapter.safetensors"], []),
        (["--draft", "suffix"], ["--draft suffix alone needs text that repeats"]),
        (["--draft", "ngram"], []),
        (["--draft", "mtp", "--draft", "suffix", "--draft", "early-exit:2"], ["early-exit:2"]),
    ],
    ids=lambda value: " ".join(value),
)
def test_a_draft_that_may_lack_what_it_needs_is_a_warning_at_the_start(flags: list[str], warned: list[str]) -> None:
    warnings = up_flags.needs_of_drafts(build_parser({}).parse_args(["up", "--target", "some/model", *flags]))
    assert len(warnings) == len(warned)
    assert all(any(words in warning for warning in warnings) for words in warned)
