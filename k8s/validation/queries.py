"""Queries of PromQL: each series that they name exists, and has the labels that are matched, grouped or joined by.

The labels of a query's result are derived from its parts, so that a rule which reads a recorded series is checked too.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import promql_parser as promql

from .series import Series

Labels = frozenset[str]


class QueryError(Exception):
    """A query is malformed, or names a series or a label that does not exist."""


@dataclass(frozen=True)
class Matcher:
    """A condition on one label."""

    name: str
    value: str
    is_regex: bool
    is_equal: bool
    """False where the label must differ."""


@dataclass(frozen=True)
class Selector:
    """The series that a part of a query reads, and the conditions on their labels."""

    series: str
    matchers: tuple[Matcher, ...]


def labels_of_query(text: str, series: Series) -> Labels:
    """Return the labels of a query's result. Raises QueryError."""
    return _labels(_parsed(text), series)


def selectors_of_query(text: str) -> list[Selector]:
    """Return what a query reads, in the order of its text. Raises QueryError."""
    return list(_selectors(_parsed(text)))


def _parsed(text: str) -> Any:
    try:
        return promql.parse(text)
    except ValueError as error:
        raise QueryError(f"is not PromQL: {' '.join(str(error).split())}") from None


def _selectors(expression: Any) -> Iterator[Selector]:
    match type(expression).__name__:
        case "VectorSelector":
            yield _selector(expression)
        case "MatrixSelector":
            yield _selector(expression.vector_selector)
        case "ParenExpr" | "UnaryExpr" | "SubqueryExpr" | "AggregateExpr":
            yield from _selectors(expression.expr)
        case "BinaryExpr":
            yield from _selectors(expression.lhs)
            yield from _selectors(expression.rhs)
        case "Call":
            for argument in expression.args:
                yield from _selectors(argument)


def _selector(selector: Any) -> Selector:
    matchers = _matchers(selector)
    equal, regex = (promql.MatchOp.Equal, promql.MatchOp.Re), (promql.MatchOp.Re, promql.MatchOp.NotRe)
    return Selector(
        _name(selector) or "",
        tuple(
            Matcher(one.name, one.value, is_regex=one.op in regex, is_equal=one.op in equal)
            for one in matchers
            if one.name != "__name__"
        ),
    )


def _matchers(selector: Any) -> list[Any]:
    return [*selector.matchers.matchers, *(one for group in selector.matchers.or_matchers for one in group)]


def _name(selector: Any) -> str | None:
    named = (str(one.value) for one in _matchers(selector) if one.name == "__name__")
    return str(selector.name) if selector.name else next(named, None)


def _labels(expression: Any, series: Series) -> Labels:
    match type(expression).__name__:
        case "VectorSelector":
            return _of_selector(expression, series)
        case "MatrixSelector":
            return _of_selector(expression.vector_selector, series)
        case "ParenExpr" | "UnaryExpr" | "SubqueryExpr":
            return _labels(expression.expr, series)
        case "AggregateExpr":
            return _of_aggregate(expression, series)
        case "BinaryExpr":
            return _of_binary(expression, series)
        case "Call":
            return _of_call(expression, series)
        case _:
            return frozenset()


def _of_selector(selector: Any, series: Series) -> Labels:
    matchers, name = _matchers(selector), _name(selector)
    if name is None:
        raise QueryError("names no series")
    if name not in series:
        raise QueryError(f"no service exports {name}{_nearest(name, series)}")
    labels = series[name]
    _require((one.name for one in matchers if one.name != "__name__"), labels, f"{name} has no label")
    return labels


def _of_aggregate(expression: Any, series: Series) -> Labels:
    labels = _labels(expression.expr, series)
    if expression.modifier is None:
        return frozenset()
    named = expression.modifier.labels
    is_by = expression.modifier.type == promql.AggModifierType.By
    _require(named, labels, f"{'by' if is_by else 'without'}: the aggregated series has no label")
    return frozenset(named) if is_by else labels - set(named)


def _of_binary(expression: Any, series: Series) -> Labels:
    left, right = _labels(expression.lhs, series), _labels(expression.rhs, series)
    modifier = expression.modifier
    matching = None if modifier is None else modifier.matching
    if matching is not None:
        _require(matching.labels, left, "on or ignoring: the left side has no label")
        _require(matching.labels, right, "on or ignoring: the right side has no label")
    scalars = ("NumberLiteral",)
    if type(expression.lhs).__name__ in scalars:
        return right
    if modifier is not None and modifier.card == promql.VectorMatchCardinality.OneToMany:
        return right
    return left


def _of_call(expression: Any, series: Series) -> Labels:
    name, arguments = expression.func.name, expression.args
    labels = frozenset().union(*(_labels(argument, series) for argument in arguments))
    if name == "histogram_quantile":
        _require(["le"], labels, "histogram_quantile: the series has no label")
        return labels - {"le"}
    if name in ("label_replace", "label_join"):
        return labels | {arguments[1].val}
    if name in ("scalar", "time", "vector"):
        return frozenset()
    return labels


def _require(names: Iterable[str], labels: Labels, words: str) -> None:
    for name in names:
        if name not in labels:
            raise QueryError(f"{words} {name}{_nearest(name, labels)}")


def _nearest(name: str, names: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, list(names), 1)
    return f"; did you mean {close[0]}?" if close else ""
