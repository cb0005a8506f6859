"""`specdec completion`: its scripts, the one for bash as bash itself runs it."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from specdec.cli.__main__ import _COMMANDS, run


def script(shell: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert run(["completion", shell], {"SPECDEC_API_KEY": "a-secret"}) == 0
    return capsys.readouterr().out


def completed(script: str, *words: str) -> list[str]:
    """Return what bash offers for the last word."""
    given = " ".join(f"'{word}'" for word in words)
    program = (
        f"{script}\nCOMP_WORDS=({given}); COMP_CWORD={len(words) - 1}\n"
        f"_shtab_specdec '{words[0]}' '{words[-1]}' '{words[-2]}'\nprintf '%s\\n' \"${{COMPREPLY[@]}}\""
    )
    done = subprocess.run(["bash", "--norc", "-c", program], capture_output=True, text=True, check=True)
    return done.stdout.split()


def test_bash_completes_commands_flags_choices_and_files(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    bash = script("bash", capsys)
    assert set(_COMMANDS) <= set(completed(bash, "specdec", ""))
    assert completed(bash, "specdec", "gen") == ["generate"]
    assert set(completed(bash, "specdec", "top", "--o")) == {"--once"}
    assert completed(bash, "specdec", "generate", "--mode", "re") == ["rejection"]
    (tmp_path / "prompts.txt").touch()
    assert completed(bash, "specdec", "bench", "--prompts", f"{tmp_path}/pro") == [f"{tmp_path}/prompts.txt"]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_every_shell_gets_all_commands_and_no_secret_of_the_environment(
    shell: str, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = script(shell, capsys)
    assert all(name in shown for name in _COMMANDS)
    assert "--draft-pool" in shown or "draft-pool" in shown
    assert "a-secret" not in shown


def test_json_holds_the_script(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["completion", "zsh", "--json"], {}) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["shell"] == "zsh"
    assert shown["script"].startswith("#compdef specdec\n")


def test_another_shell_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["completion", "ksh"], {}) == 2
    assert "argument shell: invalid choice: 'ksh'" in capsys.readouterr().err
