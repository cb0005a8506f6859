"""Every block of code in the README and the documentation that is Python or a `specdec` command runs, on the demo pair.

A command that needs another machine is skipped with its reason; a command that is neither run nor excused fails. Every
`specdec` command line, also one shown with its output or skipped, is one that the command line takes. The pages of
docs/history show commands of their time and are left out.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import subprocess
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest

from specdec.cli import up_flags
from specdec.cli.__main__ import build_parser
from tests.support.gateway_system import System
from tests.support.optional_clients import REASON, missing_from
from tests.support.up_rig import ENVIRON, SPECDEC, specdec

ROOT = Path(__file__).resolve().parents[2]
HISTORY = ROOT / "docs" / "history"
DOCUMENTS = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md")),
    *(path for path in sorted((ROOT / "docs").rglob("*.md")) if not path.is_relative_to(HISTORY)),
]
FENCED = re.compile(r"^```(?P<language>\S*)[^\n]*\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL)
SHELL = ("", "sh", "bash", "shell", "console")
ADDRESS, HTTP_ADDRESS = "127.0.0.1:50051", "127.0.0.1:8000"

#: Commands that no test of this file can run, by what they look like.
EXCUSES = {
    r"make \S+": "make's targets are what CI runs",
    r"\. \S*activate": "the environment is already there",
    r"specdec up .*(--device cuda|Qwen/|\.gguf)": "needs a GPU, the Hugging Face hub or a model of the reader's own",
    rf"specdec up( --http {re.escape(HTTP_ADDRESS)})?( &| --detach)?$": "is what the other commands run on here",
    r"specdec up --draft suffix --draft code=": "starts a system of its own; test_draft_pools has one",
    r"specdec up --allow-grammars ": "starts a system of its own; test_structured_output has one",
    r"specdec (serve|plan|advise --target) (Qwen/|.*\.gguf)": "needs the Hugging Face hub or a model of one's own",
    r"python -m (target_service|draft_service|coordinator|gateway) .*redis://redis": "needs a GPU and other machines",
    r"specdec up --otlp-endpoint ": "sends traces to a collector of the reader's own; test_traces has one",
    r"python -m (target_service|draft_service|coordinator|gateway) .*(--service-key|Qwen/|10\.0\.0\.)": (
        "needs files and machines of the reader's own; test_access has such services"
    ),
    r"specdec up .*--jwt-jwks https://": "needs an identity provider; test_access has one",
    r"(export SPECDEC_ENDPOINT|SPECDEC_API_KEY=key-of-an-operator)": "names a system of the reader's own",
    r"(chmod 600 |python3 -c \"import secrets|openssl |sed -i |printf '(%s acme|rediss|subjectAlt))": (
        "makes or changes a file of the reader's own; test_operators_pages runs it"
    ),
    r"curl https://llm\.acme": "needs a cluster; tests/pods/test_production.py sends such a request",
    r"(python3? -m )?pip ": "installs packages",
    r"\.venv/bin/python -m pytest ": "is a test",
    r"(docker|kubectl|kustomize|helm|git|apt-get|brew) ": "needs a cluster, a daemon or the network",
    r"python -m bench ": "is measured by `make bench`",
}


class Block(NamedTuple):
    """A block of code; its name is the document's with the line."""

    name: str
    language: str
    code: str

    @property
    def commands(self) -> list[str]:
        """Of a shell's block, without comments."""
        return self._without_comments(self._lines)

    @property
    def commands_shown(self) -> list[str]:
        """Of a block that has what they print, too."""
        return self._without_comments(line for line in self._lines if line.startswith("$ "))

    @property
    def _lines(self) -> list[str]:
        return self.code.replace("\\\n", " ").splitlines()

    @staticmethod
    def _without_comments(lines: Iterable[str]) -> list[str]:
        shown = (re.sub(r"(^|\s)#.*", "", line.removeprefix("$ ")).strip() for line in lines)
        return [command for command in shown if command]


def blocks() -> list[Block]:
    return [
        Block(f"{path.name}:{text[: found.start()].count(chr(10)) + 1}", found["language"], found["code"])
        for path in DOCUMENTS
        for text in [path.read_text()]
        for found in FENCED.finditer(text)
    ]


def written_command_lines() -> list[tuple[str, list[str]]]:
    """The arguments of every `specdec` that stands in a block, with the block's name."""
    found = []
    for block in blocks():
        commands = block.commands if block.language in SHELL else block.commands_shown
        for command in commands:
            for words in parts_of(command):
                if words[0] == "specdec":
                    found.append((block.name, words[1:]))
    return found


def parts_of(command: str) -> list[list[str]]:
    """The simple commands of a pipe or a list."""
    lexer = shlex.shlex(command, posix=True, punctuation_chars="|&;")
    lexer.whitespace_split = True
    parts: list[list[str]] = [[]]
    for word in lexer:
        if set(word) <= set("|&;"):
            parts.append([])
        else:
            parts[-1].append(word)
    return [words for words in parts if words]


