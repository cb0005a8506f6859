"""Early exits of real models: their steps, and settings that are refused."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from specdec.contract.errors import InvalidRequest, Unsupported
from specdec.engine.base import SequenceSlice, StepPlan, Worker
from specdec.engine.loader import load_worker
from specdec.engine.model.early_exit import decoder_of
from specdec.engine.options import CompileOptions, LoadRequest
from specdec.settings.draft_specs import LocalDraftSpec
from tests.support.interpreted_kernels import num_replays, running
from tests.support.process_template import run_like
from tests.support.tiny_architectures import VOCABULARY_SIZE, build_tiny_architecture
from tests.support.tiny_models import build_tiny_model

AUTO_OPTIONS = CompileOptions()

NUM_LAYERS = 4
TOKENS = (5, 9, 30, 7, 11, 60, 8, 23, 45, 12, 14, 90, 81, 17, 33, 21, 20, 100, 64)
BLOCKS = (3, 1)
EXIT = LocalDraftSpec("early-exit", "early-exit", 2)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_model("llama", tmp_path_factory.mktemp("llama"), num_layers=NUM_LAYERS)


def load(
    directory: Path, *specs: LocalDraftSpec, compiling: CompileOptions = AUTO_OPTIONS, **options: object
) -> Worker:
    return load_worker(
        LoadRequest(
            str(directory),
            compiling=compiling,
            local_drafts=specs,
            **({"device": "cpu", "dtype": "float32", "num_kv_blocks": 8} | options),
        )
    )


def shortened(directory: Path, to: Path) -> Path:
    """Return a Hugging Face model of the first layers."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    model.model.layers = model.model.layers[: EXIT.num_layers]
    model.config.num_hidden_layers = EXIT.num_layers
    model.save_pretrained(to)
    return to


def full(token_ids: tuple[int, ...], start: int, num_rows: int = 1) -> StepPlan:
    return StepPlan((SequenceSlice(token_ids, start, BLOCKS, num_rows),))


def drafted(token_id: int, start: int, index: int, name: str = "early-exit") -> StepPlan:
    return StepPlan((SequenceSlice((token_id,), start, BLOCKS, 1, index),), local_draft=name)


@pytest.fixture
def compiling(request: pytest.FixtureRequest) -> Iterator[CompileOptions]:
    with running(request.param) as compiling:
        yield compiling


# Recording is slow, so each kind of CUDA graph runs with one of both models.
@pytest.mark.parametrize(
    ("compiling", "is_adapted"),
    [("native", False), ("native", True), ("eager", False), ("eager", True), ("cuda-graphs", False),
     pytest.param("cuda-graphs, paged", True, marks=pytest.mark.full)],
    indirect=["compiling"],
)  # fmt: skip
def test_a_draft_step_equals_the_forward_pass_of_the_first_layers(
    llama: Path, tmp_path: Path, compiling: CompileOptions, is_adapted: bool
) -> None:
    weight, bias = torch.eye(64), torch.zeros(64)
    if is_adapted:
        generator = torch.Generator().manual_seed(3)
        weight, bias = (part + torch.randn(part.shape, generator=generator) / 8 for part in (weight, bias))
        save_file({"weight": weight, "bias": bias}, tmp_path / "adapter.safetensors")
    worker = load(llama, replace(EXIT, path=str(tmp_path) if is_adapted else ""), compiling=compiling)
    short = AutoModelForCausalLM.from_pretrained(shortened(llama, tmp_path / "short"), dtype=torch.float32).eval()
    first = len(TOKENS) - 4
    worker.execute(full(TOKENS[:first], 0))
    with torch.inference_mode():
        normed = short.model(torch.tensor([TOKENS])).last_hidden_state[0, first:]
        expected = short.lm_head(torch.nn.functional.linear(normed, weight, bias))
    before = num_replays(compiling)
    for index, token_id in enumerate(TOKENS[first:]):  # over the end of a block
        row = worker.execute(drafted(token_id, first + index, index))
        torch.testing.assert_close(row[0], expected[index, : row.shape[1]], rtol=1e-4, atol=1e-4)
    assert num_replays(compiling) - before == (4 if compiling.backend == "cuda-graphs" else 0)


