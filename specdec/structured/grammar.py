"""A constraint's text as a grammar of llguidance.

Every option that changes which texts a schema allows is set here, because a schema may contain options of its own
(`x-guidance`), one of which ignores keywords without a word.
"""

from __future__ import annotations

import json
import re
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from specdec.contract.constraint import Constraint, ConstraintKind
from specdec.contract.errors import InvalidRequest
from specdec.structured.json_schema import prepare
from specdec.structured.structural_tags import StructuralTags

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

#: White space between two parts of a JSON text. Without a limit, a small model may write spaces to the end of its
#: output.
_WHITESPACE = r"[ \n\t]{0,8}"

#: Escapes in JSON texts. With `\u`, a property could be named in a second way, and evade what the schema says of it.
_ESCAPES = 'nrbtf\\"'

MAX_CHOICES = 1000

#: Key of a schema's options for llguidance. They are overridden, but not those of a schema within a grammar.
_LIBRARY_OPTIONS = "x-guidance"

_ESCAPED = re.compile(r"\\u([0-9a-fA-F]{4})")

_FIELDS = {
    ConstraintKind.JSON_SCHEMA: "constraint.json_schema",
    ConstraintKind.JSON_OBJECT: "constraint.json_object",
    ConstraintKind.REGEX: "constraint.regex",
    ConstraintKind.CHOICE: "constraint.choice",
    ConstraintKind.GRAMMAR: "constraint.grammar",
    ConstraintKind.STRUCTURAL: "tools",
    ConstraintKind.STRUCTURAL_TAG: "constraint.structural_tag",
}


#: First line of a grammar that is made of an answer's constraint and of no tools, so that errors name its field.
_ANSWER_LINE = re.compile(r"// Answer: (constraint\.\w+)")


def field_of(constraint: Constraint) -> str:
    """Return the name of the request field that holds the constraint."""
    if constraint.kind is ConstraintKind.STRUCTURAL and (named := _ANSWER_LINE.search(constraint.text, 0, 100)):
        return named[1]
    return _FIELDS[constraint.kind]


def answer_line(answer: Constraint) -> str:
    """Return the comment by which a grammar names the field of the answer that it is made of."""
    return f"// Answer: {field_of(answer)}"


def invalid(constraint: Constraint, problem: str) -> InvalidRequest:
    """Return the error for a constraint that cannot be used."""
    field = field_of(constraint)
    return InvalidRequest(f"{field} {problem}", reason="CONSTRAINT_INVALID", field=field)


def check_text(constraint: Constraint) -> None:
    """Check what takes no compilation: the length and the form of the text. Raises InvalidRequest."""
    constraint.check_size()
    if "\0" in constraint.text:
        raise invalid(constraint, "must not contain NUL characters")
    if constraint.kind is not ConstraintKind.JSON_OBJECT and not constraint.text:
        raise invalid(constraint, "must not be empty")
    grammar_of(constraint)


def grammar_of(constraint: Constraint) -> str:
    """Return the grammar of a constraint, as `LLMatcher` takes it. Its rules are not checked here.

    Raises:
        InvalidRequest: the text is not of its kind (CONSTRAINT_INVALID).
    """
    from llguidance import LLMatcher

    if constraint.kind is ConstraintKind.JSON_SCHEMA:
        return _json_grammar(schema_of(constraint), constraint)
    if constraint.kind is ConstraintKind.JSON_OBJECT:
        return _json_grammar({"type": "object"}, constraint)
    if constraint.kind is ConstraintKind.REGEX:
        return LLMatcher.grammar_from_regex(constraint.text)
    if constraint.kind is ConstraintKind.CHOICE:
        return LLMatcher.grammar_from_regex("|".join(_literal(choice) for choice in _choices(constraint)))
    if constraint.kind is ConstraintKind.STRUCTURAL:
        return LLMatcher.grammar_from_lark(constraint.text)
    if constraint.kind is ConstraintKind.STRUCTURAL_TAG:
        return LLMatcher.grammar_from_lark(lark_of(constraint))
    return _grammar(constraint)


def answer_expression(constraint: Constraint) -> str:
    """Return a constraint as an expression of Lark, for a grammar in which it is one part.

    Not for GRAMMAR and STRUCTURAL_TAG, which have rules; see `lark_of`.

    Raises:
        InvalidRequest: the text is not of its kind (CONSTRAINT_INVALID).
    """
    grammar = grammar_of(constraint)
    (only,) = json.loads(grammar)["grammars"]
    if constraint.kind in (ConstraintKind.REGEX, ConstraintKind.CHOICE):
        return str(only["lark_grammar"]).removeprefix("start: ")
    return f"%json {json.dumps(only['json_schema'])}"