def mentions() -> list[tuple[str, list[str]]]:
    """The arguments of every `specdec` in the prose, with the document's name. Values may be placeholders."""
    return [
        (path.name, found.split())
        for path in DOCUMENTS
        for found in re.findall(r"`specdec ([a-z][^`]*)`", FENCED.sub("", path.read_text()))
    ]


def require_taken(arguments: list[str]) -> None:
    """Parses a command line as `specdec` does. Raises SystemExit or Usage: it would be refused for its flags."""
    args = build_parser({}).parse_args(arguments)
    if args.command == "up":
        up_flags.check(args)


#: `test_examples` runs the included programs.
PYTHON = [block for block in blocks() if block.language == "python" and not block.code.startswith("--8<--")]
#: Each command once, with a block that has it.
COMMANDS = {command: block.name for block in blocks() if block.language in SHELL for command in block.commands}
#: What a command gets in addition, because without it the command takes long.
SHORTENED = {"specdec bench": "--repeats 1 --max-new-tokens 64"}


def at(demo: System, code: str) -> str:
    """The code with the addresses of the running system."""
    return code.replace(HTTP_ADDRESS, demo.http).replace(ADDRESS, demo.grpc)


def test_every_block_has_a_language_that_is_known() -> None:
    known = {*SHELL, "python", "js", "mermaid", "json", "yaml", "toml", "proto", "text", "promql"}
    assert [block.name for block in blocks() if block.language not in known] == []
    assert PYTHON
    assert COMMANDS


@pytest.mark.parametrize("block", PYTHON, ids=lambda block: block.name)
def test_a_python_block_runs(
    block: Block,
    demo: System,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    # Otherwise it calls no system, or another one; the guide for moving from Transformers also shows their side.
    assert any(word in block.code for word in (ADDRESS, HTTP_ADDRESS, "Client(", "assistant_model="))
    if missing_from(block.code):
        pytest.skip(f"{block.name}: {REASON}")
    for name in [name for name in os.environ if name.startswith("SPECDEC_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("SPECDEC_ENDPOINT", demo.grpc)
    monkeypatch.chdir(ROOT)
    # In this process, which has imported the libraries: a process of its own takes seconds to import them again.
    if block.name.startswith("tools-and-agents.md"):  # the demo pair has no format of calls
        demo = replace(demo, http=request.getfixturevalue("tool_url").removeprefix("http://"))
    code = compile(at(demo, block.code), block.name, "exec", dont_inherit=True)
    exec(code, {"__name__": "__main__"})
    assert capsys.readouterr().out.strip()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder in which commands run, because some of them write files."""
    return tmp_path_factory.mktemp("commands")


@pytest.mark.parametrize(("command", "name"), COMMANDS.items(), ids=lambda value: value)
def test_a_command_runs_or_says_why_not(command: str, name: str, demo: System, folder: Path) -> None:
    for pattern, reason in EXCUSES.items():
        if re.match(pattern, command):
            pytest.skip(f"{name}: {reason}")
    assert command.startswith(("specdec ", "printf ", "curl ")), f"{name}: {command} is neither run nor excused"
    shown = at(demo, f"{command} {SHORTENED.get(command, '')}").replace("specdec", shlex.join(SPECDEC))
    result = subprocess.run(
        shown, shell=True, cwd=folder, stdin=subprocess.DEVNULL, capture_output=True, text=True,
        env=ENVIRON | {"SPECDEC_ENDPOINT": demo.grpc},
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert "error" not in result.stderr
    assert '"error":' not in result.stdout


@pytest.mark.parametrize(("name", "arguments"), written_command_lines(), ids=lambda value: str(value))
def test_a_written_command_line_is_one_that_specdec_takes(name: str, arguments: list[str]) -> None:
    require_taken(arguments)


@pytest.mark.parametrize(("name", "arguments"), mentions(), ids=lambda value: str(value))
def test_a_command_in_the_prose_has_flags_that_exist(name: str, arguments: list[str]) -> None:
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown), pytest.raises(SystemExit) as ended:
        build_parser({}).parse_args([arguments[0], "--help"])
    assert ended.value.code == 0
    flags = {word.partition("=")[0] for word in arguments if word.startswith("--")}
    assert flags <= set(re.findall(r"--[a-z-]+", shown.getvalue()))


def test_the_command_lines_beside_their_output_are_looked_at() -> None:
    written = [arguments for _, arguments in written_command_lines()]
    assert ["up", "--tensor-parallel", "2"] in written
    assert ["generate", "-", "--json-lines", "--stop", "class"] in written
    assert any(arguments[0] == "scale" for arguments in written)


@pytest.mark.parametrize(
    "arguments",
    [["up", "--replicas", "2"], ["up", "--route", "best"], ["up", "--kv-cache-bytes-target", "0"], ["chat", "--trims"]],
    ids=" ".join,
)
def test_a_flag_or_value_that_is_not_taken_would_be_noticed(arguments: list[str]) -> None:
    with pytest.raises((SystemExit, up_flags.Usage)):
        require_taken(arguments)


def test_a_command_that_does_not_exist_would_be_noticed() -> None:
    assert specdec("chatter").returncode == 2