@pytest.mark.parametrize("model_type", ["gemma4", pytest.param("llama4", marks=pytest.mark.full)])
def test_a_draft_step_of_a_text_half_equals_its_first_layer(model_type: str, tmp_path: Path) -> None:
    model = build_tiny_architecture(model_type, tmp_path)
    worker = load(tmp_path, replace(EXIT, num_layers=1))
    text = decoder_of(model)
    text.layers = text.layers[:1]
    tokens = [token_id % VOCABULARY_SIZE for token_id in TOKENS]
    with torch.inference_mode():
        expected = model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0, -1]
    worker.execute(full(tuple(tokens[:-1]), 0))
    row = worker.execute(drafted(tokens[-1], len(tokens) - 1, 0))
    torch.testing.assert_close(row[0], expected[: row.shape[1]], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("compiling", ["native", "eager", "cuda-graphs"], indirect=True)
def test_draft_steps_do_not_change_the_verification_after_them(llama: Path, compiling: CompileOptions) -> None:
    """The verification has the same bits after any draft."""
    alone, drafting = load(llama, compiling=compiling), load(llama, EXIT, compiling=compiling)
    first = len(TOKENS) - 4
    for worker in (alone, drafting):
        worker.execute(full(TOKENS[:first], 0))
    for index, token_id in enumerate((TOKENS[first], 77, 78, 79)):
        drafting.execute(drafted(token_id, first + index, index))
    rows = [worker.execute(full(TOKENS[first:], first, 4)) for worker in (alone, drafting)]
    assert torch.equal(*rows)


def test_several_sessions_share_a_draft_step(llama: Path) -> None:
    worker = load(llama, EXIT)
    sessions = {0: TOKENS[:5], 1: TOKENS[5:14], 2: TOKENS[14:]}
    for block, token_ids in sessions.items():
        worker.execute(StepPlan((SequenceSlice(token_ids[:-1], 0, (block,), 1),)))
    slices = tuple(
        SequenceSlice((token_ids[-1],), len(token_ids) - 1, (block,), 1, 0) for block, token_ids in sessions.items()
    )
    together = worker.execute(StepPlan(slices, local_draft="early-exit"))
    alone = [worker.execute(StepPlan((part,), local_draft="early-exit")) for part in slices]
    assert torch.equal(together, torch.cat(alone))


@pytest.mark.parametrize("num_layers", [NUM_LAYERS, NUM_LAYERS + 1, 60_000])
def test_an_early_exit_after_the_last_layer_is_refused(llama: Path, num_layers: int) -> None:
    with pytest.raises(InvalidRequest, match=rf"has {NUM_LAYERS} layers, so an early exit runs 1 to {NUM_LAYERS - 1}"):
        load(llama, LocalDraftSpec("early-exit", "early-exit", num_layers))


def test_an_adapter_that_does_not_fit_is_refused_with_the_reason(llama: Path, tmp_path: Path) -> None:
    def refusal(name: str, tensors: dict[str, torch.Tensor] | bytes | None, layers: str = "2") -> str:
        path = tmp_path / name
        if isinstance(tensors, bytes):
            path.write_bytes(tensors)
        elif tensors is not None:
            save_file(tensors, path, metadata={"num_layers": layers})
        with pytest.raises(InvalidRequest) as caught:
            load(llama, LocalDraftSpec("early-exit", "early-exit", 2, str(path)))
        assert "\n" not in caught.value.message
        return caught.value.message

    weight, bias = torch.eye(64), torch.zeros(64)
    assert "does not exist" in refusal("missing.safetensors", None)
    assert "is not a readable safetensors file" in refusal("pickle.safetensors", b"\x80\x04cos\nsystem\n")
    assert "(32, 64)" in refusal("narrow.safetensors", {"weight": weight[:32].clone(), "bias": bias})
    assert "not weight (64, 64) and bias (64,)" in refusal("partial.safetensors", {"weight": weight})
    assert "not finite" in refusal("nan.safetensors", {"weight": weight * float("nan"), "bias": bias})
    many = {f"tensor {index}": torch.zeros(1) for index in range(2000)}
    assert len(refusal("many.safetensors", many)) < 600
    assert "is for 3 layers" in refusal("other.safetensors", {"weight": weight, "bias": bias}, "3")


def test_local_drafts_with_torch_compile_are_refused(llama: Path) -> None:
    with pytest.raises(Unsupported, match="use --compile-backend auto"):
        load(llama, EXIT, compiling=CompileOptions("inductor"))


def test_a_start_with_a_wrong_local_draft_ends_with_one_line(llama: Path) -> None:
    flags = ["--model", str(llama), "--device", "cpu", "--redis-url", "memory://", "--listen", "127.0.0.1:0"]
    ended = run_like("target_service", *flags, "--local-draft", f"early-exit:{NUM_LAYERS}")
    assert ended.returncode == 1
    errors = [line for line in ended.stderr.splitlines() if "early exit runs 1 to" in line]
    assert len(errors) == 1
    assert "Traceback" not in ended.stderr
