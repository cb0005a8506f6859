"""A seed without a mode gives one text: over gRPC, HTTP, the SDK and the command line, whatever drafts and load are."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
import pytest_asyncio

from specdec.client import AsyncClient
from specdec.v1 import coordinator_pb2 as pb
from tests.support.coordinator_rig import PROMPT, Coordinator, Rig, request
from tests.support.gateway_rig import RunningGateway, running_gateway
from tests.support.output import Output
from tests.support.table_services import write_chat_tokenizer

pytestmark = pytest.mark.asyncio(loop_scope="module")  # the tests share services

SAMPLED: dict[str, Any] = {
    "temperature": 1.0, "max_new_tokens": 32, "ignore_eos": True, "mode": pb.SPECULATION_MODE_UNSPECIFIED,
}  # fmt: skip
BODY: dict[str, Any] = {"temperature": 1.0, "ignore_eos": True}
HELLO = [{"role": "user", "content": "w5 w6"}]
#: The input of each route, and the name of its limit.
ROUTES: dict[str, tuple[dict[str, Any], str]] = {
    "/v1/completions": ({"prompt": PROMPT}, "max_tokens"),
    "/v1/chat/completions": ({"messages": HELLO}, "max_tokens"),
    "/v1/responses": ({"input": "w5 w6", "store": False}, "max_output_tokens"),
    "/v1/messages": ({"messages": HELLO}, "max_tokens"),
}
#: Numbers of draft tokens, of which each gives another text in the mode rejection.
GAMMAS = (0, 1, 2, 3, 5, 8, None, None)
MAX_SEED = 2**64 - 1


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def coordinator() -> AsyncIterator[Coordinator]:
    """A coordinator whose requests may be drafted by a model, by the target itself, or by text."""
    async with Rig(drafts=2, local_drafts={"early-exit:2": 4}, write_checkpoint=write_chat_tokenizer) as rig:
        yield await rig.coordinator(lookup=("suffix",))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def gateway(coordinator: Coordinator) -> AsyncIterator[RunningGateway]:
    async with running_gateway(coordinator.server.address) as gateway:
        yield gateway


async def outputs_of(coordinator: Coordinator, *variants: dict[str, Any]) -> list[Output]:
    """Return the outputs of requests that run at once."""
    return await asyncio.gather(*(coordinator.generate(request(**SAMPLED | variant)) for variant in variants))


async def texts_of(gateway: RunningGateway, path: str, *variants: dict[str, Any]) -> list[Any]:
    """Return the outputs of HTTP requests that run at once, as JSON without what differs in any case."""
    prompt, limit = ROUTES[path]
    bodies = [BODY | prompt | {limit: 32} | variant for variant in variants]
    answers = await asyncio.gather(*(gateway.http.post(path, json=body) for body in bodies))
    return [written(answer.raise_for_status().json()) for answer in answers]


def written(answer: dict[str, Any]) -> list[str]:
    """Return the texts of an answer of any route."""
    if "choices" in answer:
        choices = sorted(answer["choices"], key=lambda choice: choice["index"])
        return [choice["text"] if "text" in choice else choice["message"]["content"] for choice in choices]
    return [part["text"] for part in (answer["content"] if "content" in answer else answer["output"][0]["content"])]


async def test_one_seed_gives_one_text_over_grpc_for_every_gamma_and_draft_and_at_once(
    coordinator: Coordinator,
) -> None:
    variants = [{"seed": 11, "gamma": gamma} for gamma in GAMMAS]
    variants += [{"seed": 11, "draft_pool": pool} for pool in ("default", "early-exit:2", "suffix")]
    variants += [{"seed": 11, "mode": pb.SPECULATION_MODE_OFF}, {"seed": 11, "mode": pb.SPECULATION_MODE_COUPLED}]
    outputs = await outputs_of(coordinator, *variants)
    assert len({tuple(output.token_ids) for output in outputs}) == 1
    assert sum(output.finished.stats.num_accepted_tokens for output in outputs if output.finished) > 0
    (other,) = await outputs_of(coordinator, {"seed": 12})
    assert other.token_ids != outputs[0].token_ids


async def test_a_request_without_a_seed_or_with_a_mode_is_served_as_it_says(coordinator: Coordinator) -> None:
    """Negative control: without a seed no text repeats, and in the mode rejection it depends on gamma."""
    unseeded, named = {}, {"seed": 11, "mode": pb.SPECULATION_MODE_REJECTION}
    outputs = await outputs_of(coordinator, *({**one, "gamma": gamma} for one in (unseeded, named) for gamma in (0, 5)))
    assert len({tuple(output.token_ids) for output in outputs}) == 4


@pytest.mark.parametrize("path", ROUTES)
async def test_one_seed_gives_one_text_over_http(gateway: RunningGateway, path: str) -> None:
    speculations = [{"gamma": gamma} for gamma in GAMMAS if gamma is not None] + [{}, {"mode": None}]
    texts = await texts_of(gateway, path, *({"seed": 11, "speculation": each} for each in speculations))
    assert len(texts) == 8
    assert all(text == texts[0] for text in texts)
    assert texts[0] != (await texts_of(gateway, path, {"seed": 12}))[0]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("seed", [11, MAX_SEED - 1, -2])
async def test_output_number_i_is_the_output_of_seed_plus_i_alone(
    gateway: RunningGateway, path: str, seed: int
) -> None:
    (together,) = await texts_of(gateway, path, {"seed": seed, "n": 3})
    alone = await texts_of(gateway, path, *({"seed": (seed + index) % (MAX_SEED + 1)} for index in range(3)))
    assert together == [text for texts in alone for text in texts]
    assert len(set(together)) == 3


async def test_one_seed_gives_one_text_in_the_sdk_and_on_the_command_line(
    coordinator: Coordinator,
) -> None:
    options = {"temperature": 1.0, "max_new_tokens": 16, "seed": 11}
    async with AsyncClient(coordinator.server.address) as client:
        completions = await asyncio.gather(*(client.generate("w5 w6", gamma=gamma, **options) for gamma in GAMMAS))
    token_ids = {completion.token_ids for completion in completions}
    command = [sys.executable, "-m", "specdec.cli", "generate", "w5 w6", "--endpoint", coordinator.server.address]
    command += ["--json", "--temperature", "1", "--max-new-tokens", "16", "--seed", "11"]
    for gamma in (0, 5):
        process = await asyncio.create_subprocess_exec(*command, "--gamma", str(gamma), stdout=asyncio.subprocess.PIPE)
        token_ids.add(tuple(json.loads((await process.communicate())[0])["token_ids"]))
    assert len(token_ids) == 1


async def test_each_turn_of_a_session_repeats_with_its_seed(coordinator: Coordinator) -> None:
    sessions = []
    for gamma in (0, 2, 7):
        turns = [{"seed": 11}, {"seed": 12}, {"seed": 12}]
        outputs = [
            await coordinator.generate(request(session_id=f"s{gamma}", gamma=gamma, **SAMPLED | turn)) for turn in turns
        ]
        sessions.append([output.token_ids for output in outputs])
    assert sessions[0] == sessions[1] == sessions[2]


async def test_a_resumed_request_keeps_its_mode(coordinator: Coordinator) -> None:
    asked = request(session_id="resumed", request_id="r", seed=11, gamma=3, **SAMPLED | {"max_new_tokens": 200})
    stream, held = coordinator.stub.Generate(asked), 0
    while held < 5:
        event = await stream.read()
        assert event is not grpc.aio.EOF
        held += len(event.tokens.token_ids)
    stream.cancel()
    rest = await coordinator.generate(pb.GenerateRequest(session_id="resumed", request_id="r", resume_from=0))
    (whole,) = await outputs_of(coordinator, {"seed": 11, "gamma": 0, "max_new_tokens": 200})
    assert rest.token_ids == whole.token_ids
