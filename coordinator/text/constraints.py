"""Admission of constraints: each is compiled once before its request is queued, in a process that can be killed.

A grammar is a program that comes with a request, and compiling it may take long or much memory. `front/servicer` calls
this module after `front/validation`; the checked request carries the constraint's identity to the targets.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any, NamedTuple

from coordinator.requests import GenerationRequest
from coordinator.text.fair_turns import FairTurns
from coordinator.text.output_forms import OutputForms
from coordinator.text.text_process import TextProcess, in_thread
from coordinator.text.tokenizer import ServedTokenizer
from specdec.contract.constraint import Constraint, ConstraintKind
from specdec.contract.engine_api import EngineInfo
from specdec.contract.errors import InvalidRequest, Unsupported
from specdec.contract.tools import Tools
from specdec.structured.grammar import check_text, field_of

#: Number of constraints that are remembered as compiled.
_MAX_REMEMBERED = 1024
#: Time in which the tools of a request must compile. Other requests wait for the process meanwhile.
_MAX_PARTS_S = 10.0


async def prepare_constraints(tokenizer: ServedTokenizer, replica: EngineInfo) -> None:
    """Build the table of tokens that constrained requests to a target need; without effect for another replica.

    All streams would wait for it later, because the library holds Python's lock. A tokenizer that cannot follow
    constraints serves requests without them.
    """
    if replica.role == "target" and replica.supports_constraints:
        with suppress(Unsupported):  # each constrained request is told
            await asyncio.to_thread(lambda: tokenizer.token_table(replica.eos_token_ids).library_table())


class _Compiled(NamedTuple):
    identity: bytes
    warnings: tuple[str, ...]
    """Keywords that are ignored."""
    compile_s: float | None
    """Seconds of the compilation; None if the constraint was known."""


class ConstraintAdmission:
    """Checks the constraints of requests. Used from one event loop."""

    def __init__(
        self,
        tokenizer: ServedTokenizer,
        forms: OutputForms,
        count: Callable[[str, float | None], None],
        *,
        allows_grammars: bool,
    ) -> None:
        """
        Args:
            tokenizer: tokenizer of the target model.
            forms: forms of the model's outputs.
            count: counts a constraint by its kind, with the seconds of its compilation; None if it was known.
            allows_grammars: whether clients may send grammars, whose masks can take much more time than others.
        """
        self._count = count
        self._tokenizer = tokenizer
        self._allows_grammars = allows_grammars
        self._forms = forms
        self._process = TextProcess({"model": tokenizer.model})
        self._turns = FairTurns()
        """Turns at the process, so that one tenant's slow constraints delay another's request by one compilation."""
        self._compiled: OrderedDict[bytes, tuple[str, ...]] = OrderedDict()
        """Warnings of each compiled constraint, by its identity."""

    async def with_form(self, request: GenerationRequest) -> GenerationRequest:
        """Return a checked request with the form of its output, and with one constraint for all of it.

        Raises as `OutputForms.with_form`.
        """
        if not self._forms.has_form(request):
            return request
        return await in_thread(self._forms.with_form, request)

    async def admit(
        self, request: GenerationRequest, answer: Constraint | None, eos_token_ids: tuple[int, ...], tenant: str
    ) -> GenerationRequest:
        """Return the request with the identity of its constraint, which has been compiled.

        Args:
            request: a checked request, with its form.
            answer: constraint that the client sent.
            eos_token_ids: end tokens of the target model.
            tenant: tenant of the request.

        Raises:
            InvalidRequest: the constraint cannot be compiled within the limits (CONSTRAINT_INVALID).
            Unsupported: the constraint is a grammar and those are off, the model's tokenizer cannot follow
                constraints, or llguidance is not installed.
            Unavailable: the process cannot be started.
        """
        sampling = request.sampling
        if sampling.constraint is None:
            return request
        if answer is not None and answer.kind is ConstraintKind.GRAMMAR and not self._allows_grammars:
            field = field_of(answer)
            raise Unsupported(
                f"{field} is not accepted: grammars of clients are off; use a JSON schema, a regular expression or "
                "choices, or start the coordinator with --allow-grammars",
                field=field,
            )
        ignored: tuple[str, ...] = ()
        if sampling.constraint.kind is ConstraintKind.STRUCTURAL:
            ignored = await self._check_parts(request.tools, answer, eos_token_ids, tenant)
        compiled = await self._compile(sampling.constraint, eos_token_ids, tenant)
        self._count(sampling.constraint.kind.name.lower(), compiled.compile_s)
        filters = replace(
            sampling.filters,
            constraint_id=compiled.identity,
            end_token_ids=tuple(sorted({*eos_token_ids, *sampling.stop_token_ids})),
        )
        sampling = replace(sampling, filters=filters, ignore_eos=False)
        warnings = tuple(dict.fromkeys((*compiled.warnings, *ignored)))
        return replace(request, sampling=sampling, constraint_warnings=warnings)

    async def _check_parts(
        self, tools: Tools | None, answer: Constraint | None, eos_token_ids: tuple[int, ...], tenant: str
    ) -> tuple[str, ...]:
        """Check the client's own constraint and each tool by itself; return what they ignore.

        The constraint of the whole output is a grammar, in which llguidance passes over what it does not enforce.

        Raises InvalidRequest, which names the part at fault.
        """
        compile_s, ignored = 0.0, list[str]()
        if answer is not None:
            ignored += (await self._compile(answer, eos_token_ids, tenant)).warnings
        for index, tool in enumerate(tools.definitions if tools is not None else ()):
            parameters = Constraint.json_schema(tool.parameters, is_lenient=not tool.is_strict)
            if compile_s > _MAX_PARTS_S:
                raise InvalidRequest(
                    f"tools take more than {_MAX_PARTS_S:g} s to compile; send fewer, or simpler ones",
                    reason="CONSTRAINT_INVALID",
                    field="tools",
                )
            try:
                compiled = await self._compile(parameters, eos_token_ids, tenant)
            except InvalidRequest as error:
                field = f"tools.definitions[{index}].parameters_json"
                problem = error.message.removeprefix(field_of(parameters)).strip()
                raise InvalidRequest(f"{field} {problem}", reason="CONSTRAINT_INVALID", field=field) from error
            compile_s += compiled.compile_s or 0.0
            ignored += compiled.warnings
        return tuple(ignored)

    def close(self) -> None:
        """End the process. Idempotent."""
        self._process.close()

    async def _compile(self, constraint: Constraint, eos_token_ids: tuple[int, ...], tenant: str) -> _Compiled:
        """Return a constraint that can be compiled. Raises as `admit`."""
        table = self._tokenizer.token_table(eos_token_ids)  # `prepare_constraints` has built it
        identity = table.identity_of(constraint)
        if (warnings := self._compiled.get(identity)) is not None:
            return _Compiled(identity, warnings, None)
        async with self._turns.of(tenant):
            began_s = time.monotonic()
            warnings = await in_thread(self._ask, constraint, eos_token_ids)
        self._compiled[identity] = warnings
        while len(self._compiled) > _MAX_REMEMBERED:
            self._compiled.popitem(last=False)
        return _Compiled(identity, warnings, time.monotonic() - began_s)

    def _ask(
        self, constraint: Constraint, eos_token_ids: tuple[int, ...], *, given_up: threading.Event
    ) -> tuple[str, ...]:
        """Compile a constraint in the process; return what it ignores. Blocks, and raises as `admit`."""
        check_text(constraint)
        question: dict[str, Any] = {
            "constraint": {"kind": constraint.kind, "text": constraint.text, "is_lenient": constraint.is_lenient},
            "eos_token_ids": eos_token_ids,
        }
        return tuple(self._process.ask(question, field_of(constraint), given_up)["warnings"])
