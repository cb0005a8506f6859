"""Divides one output into its answer, its reasoning and its tool calls, token by token.

`output` gives it the text of each token. Markers that are single tokens are known by their ids, so the same text
spelled by other tokens stays text.
"""

from __future__ import annotations

import hashlib
import string
from collections.abc import Mapping
from functools import partial

from coordinator.requests import GenerationIdentity
from coordinator.text.tokenizer import ServedTokenizer
from specdec.contract.errors import SessionLost
from specdec.contract.tools import OutputPart
from specdec.structured.output_parser import OutputParser
from specdec.structured.tool_formats import markers_of, tool_formats

_LETTERS = string.ascii_letters + string.digits
_USUAL_ID_CHARACTERS = 24


class OutputParts:
    """The parts of one output with a form."""

    def __init__(self, parser: OutputParser, markers: Mapping[int, str]) -> None:
        """
        Args:
            parser: parser at the beginning of the output.
            markers: by token id, the markers that are single tokens.
        """
        self._parser = parser
        self.markers = markers
        self.num_reasoning_tokens = 0
        """Number of tokens up to the end of the reasoning, its marks included."""
        self._num_tokens = 0

    @property
    def has_call(self) -> bool:
        """True if the output holds a whole call."""
        return self._parser.num_complete_calls > 0

    def take(self, text: str, token_id: int, *, is_last: bool) -> list[OutputPart]:
        """Return the parts that a token completed.

        Args:
            text: text that the token made final; of a marker, the text before it.
            token_id: the token.
            is_last: True if the output ends with this token.
        """
        was_reasoning = self._parser.is_reasoning
        self._num_tokens += 1
        parts = self._parser.feed_text(text) if text else []
        if (marker := self.markers.get(token_id)) is not None:
            parts = parts + self._parser.feed_marker(marker)
        if was_reasoning or self._parser.is_reasoning:
            self.num_reasoning_tokens = self._num_tokens
        if is_last:
            parts = parts + self._parser.finish()
        return parts


def parts_of(identity: GenerationIdentity, tokenizer: ServedTokenizer) -> OutputParts | None:
    """Return what divides the output of a request; None if it has no form."""
    form = identity.parameters.output_form
    if form is None:
        return None
    name = form.tool_format_name
    if name and name not in tool_formats():
        raise SessionLost(
            f"the last request of session {identity.session_id} has tool calls in a format that this version does not "
            f"know, {name!r}; resume it at a coordinator of the version that began it",
            field="session_id",
        )
    token_ids = tokenizer.marker_ids(markers_of(form))
    num_characters = tool_formats()[name].id_characters if name else 0
    id_of = partial(call_id, identity.session_id, identity.turn, num_characters=num_characters)
    parser = OutputParser(form, token_ids.keys(), id_of)
    return OutputParts(parser, {token_id: marker for marker, token_id in token_ids.items()})


def call_id(session_id: str, turn: int, index: int, *, num_characters: int = 0) -> str:
    """Return the id of a call, which is the same whenever and wherever the output is read.

    Args:
        session_id: session of the output.
        turn: turn of the output.
        index: number of the call in the output.
        num_characters: number of letters and digits; 0: the usual form, as of OpenAI.
    """
    digest = hashlib.blake2b(f"{session_id}\0{turn}\0{index}".encode(), digest_size=32).digest()
    letters = "".join(_LETTERS[byte % len(_LETTERS)] for byte in digest)
    return letters[:num_characters] if num_characters else f"call_{letters[:_USUAL_ID_CHARACTERS]}"
