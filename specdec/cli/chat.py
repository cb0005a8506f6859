"""`specdec chat`: a conversation over one session. Ctrl-C stops the current answer, Ctrl-D leaves.

In a terminal an error returns to the prompt, with the conversation as it was before the message; elsewhere it is the
end. Not here: the chat template (the server applies the target's own), reading a message (`message_reader`).
"""

from __future__ import annotations

import argparse
import contextlib
import re
import sys
import uuid
from collections.abc import Mapping
from pathlib import PurePath
from typing import Any

from specdec.cli.answer import Interrupts, print_closing_line, read_answer
from specdec.cli.conversation import Conversation
from specdec.cli.message_reader import MessageReader
from specdec.cli.request_flags import PATIENT_BUDGETS, add_request_flags, request_options
from specdec.cli.terminal import TokenWriter, wants_colour
from specdec.client import ChatMessage, Client, GenerateOptions
from specdec.errors import InvalidRequest, SessionLost, SpecdecError, error_line

_HELP = """\
/help         this
/clear        forget the conversation (the system message stays)
/system TEXT  tell the model something before everything else; without TEXT: show it
/trim [N]     drop the N oldest turns; without N: the older half
/exit         leave, as Ctrl-D does
Ctrl-C stops an answer. A pasted text is one message; so is what stands between two \"\"\".
A message may begin with / when a space comes before it."""

_COMMAND = re.compile(r"/(?P<name>\w+)(?:\s+(?P<rest>.*))?", re.DOTALL)
_DEMO_TARGET = ("models", "demo", "target")


def add_parser(commands: Any, environ: Mapping[str, str]) -> None:
    parser = commands.add_parser("chat", help="talk over one session", allow_abbrev=False)
    add_request_flags(parser, environ)
    parser.add_argument("--system", default="", metavar="TEXT", help="what the model is told before everything else")
    parser.add_argument("--trim", action="store_true", help="drop the oldest turns by itself when the context is full")


def run(args: argparse.Namespace, environ: Mapping[str, str], interrupts: Interrupts) -> int:
    """Reads messages until the end of input.

    Raises:
        SpecdecError: the model cannot chat; or, without a terminal, an answer failed.
    """
    writer = TokenWriter(sys.stdout, coloured=wants_colour(sys.stdout, environ))
    reader = MessageReader()
    with Client(args.endpoint, budgets=PATIENT_BUDGETS) as client:
        chat = Chat(client, Conversation(args.system), request_options(args), writer, interrupts, trims=args.trim)
        chat.check_model()
        if reader.is_terminal:
            print(f"Ctrl-C stops an answer, Ctrl-D leaves, /help says more.  {writer.legend()}", file=sys.stderr)
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
                    print(error_line(error), file=sys.stderr)
                    if error.reason == "CONTEXT_TOO_LONG":
                        hint = "" if args.trim else ": /trim drops its oldest turns"
                        print(f"the conversation is as it was{hint}", file=sys.stderr)
        finally:
            with contextlib.suppress(SpecdecError):  # the server forgets idle sessions by itself as well
                client.delete_session(chat.session_id)
    return 0


class Chat:
    """One conversation with the model behind a client."""

    def __init__(
        self,
        client: Client,
        conversation: Conversation,
        options: GenerateOptions,
        writer: TokenWriter,
        interrupts: Interrupts,
        *,
        trims: bool,
    ) -> None:
        """`trims`: whether the oldest turns make room by themselves."""
        self._client = client
        self._conversation = conversation
        self.session_id = uuid.uuid4().hex
        self._options = options | GenerateOptions(session_id=self.session_id, provenance=True)
        self._writer = writer
        self._interrupts = interrupts
        self._trims = trims

    def check_model(self) -> None:
        """Says before the first message what is known of the model's talking.

        Raises:
            InvalidRequest: it has no chat template (NO_CHAT_TEMPLATE), or the template refuses a system message.
            SpecdecError: it cannot be asked.
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
                "The demo pair is a completion model: it writes Python and answers nothing. Use "
                "`specdec generate 'def read_lines(path):'`, or `specdec up` with a model that chats.",
                file=sys.stderr,
            )

    def take(self, text: str) -> bool:
        """Obeys a command or gets a message answered; False when the user wants to leave. Raises as `_ask`."""
        command = _COMMAND.fullmatch(text.rstrip())
        if command is not None:
            return self._obey(command["name"], (command["rest"] or "").strip())
        if text.strip():
            self._ask(text.removeprefix(" ") if text.startswith(" /") else text)
        return True

    def _obey(self, name: str, rest: str) -> bool:
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
                print(f"/{name} {rest}".rstrip() + " is no command; /help names them", file=sys.stderr)
        return True

    def _ask(self, text: str) -> None:
        """Gets a message answered. What Ctrl-C left of the answer still belongs to the conversation.

        Raises:
            SpecdecError: it could not be; the conversation is as it was before, its oldest turns too.
        """
        kept = self._conversation.kept()
        self._conversation.ask(text)
        num_dropped = 0
        try:
            try:
                self._answer_in_session()
            except InvalidRequest as error:
                if error.reason != "CONTEXT_TOO_LONG" or not self._makes_room:
                    raise
                num_dropped = self._conversation.trim(self._num_turns_too_many(error))
                self._answer_in_session()
        except BaseException:
            self._conversation.restore(kept)
            raise
        if num_dropped:
            self._say_dropped(num_dropped)

    def _answer_in_session(self) -> None:
        try:
            self._answer()
        except SessionLost as error:  # the messages still hold the conversation
            print(f"{error.message}; asking again with the whole conversation", file=sys.stderr)
            self._client.delete_session(self.session_id)
            self._answer()

    @property
    def _makes_room(self) -> bool:
        return self._trims and self._conversation.num_turns > 0

    def _num_turns_too_many(self, refusal: InvalidRequest) -> int:
        """The fewest of the oldest turns without which the last message gets its answer.

        Raises:
            InvalidRequest: CONTEXT_TOO_LONG: the message is too long by itself.
        """
        context = self._client.info().max_context_tokens
        num_prompt_tokens = context - (self._options.get("max_new_tokens") or 1)

        def num_tokens(num_dropped: int) -> int:
            return len(self._client.tokenize(messages=self._conversation.messages_without(num_dropped)))

        fewest, most = 1, self._conversation.num_turns
        if (num_alone := num_tokens(most)) > num_prompt_tokens:
            raise InvalidRequest(
                f"the message is too long by itself: it makes {num_alone} tokens, the context of {context} has room "
                f"for {max(0, num_prompt_tokens)} before an answer; no turn was dropped",
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
        print(f"dropped {num_turns} of the oldest turns, {left} are left", file=sys.stderr)

    def _answer(self) -> None:
        stream = self._client.generate(self._conversation.messages, stream=True, **self._options)
        completion = read_answer(self._client, stream, self._interrupts, self._writer.write)
        print(flush=True)
        print_closing_line(self._client, completion, self._options)
        self._conversation.answer(completion.text)
