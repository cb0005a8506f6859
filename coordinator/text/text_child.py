"""The process in which chat templates are rendered and long texts are encoded, because it can be ended at any moment.

A template is a program that comes with a model, and its input comes with a request. Jinja's sandbox keeps it from the
machine, but not from looping for ever or from making gigabytes out of one line, and no thread can be stopped from
outside. Here a timer ends the process in the middle of whatever it does, and the memory it may take is bounded. The
price is a process of 60 MB, a second at the first conversation, and a pipe's round trip for each.

Run as a file by `text_process`, which is also the only one to talk to it. Each message is a length and JSON.
"""

from __future__ import annotations

import json
import resource
import signal
import struct
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import IO, Any

#: Of CPU, for one conversation and for compiling the template before the first. Templates have nothing to wait for, and
#: a busy machine must not count against them.
TEMPLATE_CPU_S = 5.0
#: Beyond what the process holds already.
TEMPLATE_MEMORY_BYTES = 512 << 20
MAX_RENDERED_CHARACTERS = 16 << 20
_MAX_REASON_CHARACTERS = 500
_LENGTH = struct.Struct("<Q")


def read_message(file: IO[bytes]) -> Any:
    """The next message; None at the end."""
    header = file.read(_LENGTH.size)
    if len(header) < _LENGTH.size:
        return None
    (num_bytes,) = _LENGTH.unpack(header)
    body = file.read(num_bytes)
    return json.loads(body) if len(body) == num_bytes else None


def write_message(file: IO[bytes], message: Any) -> None:
    body = json.dumps(message).encode()
    file.write(_LENGTH.pack(len(body)) + body)
    file.flush()


def render(setting: Mapping[str, Any], messages: list[dict[str, str]]) -> str:
    """The conversation as text, the opening of the assistant's next turn included."""
    from transformers.utils.chat_template_utils import render_jinja_template

    with _bounded():
        # transformers says that it gives one text; it gives one a conversation, and what the model is to learn.
        (text,), _ = render_jinja_template(  # type: ignore[str-unpack]
            conversations=[messages],
            chat_template=setting["template"],
            add_generation_prompt=True,
            **setting["special_tokens"],
        )
    if len(text) > MAX_RENDERED_CHARACTERS:
        raise ValueError(f"it makes {len(text)} characters of them, the limit is {MAX_RENDERED_CHARACTERS}")
    return str(text)


def encode(setting: Mapping[str, Any], text: str, add_special_tokens: bool) -> list[int]:
    """Token ids of a text, as the coordinator's own tokenizer gives them."""
    token_ids: list[int] = _tokenizer(setting["model"]).encode(
        text, add_special_tokens=add_special_tokens, verbose=False
    )
    return token_ids


@cache
def _tokenizer(model: str) -> Any:
    from specdec.checkpoints.vocabulary import load_tokenizer

    return load_tokenizer(model)


@contextmanager
def _bounded() -> Iterator[None]:
    """Ends the process when what runs within takes too long, and raises MemoryError when it takes too much."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit = _held_bytes() + TEMPLATE_MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))
    # Nobody handles SIGPROF: it ends the process, even within a single call of C code.
    signal.setitimer(signal.ITIMER_PROF, TEMPLATE_CPU_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def _held_bytes() -> int:
    """Of address space, where the system tells; where it does not, none is counted and the limit is as good as none."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    except OSError:
        return 1 << 46


def _answer(setting: Mapping[str, Any], request: Mapping[str, Any]) -> dict[str, Any]:
    try:
        if "messages" in request:
            return {"text": render(setting, request["messages"])}
        return {"token_ids": encode(setting, request["text"], request["add_special_tokens"])}
    # Whatever the template or the tokenizer raises, a panic of the latter included, is its answer.
    except BaseException as error:
        reason = " ".join(str(error).split())
        is_refusal = type(error).__name__ == "TemplateError"  # what `raise_exception` of a template raises
        reason = reason if is_refusal and reason else f"{type(error).__name__}: {reason}".rstrip(": ")
        return {"error": reason.encode("ascii", "backslashreplace").decode()[:_MAX_REASON_CHARACTERS]}


def main() -> None:
    checkout = str(Path(__file__).resolve().parents[1])
    if checkout not in sys.path:  # nothing is installed
        sys.path.append(checkout)
    with suppress(OSError):  # short of memory, this process is to go and not the coordinator
        Path("/proc/self/oom_score_adj").write_text("1000")
    requests, answers = sys.stdin.buffer, sys.stdout.buffer
    sys.stdout = sys.stderr  # nobody else may write there
    setting = read_message(requests)
    while (request := read_message(requests)) is not None:
        write_message(answers, _answer(setting, request))


if __name__ == "__main__":
    main()
