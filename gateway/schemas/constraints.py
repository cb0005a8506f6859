"""Fields that demand a form of the output, and the constraints that they become.

OpenAI's formats demand a schema leniently unless `strict` is true, and the answer tells what is not enforced. The forms
of vLLM's and Anthropic's APIs are kept as a whole or refused. The coordinator compiles each constraint before its
request is queued; `StatedConstraint` has the field's name for its errors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BeforeValidator, ConfigDict, Field, model_validator

from gateway.sampling import SamplingFields
from gateway.schemas.common import Flag, FreeObject, Items, Request, Text
from specdec.contract.constraint import Constraint
from specdec.contract.errors import InvalidRequest, SpecdecError

#: Field of the constraint in the coordinator's errors.
_OUR_FIELD = "constraint"


@dataclass(frozen=True, slots=True)
class StatedConstraint(Constraint):
    """A constraint with the field of the request that states it."""

    field: str = ""


def in_their_words(error: SpecdecError, field: str) -> SpecdecError:
    """Return an error; one that is about the constraint names the field of the request that states it."""
    if error.field != _OUR_FIELD and not error.field.startswith(f"{_OUR_FIELD}."):
        return error
    has_name = error.message.startswith(error.field)
    message = field + error.message.removeprefix(error.field) if has_name else error.message
    told = type(error)(message, reason=error.reason, field=field)
    told.partial = error.partial
    return told


def stated(field: str, make: Callable[..., Constraint], *args: Any, **options: Any) -> StatedConstraint:
    """Return the constraint that `make` gives, as stated by a field. Raises InvalidRequest, which names the field."""
    try:
        made = make(*args, **options)
    except InvalidRequest as error:
        raise in_their_words(error, field) from None
    return StatedConstraint(made.kind, made.text, made.is_lenient, field)


def only_one(constraints: Iterable[StatedConstraint | None]) -> StatedConstraint | None:
    """Return the constraint of a request; None if it has none. Raises InvalidRequest for two."""
    given = [constraint for constraint in constraints if constraint is not None]
    if len(given) > 1:
        first, second = given[0].field, given[1].field
        raise InvalidRequest(f"{second} cannot be combined with {first}: give one of both", field=second)
    return given[0] if given else None


class _Exact(Request):
    """An object without further fields: one that is not known could be a demand."""

    model_config = ConfigDict(extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _keep_one_unknown(cls, fields: Any) -> Any:
        """Leave out all unknown fields but the first, because each would be an error of its own."""
        if not isinstance(fields, dict):
            return fields
        known = {info.alias or name for name, info in cls.model_fields.items()}
        unknown = [name for name in fields if name not in known and fields[name] is not None][:1]
        return {name: value for name, value in fields.items() if name in known or name in unknown}


def _absent_if_empty(value: Any) -> Any:
    """Return None for a format of nulls alone, as clients send that write out every field."""
    return None if isinstance(value, dict) and not any(each is not None for each in value.values()) else value


def _require_both(name: str, kind: str, schema: object) -> None:
    """Raise ValueError if a format has the type json_schema and no schema in the field `name`, or the reverse."""
    if kind == "json_schema" and schema is None:
        raise ValueError(f"the type json_schema needs {name}")
    if kind != "json_schema" and schema is not None:
        raise ValueError(f"{name} needs the type json_schema, got {kind}")


OrNothing = BeforeValidator(_absent_if_empty)


class _NamedSchema(_Exact):
    """Fields of both of OpenAI's forms of a schema."""

    name: Text | None = None
    """Name of the schema; it changes nothing."""
    description: Text | None = None
    """Description of the output; it changes nothing, because the model reads the prompt alone."""
    strict: Flag | None = None
    """true: every keyword of the schema is enforced, or the request refused. Else keywords that cannot be enforced are
    ignored, and the answer names them under `specdec.constraint_warnings`."""

    def stated(self, field: str, schema: FreeObject) -> StatedConstraint:
        """Return the constraint to a schema. Raises InvalidRequest."""
        return stated(f"{field}.schema", Constraint.json_schema, schema, is_lenient=not self.strict)


class JsonSchema(_NamedSchema):
    """A JSON schema for the output."""

    schema_: FreeObject = Field(alias="schema")
    """The schema."""


class ResponseFormat(_Exact):
    """Form of the output in OpenAI's chat API."""

    type: Literal["text", "json_object", "json_schema"]
    """text: any text. json_object: a JSON object. json_schema: JSON of a schema."""
    json_schema: JsonSchema | None = None
    """The schema, for the type json_schema."""

    @model_validator(mode="after")
    def _check_schema(self) -> Self:
        _require_both("json_schema", self.type, self.json_schema)
        return self

    def constraint(self, field: str) -> StatedConstraint | None:
        """Return the constraint; None for text. Raises InvalidRequest."""
        if self.json_schema is not None:
            return self.json_schema.stated(f"{field}.json_schema", self.json_schema.schema_)
        return stated(field, Constraint.json_object) if self.type == "json_object" else None


