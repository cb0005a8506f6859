"""A process for work that may have to be killed: chat templates, long texts, constraints.

A template is a program that comes with a model, and its input comes with a request. Jinja's sandbox protects the
machine, but a template may still loop forever or turn one line into gigabytes, and a thread cannot be stopped from
outside. In this process a timer ends the work, and its memory is limited. The cost is a process of 60 MB, a second at
the first conversation, and the round trip of a pipe for each one.

`text_process` runs this module and exchanges messages with it. A message is a length followed by JSON.
"""

from __future__ import annotations

import json
import resource
import signal
import struct
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import IO, Any

#: Limit on CPU time for one conversation, including the compilation of the template before the first. Wall time would
#: make templates fail on a busy machine.
TEMPLATE_CPU_S = 5.0
#: Limit on CPU time for the compilation of one constraint.
CONSTRAINT_CPU_S = 2.0
#: Limit on the memory that rendering may add to the process.
TEMPLATE_MEMORY_BYTES = 512 << 20
MAX_RENDERED_CHARACTERS = 16 << 20
#: OpenAI's role for instructions to reasoning models, and what most templates call it.
_DEVELOPER = "developer"
_SYSTEM = {"role": "system"}
_MAX_REASON_CHARACTERS = 500
#: Most warnings of a constraint that are told.
_MAX_WARNINGS = 16
_LENGTH = struct.Struct("<Q")


def read_message(file: IO[bytes]) -> Any:
    """Return the next message; None at the end of the pipe."""
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


def render(
    setting: Mapping[str, Any],
    messages: list[dict[str, Any]],
    arguments: Mapping[str, Any],
    tools: list[dict[str, Any]] | None = None,
) -> str:
    """Return the conversation as text, with the opening of the assistant's next turn.

    Args:
        setting: first message of this process.
        messages: the conversation, as `message_forms` takes it. Messages of the role developer get the role system if
            the template does not know theirs.
        arguments: further variables of the template, none of them a special token.
        tools: value of the template's variable `tools`.
    """
    from transformers.utils.chat_template_utils import render_jinja_template

    from coordinator.text.message_forms import render_as_read

    def render_form(form: Sequence[Mapping[str, Any]]) -> str:
        # The declared return type is one text; the function returns a list of texts and the masks for training.
        (text,), _ = render_jinja_template(  # type: ignore[str-unpack]
            conversations=[[dict(message) for message in form]],
            tools=tools,  # type: ignore[arg-type]
            chat_template=setting["template"],
            add_generation_prompt=True,
            **setting["special_tokens"],
            **arguments,
        )
        if len(text) > MAX_RENDERED_CHARACTERS:
            raise ValueError(f"it makes {len(text)} characters of them, the limit is {MAX_RENDERED_CHARACTERS}")
        text.encode()  # refuses halves of characters
        return str(text)

    with _bounded(setting["template_cpu_s"]):
        if not _knows_role(setting["template"], _DEVELOPER):
            messages = [message | _SYSTEM if message["role"] == _DEVELOPER else message for message in messages]
        return render_as_read(render_form, messages)


@cache
def _knows_role(template: str, role: str) -> bool:
    from coordinator.text.message_forms import knows_role

    return knows_role(template, role)


def encode(setting: Mapping[str, Any], text: str, *, add_special_tokens: bool, continues: bool) -> list[int]:
    """Return the token ids of a text, equal to those of the coordinator's own tokenizer."""
    tokenizer = _tokenizer(setting["model"], continues)
    token_ids: list[int] = tokenizer.encode(text, add_special_tokens=add_special_tokens, verbose=False)
    return token_ids


@cache
def _tokenizer(model: str, continues: bool) -> Any:
    from specdec.checkpoints.vocabulary import continuing_tokenizer, load_tokenizer

    tokenizer = load_tokenizer(model)
    return continuing_tokenizer(tokenizer) if continues else tokenizer


def compile_constraint(
    setting: Mapping[str, Any], constraint: Mapping[str, Any], eos_token_ids: Sequence[int]
) -> list[str]:
    """Compile a constraint as the targets do, and return what it ignores. Raises InvalidRequest if that fails."""
    from specdec.contract.constraint import Constraint, ConstraintKind
    from specdec.structured.admission import check_constraint

    table = _token_table(setting["model"], tuple(eos_token_ids))
    table.library_table()
    with _bounded(CONSTRAINT_CPU_S):
        kind = ConstraintKind(constraint["kind"])
        checked = Constraint(kind, constraint["text"], constraint["is_lenient"])
        warnings = check_constraint(table, checked, eos_token_ids)
        return [warning[:_MAX_REASON_CHARACTERS] for warning in warnings[:_MAX_WARNINGS]]


@cache
def _token_table(model: str, eos_token_ids: tuple[int, ...]) -> Any:
    from specdec.checkpoints.vocabulary import load_tokenizer, vocabulary_size
    from specdec.structured.token_table import TokenTable

    tokenizer = load_tokenizer(model)
    return TokenTable(tokenizer, eos_token_ids, vocabulary_size(tokenizer.get_vocab()))


@contextmanager
def _bounded(cpu_s: float) -> Iterator[None]:
    """Limit the block: too much CPU time ends the process, and too much memory raises MemoryError."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit = _held_bytes() + TEMPLATE_MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))
    # SIGPROF has no handler, so it ends the process, even within a single call of C code.
    signal.setitimer(signal.ITIMER_PROF, cpu_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def _held_bytes() -> int:
    """Return the size of the address space, or a huge number, which disables the limit, if it cannot be read."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    except OSError:
        return 1 << 46


def _answer(setting: Mapping[str, Any], request: Mapping[str, Any]) -> dict[str, Any]:
    try:
        if "messages" in request:
            arguments, tools = request["template_arguments"], request.get("tools")
            return {"text": render(setting, request["messages"], arguments, tools)}
        if "constraint" in request:
            return {"warnings": compile_constraint(setting, **request)}
        return {"token_ids": encode(setting, **request)}
    # Every error of the template or the tokenizer becomes an answer, including a panic of the tokenizer.
    except BaseException as error:
        if type(error).__name__ == "LeftOut":
            return {"left_out": error.index}  # type: ignore[attr-defined]
        reason = " ".join(str(error).split())
        # Raised by a template's `raise_exception`, and for a constraint.
        is_refusal = type(error).__name__ in ("TemplateError", "InvalidRequest")
        reason = reason if is_refusal and reason else f"{type(error).__name__}: {reason}".rstrip(": ")
        return {"error": reason.encode("ascii", "backslashreplace").decode()[:_MAX_REASON_CHARACTERS]}


def main() -> None:
    with suppress(OSError):  # when memory runs out, the kernel kills this process and not the coordinator
        Path("/proc/self/oom_score_adj").write_text("1000")
    requests, answers = sys.stdin.buffer, sys.stdout.buffer
    sys.stdout = sys.stderr  # keeps other output out of the pipe
    setting = read_message(requests)
    while (request := read_message(requests)) is not None:
        write_message(answers, _answer(setting, request))


if __name__ == "__main__":
    main()
