"""A hung draft with another tokenizer, and a hung target that drafts by itself beside drafts found in text.

Streams continue with the same greedy text, and use the drafts again when the process continues. Real processes around
tiny models are stopped and continued by signals. The tests count drafts instead of seconds.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from specdec.checkpoints.vocabulary import load_tokenizer
from specdec.v1 import coordinator_pb2 as pb
from tests.support.freezing import frozen_part
from tests.support.head_checkpoints import (
    as_speculators,
    eagle3_config,
    eagle3_tensors,
    medusa_tensors,
    write_eagle3,
    write_medusa,
)
from tests.support.other_tokenizers import TEXTS, build_cross_vocabulary_copy, build_model, save_byte_level, save_pieces
from tests.support.output import Output
from tests.support.process_rig import read_rest, read_some, run, stub_of
from tests.support.stack import Stack
from tests.support.target_alone import TargetAlone
from tests.support.tiny_models import build_tiny_model

NUM_TOKENS, LONG = 160, 320
WIDTH, VOCABULARY = 64, 96
PROMPT = [5, 17, 9, 42, 3, 8]

#: Of a target with all of them, and of its coordinator.
LOCAL_POOLS = ("early-exit", "eagle3", "medusa")
POOLS = (*LOCAL_POOLS, "ngram")


def ask(prompt: list[int], pool: str = "", *, num_tokens: int = NUM_TOKENS) -> pb.GenerateRequest:
    return pb.GenerateRequest(
        prompt_token_ids=pb.TokenIds(ids=prompt),
        sampling=pb.SamplingParams(temperature=0.0, max_new_tokens=num_tokens),
        speculation=pb.SpeculationParams(gamma=3, draft_pool=pool),
        return_provenance=True,
    )


def num_drafted(output: Output) -> int:
    return int(output.finished.stats.num_draft_tokens)


# ---- a draft with another tokenizer ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def translated(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Stack, list[list[int]], list[list[int]]]]:
    """Return the services, prompts, and the target's own output for each prompt."""
    folder = tmp_path_factory.mktemp("translated")
    target = build_model(save_pieces(folder / "pieces"), folder / "target", context=2048)
    draft = build_cross_vocabulary_copy(target, save_byte_level(folder / "bytes"), folder / "draft")
    alone, tokenizer = TargetAlone(target), load_tokenizer(target)
    prompts = [tokenizer.encode(text) for text in TEXTS]
    expected = [alone.greedy(prompt, NUM_TOKENS) for prompt in prompts]
    with Stack(target, draft, draft_arguments=("--for-tokenizer", str(target))) as stack:
        yield stack, prompts, expected


@pytest.mark.full
def test_a_stream_continues_without_a_hung_translated_draft_and_uses_it_again_later(
    translated: tuple[Stack, list[list[int]], list[list[int]]],
) -> None:
    stack, prompts, expected = translated
    stub = stub_of(stack.endpoint)
    before = [run(stub, ask(prompt)) for prompt in prompts]
    assert [output.token_ids for output in before] == expected
    assert min(num_drafted(output) for output in before) > 20
    streams = [stub.Generate(ask(prompt)) for prompt in prompts]
    outputs = [read_some(stream, 2) for stream in streams]
    with frozen_part(stack, "draft"), ThreadPoolExecutor() as readers:
        list(readers.map(read_rest, streams, outputs))
    assert [output.token_ids for output in outputs] == expected
    while num_drafted(run(stub, ask(prompts[0]))) < 0.8 * num_drafted(before[0]):
        pass  # the test's own time limit is the bound
    after = [run(stub, ask(prompt)) for prompt in prompts]
    assert [output.token_ids for output in after] == expected
    for was, now in zip(before, after, strict=True):
        assert num_drafted(now) > 0.8 * num_drafted(was)
        assert now.finished.stats.num_accepted_tokens > 0.8 * was.finished.stats.num_accepted_tokens


@pytest.mark.full
def test_a_translated_draft_that_stalls_in_mid_stream_drafts_again_in_the_same_stream(
    translated: tuple[Stack, list[list[int]], list[list[int]]],
) -> None:
    stack, prompts, expected = translated
    stub = stub_of(stack.endpoint)
    stream = stub.Generate(ask(prompts[0], num_tokens=LONG))
    output = read_some(stream, 20)
    with frozen_part(stack, "draft"):
        while len(output.token_ids) < 80:
            output.add(next(stream))
    read_rest(stream, output)
    assert output.token_ids[:NUM_TOKENS] == expected[0]
    undisturbed = run(stub, ask(prompts[0], num_tokens=LONG))
    assert output.token_ids == undisturbed.token_ids
    assert num_drafted(output) > 0.4 * num_drafted(undisturbed)