class TextFormat(_NamedSchema):
    """Form of the output in OpenAI's Responses API."""

    type: Literal["text", "json_object", "json_schema"]
    """text: any text. json_object: a JSON object. json_schema: JSON of a schema."""
    schema_: FreeObject | None = Field(default=None, alias="schema")
    """The schema, for the type json_schema."""

    @model_validator(mode="after")
    def _check_schema(self) -> Self:
        _require_both("schema", self.type, self.schema_)
        return self

    def constraint(self, field: str) -> StatedConstraint | None:
        """Return the constraint; None for text. Raises InvalidRequest."""
        if self.schema_ is not None:
            return self.stated(field, self.schema_)
        return stated(field, Constraint.json_object) if self.type == "json_object" else None


class JsonOutputFormat(_Exact):
    """Form of the output in Anthropic's API."""

    type: Literal["json_schema"]
    """json_schema: JSON of a schema."""
    schema_: FreeObject = Field(alias="schema")
    """The schema. Every keyword is enforced, or the request refused."""

    def constraint(self, field: str) -> StatedConstraint:
        """Return the constraint. Raises InvalidRequest."""
        return stated(f"{field}.schema", Constraint.json_schema, self.schema_)


def _without_false(value: Any) -> Any:
    """Return vLLM's object without the options that are off."""
    return {name: each for name, each in value.items() if each is not False} if isinstance(value, dict) else value


class StructuredOutputs(_Exact):
    """Form of the output in vLLM's API: one of these. It is enforced as a whole, or the request refused."""

    json_: FreeObject | Text | None = Field(default=None, alias="json")
    """JSON schema, as an object or as JSON text."""
    regex: Text | None = None
    """Regular expression, which the whole output matches."""
    choice: Items[Text] | None = None
    """Texts of which the output is one."""
    grammar: Text | None = None
    """Lark or GBNF grammar; only if the coordinator has `--allow-grammars`."""
    json_object: Flag | None = None
    """true: a JSON object."""
    structural_tag: FreeObject | Text | None = None
    """Free text with parts of a fixed form, as an object or as JSON text: `structures`, each with `begin`, `schema` and
    `end`, and `triggers`, the texts with which they begin."""

    def constraints(self, field: str) -> Iterable[StatedConstraint | None]:
        """Yield the constraint of each member. Raises InvalidRequest."""
        yield from constraints_of(f"{field}.", self.json_, self.regex, self.choice, self.grammar)
        yield stated(f"{field}.json_object", Constraint.json_object) if self.json_object else None
        if self.structural_tag is not None:
            yield stated(f"{field}.structural_tag", Constraint.structural_tag, self.structural_tag)


def constraints_of(
    prefix: str, schema: FreeObject | str | None, regex: str | None, choice: list[str] | None, grammar: str | None
) -> Iterable[StatedConstraint | None]:
    """Yield the constraint of each field of vLLM's whose name begins with `prefix`. Raises InvalidRequest."""
    for name, make, value in (
        ("json", Constraint.json_schema, schema),
        ("regex", Constraint.regex, regex),
        ("choice", Constraint.choice, choice),
        ("grammar", Constraint.grammar, grammar),
    ):
        yield None if value is None else stated(f"{prefix}{name}", make, value)


class CompletionFields(SamplingFields):
    """Fields of both completion routes: those of sampling, and those that demand a form of the output."""

    form_fields: ClassVar[str] = "response_format or structured_outputs"

    response_format: Annotated[ResponseFormat | None, OrNothing] = None
    """Form of the output: text, a JSON object, or JSON of a schema."""
    structured_outputs: Annotated[StructuredOutputs | None, BeforeValidator(_without_false)] = None
    """Form of the output as in vLLM's API: a JSON schema, a regular expression, choices or a grammar."""
    guided_json: FreeObject | Text | None = None
    """The former name of structured_outputs.json."""
    guided_regex: Text | None = None
    """The former name of structured_outputs.regex."""
    guided_choice: Items[Text] | None = None
    """The former name of structured_outputs.choice."""
    guided_grammar: Text | None = None
    """The former name of structured_outputs.grammar."""

    def constraint(self) -> StatedConstraint | None:
        """Return the form that the output must have; None for any. Raises InvalidRequest for two."""
        guided = (self.guided_json, self.guided_regex, self.guided_choice, self.guided_grammar)
        found = [*constraints_of("guided_", *guided)]
        if self.structured_outputs is not None:
            found += self.structured_outputs.constraints("structured_outputs")
        if self.response_format is not None:
            found.append(self.response_format.constraint("response_format"))
        return only_one(found)
