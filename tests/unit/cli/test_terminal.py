"""Colours of tokens and the legend that names them."""

from __future__ import annotations

import io
import re

import pytest

from specdec.cli.terminal import TokenWriter, wants_colour
from specdec.client import Chunk, TokenDetail
from specdec.contract.types import TokenSource

ANSI = re.compile("\x1b\\[([0-9;]*)m")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def detail(source: TokenSource, text: str) -> TokenDetail:
    return TokenDetail(source=source, p=1, q=1, draft_pool="", logprob=None, top_logprobs=(), text=text)


TEXTS = ("a", " b", "", "\n c")
CHUNK = Chunk(0, (1, 2, 3, 4), "a b\n c", tuple(map(detail, TokenSource, TEXTS)))


@pytest.mark.parametrize(
    ("stream", "environ", "coloured"),
    [
        (Terminal(), {}, True),
        (Terminal(), {"NO_COLOR": "1"}, False),
        (Terminal(), {"NO_COLOR": ""}, True),
        (Terminal(), {"TERM": "dumb"}, False),
        (io.StringIO(), {}, False),
        (io.StringIO(), {"FORCE_COLOR": "1"}, False),
    ],
)
def test_colour_needs_a_terminal_and_no_variable_against_it(
    stream: io.StringIO, environ: dict[str, str], coloured: bool
) -> None:
    assert wants_colour(stream, environ) is coloured


def test_each_token_has_the_colour_of_its_source_and_the_text_is_unchanged() -> None:
    stream = Terminal()
    writer = TokenWriter(stream, coloured=True)
    writer.write(CHUNK)
    assert ANSI.sub("", stream.getvalue()) == "a b\n c"
    legend_codes = [code for code in ANSI.findall(writer.legend()) if code != "0"]
    assert len(set(legend_codes)) == 4
    shown_codes = [code for code in ANSI.findall(stream.getvalue()) if code != "0"]
    assert shown_codes == [legend_codes[0], legend_codes[1], legend_codes[3]]
    assert ANSI.sub("", writer.legend()).split() == ["accepted", "corrected", "bonus", "target-only"]


def test_without_colour_the_text_is_plain_and_there_is_no_legend() -> None:
    stream = io.StringIO()
    writer = TokenWriter(stream, coloured=False)
    writer.write(CHUNK)
    assert stream.getvalue() == "a b\n c"
    assert writer.legend() == ""


def test_a_text_that_differs_from_its_details_is_shown_without_colour() -> None:
    stream = Terminal()
    TokenWriter(stream, coloured=True).write(Chunk(0, (1,), "whole", (detail(TokenSource.BONUS, "half"),)))
    assert stream.getvalue() == "whole"


def test_escape_sequences_of_a_model_reach_a_pipe_and_not_a_terminal() -> None:
    chunk = Chunk(0, (1,), "\x1b[2J\x9b2J", ())
    terminal, pipe = Terminal(), io.StringIO()
    TokenWriter(terminal, coloured=False).write(chunk)
    TokenWriter(pipe, coloured=False).write(chunk)
    assert not {"\x1b", "\x9b"} & set(terminal.getvalue())
    assert pipe.getvalue() == "\x1b[2J\x9b2J"
