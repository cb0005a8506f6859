"""Golden recordings: wire bytes and draws of eight generations must not change unnoticed.

Real engines over table models, real encoding and decoding of both links; no sockets. What is compared: every request
and reply item as bytes, and every decided token with its source, p and q. Times are cleared. Fields that the protos
have gained since the recording are cleared as well: they may be added, but nothing that was there may move.

`python -m tests.contract.test_golden_rounds` records afresh, after a change that is meant to alter draws or bytes.
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.message import Message

from draft_service.proposer import Proposer
from specdec.contract.types import Mode, Proposal, ProposeRequest, SamplingFilters, Verification, VerifyRequest
from specdec.rpc import codec, proposals, verifications
from specdec.v1 import draft_pb2, target_pb2
from target_service.verifier import Verifier
from tests.support.links import decode_proposal, decode_verification
from tests.support.round_driver import RoundDriver
from tests.support.table_worker import TableWorker

RECORDING = Path(__file__).with_name("golden_rounds.json")
PROMPT = [5, 6, 7, 8, 9, 10, 3, 4, 5, 6, 7, 8, 2, 3, 4, 5, 6]
GAMMA = 3
NUM_TOKENS = 12

#: Fields, by message, that were added after the recording.
YOUNGER_FIELDS: dict[str, tuple[str, ...]] = {}


@dataclass(frozen=True)
class Case:
    filters: SamplingFilters
    mode: Mode = Mode.REJECTION
    gamma: int = GAMMA
    num_logprobs: int | None = None


CASES = {
    "greedy": Case(SamplingFilters(temperature=0.0)),
    "rejection at temperature 1": Case(SamplingFilters()),
    "rejection with top-k, top-p and penalties": Case(
        SamplingFilters(temperature=0.7, top_k=12, top_p=0.9, repetition_penalty=1.2, presence_penalty=0.3,
                  frequency_penalty=0.2)
    ),
    "rejection with min-p, biases and masked end tokens": Case(
        SamplingFilters(min_p=0.02, logit_bias={3: 2.5, 9: -1.5}, min_new_tokens=6, end_token_ids=(1, 4))
    ),
    "block": Case(SamplingFilters(temperature=0.9), Mode.BLOCK, gamma=4),
    "coupled": Case(SamplingFilters(top_p=0.95), Mode.COUPLED),
    "target only": Case(SamplingFilters(), Mode.OFF, gamma=0),
    "rejection with logprobs": Case(SamplingFilters(temperature=1.1), num_logprobs=2),
}  # fmt: skip


@dataclass
class RecordedLink:
    """An engine of either role behind the codec of its link; every message is recorded."""

    engine: Any
    num_logprobs: int | None = None
    items: list[str] = field(default_factory=list)

    async def propose(self, request: ProposeRequest) -> Proposal:
        asked = self._note(codec.encode_propose_request(request, 1))
        received = codec.decode_propose_request(draft_pb2.ProposeRequest.FromString(asked), self.engine.info())
        reply = self._note(proposals.encode_proposal(await self.engine.propose(received), 1))
        return decode_proposal(draft_pb2.Proposal.FromString(reply), request)

    async def verify(self, request: VerifyRequest) -> Verification:
        request = replace(request, num_logprobs=self.num_logprobs)
        asked = self._note(codec.encode_verify_request(request, 1))
        received = codec.decode_verify_request(target_pb2.VerifyRequest.FromString(asked), self.engine.info())
        reply = self._note(verifications.encode_verification(await self.engine.verify(received), 1))
        return decode_verification(target_pb2.Verification.FromString(reply), request)

    def _note(self, message: Message) -> bytes:
        travelling = message.SerializeToString()
        for part in (message, getattr(message, "round", None)):
            for name in YOUNGER_FIELDS.get(type(part).__name__, ()):
                part.ClearField(name)
        if "forward_s" in message.DESCRIPTOR.fields_by_name:
            message.ClearField("forward_s")
        if isinstance(message, target_pb2.Verification) and message.HasField("drafted"):
            message.drafted.ClearField("forward_s")
        self.items.append(f"{type(message).__name__} {message.SerializeToString(deterministic=True).hex()}")
        return travelling


def decisions_of(driver: RoundDriver) -> list[dict[str, Any]]:
    """Return every decided token with its source, p and q."""
    return [
        {
            "token_ids": [int(token_id) for token_id in decision.token_ids],
            "sources": [int(source) for source in decision.sources],
            "p": [float(p) for p in decision.p],
            "q": [float(q) for q in decision.q],
        }
        for decision in driver.decisions
    ]


async def run_case(case: Case) -> dict[str, Any]:
    """Return messages and decisions of a generation, with misses and resends."""
    proposer, verifier = Proposer(TableWorker(salt=1)), Verifier(TableWorker())
    draft, target = RecordedLink(proposer), RecordedLink(verifier, case.num_logprobs)
    driver = RoundDriver("golden", list(PROMPT), draft, target, filters=case.filters, mode=case.mode, seed=20_260_101)
    try:
        await driver.generate(NUM_TOKENS // 2, case.gamma)
        await proposer.release(["golden"])  # the replica forgets the session, which causes a miss and a resend
        await driver.generate(NUM_TOKENS, case.gamma)
    finally:
        await proposer.close()
        await verifier.close()
    return {
        "draft_link": draft.items,
        "target_link": target.items,
        "decisions": decisions_of(driver),
    }


@pytest.mark.parametrize("name", CASES)
async def test_a_generation_sends_the_recorded_bytes_and_draws_the_recorded_tokens(name: str) -> None:
    recorded = json.loads(RECORDING.read_text())[name]
    seen = await run_case(CASES[name])
    assert seen["decisions"] == recorded["decisions"]
    assert seen["draft_link"] == recorded["draft_link"]
    assert seen["target_link"] == recorded["target_link"]


async def test_the_recording_notices_another_seed_and_another_support() -> None:
    """Negative control: a change of draws changes the recording."""
    recorded = json.loads(RECORDING.read_text())["rejection at temperature 1"]
    other = await run_case(Case(SamplingFilters(temperature=1.0 + 1e-3)))
    assert other["target_link"] != recorded["target_link"]


if __name__ == "__main__":
    RECORDING.write_text(json.dumps({name: asyncio.run(run_case(case)) for name, case in CASES.items()}, indent=1))
