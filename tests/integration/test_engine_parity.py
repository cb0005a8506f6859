"""Logits of ragged paged batches against Hugging Face's own eager forward, architecture by architecture.

Whole sequences run through `transformers` once; the worker gets them in random pieces, several sequences a step, with
blocks in random order. Models have gain 1 and logits of spread 1, so that a mistake is larger than float32 rounding.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from specdec.contract.types import BLOCK_TOKENS
from specdec.engine.base import SequenceSlice, StepPlan, Worker
from specdec.engine.loader import load_worker
from specdec.engine.options import CompileOptions, LoadRequest
from tests.support.cuda_graphs_rig import CountedCapture
from tests.support.tiny_models import ARCHITECTURES, build_tiny_model

VOCABULARY_SIZE = 96
PADDED_ROWS = 8
NUM_BLOCKS = 64
BLOCKS_PER_SEQUENCE = 8
LLAMA_SHAPED = ("llama", "qwen2", "qwen3", "mistral")
#: Widths of the CUDA graphs: of the chunk lengths 7 is padded to 9, and 17 and 40 run eagerly.
WIDTHS = (1, 2, 3, 5, 9)
CHUNK_LENGTHS = (1, 1, 2, 5, 7, 17, 40)
#: A padding row of the embedding, which is not in the vocabulary; its keys and values are NaN in every layer.
NAN_TOKEN_ID = VOCABULARY_SIZE + 1


class Case:
    """A worker and the eager model it must equal."""

    def __init__(self, directory: Path, architecture: str, compile_backend: str) -> None:
        self.directory = directory
        self.capture = CountedCapture() if compile_backend == "cuda-graphs" else None
        # Qwen 3's width is otherwise 24, which native kernels do not support.
        overrides = {"head_dim": 32} if (architecture, compile_backend) == ("qwen3", "native") else {}
        build_tiny_model(
            architecture,
            directory,
            vocabulary_size=VOCABULARY_SIZE,
            padded_rows=PADDED_ROWS,
            context=256,
            gain=1.0,
            logit_spread=1.0,
            config_overrides=overrides,
        )
        self.eager = AutoModelForCausalLM.from_pretrained(directory, attn_implementation="eager").eval()
        self.eager.get_input_embeddings().weight.data[NAN_TOKEN_ID] = torch.nan
        self.eager.save_pretrained(directory)
        self.worker = load_worker(
            LoadRequest(
                str(directory),
                device="cpu",
                dtype="float32",
                num_kv_blocks=NUM_BLOCKS,
                compiling=CompileOptions(compile_backend, WIDTHS, capture=self.capture),
            )
        )
        self.num_replays_at_load = self.capture.num_replays if self.capture else 0
        ids = list(range(NUM_BLOCKS))
        random.Random(7).shuffle(ids)
        self.tables = [
            tuple(ids[start : start + BLOCKS_PER_SEQUENCE]) for start in range(0, NUM_BLOCKS, BLOCKS_PER_SEQUENCE)
        ]

    @torch.no_grad()
    def expected(self, token_ids: list[int]) -> torch.Tensor:
        return self.eager(torch.tensor([token_ids])).logits[0, :, :VOCABULARY_SIZE]


@pytest.fixture(
    scope="module",
    params=[
        *((architecture, "eager") for architecture in ARCHITECTURES),
        *((architecture, "native") for architecture in LLAMA_SHAPED),
        *((architecture, "cuda-graphs") for architecture in LLAMA_SHAPED),
    ],
    ids="-".join,
)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Case]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    architecture, compile_backend = request.param
    case = Case(tmp_path_factory.mktemp(architecture), architecture, compile_backend)
    yield case
    assert case.capture is None or case.capture.num_replays > case.num_replays_at_load
    torch.set_num_threads(threads)


def piece(token_ids: list[int], start: int, end: int, table: tuple[int, ...], num_logit_rows: int) -> SequenceSlice:
    return SequenceSlice(tuple(token_ids[start:end]), start, table[: -(-end // BLOCK_TOKENS)], num_logit_rows)


def random_tokens(rng: random.Random, length: int) -> list[int]:
    return [rng.randrange(2, VOCABULARY_SIZE) for _ in range(length)]


def run(worker: Worker, *slices: SequenceSlice) -> torch.Tensor:
    return worker.execute(StepPlan(slices))


def assert_equal(actual: torch.Tensor, expected: torch.Tensor) -> None:
    assert actual.dtype == torch.float32
    assert actual.shape == expected.shape
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-5)


def test_random_ragged_batches_equal_the_eager_forward(case: Case) -> None:
    rng = random.Random(3)
    sequences = [random_tokens(rng, length) for length in (90, 61, 33, 70, 17, 48)]
    expected = [case.expected(sequence) for sequence in sequences]
    done = [0] * len(sequences)
    while any(length < len(sequence) for length, sequence in zip(done, sequences, strict=True)):
        slices, rows = [], []
        for index, sequence in enumerate(sequences):
            if done[index] == len(sequence) or rng.random() < 0.2:
                continue
            end = min(len(sequence), done[index] + rng.choice(CHUNK_LENGTHS))
            num_rows = rng.randint(0, end - done[index])
            slices.append(piece(sequence, done[index], end, case.tables[index], num_rows))
            rows.append(expected[index][end - num_rows : end])
            done[index] = end
        if slices:
            assert_equal(run(case.worker, *slices), torch.cat(rows))


def test_a_truncated_sequence_rewrites_its_positions(case: Case) -> None:
    rng = random.Random(4)
    first = random_tokens(rng, 60)
    second = first[:37] + random_tokens(rng, 23)
    table = case.tables[0]
    run(case.worker, piece(first, 0, 60, table, 0))
    rows = run(case.worker, piece(second, 37, 42, table, 5))
    assert_equal(rows, case.expected(second)[37:42])
    rows = run(case.worker, piece(second, 42, 60, table, 18))
    assert_equal(rows, case.expected(second)[42:60])


def test_two_sequences_share_the_blocks_of_their_prefix(case: Case) -> None:
    rng = random.Random(5)
    prefix = random_tokens(rng, 2 * BLOCK_TOKENS)
    left, right = prefix + random_tokens(rng, 20), prefix + random_tokens(rng, 9)
    left_table = case.tables[0]
    right_table = left_table[:2] + case.tables[1][2:]
    run(case.worker, piece(left, 0, len(left), left_table, 0))
    rows = run(
        case.worker,
        piece(right, 32, len(right), right_table, 9),
        piece(left, len(left) - 1, len(left), left_table, 1),
    )
    assert_equal(rows, torch.cat((case.expected(right)[32:], case.expected(left)[-1:])))


def test_a_single_sequence_in_adjacent_blocks_equals_the_eager_forward(case: Case) -> None:
    tokens = random_tokens(random.Random(6), 80)
    expected, table = case.expected(tokens), tuple(range(20, 28))
    assert_equal(run(case.worker, piece(tokens, 0, 50, table, 50)), expected[:50])
    assert_equal(run(case.worker, piece(tokens, 50, 51, table, 1)), expected[50:51])
    assert_equal(run(case.worker, piece(tokens, 51, 56, table, 5)), expected[51:56])
    assert_equal(run(case.worker, piece(tokens, 56, 80, table, 3)), expected[77:])


def test_a_first_chunk_and_a_single_first_token_equal_the_eager_forward(case: Case) -> None:
    rng = random.Random(8)
    one, two = random_tokens(rng, 1), random_tokens(rng, 34)
    assert_equal(run(case.worker, piece(one, 0, 1, case.tables[0], 1)), case.expected(one))
    rows = run(case.worker, piece(two, 0, 34, case.tables[1], 2), piece(one, 0, 1, case.tables[0], 1))
    assert_equal(rows, torch.cat((case.expected(two)[-2:], case.expected(one))))


def test_nan_left_in_freed_blocks_does_not_reach_their_next_owners(case: Case) -> None:
    rng = random.Random(11)
    one, two = random_tokens(rng, 40), random_tokens(rng, 61)
    for table in case.tables[:2]:
        poisoned = run(case.worker, piece([NAN_TOKEN_ID] * 80, 0, 80, table, 1))
        assert poisoned.isnan().all()
    for start, end in ((0, 7), (7, 16), (16, 17), (17, 18), (18, 35), (35, 40)):
        rows = run(
            case.worker,
            piece(one, start, end, case.tables[0], end - start),
            piece(two, start + 21, end + 21, case.tables[1], end - start)
            if start
            else piece(two, 0, 28, case.tables[1], 7),
        )
        expected = (case.expected(one)[start:end], case.expected(two)[start + 21 : end + 21])
        assert_equal(rows, torch.cat(expected))


def test_a_step_without_logit_rows_returns_no_logits(case: Case) -> None:
    tokens = random_tokens(random.Random(9), 20)
    assert run(case.worker, piece(tokens, 0, 20, case.tables[0], 0)).shape == (0, VOCABULARY_SIZE)


def test_bfloat16_stays_close_to_float32(case: Case) -> None:
    worker = load_worker(LoadRequest(str(case.directory), device="cpu", dtype="bfloat16", num_kv_blocks=NUM_BLOCKS))
    tokens = random_tokens(random.Random(10), 60)
    run(worker, piece(tokens, 0, 40, case.tables[0], 0))
    rows = run(worker, piece(tokens, 40, 45, case.tables[0], 5))
    difference = (rows - case.expected(tokens)[40:45]).abs()
    assert rows.dtype == torch.float32
    assert worker.shape.dtype == "bfloat16"
    # 8 bits of mantissa through three layers, against logits of spread 1: a wrong mask costs ten times as much.
    assert difference.mean() < 0.05
