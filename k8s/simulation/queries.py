"""Evaluates the PromQL of the manifests on scraped series.

It knows the functions and operators that the autoscalers use. Any other query, and one that reads a series which the
simulation does not make, fails by name, so that no signal is silently left out.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

import promql_parser as promql

from k8s.simulation.scraped import LOOKBACK_S, OneSeries, Scraped

Key = tuple[tuple[str, str], ...]
Vector = dict[Key, float]
_ARITHMETIC: dict[str, Callable[[float, float], float]] = {
    "+": operator.add, "-": operator.sub, "*": operator.mul,
    "/": lambda left, right: left / right if right else math.nan,
}  # fmt: skip


class UnsupportedQuery(Exception):
    """The simulation cannot evaluate a query; the message names the query and the part."""


def evaluate(query: str, scraped: Scraped, now_s: float) -> Vector:
    """Return the values of a query by their labels, without those that are not a number.

    Raises:
        UnsupportedQuery: it has a part that is not simulated.
    """
    try:
        value = _Evaluation(scraped, now_s).of(promql.parse(query))
    except UnsupportedQuery as error:
        raise UnsupportedQuery(f"{query}: {error}") from None
    if not isinstance(value, dict):
        raise UnsupportedQuery(f"{query}: is a number, not a vector")
    return {key: each for key, each in value.items() if not math.isnan(each)}


class _Evaluation:
    """One query at one time."""

    def __init__(self, scraped: Scraped, now_s: float) -> None:
        self._scraped, self._now_s = scraped, now_s

    def of(self, expression: Any) -> Vector | float:
        match type(expression).__name__:
            case "NumberLiteral":
                return float(expression.val)
            case "ParenExpr":
                return self.of(expression.expr)
            case "VectorSelector":
                return self._instant(expression)
            case "AggregateExpr":
                return self._sum(expression)
            case "BinaryExpr":
                return self._binary(expression)
            case "Call":
                return self._call(expression)
            case name:
                raise UnsupportedQuery(f"{name} is not simulated")

    def _instant(self, selector: Any) -> Vector:
        found: Vector = {}
        for series in self._selected(selector):
            samples = [] if series.is_stale else series.within(self._now_s - LOOKBACK_S, self._now_s)
            if samples:
                found[_key(series)] = samples[-1][1]
        return found

    def _selected(self, selector: Any) -> list[OneSeries]:
        if selector.name not in self._scraped:
            raise UnsupportedQuery(f"the series {selector.name} is not simulated")
        matchers = selector.matchers.matchers
        for matcher in matchers:
            if str(matcher.op) != "MatchOp.Equal":
                raise UnsupportedQuery(f"the matcher of {matcher.name} is not simulated")
        return [
            series
            for series in self._scraped.of(selector.name)
            if all(series.labels.get(matcher.name, "") == matcher.value for matcher in matchers)
        ]

    def _sum(self, expression: Any) -> Vector:
        if str(expression.op) != "sum" or expression.modifier is not None:
            raise UnsupportedQuery(f"{expression.op} with these labels is not simulated")
        vector = self._vector(expression.expr)
        return {(): sum(vector.values())} if vector else {}

    def _binary(self, expression: Any) -> Vector | float:
        apply = _ARITHMETIC.get(str(expression.op))
        if apply is None:
            raise UnsupportedQuery(f"the operator {expression.op} is not simulated")
        left, right = self.of(expression.lhs), self.of(expression.rhs)
        if isinstance(left, dict) and isinstance(right, dict):
            return {key: apply(left[key], right[key]) for key in left.keys() & right.keys()}
        if isinstance(left, dict):
            return {key: apply(value, float(right)) for key, value in left.items()}  # type: ignore[arg-type]
        if isinstance(right, dict):
            return {key: apply(left, value) for key, value in right.items()}
        return apply(left, right)

    def _call(self, expression: Any) -> Vector:
        name, arguments = expression.func.name, expression.args
        if name in ("rate", "avg_over_time"):
            window = rate if name == "rate" else _mean
            return self._over_time(arguments[0], window)
        if name == "sqrt":
            return {key: math.sqrt(value) for key, value in self._vector(arguments[0]).items()}
        if name == "clamp_max":
            return {key: min(value, arguments[1].val) for key, value in self._vector(arguments[0]).items()}
        raise UnsupportedQuery(f"the function {name} is not simulated")

    def _over_time(self, matrix: Any, window: Callable[[list[tuple[float, float]], float, float], float]) -> Vector:
        begin_s = self._now_s - matrix.range.total_seconds()
        values = {
            _key(series): window(series.within(begin_s, self._now_s), begin_s, self._now_s)
            for series in self._selected(matrix.vector_selector)
            if not series.is_stale
        }
        return {key: value for key, value in values.items() if not math.isnan(value)}

    def _vector(self, expression: Any) -> Vector:
        value = self.of(expression)
        if not isinstance(value, dict):
            raise UnsupportedQuery("a number stands where a vector is expected")
        return value


def _key(series: OneSeries) -> Key:
    return tuple(sorted(series.labels.items()))


def _mean(samples: list[tuple[float, float]], begin_s: float, end_s: float) -> float:
    return sum(value for _, value in samples) / len(samples) if samples else math.nan


def rate(samples: list[tuple[float, float]], begin_s: float, end_s: float) -> float:
    """Return the increase a second of a counter, extrapolated to the window as Prometheus does; NaN: too few samples.

    The increase is carried on to an end of the window that is nearer than 1.1 times the distance of two samples, else
    by half of that distance.
    """
    if len(samples) < 2:
        return math.nan
    (first_s, first), (last_s, last) = samples[0], samples[-1]
    between_s = (last_s - first_s) / (len(samples) - 1)
    covered_s = last_s - first_s
    for gap_s in (first_s - begin_s, end_s - last_s):
        covered_s += gap_s if gap_s < 1.1 * between_s else between_s / 2
    return (last - first) * covered_s / (last_s - first_s) / (end_s - begin_s)
