"""Settings: sources of values, their precedence, and the reports of mistakes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from pydantic import ValidationError
from pydantic_settings import SettingsConfigDict

from specdec.settings.adapter_specs import AdapterSpec, parse_adapters
from specdec.settings.addresses import advertised_address, join_address, split_address
from specdec.settings.coordinator import CoordinatorSettings
from specdec.settings.draft import DraftSettings
from specdec.settings.reading import parse_settings
from specdec.settings.shared import AddressList, ServiceSettings
from specdec.settings.target import TargetSettings


class ManySettings(DraftSettings):
    """A service for this test, with a list and a switch."""

    model_config = SettingsConfigDict(env_prefix="SPECDEC_DRAFT__")

    endpoint: AddressList = ()
    """Addresses."""

    eager: bool = False
    """A switch."""


def parse(*argv: str) -> ManySettings:
    return parse_settings(ManySettings, prog="draft", argv=["--model", "m", *argv])


@pytest.fixture
def toml(tmp_path: Path) -> Path:
    path = tmp_path / "draft.toml"
    path.write_text('pool = "file"\ndevice = "file"\ndtype = "float16"\nendpoint = ["f:1", "f:2"]\n')
    return path


def test_a_flag_beats_the_environment_which_beats_the_file_which_beats_the_default(
    toml: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPECDEC_DRAFT__POOL", "environment")
    monkeypatch.setenv("SPECDEC_DRAFT__DEVICE", "environment")
    settings = parse("--config", str(toml), "--pool", "flag")
    assert (settings.pool, settings.device, settings.dtype, settings.max_gamma) == (
        "flag",
        "environment",
        "float16",
        16,
    )


def test_an_environment_variable_can_name_the_configuration_file(toml: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECDEC_DRAFT__CONFIG", str(toml))
    assert parse().pool == "file"


def test_lists_are_repeated_flags_comma_separated_values_or_toml_arrays(
    toml: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert parse("--endpoint", "a:1", "--endpoint", "b:2").endpoint == ("a:1", "b:2")
    assert parse("--config", str(toml)).endpoint == ("f:1", "f:2")
    monkeypatch.setenv("SPECDEC_DRAFT__ENDPOINT", "c:3,d:4")
    assert parse().endpoint == ("c:3", "d:4")


def test_switches_and_absent_values_have_flags() -> None:
    settings = parse("--eager", "--num-threads", "2")
    assert (settings.eager, settings.num_threads) == (True, 2)
    assert parse("--no-eager", "--num-threads", "none").num_threads is None


def test_settings_that_are_built_directly_ignore_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECDEC_TARGET__POOL", "environment")
    assert TargetSettings(model="m").pool == "default"


def test_the_former_name_of_the_cuda_graph_backend_is_accepted() -> None:
    assert parse("--compile-backend", "captured").compile_backend == "cuda-graphs"


@pytest.mark.parametrize("place", ["flag", "environment", "file"])
def test_a_removed_setting_is_refused_with_what_replaces_it(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["--tokenizer", "MODEL"]
    if place == "flag":
        argv += ["--worker-contract", "smg"]
    elif place == "environment":
        monkeypatch.setenv("SPECDEC_COORDINATOR__WORKER_CONTRACT", "smg")
    else:
        path = tmp_path / "coordinator.toml"
        path.write_text('worker_contract = "smg"')
        argv += ["--config", str(path)]
    with pytest.raises(SystemExit) as ended:
        parse_settings(CoordinatorSettings, prog="coordinator", argv=argv)
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert "was removed: the router smg is not served any more; the gateway serves" in error
    assert error.count("\n") == 1


def test_the_removed_backend_is_refused_with_the_one_that_replaces_it(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parse_settings(TargetSettings, prog="target", argv=["--model", "MODEL", "--backend", "sglang"])
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert "--backend: sglang was removed: use server, which speaks to any OpenAI-style server" in error
    assert error.count("\n") == 1


BACKEND = ["--model", "MODEL", "--backend", "vllm", "--backend-url", "http://127.0.0.1:8000"]


def test_adapters_are_named_each_by_a_flag_or_in_one_value() -> None:
    expected = (AdapterSpec("sql", "/adapters/sql"), AdapterSpec("tone", "tone"))
    for words in (["--adapter", "sql=/adapters/sql", "--adapter", "tone"], ["--adapter", "sql=/adapters/sql,tone"]):
        settings = parse_settings(TargetSettings, prog="target", argv=[*BACKEND, *words])
        assert parse_adapters(settings.adapter) == expected


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--model", "M", "--adapter", "sql=PATH"], "--backend own, which loads no adapters: serve it in vLLM"),
        (
            ["--model", "M", "--backend", "llama-cpp", "--adapter", "sql"],
            "--backend llama-cpp, which loads no adapters: merge it into the file (llama-export-lora",
        ),
        ([*BACKEND, "--adapter", "a=x", "--adapter", "a=y"], "two adapters are called 'a'"),
        ([*BACKEND, "--adapter", "a b=x"], "must be NAME=PATH_OR_ID"),
        ([*BACKEND, "--adapter", "a="], "must state after = how the server lists the adapter"),
        ([*BACKEND, "--adapter", ",".join(f"a{number}" for number in range(65))], "at most 64 adapters, not 65"),
    ],
    ids=lambda value: value[-1][:20] if isinstance(value, list) else None,
)
def test_adapters_that_cannot_be_served_are_refused_with_what_would_work(
    argv: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        parse_settings(TargetSettings, prog="target", argv=argv)
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert words in error
    assert error.count("\n") == 1


def test_a_setting_that_is_fixed_now_is_ignored_with_a_warning(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SPECDEC_COORDINATOR__LOOKUP_HISTORY_TOKENS", "5000")
    argv = ["--tokenizer", "MODEL", "--poll-interval-s", "0.5", "--lease-ttl-s=9"]
    settings = parse_settings(CoordinatorSettings, prog="coordinator", argv=argv)
    assert settings.lease_ttl_s == 9
    lines = capsys.readouterr().err.splitlines()
    assert lines == [
        "warning: --poll-interval-s has no effect any more: its value is fixed",
        "warning: environment variable SPECDEC_COORDINATOR__LOOKUP_HISTORY_TOKENS has no effect any more: its value is "
        "fixed",
    ]


def test_settings_cannot_be_changed() -> None:
    with pytest.raises(ValidationError):
        parse().pool = "other"  # type: ignore[misc]


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--nonsense", "1"], "--nonsense"),
        (["--mod", "m"], "--mod"),  # abbreviations are refused: a flag added later could change their meaning
        (["--listen", "nowhere"], "--listen: must be HOST:PORT"),
        (["--health", "h:99999"], "--health: must be HOST:PORT"),
        (["--redis-url", "http://x"], "--redis-url: must begin with redis://"),
        (["--kv-tier-url", "memory://"], "--kv-tier-url: must begin with redis://"),
        (["--kv-tier-url", "redis://127.0.0.1/1"], "--kv-tier-url is the Redis of --redis-url"),
        (["--kv-tier-url", "unix:///a", "--redis-url", "unix:///a?db=1"], "--kv-tier-url is the Redis of --redis-url"),
        (["--dtype", "float8"], "--dtype: "),
        (["--max-gamma", "0"], "--max-gamma: "),
        (["--max-gamma", "many"], "--max-gamma: "),
        (["--prefill-budget-ms", "0"], "--prefill-budget-ms: "),
        (["--endpoint", "x"], "--endpoint: "),
        (["--pool"], "--pool"),
        (["--config", "/does/not/exist"], "--config: cannot read"),
    ],
)
def test_a_usage_error_is_one_line_and_exit_code_2(
    argv: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        parse(*argv)
    printed = capsys.readouterr()
    assert caught.value.code == 2
    assert printed.out == ""
    assert printed.err.startswith("error: ")
    assert words in printed.err
    assert printed.err.count("\n") == 1


@pytest.mark.parametrize("tenant", ["", "a/b", "a b", "{a}", "x" * 65, "\u00e9"])
def test_a_tenant_is_a_short_plain_name(tenant: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_settings(CoordinatorSettings, prog="coordinator", argv=["--tokenizer", "t", "--tenant", tenant])
    expected = f"error: --tenant: {tenant!a} is not 1 to 64 letters, digits, '_', '.' or '-' (INVALID_REQUEST)\n"
    assert capsys.readouterr().err == expected
    named = parse_settings(CoordinatorSettings, prog="coordinator", argv=["--tokenizer", "t", "--tenant", "x" * 64])
    assert named.tenant == "x" * 64


@pytest.mark.parametrize(
    ("settings_type", "flag", "value"),
    [
        (CoordinatorSettings, "--session-ttl-s", "1e18"),
        (CoordinatorSettings, "--session-ttl-s", "inf"),
        (CoordinatorSettings, "--lease-ttl-s", "0.0001"),
        (CoordinatorSettings, "--lease-ttl-s", "inf"),
        (CoordinatorSettings, "--max-message-bytes", "2147483648"),
        (TargetSettings, "--registry-ttl-s", "1e18"),
        (TargetSettings, "--num-threads", "100000"),
    ],
)
def test_a_value_that_store_or_transport_cannot_support_is_refused_with_its_flag(
    settings_type: type[ServiceSettings], flag: str, value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    model = ["--model" if settings_type is TargetSettings else "--tokenizer", "m"]
    with pytest.raises(SystemExit) as caught:
        parse_settings(settings_type, prog="service", argv=[*model, flag, value])
    assert caught.value.code == 2
    assert flag in capsys.readouterr().err.splitlines()[-1]


def test_a_missing_model_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        parse_settings(TargetSettings, prog="target", argv=[])
    assert "--model" in capsys.readouterr().err


def test_an_unknown_key_in_the_environment_or_the_file_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "wrong.toml"
    path.write_text("modle = 1\n")
    with pytest.raises(SystemExit, match="2"):
        parse("--config", str(path))
    assert "'modle' is not a setting" in capsys.readouterr().err
    monkeypatch.setenv("SPECDEC_DRAFT__MODLE", "x")
    with pytest.raises(SystemExit, match="2"):
        parse()
    assert "SPECDEC_DRAFT__MODLE is not a setting" in capsys.readouterr().err


def test_a_broken_file_is_a_usage_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "broken.toml"
    path.write_text("= =")
    with pytest.raises(SystemExit, match="2"):
        parse("--config", str(path))
    assert "not valid TOML" in capsys.readouterr().err


@pytest.mark.parametrize("settings_type", [DraftSettings, TargetSettings])
def test_help_explains_every_flag(settings_type: type[ServiceSettings], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        parse_settings(settings_type, prog="python -m some_service", argv=["--help"])
    text = capsys.readouterr().out
    for name, field in settings_type.model_fields.items():
        assert "--" + name.replace("_", "-") in text
        assert field.description
        assert field.description.split()[0] in text
    assert settings_type.model_config["env_prefix"] + "LOG_FORMAT" in text.replace("\n", " ")


@pytest.mark.parametrize("address", ["127.0.0.1:0", "[::1]:50051", "host.example:65535", ":80"])
def test_addresses_split_and_join_again(address: str) -> None:
    assert join_address(*split_address(address)) == address


@pytest.mark.parametrize("address", ["", "host", "host:", "host:65536", "host:-1", "::1:50", "http://host:50", "h:5 "])
def test_a_malformed_host_and_port_is_refused(address: str) -> None:
    with pytest.raises(ValueError, match="must be HOST:PORT"):
        split_address(address)


def test_the_advertised_address_has_the_bound_port_and_a_reachable_host() -> None:
    assert advertised_address("", "127.0.0.1:0", 4711) == "127.0.0.1:4711"
    assert advertised_address("draft.internal:50061", "0.0.0.0:0", 4711) == "draft.internal:50061"
    assert advertised_address("10.0.0.7", "0.0.0.0:0", 4711) == "10.0.0.7:4711"
    assert advertised_address("fd00::7", "[::]:50061", 50061) == "[fd00::7]:50061"
    assert advertised_address("[fd00::7]:1", "[::]:50061", 50061) == "[fd00::7]:1"
    assert advertised_address("draft", "0.0.0.0:0", 4711) == "draft:4711"
    host, port = split_address(advertised_address("", "0.0.0.0:0", 4711))
    assert port == 4711
    assert host not in ("", "0.0.0.0")


@pytest.mark.parametrize("settings_type", [DraftSettings, TargetSettings, CoordinatorSettings])
def test_help_shows_no_python_types_and_no_flag_that_is_always_refused(
    settings_type: type[ServiceSettings], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        parse_settings(settings_type, prog="service", argv=["--help"])
    assert ended.value.code == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert re.findall(r"\b(str|int|float|bool|tuple|list|null|None)\b|\[str|\(default: (?:none|\(\))?\)", shown) == []
    assert "--listen HOST:PORT" in shown
    assert "--drain-grace-s SECONDS" in shown
    assert "--http" not in shown
