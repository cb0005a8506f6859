"""`specdec chat`: a conversation in one session. Ctrl-C stops the current answer, Ctrl-D leaves.

In a terminal an error returns to the prompt, with the conversation as it was before the message; elsewhere it ends the
program. The server applies the target's chat template.
"""

from __future__ import annotations

import argparse
import contextlib
import re
import sys
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

from specdec.cli.answer import Interrupts, read_answer
from specdec.cli.chat_history import ChatHistory, read_tools, shown_call
from specdec.cli.closing_line import add_verbose_flag, print_closing_line
from specdec.cli.command_parser import print_error
from specdec.cli.json_output import add_json_flag, print_json
from specdec.cli.request_flags import PATIENT_BUDGETS, add_request_flags, connect, request_options
from specdec.cli.terminal import TokenWriter, wants_colour
from specdec.client import ChatMessage, Client, GenerateOptions
from specdec.contract.errors import InvalidRequest, SessionLost, SpecdecError

_HELP = """\
/help         show this list
/clear        forget the conversation and keep the system message
/system TEXT  set the system message; without TEXT: show it
/trim [N]     drop the N oldest turns; without N: the older half
/exit, /quit  leave, as Ctrl-D does
Ctrl-C stops an answer. A pasted text is one message, and so is the text between two \"\"\".
To begin a message with /, put a space before it."""

_COMMAND = re.compile(r"/(?P<name>\w+)(?:\s+(?P<rest>.*))?", re.DOTALL)
_DEMO_TARGET = ("models", "demo", "target")
_QUOTES = '"""'


def add_parser(commands: Any, environ: Mapping[str, str]) -> None:
    parser = commands.add_parser("chat", help="talk over one session", allow_abbrev=False)
    add_request_flags(parser, environ)
    parser.add_argument("--system", default="", metavar="TEXT", help="system message of the conversation")
    parser.add_argument("--trim", action="store_true", help="drop the oldest turns when the context is full")
    parser.add_argument(
        "--tools", metavar="FILE",
        help="JSON list of tools that the model may call; its calls are printed, and the next lines are their results",
    )  # fmt: skip
    add_json_flag(parser, "streamed text, for each answer")
    add_verbose_flag(parser)


def run(args: argparse.Namespace, environ: Mapping[str, str], interrupts: Interrupts) -> int:
    """Answer messages until the end of input.

    Raises:
        SpecdecError: the model has no chat template; or, without a terminal, an answer failed.
    """
    writer = TokenWriter(sys.stdout, coloured=wants_colour(sys.stdout, environ))
    reader = MessageReader()
    with connect(args, PATIENT_BUDGETS) as client:
        habits = Habits(args.trim, args.verbose, args.json)
        options = request_options(args)
        if args.tools:
            options["tools"] = read_tools(args.tools)
        chat = Chat(client, ChatHistory(args.system), options, writer, interrupts, habits)
        chat.check_model()
        if reader.is_terminal:
            print(f"Ctrl-C stops an answer, Ctrl-D leaves, /help lists commands.  {writer.legend()}", file=sys.stderr)
        try:
            while (text := reader.read()) is not None:
                try:
                    if not chat.take(text):
                        break
                except KeyboardInterrupt:  # between an answer and the prompt
                    if not reader.is_terminal:
                        raise
                    print()
                except SpecdecError as error:
                    if not reader.is_terminal:
                        raise
                    print_error(error, as_json=args.json)
                    if error.reason == "CONTEXT_TOO_LONG":
                        hint = "" if args.trim else ": /trim drops its oldest turns"
                        print(f"the conversation is unchanged{hint}", file=sys.stderr)
        finally:
            with contextlib.suppress(SpecdecError):  # the server removes idle sessions anyway
                client.delete_session(chat.session_id)
    return 0


@dataclass(frozen=True)
class Habits:
    """Choices of the user for the whole chat."""

    trims: bool
    """True drops the oldest turns when the context is full."""
    verbose: bool
    """True adds figures to the closing lines."""
    is_json: bool
    """True prints each answer as a JSON object once it has ended."""


class MessageReader:
    """Reads the user's messages from standard input: one per line, or several lines between triple quotes.

    In a terminal, readline edits the line if Python was built with it, and its bracketed paste makes a pasted text one
    message. Make one reader only, because it configures the terminal.
    """

    def __init__(self) -> None:
        self.is_terminal = sys.stdin.isatty()
        if self.is_terminal:
            with contextlib.suppress(ImportError):  # without readline each pasted line is a message
                import readline

                readline.parse_and_bind("set enable-bracketed-paste on")

    def read(self) -> str | None:
        """Return the next message, or None at the end of input. Ctrl-C discards the part typed so far."""
        is_over = False
        while not is_over:
            try:
                try:
                    return self._read_message()
                except EOFError:
                    is_over = True
                    if self.is_terminal:
                        print()
            except KeyboardInterrupt:  # may be pending from before Ctrl-D: readline misses one right after its prompt
                print()
        return None

    def _read_message(self) -> str:
        line = self._read_line("> ")
        if not line.lstrip().startswith(_QUOTES):
            return line
        text = line.lstrip().removeprefix(_QUOTES)
        while not text.rstrip().endswith(_QUOTES):
            text += "\n" + self._read_line(". ")
        return text.rstrip().removesuffix(_QUOTES).strip("\n")

    def _read_line(self, prompt: str) -> str:
        return input(prompt if self.is_terminal else "")


