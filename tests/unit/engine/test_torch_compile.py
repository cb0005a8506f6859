"""Steps compiled by `torch.compile` against eager ones, and backends that do not exist."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from specdec.contract.errors import InvalidRequest, Unsupported
from specdec.contract.types import BLOCK_TOKENS
from specdec.engine.base import SequenceSlice, StepPlan, Worker
from specdec.engine.loader import load_worker
from specdec.engine.options import CompileOptions, LoadRequest, row_counts
from tests.support.tiny_models import SLIDING_WINDOW, build_tiny_model

VOCABULARY_SIZE = 96
NUM_BLOCKS = 24
#: Adjacent blocks, and scattered ones.
TABLES = (tuple(range(3, 11)), (19, 2, 14, 0, 22, 13, 1, 18))
#: Steps of at most six rows are compiled.
ROWS = (1, 3, 6)
#: A padding row of the embedding, which is not in the vocabulary; its keys and values are NaN in every layer.
NAN_TOKEN_ID = VOCABULARY_SIZE + 1

#: A window in the second layer alone.
MIXED_LAYERS = {
    "layer_types": ["full_attention", "sliding_attention"],
    "use_sliding_window": True,
    "sliding_window": SLIDING_WINDOW,
    "max_window_layers": 1,
}


def load(model: Path, backend: str, *, dtype: str = "float32", **options: object) -> Worker:
    compiling = CompileOptions(backend, **({"row_counts": ROWS} | options))
    return load_worker(
        LoadRequest(str(model), device="cpu", dtype=dtype, num_kv_blocks=NUM_BLOCKS, compiling=compiling)
    )


def build(architecture: str, directory: Path, **options: object) -> Path:
    sizes = {"vocabulary_size": VOCABULARY_SIZE, "padded_rows": 8, "num_layers": 2, "context": 256}
    return build_tiny_model(architecture, directory, gain=1.0, logit_spread=1.0, **sizes, **options)


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = build("llama", tmp_path_factory.mktemp("llama"))
    model = AutoModelForCausalLM.from_pretrained(directory)
    model.get_input_embeddings().weight.data[NAN_TOKEN_ID] = torch.nan
    model.save_pretrained(directory)
    return directory


class Pair:
    """An eager and a compiled worker that run the same steps."""

    def __init__(self, model: Path, backend: str, *, atol: float = 1e-4, **options: object) -> None:
        self.eager = load(model, "eager", **options)
        self.compiled = load(model, backend, **options)
        self._atol = atol

    def run(self, *slices: SequenceSlice) -> torch.Tensor:
        """Run one step on both and require logits that are equal up to rounding."""
        expected, actual = (worker.execute(StepPlan(slices)) for worker in (self.eager, self.compiled))
        assert actual.shape == expected.shape
        torch.testing.assert_close(actual, expected, rtol=0, atol=self._atol, equal_nan=True)
        return actual


def piece(tokens: list[int], start: int, end: int, table: tuple[int, ...], num_rows: int) -> SequenceSlice:
    return SequenceSlice(tuple(tokens[start:end]), start, table[: -(-end // BLOCK_TOKENS)], num_rows)


def random_tokens(seed: int, length: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(2, VOCABULARY_SIZE) for _ in range(length)]


def check_steps_of_one_sequence(pair: Pair) -> None:
    """Decode from the first token on, with every compiled width and one beyond, block by block, with rollbacks."""
    for table in TABLES:
        first, second = random_tokens(1, 128), random_tokens(2, 128)
        pair.run(piece(first, 0, 1, table, 1))  # the lone first token reads its own block alone
        done = 1
        for width in (1, 2, 3, 4, 5, 6, 7, 1, 1, 3, 2, 6):
            pair.run(piece(first, done, done + width, table, width))
            done += width
        assert done > SLIDING_WINDOW + BLOCK_TOKENS
        tokens = first[: done - 5] + second[done - 5 :]
        for start, end, num_rows in ((done - 5, done - 2, 3), (done - 2, done - 1, 1), (done - 1, done + 5, 0)):
            pair.run(piece(tokens, start, end, table, num_rows))
        pair.run(piece(tokens, done + 5, 120, table, 2))  # a chunk with more rows than any compiled step
        pair.run(piece(tokens, 120, 122, table, 1))


@pytest.mark.parametrize(
    ("architecture", "overrides"),
    [
        ("llama", {}),
        pytest.param("qwen2", {}, marks=pytest.mark.full),
        pytest.param("mistral", {}, marks=pytest.mark.full),
        pytest.param("qwen3", MIXED_LAYERS, marks=pytest.mark.full),
    ],
)
def test_steps_of_one_sequence_equal_eager_ones(architecture: str, overrides: dict, tmp_path: Path) -> None:
    pair = Pair(build(architecture, tmp_path, config_overrides=overrides), "aot_eager")
    # Whatever context and width, nothing is compiled once a service is ready.
    with torch.compiler.set_stance("fail_on_recompile"):
        check_steps_of_one_sequence(pair)


def test_steps_between_compiled_ones_stay_eager_and_share_the_cache(llama: Path) -> None:
    pair = Pair(llama, "aot_eager", row_counts=(3,))
    left, right = random_tokens(3, 100), random_tokens(4, 100)
    pair.run(piece(left, 0, 40, TABLES[0], 1), piece(right, 0, 33, TABLES[1], 1))
    pair.run(piece(left, 40, 43, TABLES[0], 3))
    pair.run(piece(right, 33, 34, TABLES[1], 1))
    pair.run(piece(left, 43, 45, TABLES[0], 2), piece(right, 34, 37, TABLES[1], 3))
    pair.run(piece(left, 45, 46, TABLES[0], 1))


def test_nan_left_in_freed_blocks_is_not_read_by_a_compiled_step(llama: Path) -> None:
    pair = Pair(llama, "aot_eager", row_counts=(3,))
    assert pair.run(piece([NAN_TOKEN_ID] * 60, 0, 60, TABLES[0], 60)).isnan().all()
    tokens = random_tokens(5, 60)
    for start in range(0, 60, 3):
        logits = pair.run(piece(tokens, start, start + 3, TABLES[0], 3))
        assert logits.isfinite().all()


def test_compiled_int8_steps_equal_eager_ones(llama: Path) -> None:
    # Activations are rounded to bfloat16: where the last bit of a float32 differs, so may one of those.
    pair = Pair(llama, "aot_eager", dtype="int8", row_counts=(3,), atol=0.05)
    tokens = random_tokens(6, 60)
    pair.run(piece(tokens, 0, 40, TABLES[0], 1))
    pair.run(piece(tokens, 40, 43, TABLES[0], 3))
    pair.run(piece(tokens, 43, 44, TABLES[0], 1))


@pytest.mark.full
def test_inductor_steps_equal_eager_ones(tmp_path: Path) -> None:
    pair = Pair(build("qwen3", tmp_path, config_overrides=MIXED_LAYERS), "inductor")
    with torch.compiler.set_stance("fail_on_recompile"):
        check_steps_of_one_sequence(pair)


def test_graphs_have_the_row_counts_of_a_services_steps() -> None:
    assert row_counts(2) == (1, 2)
    assert row_counts(5) == (1, 2, 3, 5)
    assert row_counts(6) == (1, 2, 3, 5, 9)
    assert row_counts(17) == (1, 2, 3, 5, 9, 17)


def test_an_unknown_backend_is_refused_before_anything_is_loaded() -> None:
    with pytest.raises(InvalidRequest, match=r"compile_backend 'tensorflow' .* eager, .*inductor") as raised:
        load(Path(__file__).parent, "tensorflow")
    assert raised.value.field == "compile_backend"
    assert "\n" not in raised.value.message


def test_a_backend_that_cannot_compile_is_refused_in_one_line(llama: Path, capfd: pytest.CaptureFixture[str]) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("no such device\nand much more")

    torch._dynamo.register_backend(broken, "broken_for_a_test")
    with pytest.raises(Unsupported, match=r"compile_backend 'broken_for_a_test' cannot .*: no such device$"):
        load(llama, "broken_for_a_test")
    assert capfd.readouterr().err == ""


def test_a_model_of_another_shape_stays_eager_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    worker = load(build_tiny_model("gpt2", tmp_path, num_layers=1), "aot_eager")
    assert [record.levelname for record in caplog.records if record.name.startswith("specdec")] == ["WARNING"]
    assert "type gpt2" in caplog.text
    assert worker.execute(StepPlan((piece([2, 3], 0, 2, TABLES[0], 2),))).shape == (2, 256)
