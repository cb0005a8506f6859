"""Compiled steps against eager ones, what is kept on disk, and backends that are not there."""

from __future__ import annotations

import logging
import os
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from specdec.engine.base import SequenceSlice, StepPlan, Worker
from specdec.engine.compiled.graph_package import MAX_KEPT_BYTES, PackageKey, PackageStore
from specdec.engine.loader import load_worker
from specdec.engine.model.options import CompileOptions, row_counts
from specdec.errors import InvalidRequest, Unsupported
from specdec.types import BLOCK_TOKENS
from tests.support.tiny_models import SLIDING_WINDOW, build_tiny_model

VOCABULARY_SIZE = 96
NUM_BLOCKS = 24
#: Side by side, and scattered.
TABLES = (tuple(range(3, 11)), (19, 2, 14, 0, 22, 13, 1, 18))
#: Graphs of other row counts than services have, so that few are compiled here: a step of 1 or 2 is padded to 3.
ROWS = (1, 3, 6)
#: A padded row of the embedding, so no token of the vocabulary; its keys and values are NaN in every layer.
NAN_TOKEN_ID = VOCABULARY_SIZE + 1

#: A window in the second layer alone.
MIXED_LAYERS = {
    "layer_types": ["full_attention", "sliding_attention"],
    "use_sliding_window": True,
    "sliding_window": SLIDING_WINDOW,
    "max_window_layers": 1,
}


def load(model: Path, backend: str, *, dtype: str = "float32", **options: object) -> Worker:
    compiling = CompileOptions(backend, **({"row_counts": ROWS, "is_tuned": False} | options))
    return load_worker(str(model), device="cpu", dtype=dtype, num_kv_blocks=NUM_BLOCKS, compiling=compiling)


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


def compiled_graphs(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What was said of each graph that was compiled."""
    return [record.progress for record in caplog.records if hasattr(record, "progress")]


class Pair:
    """An eager and a compiled worker that are given the same steps."""

    def __init__(self, model: Path, backend: str, *, atol: float = 1e-4, **options: object) -> None:
        self.eager = load(model, "eager", **options)
        self.compiled = load(model, backend, **options)
        self._atol = atol

    def run(self, *slices: SequenceSlice) -> torch.Tensor:
        """One step of both; the logits must be equal but for rounding."""
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
    """Decoding from the first token on, every width a graph takes and one beyond, block by block, with rollbacks."""
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
        pair.run(piece(tokens, done + 5, 120, table, 2))  # a chunk longer than any graph
        pair.run(piece(tokens, 120, 122, table, 1))


@pytest.mark.parametrize(
    ("architecture", "overrides"),
    [
        ("llama", {}),
        ("qwen2", {}),
        ("mistral", {}),
        ("qwen3", MIXED_LAYERS),
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


def test_int8_weights_are_the_same_when_compiled(llama: Path) -> None:
    # Activations are rounded to bfloat16: where the last bit of a float32 differs, so may one of those.
    pair = Pair(llama, "aot_eager", dtype="int8", row_counts=(3,), atol=0.05)
    tokens = random_tokens(6, 60)
    pair.run(piece(tokens, 0, 40, TABLES[0], 1))
    pair.run(piece(tokens, 40, 43, TABLES[0], 3))
    pair.run(piece(tokens, 43, 44, TABLES[0], 1))


@pytest.mark.full
def test_inductor_packages_equal_eager_steps_and_the_next_start_compiles_none(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO, logger="specdec")
    model, kept, temporary = build("mistral", tmp_path / "model"), tmp_path / "kept", tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    key = PackageKey(load(model, "eager").shape.model_fingerprint, "float32", is_tuned=False)
    package = kept / f"{key.digest(3)}.pt2"
    kept.mkdir()
    package.write_bytes(b"damaged")
    forgotten = kept / "forgotten.pt2"
    forgotten.touch()
    os.truncate(forgotten, MAX_KEPT_BYTES)  # a hole: it takes no room
    os.utime(forgotten, (0, 0))

    check_steps_of_one_sequence(Pair(model, "inductor", row_counts=(3,), directory=kept))
    assert compiled_graphs(caplog) == ["1/1"]
    written = package.stat().st_mtime_ns
    check_steps_of_one_sequence(Pair(model, "inductor", row_counts=(3,), directory=kept))
    assert compiled_graphs(caplog) == ["1/1"]
    assert package.stat().st_mtime_ns == written

    assert not forgotten.exists()  # with the new package there was too much

    package.chmod(0o666)
    assert PackageStore(kept).load(key, 3) is None  # anyone may have written it
    package.chmod(0o644)
    assert PackageStore(kept).load(key, 3) is not None
    content = bytearray(package.read_bytes())
    content[len(content) // 2] ^= 0xFF
    package.write_bytes(content)
    assert PackageStore(kept).load(key, 3) is None
    assert list(kept.iterdir()) == [package]
    assert not list(temporary.iterdir())


@pytest.mark.parametrize("change", ["model_fingerprint", "dtype", "is_tuned"])
def test_a_package_of_something_else_has_another_name(change: str) -> None:
    key = PackageKey("f", "float32", is_tuned=True)
    other = replace(key, **{change: "int8" if change != "is_tuned" else False})
    assert key.digest(1) == replace(key).digest(1)
    assert len({key.digest(1), key.digest(2), other.digest(1)}) == 3


def test_graphs_have_the_row_counts_that_a_service_meets() -> None:
    assert row_counts(2) == (1, 2)
    assert row_counts(5) == (1, 2, 3, 5)
    assert row_counts(6) == (1, 2, 3, 5, 9)
    assert row_counts(17) == (1, 2, 3, 5, 9, 17)


def test_an_unknown_backend_is_refused_before_anything_is_loaded() -> None:
    with pytest.raises(InvalidRequest, match=r"compile_backend 'tensorflow' .* eager, .*inductor") as raised:
        load(Path(__file__).parent, "tensorflow")
    assert raised.value.field == "compile_backend"
    assert "\n" not in raised.value.message


def test_a_backend_that_cannot_compile_says_so_in_one_line(llama: Path, capfd: pytest.CaptureFixture[str]) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("no such device\nand much more")

    torch._dynamo.register_backend(broken, "broken_for_a_test")
    with pytest.raises(Unsupported, match=r"compile_backend 'broken_for_a_test' cannot .*: no such device$"):
        load(llama, "broken_for_a_test")
    assert capfd.readouterr().err == ""


def test_a_directory_that_cannot_be_written_is_named(llama: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(InvalidRequest, match="file/compiled: Not a directory; set XDG_CACHE_HOME"):
        load(llama, "inductor", directory=tmp_path / "file" / "compiled")


def test_a_model_without_a_graph_stays_eager_with_one_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    worker = load(build_tiny_model("gpt2", tmp_path, num_layers=1), "aot_eager")
    assert [record.levelname for record in caplog.records if record.name.startswith("specdec")] == ["WARNING"]
    assert "type gpt2" in caplog.text
    assert worker.execute(StepPlan((piece([2, 3], 0, 2, TABLES[0], 2),))).shape == (2, 256)
