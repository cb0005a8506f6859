"""A file of this package declares how the models of a family write tool calls.

A declaration is text with the places of the name and the arguments. The grammar of an output (`output_grammar`) and the
parser of its tokens (`output_parser`) are both made from it, so that what may be written is what can be read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from specdec.contract.output_form import Layout


class Cursor(Protocol):
    """Reads the arguments of one call, symbol by symbol, and gives them as JSON text."""

    is_done: bool
    """True after the last symbol of the arguments."""

    def feed(self, symbol: str) -> str:
        """Take a character, or a whole marker; return the JSON text that is final now."""
        ...


class GrammarRules(Protocol):
    """The rules of a grammar under construction, for the arguments of a format (`output_grammar`)."""

    def literal(self, text: str) -> str:
        """Return an expression for a fixed text, in which markers are single tokens."""
        ...

    def text_until(self, closer: str) -> str:
        """Return an expression for any text up to and including `closer`."""
        ...

    def json(self, schema: Mapping[str, Any], *, is_lenient: bool) -> str:
        """Return an expression for JSON of a schema in the template's own separators."""
        ...

    def rule(self, expression: str) -> str:
        """Add a rule; return its name."""
        ...

    def shared_rule(self, key: str, make: Callable[[], str]) -> str:
        """Return the name of the rule of a key, which is made at the first call. A rule may contain itself."""
        ...


class ArgumentStyle(Protocol):
    """A way to write the arguments of a call."""

    def grammar(self, rules: GrammarRules, schema: Mapping[str, Any], layout: Layout, *, is_lenient: bool) -> str:
        """Return an expression for the arguments of a schema. Raises ValueError for one that cannot be enforced."""
        ...

    def read_layout(self, written: str, layout: Layout) -> tuple[Layout, int] | None:
        """Return the layout that a text begins with, and the length of the arguments there.

        The arguments are `probe.PROBED_ARGUMENTS`. None if the text does not begin with them in this style.
        """
        ...

    def text_parameters(self, schema: Mapping[str, Any]) -> tuple[str, ...]:
        """Return the names of the parameters whose values are written as bare text, which the cursor quotes."""
        ...

    def cursor(self, layout: Layout, text_parameters: tuple[str, ...]) -> Cursor:
        """Return a cursor at the beginning of the arguments of one call."""
        ...


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """The calls of a family of models: LIST_OPEN, then calls with `Layout.between` between them, then LIST_CLOSE.

    A call is HEAD, its name, MIDDLE, its arguments, TAIL.
    """

    name: str
    """Name for settings."""
    head: str
    middle: str
    tail: str
    arguments: ArgumentStyle
    opener: str
    """Beginning of LIST_OPEN and HEAD that no other text of an output may have."""
    list_open: str = ""
    list_close: str = ""
    layout: Layout = field(default_factory=Layout)
    """Layout if the template does not show another."""
    markers: tuple[str, ...] = ()
    """Parts of the texts above that are single tokens in the vocabularies of the family."""
    is_first_only: bool = False
    """True if a call can only be the whole output, so that `opener` has no meaning after other text."""
    has_one_call: bool = False
    """True if an output holds one call at most."""
    id_characters: int = 0
    """Number of letters and digits of a call's id; 0: the usual form."""

    @property
    def first_head(self) -> str:
        """Text from the beginning of the calls to the name of the first."""
        return self.list_open + self.head
