"""`specdec chat`: a conversation over one session. Ctrl-C stops the current answer, Ctrl-D leaves.

Not here: the chat template; the server applies the target's own.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import uuid
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from specdec.cli.generate import BUDGETS, add_request_flags, request_options
from specdec.cli.terminal import TokenWriter, closing_line, wants_colour
from specdec.client import ChatMessage, Client, Stream
from specdec.errors import SessionLost, SpecdecError


def add_parser(commands: Any, environ: Mapping[str, str]) -> None:
    parser = commands.add_parser("chat", help="talk over one session", allow_abbrev=False)
    add_request_flags(parser, environ)


#: Within it, Ctrl-C calls what it was given.
_Interrupts = Callable[[Callable[[], None]], contextlib.AbstractContextManager[None]]


def run(args: argparse.Namespace, environ: Mapping[str, str], interrupts: _Interrupts) -> int:
    """Reads one message a line until the end of input. Raises SpecdecError when an answer fails."""
    writer = TokenWriter(sys.stdout, coloured=wants_colour(sys.stdout, environ))
    if sys.stdin.isatty():
        _prepare_terminal()
        print(f"Ctrl-C stops an answer, Ctrl-D leaves.  {writer.legend()}", file=sys.stderr)
    session_id = uuid.uuid4().hex
    messages: list[ChatMessage] = []
    with Client(args.endpoint, budgets=BUDGETS) as client:
        try:
            while (line := _read_line()) is not None:
                if not line.strip():
                    continue
                messages.append({"role": "user", "content": line})
                ask = partial(
                    client.generate, messages=messages, session_id=session_id, stream=True, provenance=True,
                    **request_options(args),
                )  # fmt: skip
                try:
                    text = _answer(ask(), writer, interrupts)
                except SessionLost as error:  # the messages still hold the conversation
                    print(f"{error.message}; asking again with the whole conversation", file=sys.stderr)
                    client.delete_session(session_id)
                    text = _answer(ask(), writer, interrupts)
                messages.append({"role": "assistant", "content": text})
        finally:
            with contextlib.suppress(SpecdecError):  # the server forgets idle sessions by itself as well
                client.delete_session(session_id)
    return 0


def _answer(stream: Stream, writer: TokenWriter, interrupts: _Interrupts) -> str:
    """Streams one answer; what Ctrl-C left of it still belongs to the conversation."""
    texts: list[str] = []
    is_stopped = False

    def stop() -> None:
        nonlocal is_stopped
        is_stopped = True
        stream.close()

    with interrupts(stop), stream:
        for chunk in stream:
            texts.append(chunk.text)
            writer.write(chunk)
    print(flush=True)
    print("stopped" if is_stopped else closing_line(stream.result()), file=sys.stderr)
    return "".join(texts)


def _read_line() -> str | None:
    """The next message, or None at the end of input."""
    while True:
        try:
            return input("> " if sys.stdin.isatty() else "")
        except EOFError:
            if sys.stdin.isatty():
                print()
            return None
        except KeyboardInterrupt:
            print()


def _prepare_terminal() -> None:
    with contextlib.suppress(ImportError):  # line editing where Python was built with it
        import readline  # noqa: F401