class Chat:
    """One conversation with the model behind a client."""

    def __init__(
        self,
        client: Client,
        conversation: ChatHistory,
        options: GenerateOptions,
        writer: TokenWriter,
        interrupts: Interrupts,
        habits: Habits,
    ) -> None:
        self._client = client
        self._conversation = conversation
        self.session_id = uuid.uuid4().hex
        self._options = options | GenerateOptions(session_id=self.session_id, provenance=True)
        self._writer = writer
        self._interrupts = interrupts
        self._habits = habits

    def check_model(self) -> None:
        """Refuse a model that cannot chat before the first message is typed, and warn about the demo pair.

        Raises:
            InvalidRequest: the model has no chat template (NO_CHAT_TEMPLATE), or it refuses a system message.
            SpecdecError: the system cannot be reached.
        """
        greeting: list[ChatMessage] = [*self._conversation.messages, {"role": "user", "content": "hello"}]
        try:
            self._client.tokenize(messages=greeting)
        except InvalidRequest as error:
            if error.reason != "NO_CHAT_TEMPLATE":
                raise
            message = f"{error.message}: it is a completion model; use `specdec generate PROMPT`"
            raise InvalidRequest(message, reason=error.reason, field=error.field) from error
        if PurePath(self._client.info().target_model).parts[-3:] == _DEMO_TARGET:
            print(
                "The demo pair is a completion model: it writes Python and does not answer questions. Use "
                "`specdec generate 'def read_lines(path):'`, or `specdec up` with a model that chats.",
                file=sys.stderr,
            )

    def take(self, text: str) -> bool:
        """Run a command, or have a message answered; return False to leave. Raises as `_ask` does."""
        command = _COMMAND.fullmatch(text.rstrip())
        if command is not None:
            return self._run_command(command["name"], (command["rest"] or "").strip())
        if text.strip():
            self._ask(text.removeprefix(" ") if text.startswith(" /") else text)
        return True

    def _run_command(self, name: str, rest: str) -> bool:
        match name:
            case "help":
                print(_HELP, file=sys.stderr)
            case "clear":
                self._conversation.clear()
                self._client.delete_session(self.session_id)
            case "system" if rest:
                self._conversation.system = rest
            case "system":
                print(self._conversation.system or "there is no system message", file=sys.stderr)
            case "trim" if not rest or (rest.isdecimal() and int(rest)):
                num_turns = int(rest) if rest else (self._conversation.num_turns + 1) // 2
                self._say_dropped(self._conversation.trim(num_turns))
            case "exit" | "quit":
                return False
            case _:
                print(f"/{name} {rest}".rstrip() + " is not a command; /help lists them", file=sys.stderr)
        return True

    def _ask(self, text: str) -> None:
        """Have a message answered. The part of an answer before Ctrl-C stays in the conversation.

        Raises:
            SpecdecError: the request failed. The conversation is then as it was before, dropped turns included.
        """
        before = self._conversation.snapshot()
        self._conversation.ask(text)
        if self._conversation.open_calls:  # the answer needs the results of all calls
            return
        num_dropped = 0
        try:
            try:
                self._answer_in_session()
            except InvalidRequest as error:
                if error.reason != "CONTEXT_TOO_LONG" or not self._can_trim:
                    raise
                num_dropped = self._conversation.trim(self._num_turns_to_drop(error))
                self._answer_in_session()
        except BaseException:
            self._conversation.restore(before)
            raise
        if num_dropped:
            self._say_dropped(num_dropped)

    def _answer_in_session(self) -> None:
        try:
            self._answer()
        except SessionLost as error:  # `messages` still holds the whole conversation
            print(f"{error.message}; sending the whole conversation again", file=sys.stderr)
            self._client.delete_session(self.session_id)
            self._answer()

    @property
    def _can_trim(self) -> bool:
        return self._habits.trims and self._conversation.num_turns > 0

    def _num_turns_to_drop(self, refusal: InvalidRequest) -> int:
        """Return the smallest number of oldest turns to drop so that the last message fits.

        Raises:
            InvalidRequest: the message alone is too long (CONTEXT_TOO_LONG).
        """
        context = self._client.info().max_context_tokens
        num_prompt_tokens = context - (self._options.get("max_new_tokens") or 1)

        def num_tokens(num_dropped: int) -> int:
            messages = self._conversation.messages_without(num_dropped)
            return len(self._client.tokenize(messages=messages, tools=self._options.get("tools")))

        fewest, most = 1, self._conversation.num_turns
        if (num_alone := num_tokens(most)) > num_prompt_tokens:
            raise InvalidRequest(
                f"the message alone is too long: it has {num_alone} tokens, and the context of {context} has room for "
                f"{max(0, num_prompt_tokens)} before an answer; no turn was dropped",
                reason=refusal.reason,
                field=refusal.field,
            )
        while fewest < most:
            middle = (fewest + most) // 2
            if num_tokens(middle) > num_prompt_tokens:
                fewest = middle + 1
            else:
                most = middle
        return fewest

    def _say_dropped(self, num_turns: int) -> None:
        left = self._conversation.num_turns
        print(f"dropped the {num_turns} oldest turns, {left} are left", file=sys.stderr)

    def _answer(self) -> None:
        stream = self._client.generate(self._conversation.messages, stream=True, **self._options)
        if self._habits.is_json:
            completion = read_answer(self._client, stream, self._interrupts, lambda chunk: None)
            print_json(completion.to_dict())
        else:
            completion = read_answer(self._client, stream, self._interrupts, self._writer.write)
            if completion.text or not completion.tool_calls:
                print(flush=True)
            for call in completion.tool_calls:
                print(self._writer.shown(shown_call(call)), flush=True)
            print_closing_line(self._client, completion, self._options, verbose=self._habits.verbose)
        self._conversation.answer(completion)