def lark_of(constraint: Constraint) -> str:
    """Return a constraint with rules, GRAMMAR or STRUCTURAL_TAG, as a grammar that may be a part of another one.

    Raises:
        InvalidRequest: the text is not of its kind (CONSTRAINT_INVALID).
    """
    if constraint.kind is ConstraintKind.GRAMMAR:
        return constraint.text
    tags = tags_of(constraint)
    try:
        return tags.grammar(answer_expression)
    except InvalidRequest as error:
        raise invalid(constraint, f"has a schema that cannot be used: {error.message}") from error


def tags_of(constraint: Constraint) -> StructuralTags:
    """Return the structural tags of a constraint. Raises InvalidRequest if its text has none."""
    try:
        return StructuralTags.read(constraint.text)
    except json.JSONDecodeError as error:
        raise invalid(constraint, f"must be JSON: {str(error)[:200]}") from error
    except RecursionError as error:
        raise invalid(constraint, "cannot be read: it is nested too deeply") from error
    except ValueError as error:
        raise invalid(constraint, str(error)) from error


def schema_of(constraint: Constraint) -> dict[str, Any]:
    """Return a constraint's JSON schema, as llguidance enforces it. Raises InvalidRequest if it is none."""
    schema = _json(constraint)
    if not isinstance(schema, dict | bool):
        raise invalid(constraint, f"must be a JSON schema, which is an object, got {type(schema).__name__}")
    if isinstance(schema, bool):
        return {} if schema else {"not": {}}
    try:
        prepare(schema)
    except (TypeError, RecursionError) as error:
        raise invalid(constraint, f"cannot be read: {str(error)[:200]}") from error
    return schema


def schemas_within(grammar: str) -> list[dict[str, Any]]:
    """Return the JSON schemas that a grammar of a client holds."""
    schemas: list[dict[str, Any]] = []
    for match in re.finditer(r"%json\s*(?=\{)", grammar):
        with suppress(ValueError, RecursionError):  # it stands within a text, or the library refuses it
            schemas.append(json.JSONDecoder().raw_decode(grammar, match.end())[0])
    return schemas


def enforcing_options(*, is_lenient: bool) -> JsonCompileOptions:
    """Return the options of llguidance that decide how much of a JSON schema is enforced."""
    return {
        "coerce_one_of": False,
        "lenient": is_lenient,
        "json_allowed_escapes": _ESCAPES,
        "json_allow_general_unicode_escapes": False,
    }


def _json_grammar(schema: dict[str, Any], constraint: Constraint) -> str:
    from llguidance import LLMatcher

    try:
        return LLMatcher.grammar_from_json_schema(
            json.dumps(schema),
            overrides={
                "item_separator": ",",
                "key_separator": ":",
                "whitespace_pattern": _WHITESPACE,
                "whitespace_flexible": True,
                **enforcing_options(is_lenient=constraint.is_lenient),
            },
        )
    except (ValueError, RecursionError) as error:  # the library's reader takes less than Python's
        raise invalid(constraint, f"cannot be read: {str(error)[:200]}") from error


def _json(constraint: Constraint) -> Any:
    try:
        return json.loads(constraint.text)
    except (ValueError, RecursionError) as error:
        raise invalid(constraint, f"must be JSON: {str(error)[:200]}") from error


def _choices(constraint: Constraint) -> list[str]:
    choices = _json(constraint)
    if not isinstance(choices, list) or not all(isinstance(choice, str) and choice for choice in choices):
        raise invalid(constraint, "must be a list of texts that are not empty")
    if not 1 <= len(choices) <= MAX_CHOICES:
        raise invalid(constraint, f"must hold 1 to {MAX_CHOICES} texts, got {len(choices)}")
    if any("\0" in choice for choice in choices):
        raise invalid(constraint, "must not contain NUL characters")
    if any("\ud800" <= character <= "\udfff" for choice in choices for character in choice):
        raise invalid(constraint, "must not contain halves of surrogate pairs")
    return choices


def _literal(text: str) -> str:
    """Return a regular expression for one text."""
    return "".join(char if char.isascii() and char.isalnum() else f"\\x{{{ord(char):X}}}" for char in text)


def _grammar(constraint: Constraint) -> str:
    from llguidance import grammar_from

    # JSON within the grammar may spell the name with escapes.
    if _LIBRARY_OPTIONS in _ESCAPED.sub(lambda match: chr(int(match[1], 16)), constraint.text):
        raise invalid(constraint, f"must not set {_LIBRARY_OPTIONS}, which would loosen its schemas")
    try:
        return grammar_from("grammar", constraint.text)
    except ValueError as error:
        raise invalid(constraint, f"cannot be read: {str(error)[:200]}") from error
