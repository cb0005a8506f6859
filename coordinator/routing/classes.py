"""Which class of requests one belongs to: what is learned of drafts is learned for each class.

A class is the request's task label, or where it has none the kind of its prompt; and the mode, and a band of
temperature, because acceptance depends on both. The kind of a prompt is told from its last part by two plain counts:
how much of it has been there before, and how much of it is punctuation that code has and prose has not. A coordinator
serves one tenant, so classes are a tenant's own. Not here: what is learned (`coordinator.round.routing_table`).
"""

from __future__ import annotations

from collections.abc import Sequence

from specdec.types import Mode, SamplingFilters, TokenIds

#: Of a prompt, what is looked at: its last tokens.
MOST_PROMPT_TOKENS = 512

#: Labels are the clients'; of more than these, the rest is one class.
MAX_CLASSES = 64
OTHER = "other"

#: Runs of this many tokens are looked for again; a prompt where so many of them were there before repeats itself.
_RUN = 4
_REPEATING = 0.35

#: Characters that stand between words in code; prose has some two in a hundred of them, code ten and more.
_CODE = frozenset("(){}[]<>=_;:+*/\\#&|!@$%^~`")
_CODE_SHARE = 0.05


def class_of(task: str, kind: str, mode: Mode, filters: SamplingFilters) -> str:
    """The class's name, for people as well: `code/rejection/greedy`.

    Args:
        task: the request's label; "" for none.
        kind: of its prompt, where it has no label.
        mode: of the request.
        filters: likewise.
    """
    label = "".join(character if character.isprintable() else "?" for character in task)  # it is shown in terminals
    return f"{label or kind}/{mode.name.lower()}/{_band(filters)}"


def kind_of(token_ids: TokenIds, text: str) -> str:
    """repeating, code or prose.

    Args:
        token_ids: the last of the prompt, some `MOST_PROMPT_TOKENS` at most.
        text: of those.
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
    """Share of the runs of tokens that were there before."""
    runs = list(zip(*(token_ids[offset:] for offset in range(_RUN)), strict=False))
    return 1.0 - len(set(runs)) / len(runs) if len(runs) > _RUN else 0.0
