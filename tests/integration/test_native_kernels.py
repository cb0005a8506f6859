"""Guarantees of the native kernels: the same bits among any other rows, int8 near float32, and clear errors.

That they compute the right thing is shown in `test_engine_parity`.
"""

from __future__ import annotations

import os
import platform
import random
import shutil
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from specdec.checkpoints.artifact_cache import cache_directory
from specdec.contract.errors import InvalidRequest, Unsupported
from specdec.contract.types import BLOCK_TOKENS
from specdec.engine.base import SequenceSlice, StepPlan, Worker
from specdec.engine.loader import load_worker
from specdec.engine.options import CompileOptions, LoadRequest
from tests.support.choice_checks import check_coupled_choices
from tests.support.tiny_models import build_tiny_model

ROOT = Path(__file__).resolve().parents[2]
VOCABULARY_SIZE = 96
NUM_SEQUENCES = 5
BLOCKS_PER_SEQUENCE = 6
LENGTHS = (70, 3, 41, 90, 17)
#: Where services keep their kernels: those of this machine are compiled once for all tests.
KEPT_IN = cache_directory(os.environ) / "compiled"
#: 255 * 127 times as many inputs still fit into 32 bits.
WIDEST_PRODUCT = 66_311


@pytest.fixture(scope="module", params=["llama", "mistral"])
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_model(
        request.param, tmp_path_factory.mktemp(request.param), vocabulary_size=VOCABULARY_SIZE, context=256
    )


@pytest.fixture(params=[1, 2])
def num_threads(request: pytest.FixtureRequest):
    threads = torch.get_num_threads()
    yield request.param
    torch.set_num_threads(threads)


def load(directory: Path, backend: str = "native", kept_in: Path = KEPT_IN, **options: object) -> Worker:
    fixed = {"device": "cpu", "dtype": "float32", "num_kv_blocks": NUM_SEQUENCES * BLOCKS_PER_SEQUENCE}
    compiling = CompileOptions(backend, directory=kept_in)
    return load_worker(LoadRequest(str(directory), compiling=compiling, **(fixed | options)))


def tokens_of(sequence: int) -> list[int]:
    rng = random.Random(sequence)
    return [rng.randrange(2, VOCABULARY_SIZE) for _ in range(LENGTHS[sequence])]


