"""Admission of constraints: each is compiled once before its request is queued, in a process that can be killed.

A grammar is a program that comes with a request, and compiling it may take long or much memory. `front/servicer` calls
this module after `front/validation`; the checked request carries the constraint's identity to the targets.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from coordinator.requests import GenerationRequest
from coordinator.text.text_process import TextProcess, in_thread
from coordinator.text.tokenizer import ServedTokenizer
from specdec.contract.constraint import Constraint, ConstraintKind
from specdec.contract.errors import Unsupported
from specdec.structured.grammar import check_text, field_of

#: Number of constraints that are remembered as compiled.
_MAX_REMEMBERED = 1024


class ConstraintAdmission:
    """Checks the constraints of requests. Used from one event loop."""

    def __init__(
        self, tokenizer: ServedTokenizer, count: Callable[[str, float | None], None], *, allows_grammars: bool
    ) -> None:
        """
        Args:
            tokenizer: tokenizer of the target model.
            count: counts a constraint by its kind, with the seconds of its compilation; None if it was known.
            allows_grammars: whether clients may send grammars, whose masks can take much more time than others.
        """
        self._count = count
        self._tokenizer = tokenizer
        self._allows_grammars = allows_grammars
        self._process = TextProcess({"model": tokenizer.model})
        self._compiled: OrderedDict[bytes, tuple[str, ...]] = OrderedDict()
        """Warnings of each compiled constraint, by its identity."""

    async def admit(self, request: GenerationRequest, eos_token_ids: tuple[int, ...]) -> GenerationRequest:
        """Return the request with the identity of its constraint, which has been compiled.

        Args:
            request: a checked request.
            eos_token_ids: end tokens of the target model.

        Raises:
            InvalidRequest: the constraint cannot be compiled within the limits (CONSTRAINT_INVALID).
            Unsupported: the constraint is a grammar and those are off, the model's tokenizer cannot follow
                constraints, or llguidance is not installed.
            Unavailable: the process cannot be started.
        """
        sampling = request.sampling
        if sampling.constraint is None:
            return request
        if sampling.constraint.kind is ConstraintKind.GRAMMAR and not self._allows_grammars:
            field = field_of(sampling.constraint)
            raise Unsupported(
                f"{field} is not accepted: grammars of clients are off; use a JSON schema, a regular expression or "
                "choices, or start the coordinator with --allow-grammars",
                field=field,
            )
        identity, warnings = await in_thread(self._compile, sampling.constraint, eos_token_ids)
        filters = replace(
            sampling.filters,
            constraint_id=identity,
            end_token_ids=tuple(sorted({*eos_token_ids, *sampling.stop_token_ids})),
        )
        sampling = replace(sampling, filters=filters, ignore_eos=False)
        return replace(request, sampling=sampling, constraint_warnings=warnings)

    def close(self) -> None:
        """End the process. Idempotent."""
        self._process.close()

    def _compile(
        self, constraint: Constraint, eos_token_ids: tuple[int, ...], *, given_up: threading.Event
    ) -> tuple[bytes, tuple[str, ...]]:
        """Return the identity of a constraint that compiles, and what it ignores."""
        table = self._tokenizer.token_table(eos_token_ids)
        identity = table.identity_of(constraint)
        compile_s: float | None = None
        warnings = self._compiled.get(identity)
        if warnings is None:
            began_s = time.monotonic()
            check_text(constraint)
            question: dict[str, Any] = {
                "constraint": {"kind": constraint.kind, "text": constraint.text, "is_lenient": constraint.is_lenient},
                "eos_token_ids": eos_token_ids,
            }
            warnings = tuple(self._process.ask(question, field_of(constraint), given_up)["warnings"])
            table.library_table()  # so that the request's own rounds do not wait for it
            compile_s = time.monotonic() - began_s
            self._compiled[identity] = warnings
            while len(self._compiled) > _MAX_REMEMBERED:
                self._compiled.popitem(last=False)
        self._count(constraint.kind.name.lower(), compile_s)
        return identity, warnings
