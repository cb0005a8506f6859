"""The class of a request. `coordinator.round.routing_table` learns about drafts for each class.

A class consists of the request's task label, or of the kind of its prompt if it has no label; of the mode; and of a
band of temperature, because acceptance depends on both. The kind of a prompt is derived from its last part by two
counts: how much of it repeats, and how much of it is punctuation that occurs in code rather than in prose. Each adapter
of the target has separate classes, since drafts may hit its text less often. Tenants share the classes, which hold
counts and times and no text; only the coordinator's own tenant is shown their names.
"""

from __future__ import annotations

from collections.abc import Sequence

from specdec.contract.types import Mode, SamplingFilters, TokenIds

#: Number of tokens at the end of a prompt that are examined.
MOST_PROMPT_TOKENS = 512

#: Largest number of classes. Clients choose labels freely, so further labels share one class.
MAX_CLASSES = 64
OTHER = "other"

#: Length of the token n-grams that are compared, and the share of repeated ones from which a prompt is repeating.
_RUN = 4
_REPEATING = 0.35

#: Characters that are frequent in code: about 2 % of prose, and 10 % or more of code.
_CODE = frozenset("(){}[]<>=_;:+*/\\#&|!@$%^~`")
_CODE_SHARE = 0.05


def class_of(task: str, kind: str, mode: Mode, filters: SamplingFilters, adapter: str = "") -> str:
    """Return the name of the class, which is also displayed, such as `code/rejection/greedy`.

    Args:
        task: label of the request; "" for none.
        kind: kind of its prompt, if it has no label.
        mode: speculation mode of the request.
        filters: sampling filters of the request.
        adapter: label of the target's adapter; "" for none.
    """
    label = "".join(character if character.isprintable() else "?" for character in task)  # terminals display it
    return "/".join([label or kind, mode.name.lower(), _band(filters), *([adapter] if adapter else [])])


def kind_of(token_ids: TokenIds, text: str) -> str:
    """Return the kind of a prompt: repeating, code or prose.

    Args:
        token_ids: last tokens of the prompt, at most `MOST_PROMPT_TOKENS`.
        text: text of these tokens.
    """
    if _repeated_share(token_ids.tolist()) >= _REPEATING:
        return "repeating"
    marks = sum(character in _CODE for character in text)
    visible = sum(not character.isspace() for character in text)
    return "code" if marks >= _CODE_SHARE * max(visible, 1) else "prose"


def _band(filters: SamplingFilters) -> str:
    if filters.is_greedy:
        return "greedy"
    return "cool" if filters.temperature < 0.5 else "warm" if filters.temperature <= 1.0 else "hot"


def _repeated_share(token_ids: Sequence[int]) -> float:
    """Return the share of n-grams that occurred before."""
    runs = list(zip(*(token_ids[offset:] for offset in range(_RUN)), strict=False))
    return 1.0 - len(set(runs)) / len(runs) if len(runs) > _RUN else 0.0