def piece(sequence: int, start: int, end: int) -> SequenceSlice:
    first = sequence * BLOCKS_PER_SEQUENCE
    table = tuple(range(first, first + -(-end // BLOCK_TOKENS)))
    return SequenceSlice(tuple(tokens_of(sequence)[start:end]), start, table, end - start)


def run(worker: Worker, *slices: SequenceSlice) -> torch.Tensor:
    return worker.execute(StepPlan(slices))


def token_by_token(worker: Worker, sequence: int) -> torch.Tensor:
    return torch.cat([run(worker, piece(sequence, at, at + 1)) for at in range(LENGTHS[sequence])])


@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_a_row_has_the_same_bits_among_any_rows_chunks_and_number_of_threads(
    directory: Path, dtype: str, num_threads: int
) -> None:
    alone = load(directory, dtype=dtype, num_threads=1)
    expected = [token_by_token(alone, sequence) for sequence in range(NUM_SEQUENCES)]
    together = load(directory, dtype=dtype, num_threads=num_threads)
    rng = random.Random(1)
    done = [0] * NUM_SEQUENCES
    while done != list(LENGTHS):
        members = [sequence for sequence in range(NUM_SEQUENCES) if done[sequence] < LENGTHS[sequence]]
        rng.shuffle(members)
        ends = {member: min(LENGTHS[member], done[member] + rng.choice((1, 2, 5, 8, 9, 23))) for member in members}
        logits = run(together, *(piece(member, done[member], ends[member]) for member in members))
        wanted = torch.cat([expected[member][done[member] : ends[member]] for member in members])
        assert torch.equal(logits, wanted)
        done = [ends.get(sequence, done[sequence]) for sequence in range(NUM_SEQUENCES)]


def compile_with(flags: str, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put a compiler on the PATH that adds flags, and hide what is compiled; the last `-march` wins."""
    wrapper = directory / "g++"
    wrapper.write_text(f'#!/bin/sh\nexec {shutil.which("g++")} "$@" {flags}\n')
    wrapper.chmod(0o755)
    monkeypatch.setenv("PATH", str(directory), prepend=os.pathsep)
    hide_prebuilt(monkeypatch)


def hide_prebuilt(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have this process compile the kernels although `make setup` did."""
    monkeypatch.setattr("specdec.engine.kernels.library.prebuilt_libraries", partial(iter, ()))


def needs_x86(*features: str) -> pytest.MarkDecorator:
    """Skip unless this processor has these features."""
    there = Path("/proc/cpuinfo").read_text().split() if platform.machine() == "x86_64" else []
    return pytest.mark.skipif(not {"sse2", *features} <= {*there}, reason=f"needs an x86-64 with {features}")


@pytest.mark.parametrize(
    "processor",
    [
        # By default GCC does not fuse a sum with a single chain of products, and fuses one with several.
        pytest.param("znver3", marks=needs_x86("avx2", "fma")),
        # Wide vectors without integer instructions.
        pytest.param("sandybridge", marks=[needs_x86("avx"), pytest.mark.full]),
        pytest.param("x86-64", marks=[needs_x86(), pytest.mark.full]),
    ],
)
def test_a_row_has_the_same_bits_among_any_rows_on_processors_with_narrower_vectors(
    processor: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    heads_of_one_vector = {"num_attention_heads": 8, "num_key_value_heads": 8}
    path = build_tiny_model(
        "qwen2", tmp_path / "model", vocabulary_size=VOCABULARY_SIZE, config_overrides=heads_of_one_vector
    )
    compile_with(f"-march={processor}", tmp_path, monkeypatch)
    for dtype in ("float32", "int8"):
        alone, together = (load(path, kept_in=tmp_path / "kept", dtype=dtype) for _ in range(2))
        assert torch.equal(token_by_token(alone, 0), run(together, piece(0, 0, LENGTHS[0])))
    check_coupled_choices()


# Which instructions are used does not depend on the optimisation, and -O1 compiles in half the time.
@needs_x86()
@pytest.mark.full
@pytest.mark.parametrize("flags", ["-mno-avx512vnni", "-mno-avx512vnni -DSPECDEC_AS_BYTES -O1"])
def test_int8_steps_have_the_same_bits_with_any_instructions(
    tmp_path: Path, flags: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Neither width is a multiple of a group; the wider one is summed in parts.
    paths = [build_wide_model(tmp_path / str(mlp_width), mlp_width) for mlp_width in (101, 2053)]
    slices = [piece(0, 0, count) for count in (1, 2, 5, LENGTHS[0])]
    workers = [load(path, dtype="int8") for path in paths]
    best = [run(worker, rows) for worker in workers for rows in slices]
    compile_with(flags, tmp_path, monkeypatch)
    workers = [load(path, kept_in=tmp_path / "kept", dtype="int8") for path in paths]
    others = [run(worker, rows) for worker in workers for rows in slices]
    assert all(torch.equal(*pair) for pair in zip(others, best, strict=True))


def test_rows_of_pytorch_products_differ_among_other_rows(directory: Path) -> None:
    """Negative control: with PyTorch's products a row's bits depend on the other rows."""
    alone, together = load(directory, backend="eager"), load(directory, backend="eager")
    assert not torch.equal(token_by_token(alone, 0), run(together, piece(0, 0, LENGTHS[0])))


def test_int8_weights_stay_near_float32(directory: Path) -> None:
    exact, rounded = (run(load(directory, dtype=dtype), piece(0, 0, LENGTHS[0])) for dtype in ("float32", "int8"))
    assert 0 < (exact - rounded).abs().mean() < 0.05 * exact.std()


@pytest.mark.parametrize("mlp_width", [112, 101])  # a multiple of a group of inputs, and not
@pytest.mark.parametrize("backend", ["native", "eager"])
def test_int8_products_equal_those_of_the_rounded_weights(tmp_path: Path, mlp_width: int, backend: str) -> None:
    """The oracle is Hugging Face's forward pass over rounded weights. The negative control is PyTorch's kernel, which
    rounds rows more coarsely and is less close."""
    path = build_tiny_model(
        "llama", tmp_path, vocabulary_size=VOCABULARY_SIZE, config_overrides={"intermediate_size": mlp_width}
    )
    expected = logits_of_rounded_weights(path)
    logits = run(load(path, backend=backend, dtype="int8"), piece(0, 0, LENGTHS[0]))
    is_near = (logits - expected).abs().max() < 2e-3 * expected.std()
    assert is_near == (backend == "native")


@torch.no_grad()
def logits_of_rounded_weights(path: Path) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager").eval()
    for module in model.modules():
        if type(module) is torch.nn.Linear and module is not model.get_output_embeddings():
            scales = module.weight.abs().amax(dim=1, keepdim=True) / 127
            module.weight.copy_(torch.round(module.weight / scales) * scales)
    return model(torch.tensor([tokens_of(0)])).logits[0, :, :VOCABULARY_SIZE]


def build_wide_model(directory: Path, mlp_width: int) -> Path:
    return build_tiny_model(
        "llama", directory, vocabulary_size=VOCABULARY_SIZE, num_layers=1,
        config_overrides={"intermediate_size": mlp_width},
    )  # fmt: skip


def test_int8_sums_of_the_widest_products_do_not_overflow(tmp_path: Path) -> None:
    """All weights have the largest value, and so have both bytes of all numbers of a row but one."""
    path = build_wide_model(tmp_path, WIDEST_PRODUCT)
    weights = load_file(path / "model.safetensors")
    for name in ("gate_proj", "up_proj"):
        weight = weights[f"model.layers.0.mlp.{name}.weight"]
        weight.copy_(weight[0].clone())
    weights["model.layers.0.mlp.up_proj.weight"][0] *= (127 * 256) / (126 * 256 + 255)
    weights["model.layers.0.mlp.down_proj.weight"].fill_(1 / WIDEST_PRODUCT)
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    expected = logits_of_rounded_weights(path)
    logits = run(load(path, dtype="int8"), piece(0, 0, LENGTHS[0]))
    assert (logits - expected).abs().max() < 2e-3 * expected.std()


def test_wider_products_use_pytorch(tmp_path: Path) -> None:
    with pytest.raises(Unsupported, match="of this shape"):
        load(build_wide_model(tmp_path, WIDEST_PRODUCT + 1))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_rows_with_nans_or_infinities_stay_not_finite_in_int8(tmp_path: Path, value: float) -> None:
    path = build_tiny_model("llama", tmp_path, vocabulary_size=4096)
    weights = load_file(path / "model.safetensors")
    # One of the many tokens that the check before serving, which takes the same every time, does not read.
    weights["model.embed_tokens.weight"][7, 3] = value
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    bad, good = SequenceSlice((5, 7), 0, (0,), 1), SequenceSlice((5, 6), 0, (1,), 1)
    logits = run(load(path, dtype="int8"), bad, good)
    assert not torch.isfinite(logits[0]).any()
    assert torch.isfinite(logits[1]).all()


def test_a_token_outside_the_vocabulary_reads_no_memory(directory: Path) -> None:
    worker = load(directory)
    for token_id in (-1, VOCABULARY_SIZE):
        with pytest.raises(IndexError, match=r"token id -?\d+ is not in 0..95"):
            run(worker, SequenceSlice((5, token_id), 0, (0,), 1))


@pytest.mark.parametrize(
    "wrong",
    [
        pytest.param(SequenceSlice((5,), 256, tuple(range(17)), 1), id="a position past the context"),
        pytest.param(SequenceSlice((5, 6), 15, (0,), 1), id="a position that no block holds"),
        pytest.param(SequenceSlice((5,), 0, (NUM_SEQUENCES * BLOCKS_PER_SEQUENCE,), 1), id="a block past the pool"),
        pytest.param(SequenceSlice((5,), 0, (-1,), 1), id="a block before the pool"),
        pytest.param(SequenceSlice((5,), 0, (0,), 2), id="more rows of logits than tokens"),
    ],
)
def test_a_wrong_plan_touches_no_memory(directory: Path, wrong: SequenceSlice) -> None:
    worker = load(directory)
    with pytest.raises(IndexError, match=r"not in 0|does not fit"):
        run(worker, piece(1, 0, 3), wrong)
    assert len(run(worker, piece(1, 0, 3))) == 3


def test_a_refused_plan_copies_no_blocks(directory: Path) -> None:
    worker, untouched = load(directory), load(directory)
    for each in (worker, untouched):
        run(each, piece(1, 0, 2))
    copy_over_it = (0, BLOCKS_PER_SEQUENCE)
    with pytest.raises(IndexError, match=r"not in 0|does not fit"):
        worker.execute(StepPlan((SequenceSlice((5,), 0, (), 1),), (copy_over_it,)))
    assert torch.equal(run(worker, piece(1, 2, 3)), run(untouched, piece(1, 2, 3)))


def test_an_unsupported_model_is_refused_by_the_named_backend_and_runs_eagerly_by_default(tmp_path: Path) -> None:
    gpt2 = build_tiny_model("gpt2", tmp_path, vocabulary_size=VOCABULARY_SIZE)
    with pytest.raises(Unsupported, match="gpt2") as raised:
        load(gpt2)
    assert raised.value.field == "compile_backend"
    assert len(run(load(gpt2, backend="auto"), piece(1, 0, 3))) == 3


def test_an_unknown_backend_is_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="'nowhere'") as raised:
        load(tmp_path, backend="nowhere")
    assert raised.value.field == "compile_backend"
    there_are = raised.value.message.partition("choose one of ")[2].split(", ")
    assert {"auto", "native", "eager", "inductor"} <= set(there_are)
    assert len(set(there_are)) == len(there_are)
    assert not [name for name in there_are if "debug" in name or "TESTING" in name]
