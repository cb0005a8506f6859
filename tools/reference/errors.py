"""The errors page: the error classes with their gRPC codes, and each reason that the code can give."""

from __future__ import annotations

import ast
from pathlib import Path

from specdec.contract import errors
from specdec.contract.errors import SpecdecError
from tools.reference.error_advice import ADVICE
from tools.reference.markdown import code, document, item, items, paragraph

_ROOT = Path(__file__).resolve().parents[2]
_PACKAGES = ("specdec", "coordinator", "draft_service", "target_service", "gateway")

_INTRODUCTION = """Every error carries `google.rpc.ErrorInfo` with the domain `specdec` and one of the reasons below,
`BadRequest` with the field at fault if there is one, and `RetryInfo` if a retry can help. The message names the
field, the value and the limit. The Python client raises the class."""

_OUTSIDE = (
    """A message that exceeds the receiver's `--max-message-bytes` is refused by gRPC itself with `RESOURCE_EXHAUSTED`
    and without `ErrorInfo`. The Python client raises `InvalidRequest` with the size and the limit.""",
    """Bytes that are not a message, a message of more than 131,072 fields and a frame of more than 1,024 items are
    refused with `INVALID_REQUEST` before they are decoded.""",
    """An error that a target replica returns to its coordinator reaches the client as `INTERNAL`, except for
    `CONSTRAINT_INVALID` and `NO_LEGAL_TOKEN`. The log of the coordinator names the replica.""",
    """The Python client repeats a call that failed with `SESSION_BUSY`, `QUEUE_FULL`, `KV_EXHAUSTED`, `DRAINING`,
    `LEASE_LOST` or any `UNAVAILABLE` under the same request id, within its `Budgets` and the `timeout` of the call.""",
)


def page() -> str:
    """Return the page as it should be."""
    blocks = [paragraph(_INTRODUCTION), "## Classes", items([_class(each) for each in error_classes()])]
    blocks += ["## Reasons", items([item(code(reason), ADVICE[reason]) for reason in reasons()])]
    blocks += ["## Errors without a reason, and retries", *map(paragraph, _OUTSIDE)]
    return document("Errors", *blocks)


def error_classes() -> list[type[SpecdecError]]:
    """Return the classes in the order of their definition."""
    found = [each for each in vars(errors).values() if isinstance(each, type) and issubclass(each, SpecdecError)]
    return [each for each in found if each is not SpecdecError]


def reasons() -> list[str]:
    """Return every reason that an error can have, sorted."""
    return sorted({reason for each in error_classes() for reason in _reasons_of(each)})


def _class(each: type[SpecdecError]) -> str:
    notes = [each.code, *(code(reason) for reason in _reasons_of(each))]
    if each.default_retry_after_s is not None:
        notes.append(f"retry after {each.default_retry_after_s:g} s")
    return item(f"{code(each.__name__)} ({', '.join(notes)})", (each.__doc__ or "").partition("\n\n")[0])


def _reasons_of(each: type[SpecdecError]) -> list[str]:
    return [each.default_reason, *sorted(_given_reasons().get(each.__name__, set()) - {each.default_reason})]


def _given_reasons() -> dict[str, set[str]]:
    """Return the reasons that calls in the product give to each class, read from the source."""
    if not _FOUND:
        for package in _PACKAGES:
            for path in (_ROOT / package).rglob("*.py"):
                for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                    if isinstance(node, ast.Call):
                        _note(node)
    return _FOUND


def _note(call: ast.Call) -> None:
    name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    for keyword in call.keywords:
        if keyword.arg == "reason" and isinstance(keyword.value, ast.Constant) and isinstance(keyword.value.value, str):
            _FOUND.setdefault(name, set()).add(keyword.value.value)


_FOUND: dict[str, set[str]] = {}
