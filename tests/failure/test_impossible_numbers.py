"""Replicas whose answers hold numbers that no model gives: the answer is refused and counted, and another replica
serves; without one the request ends with INTERNAL and the replica's address."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import inf, nan
from typing import Any

import grpc
import numpy as np
import pytest

from coordinator.replicas.replica import DRAFT, TARGET
from specdec.contract import errors
from specdec.contract.errors import SpecdecError
from specdec.contract.types import LogitRow, Proposal, ProposeRequest, Verification, VerifyRequest
from specdec.rpc.status_mapping import from_rpc_error
from specdec.v1 import coordinator_pb2 as pb
from tests.support.coordinator_rig import PROMPT, Coordinator, Rig, request
from tests.support.output import Output, read_rest
from tests.support.table_services import VOCABULARY, start_service

Change = Callable[[Any], Any]


def answering(change: Change) -> Change:
    """Return a change of an engine: `change` makes the answers of its rounds."""

    class Changed:
        def __init__(self, engine: Any) -> None:
            self._engine = engine

        def __getattr__(self, name: str) -> Any:
            return getattr(self._engine, name)

        async def verify(self, asked: VerifyRequest, on_step: Any = None) -> Verification:
            return change(await self._engine.verify(asked, on_step and (lambda step: on_step(change(step)))))

        async def propose(self, asked: ProposeRequest) -> Proposal:
            return change(await self._engine.propose(asked))

    return Changed


def failing(error: SpecdecError) -> Change:
    """Return a change that fails every round with `error`."""

    def fail(answer: Any) -> Any:
        raise error

    return answering(fail)


def logits(**changes: Any) -> Change:
    """Return a change of the logits of every position; functions get the value that they replace."""

    def changed(row: LogitRow) -> LogitRow:
        values = {name: new(getattr(row, name)) if callable(new) else new for name, new in changes.items()}
        return replace(row, **values)

    return lambda answer: replace(answer, logit_rows=tuple(map(changed, answer.logit_rows)))


def filled(value: float) -> Callable[[Any], Any]:
    return lambda values: np.full_like(values, value)


def doubled(values: Any) -> Any:
    return np.concatenate([values, values])


def num_faults(coordinator: Coordinator, role: str) -> float:
    labels = {"model_name": "table", "role": role, "pool": "default"}
    return coordinator.metrics.registry.get_sample_value("specdec:replica_faults_total", labels) or 0.0


IMPOSSIBLE_LOGITS = {
    "a logsumexp that is NaN": logits(logsumexp=nan),
    "an infinite logsumexp": logits(logsumexp=inf),
    "a logsumexp of -inf": logits(logsumexp=-inf),
    "a logsumexp below its logits": logits(logsumexp=-1e6),
    "a tail logit that is NaN": logits(tail_logit=nan),
    "an infinite tail logit": logits(tail_logit=inf),
    "a tail logit of -inf": logits(tail_logit=-inf),
    "support logits that are NaN": logits(support_logits=filled(nan)),
    "infinite support logits": logits(support_logits=filled(inf)),
    "support logits of -inf": logits(support_logits=filled(-inf)),
    "top logits that are NaN": logits(top_logits=filled(nan)),
    "infinite top logits": logits(top_logits=filled(inf)),
    "top tokens outside the vocabulary": logits(top_token_ids=lambda ids: ids + np.uint32(VOCABULARY)),
    "twice as many top tokens": logits(top_token_ids=doubled, top_logits=doubled),
    "fewer support logits": logits(support_logits=lambda values: values[:-1]),
}
IMPOSSIBLE_COUNTS = {
    "a time that is NaN": lambda answer: replace(answer, forward_s=nan),
    "a time below 0": lambda answer: replace(answer, forward_s=-0.5),
    "an infinite time": lambda answer: replace(answer, forward_s=inf),
    "more cached tokens than there are": lambda answer: replace(answer, num_cached_tokens=2**32 - 1),
}
IMPOSSIBLE_MASSES = {
    "a lost mass that is NaN": lambda answer: replace(answer, lost_mass=(nan,) * len(answer.draft_token_ids)),
    "a lost mass below 0": lambda answer: replace(answer, lost_mass=(-1.0,) * len(answer.draft_token_ids)),
    "a lost mass above 1": lambda answer: replace(answer, lost_mass=(2.0,) * len(answer.draft_token_ids)),
}


@pytest.mark.parametrize("change", [*IMPOSSIBLE_LOGITS.values()], ids=[*IMPOSSIBLE_LOGITS])
async def test_a_stream_with_impossible_logprobs_goes_on_at_another_target(change: Change) -> None:
    async with Rig() as rig:
        liar = await start_service(TARGET, salt=0, between=answering(change))
        rig.services.append(liar)
        coordinator = await rig.coordinator()
        for index in range(6):  # with this many sessions both replicas are chosen
            asked = request(session_id=f"s{index}", temperature=1.0, seed=index, logprobs=2, max_new_tokens=6)
            output = await coordinator.generate(asked)
            assert len(output.details) == 6
            for detail in output.details:
                assert all(-1e4 < value <= 0.01 for value in (detail.logprob, detail.top_logprobs[0].logprob))
        assert liar.worker.steps
        assert num_faults(coordinator, TARGET) >= 1


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("name", ["a logsumexp that is NaN", "a tail logit that is NaN", "infinite top logits"])
async def test_a_lone_target_with_impossible_logprobs_is_named_and_counted(name: str, temperature: float) -> None:
    async with Rig(targets=0, drafts=0) as rig:
        liar = await start_service(TARGET, salt=0, between=answering(IMPOSSIBLE_LOGITS[name]))
        rig.services.append(liar)
        coordinator = await rig.coordinator()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await coordinator.generate(request(temperature=temperature, logprobs=2))
        error = from_rpc_error(caught.value)
        assert error.code == "INTERNAL"
        assert liar.address in error.message
        assert "position 0" in error.message
        assert num_faults(coordinator, TARGET) == 1


@pytest.mark.parametrize("change", [*IMPOSSIBLE_COUNTS.values()], ids=[*IMPOSSIBLE_COUNTS])
async def test_a_target_with_impossible_counts_is_replaced_and_counted(change: Change) -> None:
    async with Rig() as rig:
        rig.services.append(await start_service(TARGET, salt=0, between=answering(change)))
        coordinator = await rig.coordinator()
        for index in range(6):
            output = await coordinator.generate(request(session_id=f"s{index}"))
            assert output.token_ids == rig.target.worker.greedy_continuation(PROMPT, 24)
        assert num_faults(coordinator, TARGET) >= 1


@pytest.mark.parametrize(
    "change",
    [*IMPOSSIBLE_COUNTS.values(), *IMPOSSIBLE_MASSES.values()],
    ids=[*IMPOSSIBLE_COUNTS, *IMPOSSIBLE_MASSES],
)
async def test_a_draft_with_impossible_numbers_is_not_used_and_counted(change: Change) -> None:
    async with Rig(drafts=0) as rig:
        rig.services.append(await start_service(DRAFT, salt=0, between=answering(change)))
        coordinator = await rig.coordinator()
        output = await coordinator.generate(request(temperature=1.0, seed=1))
        assert len(output.token_ids) == 24
        assert output.finished.stats.num_draft_tokens == 0
        assert num_faults(coordinator, DRAFT) >= 1


async def test_a_token_beyond_the_tokenizer_is_refused_whatever_vocabulary_the_target_states() -> None:
    def shifted(answer: Verification) -> Verification:
        return replace(answer, choice_token_ids=answer.choice_token_ids + np.uint32(VOCABULARY))

    class Larger(answering(shifted)):  # type: ignore[misc]
        def info(self) -> Any:
            return replace(self._engine.info(), vocabulary_size=2**31)

    async with Rig(targets=0, drafts=0) as rig:
        rig.services.append(await start_service(TARGET, salt=0, between=Larger))
        coordinator = await rig.coordinator()
        stream, output = coordinator.stub.Generate(request()), Output()
        with pytest.raises(grpc.aio.AioRpcError, match=f"the vocabulary has {VOCABULARY}"):
            await read_rest(stream, output)
        assert not output.token_ids


@pytest.mark.parametrize("letter", ["x", "é", "%", "\n", "𝕏"])
@pytest.mark.parametrize("role", [DRAFT, TARGET])
async def test_the_text_of_a_replicas_error_is_cut_to_what_a_status_may_carry(
    role: str, letter: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with Rig(**{f"{role}s": 0}) as rig:
        error = errors.Internal("the device said " + letter * 400_000)
        rig.services.append(await start_service(role, salt=0, between=failing(error)))
        coordinator = await rig.coordinator()
        if role == DRAFT:
            output = await coordinator.generate(request())
            assert output.token_ids == rig.target.worker.greedy_continuation(PROMPT, 24)
        else:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await coordinator.generate(request())
            reported = from_rpc_error(caught.value)
            assert (reported.code, reported.reason) == ("INTERNAL", "INTERNAL")
            assert reported.message.startswith("the device said " + letter)
            assert reported.message.endswith(" more characters)")
        assert num_faults(coordinator, role) >= 1
        assert max(len(record.getMessage()) for record in caplog.records) < 3000


async def test_an_honest_round_with_logprobs_counts_no_fault() -> None:
    async with Rig() as rig:
        coordinator = await rig.coordinator()
        output = await coordinator.generate(
            request(temperature=1.0, seed=3, logprobs=2, mode=pb.SPECULATION_MODE_BLOCK)
        )
        assert len(output.token_ids) == 24
        assert num_faults(coordinator, TARGET) == num_faults(coordinator, DRAFT) == 0
