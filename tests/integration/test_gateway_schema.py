"""Requests that schemathesis makes from the OpenAPI document, valid and invalid, to a gateway with a coordinator."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis.errors import Unsatisfiable
from schemathesis.checks import not_a_server_error
from schemathesis.generation import GenerationMode
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from tests.support.coordinator_rig import Rig
from tests.support.gateway_rig import eventually, running_gateway
from tests.support.table_services import write_chat_tokenizer

CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
]


@pytest.mark.parametrize("num_requests", [5, pytest.param(25, marks=pytest.mark.full)])
async def test_no_request_of_the_document_breaks_the_gateway_or_gets_an_answer_it_does_not_describe(
    num_requests: int,
) -> None:
    """`num_requests` of each kind, valid and invalid, for each operation. The same ones in every run."""
    async with Rig(write_checkpoint=write_chat_tokenizer) as rig:
        coordinator = await rig.coordinator()
        async with running_gateway(coordinator.server.address) as running:
            operations = await asyncio.to_thread(attack, f"{running.url}/openapi.json", num_requests)
            routes = {
                "/v1/chat/completions",
                "/v1/completions",
                "/v1/responses",
                "/v1/messages",
                "/tokenize",
                "/detokenize",
            }
            assert {"GET /v1/models", "GET /ready", *(f"POST {route}" for route in routes)} <= operations
            await eventually(lambda: not coordinator.generations.num_running)
            await eventually(lambda: running.count("specdec:http_requests_in_flight") == 0)


def attack(url: str, num_requests: int) -> set[str]:
    """Send valid and invalid requests of every operation, check the answers, and return the operations' names."""
    names = set()
    for found in schemathesis.openapi.from_url(url).get_all_operations():
        operation = found.ok()
        names.add(operation.label)
        send_all(operation, GenerationMode.POSITIVE, num_requests)
        with contextlib.suppress(Unsatisfiable):  # an operation without input has no invalid requests
            send_all(operation, GenerationMode.NEGATIVE, num_requests)
    return names


def send_all(operation: Any, mode: GenerationMode, num_requests: int) -> None:
    @settings(
        max_examples=num_requests,
        derandomize=True,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),  # they measure time
    )
    @given(case=operation.as_strategy(generation_mode=mode))
    def send(case: Any) -> None:
        case.call_and_validate(checks=CHECKS)

    send()
