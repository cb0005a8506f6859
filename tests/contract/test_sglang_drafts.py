"""The draft pool inside SGLang, by contract: a stand-in of SGLang verifies drafts of real draft services.

The oracle is the greedy text of the stand-in's model. The stand-in states where SGLang's contract was read.
"""

from __future__ import annotations

import asyncio
import importlib
import tomllib
from array import array
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from coordinator.replicas.replica import DRAFT
from specdec.checkpoints.vocabulary import load_vocabulary, vocabulary_fingerprint
from specdec.contract.errors import InvalidSetting, Unsupported
from specdec.integrations import sglang
from tests.support import sglang_stand_in as stand_in
from tests.support.coordinator_rig import VOCABULARY, Service, start_service, write_tokenizer
from tests.support.table_worker import TableWorker

WIDTH = 5
NUM_TOKENS = 30
PROMPTS = ([5, 6, 7], [9, 8], [5, 6, 7, 4])


@pytest.fixture(autouse=True)
def _stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in.install(monkeypatch)


@pytest.fixture(params=[0, 1], ids=["the target's own model", "another model"])
async def draft(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Service]:
    write_tokenizer(tmp_path)
    fingerprint = vocabulary_fingerprint(load_vocabulary(tmp_path))
    service = await start_service(DRAFT, salt=request.param, vocabulary=fingerprint)
    monkeypatch.setenv("SPECDEC_DRAFT_ENDPOINT", service.address)
    monkeypatch.setenv("SPECDEC_DRAFT_DEADLINE_MS", "20000")
    yield service
    await service.kill()


def target() -> TableWorker:
    return TableWorker(vocabulary_size=VOCABULARY)


async def make_worker(tokenizer: Path, *, overlaps: bool) -> Any:
    """Return the worker as SGLang's scheduler makes it."""
    sglang.register()
    algorithm = stand_in.SpeculativeAlgorithm.from_string("specdec")
    args = stand_in.server_args(model_path=str(tokenizer), disable_overlap_schedule=not overlaps)
    algorithm.validate_server_args(args)
    algorithm.handle_server_args(args)
    worker_class = algorithm.create_worker(args)
    make = lambda: worker_class(server_args=args, gpu_id=0, nccl_port=1, target_worker=target())  # noqa: E731
    return await asyncio.to_thread(make)


class Scheduler:
    """Decodes as SGLang's scheduler does, with or without overlap of a step with the results of the former one."""

    def __init__(self, worker: Any, prompts: Sequence[Sequence[int]], *, has_grammar: bool = False) -> None:
        self.worker = worker
        self.width = worker.draft_token_num
        self.lags = worker.enable_overlap and not has_grammar
        first = [target().greedy_continuation(prompt, 1) for prompt in prompts]
        self.histories = [[*prompt, *tokens] for prompt, tokens in zip(prompts, first, strict=True)]
        tokens = torch.zeros(len(prompts), self.width, dtype=torch.int32)
        tokens[:, 0] = torch.tensor(first).flatten()
        lengths = torch.ones(len(prompts), dtype=torch.int32)
        requests = [stand_in.Req(str(row), array("q", prompt)) for row, prompt in enumerate(prompts)]
        spec_info = SimpleNamespace(accept_tokens=tokens.flatten(), accept_lens=lengths)
        self.batch = stand_in.ScheduleBatch(requests, spec_info, has_grammar)
        if not self.lags:
            self._process(spec_info)

    def _process(self, result: Any) -> None:
        """Note the tokens of a step in `output_ids`."""
        for row, (request, length) in enumerate(zip(self.batch.reqs, result.accept_lens.tolist(), strict=True)):
            request.output_ids.extend(result.accept_tokens.reshape(-1, self.width)[row, :length].tolist())

    async def step(self) -> None:
        former = self.batch.spec_info
        result = await asyncio.to_thread(self.worker.forward_batch_generation, self.batch, self.histories)
        for row, length in enumerate(result.accept_lens.tolist()):
            self.histories[row] += result.accept_tokens.reshape(-1, self.width)[row, :length].tolist()
        self._process(former if self.lags else result)
        self.batch.spec_info = result

    def drop(self, row: int) -> None:
        """Take a request out of the batch, so that later ones move."""
        kept = [each for each in range(len(self.histories)) if each != row]
        self.batch.reqs = [self.batch.reqs[each] for each in kept]
        self.histories = [self.histories[each] for each in kept]
        info = self.batch.spec_info
        tokens = info.accept_tokens.reshape(-1, self.width)[kept].flatten()
        self.batch.spec_info = SimpleNamespace(accept_tokens=tokens, accept_lens=info.accept_lens[kept])


def assert_greedy(scheduler: Scheduler, prompts: Sequence[Sequence[int]]) -> None:
    for history, prompt in zip(scheduler.histories, prompts, strict=True):
        assert history == [*prompt, *target().greedy_continuation(prompt, len(history) - len(prompt))]


@pytest.mark.parametrize(("overlaps", "has_grammar"), [(True, False), (True, True), (False, False)])
async def test_greedy_text_is_the_targets_own_with_fewer_steps(
    draft: Service, tmp_path: Path, overlaps: bool, has_grammar: bool
) -> None:
    scheduler = Scheduler(await make_worker(tmp_path, overlaps=overlaps), PROMPTS, has_grammar=has_grammar)
    num_steps = NUM_TOKENS // WIDTH
    for _ in range(num_steps):
        await scheduler.step()
    assert_greedy(scheduler, PROMPTS)
    num_tokens = [len(history) - len(prompt) - 1 for history, prompt in zip(scheduler.histories, PROMPTS, strict=True)]
    if draft.worker.salt == target().salt:
        assert num_tokens == [num_steps * WIDTH] * len(PROMPTS)  # every draft token is accepted
    else:
        assert sum(num_tokens) >= num_steps * len(PROMPTS)


