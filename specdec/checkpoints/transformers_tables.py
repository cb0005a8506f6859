"""Read from the source of transformers which model types it has a class for, and a type's default sizes.

The source is parsed, because importing it would import torch, which takes longer than all checks before a load. Called
by `specdec.checkpoints.preflight`.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path

_TABLES = {
    "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES": "causal",
    "MODEL_FOR_MASKED_LM_MAPPING_NAMES": "masked",
    "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES": "image",
    "MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES": "multimodal",
}


@dataclass(frozen=True, slots=True)
class KnownTypes:
    """Model types by the task that transformers has a class for."""

    causal: frozenset[str]
    masked: frozenset[str]
    image: frozenset[str]
    multimodal: frozenset[str]
    """Types of models that read more than text, without those of `image`."""


@cache
def known_types() -> KnownTypes | None:
    """Return the known model types; None if transformers is absent or its tables have an unknown form."""
    try:
        source = (_folder() / "auto" / "modeling_auto.py").read_text(encoding="utf-8")
        return KnownTypes(**dict(_tables(ast.parse(source))))
    except (OSError, ValueError, TypeError, IndexError, AttributeError, SyntaxError):
        return None


@cache
def default_sizes(model_type: str) -> Mapping[str, int]:
    """Return the whole numbers that a configuration of this type has if its file does not state them."""
    try:
        for path in _folder().glob("*/configuration_*.py"):
            if model_type.replace("-", "_").startswith(path.parent.name):
                for node in ast.parse(path.read_text(encoding="utf-8")).body:
                    if isinstance(node, ast.ClassDef) and _states_type(node, model_type):
                        return dict(_whole_numbers(node))
    except (OSError, ValueError, SyntaxError):
        pass
    return {}


def _folder() -> Path:
    """Return the folder of all models. Raises OSError: transformers is absent."""
    package = find_spec("transformers")
    if package is None or package.origin is None:
        raise FileNotFoundError
    return Path(package.origin).parent / "models"


def _tables(module: ast.Module) -> Iterator[tuple[str, frozenset[str]]]:
    """Yield the keys of `NAME = OrderedDict([(key, value), ...])` for the names of `_TABLES`."""
    for node in module.body:
        if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.Call):
            continue
        if table := _TABLES.get(ast.unparse(node.targets[0])):
            # Rows of another table are included by `*list(...)`.
            rows = [row for row in node.value.args[0].elts if isinstance(row, ast.Tuple)]  # type: ignore[attr-defined]
            yield table, frozenset(ast.literal_eval(row.elts[0]) for row in rows)


def _states_type(node: ast.ClassDef, model_type: str) -> bool:
    return any(
        isinstance(line, ast.Assign)
        and ast.unparse(line.targets[0]) == "model_type"
        and isinstance(line.value, ast.Constant)
        and line.value.value == model_type
        for line in node.body
    )


def _whole_numbers(node: ast.ClassDef) -> Iterator[tuple[str, int]]:
    """Yield the fields `name: type = number` of a class."""
    for line in node.body:
        if isinstance(line, ast.AnnAssign) and isinstance(line.value, ast.Constant) and type(line.value.value) is int:
            yield ast.unparse(line.target), line.value.value