# ---- targets that draft by themselves ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Stack, list[int]]]:
    """Return two targets with early exit and two kinds of heads, with n-grams in the coordinator; and their output."""
    folder = tmp_path_factory.mktemp("local")
    target = build_tiny_model(
        "llama", folder / "target", vocabulary_size=VOCABULARY, logit_spread=1.5, num_layers=3, context=2048
    )
    config = as_speculators(flat := eagle3_config(WIDTH, VOCABULARY, 40), [1, 2, 3])
    heads = {
        "eagle3": write_eagle3(folder / "eagle3", config, eagle3_tensors(flat)),
        "medusa": write_medusa(folder / "medusa", medusa_tensors(WIDTH, VOCABULARY)),
    }
    kinds = ["early-exit:2", *(f"{kind}:{path}" for kind, path in heads.items())]
    flags = [word for kind in kinds for word in ("--local-draft", kind)]
    expected = TargetAlone(target).greedy(PROMPT, NUM_TOKENS)
    with Stack(
        target, num_targets=2, target_arguments=[*flags, "--num-threads", "1"],
        coordinator_arguments=("--lookup", "ngram"),
    ) as stack:  # fmt: skip
        yield stack, expected


def holders(stack: Stack) -> dict[str, int]:
    """Return the number of sessions on each target."""
    pools = stub_of(stack.endpoint).GetInfo(pb.GetInfoRequest()).pools
    sessions = {replica.address: replica.num_sessions for pool in pools for replica in pool.replicas}
    targets = [part for part in stack.parts.values() if part.module == "target_service"]
    return {part.name: sessions.get(part.address, 0) for part in targets}


def drafting_pools(output: Output) -> set[str]:
    return {detail.draft_pool for detail in output.details if detail.source == pb.TOKEN_SOURCE_ACCEPTED}


@pytest.mark.full
def test_streams_leave_a_hung_target_and_get_the_same_local_drafts_elsewhere(
    local: tuple[Stack, list[int]],
) -> None:
    stack, expected = local
    stub = stub_of(stack.endpoint)
    before = {pool: run(stub, ask(PROMPT, pool)) for pool in POOLS}
    for pool, output in before.items():
        assert output.token_ids == expected, pool
        assert num_drafted(output) > 20, pool
    streams = {pool: stub.Generate(ask(PROMPT, pool)) for pool in POOLS}
    outputs = {pool: read_some(stream, 8) for pool, stream in streams.items()}
    names = list(holders(stack))
    with frozen_part(stack, names[0]), ThreadPoolExecutor() as readers:
        list(readers.map(lambda pool: read_rest(streams[pool], outputs[pool]), POOLS))
        for pool in POOLS:
            assert outputs[pool].token_ids == expected, pool
            # Where no text is found, the target's first drafts are.
            assert drafting_pools(outputs[pool]) <= {pool, *(LOCAL_POOLS[:1] if pool == "ngram" else ())}
            assert num_drafted(outputs[pool]) > num_drafted(before[pool]) / 2, pool
    with frozen_part(stack, names[1]):
        # The one that hung serves everything now, with all its drafts: what it was in the middle of disturbs nothing.
        for pool in POOLS:
            output = run(stub, ask(PROMPT, pool))
            assert output.token_ids == expected, pool
            assert num_drafted(output) > 0.8 * num_drafted(before[pool]), pool


@pytest.mark.full
def test_streams_wait_for_the_only_target_while_it_hangs_and_then_draft_again(local: tuple[Stack, list[int]]) -> None:
    stack, expected = local
    stub = stub_of(stack.endpoint)
    names = list(holders(stack))
    with frozen_part(stack, names[1]):
        while holders(stack)[names[1]]:
            time.sleep(0.05)
        streams = {pool: stub.Generate(ask(PROMPT, pool)) for pool in POOLS}
        outputs = {pool: read_some(stream, 4) for pool, stream in streams.items()}
        with frozen_part(stack, names[0]):
            time.sleep(4.0)
        with ThreadPoolExecutor() as readers:
            list(readers.map(lambda pool: read_rest(streams[pool], outputs[pool]), POOLS))
    for pool in POOLS:
        assert outputs[pool].token_ids == expected, pool