async def test_a_request_that_moves_in_the_batch_keeps_its_session(draft: Service, tmp_path: Path) -> None:
    scheduler = Scheduler(await make_worker(tmp_path, overlaps=True), PROMPTS)
    await scheduler.step()
    scheduler.drop(0)
    sessions = {each.session_id for each in scheduler.worker._pool._sessions._by_row.values()}
    await scheduler.step()
    assert {each.session_id for each in scheduler.worker._pool._sessions._by_row.values()} == sessions
    assert_greedy(scheduler, PROMPTS[1:])


async def test_without_its_draft_service_the_text_goes_on(draft: Service, tmp_path: Path) -> None:
    scheduler = Scheduler(await make_worker(tmp_path, overlaps=True), PROMPTS)
    await scheduler.step()
    await draft.kill()
    for _ in range(4):
        await scheduler.step()
    assert_greedy(scheduler, PROMPTS)


async def test_a_draft_with_another_vocabulary_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_tokenizer(tmp_path)
    service = await start_service(DRAFT, salt=0, vocabulary="another")
    monkeypatch.setenv("SPECDEC_DRAFT_ENDPOINT", service.address)
    with pytest.raises(InvalidSetting, match="start it with a model of this vocabulary"):
        await make_worker(tmp_path, overlaps=True)
    await service.kill()


@pytest.mark.parametrize(
    ("setting", "value", "flag"),
    [
        ("tp_size", 2, "--tensor-parallel-size 1"),
        ("pp_size", 2, "--pipeline-parallel-size 1"),
        ("disaggregation_mode", "decode", "without --disaggregation-mode"),
        ("device", "cpu", "--device cuda"),
        ("speculative_use_rejection_sampling", True, "without --speculative-use-rejection-sampling"),
        ("speculative_draft_model_path", "m", "without --speculative-draft-model-path"),
        ("speculative_ngram_external_corpus_path", "c", "without --speculative-ngram-external-corpus-path"),
        ("speculative_num_draft_tokens", 1, "--speculative-num-draft-tokens must be at least 2"),
    ],
)
def test_a_setting_that_cannot_work_is_refused_with_its_flag(
    monkeypatch: pytest.MonkeyPatch, setting: str, value: object, flag: str
) -> None:
    monkeypatch.setenv("SPECDEC_DRAFT_ENDPOINT", "h:1")
    sglang.refuse_unsuited(stand_in.server_args())
    with pytest.raises(Unsupported, match=flag):
        sglang.refuse_unsuited(stand_in.server_args(**{setting: value}))


def test_an_amd_gpu_is_refused_because_sglang_does_not_sample_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECDEC_DRAFT_ENDPOINT", "h:1")
    stand_in.install(monkeypatch, is_hip=True)
    with pytest.raises(Unsupported, match="--device cuda"):
        sglang.refuse_unsuited(stand_in.server_args())


def test_a_server_without_draft_replicas_is_refused_before_it_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SPECDEC_DRAFT_ENDPOINT", raising=False)
    with pytest.raises(InvalidSetting, match="SPECDEC_DRAFT_ENDPOINT is not set"):
        sglang.refuse_unsuited(stand_in.server_args())


def test_the_algorithm_is_ngram_to_sglang_where_it_asks() -> None:
    sglang.register()
    sglang.register()  # SGLang may call it once more
    algorithm = stand_in.SpeculativeAlgorithm.from_string("SPECDEC")
    assert algorithm.is_speculative()
    assert algorithm.is_ngram()
    assert algorithm.supports_overlap
    assert not algorithm.has_draft_kv()
    assert not algorithm.need_topk()
    assert not algorithm.carries_draft_hidden_states()
    relay = algorithm.create_future_map("cuda", "pool", needs_cpu_seq_lens=True, needs_confidence_relay=False)
    assert relay[1] is stand_in.SpeculativeAlgorithm.NGRAM


@pytest.mark.parametrize("given", [None, 3])
def test_settings_are_those_of_ngram_with_one_branch(given: int | None) -> None:
    sglang.register()
    args = stand_in.server_args(speculative_num_draft_tokens=given)
    stand_in.SpeculativeAlgorithm.from_string("SPECDEC").handle_server_args(args)
    width = given or WIDTH
    assert (args.speculative_num_draft_tokens, args.speculative_num_steps, args.speculative_eagle_topk) == (
        width, width, 1,
    )  # fmt: skip
    assert args.speculative_ngram_max_bfs_breadth == 1
    assert args.max_running_requests == 48
    assert not args.enable_mixed_chunk


def test_a_short_or_missing_draft_is_filled_at_the_end_of_its_chain() -> None:
    token_ids, mask = sglang.draft_chains([7, 8, 9], {0: [1, 2], 2: [3, 4, 5, 6]}, 4)
    assert token_ids.tolist() == [7, 1, 2, 0, 8, 0, 0, 0, 9, 3, 4, 5]
    lower = [[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 1, 1, 1]]
    np.testing.assert_array_equal(mask.reshape(3, 4, 4), [lower] * 3)


def test_the_package_names_the_plugin_that_sglang_loads() -> None:
    project = tomllib.loads(Path("pyproject.toml").read_text())["project"]
    module, name = project["entry-points"]["sglang.srt.plugins"]["specdec"].split(":")
    assert getattr(importlib.import_module(module), name) is sglang.register
