"""The check of a constraint before its request is accepted. Called in a process that can be killed."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from specdec.contract.constraint import Constraint, ConstraintKind
from specdec.structured.grammar import invalid, schema_of, schemas_within, tags_of
from specdec.structured.json_schema import problem_of, undefined_formats
from specdec.structured.matcher import Matcher
from specdec.structured.token_table import TokenTable


def check_constraint(table: TokenTable, constraint: Constraint, end_token_ids: Sequence[int]) -> list[str]:
    """Compile a constraint, compute its first mask, and return what it ignores.

    Args:
        table: tokens of the model.
        constraint: a constraint that `grammar.check_text` has passed.
        end_token_ids: end tokens of the model.

    Raises:
        InvalidRequest: the constraint cannot be used (CONSTRAINT_INVALID), or no text satisfies it on these tokens
            (NO_LEGAL_TOKEN).
        Unsupported: llguidance cannot read the tokenizer.
    """
    matcher = Matcher(table, constraint)
    ignored: list[str] = []
    for schema in _schemas_of(constraint):
        if (problem := problem_of(schema, is_lenient=constraint.is_lenient)) is not None:
            raise invalid(constraint, problem)
    if constraint.kind is ConstraintKind.JSON_SCHEMA:
        stated = json.loads(constraint.text)
        ignored = undefined_formats(stated) if isinstance(stated, dict) else []
    warnings = matcher.warnings
    if warnings and not constraint.is_lenient and constraint.kind is not ConstraintKind.STRUCTURAL:
        raise invalid(constraint, f"cannot be enforced: {warnings[0][:200]}; leave it out")
    matcher.mask(end_token_ids)
    return [*warnings, *ignored]


def _schemas_of(constraint: Constraint) -> list[dict[str, Any]]:
    """Return the JSON schemas that a constraint holds."""
    if constraint.kind is ConstraintKind.JSON_SCHEMA:
        return [schema_of(constraint)]
    if constraint.kind is ConstraintKind.STRUCTURAL_TAG:
        return [schema_of(structure.schema) for structure in tags_of(constraint).structures]
    return schemas_within(constraint.text) if constraint.kind is ConstraintKind.GRAMMAR else []
