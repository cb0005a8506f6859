"""int8 weights on a GPU: held in int8 from loading on, multiplied by our kernel, in CUDA graphs and eager steps.

The oracle is Hugging Face's own forward pass over the rounded weights. Kernels run in Triton's interpreter, in float32,
so only the order of sums differs.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from specdec.contract.errors import Unsupported
from specdec.engine.base import SequenceSlice, StepPlan, Worker
from specdec.engine.linear.int8 import Int8Linear, round_to_int8
from specdec.engine.loader import WholeModel, load_worker
from specdec.engine.model.checkpoint_model import pick_dtype
from specdec.engine.options import CompileOptions, LoadRequest
from tests.support.cuda_graphs_rig import CountedCapture
from tests.support.interpreted_kernels import few_programs
from tests.support.tiny_models import build_tiny_model

pytest.importorskip("triton", reason="Triton is not installed here: its kernels were not interpreted")
pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="kernels are compiled on this machine: see tests/gpu"
)

VOCABULARY_SIZE, NUM_TOKENS, NUM_LAST = 96, 24, 3
CUDA = torch.device("cuda")


def build(architecture: str, directory: Path) -> Path:
    return build_tiny_model(
        architecture, directory, vocabulary_size=VOCABULARY_SIZE, context=256, num_layers=2, gain=1.0, logit_spread=1.0
    )


@pytest.fixture(scope="module", autouse=True)
def cheaply() -> Iterator[None]:
    with few_programs():
        yield


@pytest.fixture(scope="module")
def qwen2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a model with biases."""
    return build("qwen2", tmp_path_factory.mktemp("qwen2"))


def load(
    directory: Path, backend: str = "cuda-graphs", capture: CountedCapture | None = None, *, self_check: bool = False
) -> Worker:
    """Load a model on the CPU with the products of a GPU, which a `capture` function turns on."""
    compiling = CompileOptions(backend, (1, 3), capture=capture or CountedCapture(warms_up=False))
    return load_worker(
        LoadRequest(
            str(directory), device="cpu", dtype="int8", num_kv_blocks=16, compiling=compiling, self_check=self_check
        )
    )


def logits_of(worker: Worker, tokens: list[int]) -> torch.Tensor:
    """Run a prompt and then a verification; return the verification's logits."""
    blocks, first = tuple(range(2)), NUM_TOKENS - NUM_LAST
    worker.execute(StepPlan((SequenceSlice(tuple(tokens[:first]), 0, blocks, 0),)))
    return worker.execute(StepPlan((SequenceSlice(tuple(tokens[first:]), first, blocks, NUM_LAST),)))


def rounded_logits(directory: Path, tokens: list[int]) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(directory, attn_implementation="eager").eval()
    with torch.no_grad():
        for module in model.modules():
            if type(module) is torch.nn.Linear and module is not model.get_output_embeddings():
                module.weight.copy_(round_to_int8(module.weight).rounded())
        return model(torch.tensor([tokens])).logits[0, -NUM_LAST:, :VOCABULARY_SIZE]


def random_tokens() -> list[int]:
    return torch.randint(2, VOCABULARY_SIZE, (NUM_TOKENS,), generator=torch.Generator().manual_seed(1)).tolist()


def test_steps_in_cuda_graphs_give_the_logits_of_the_rounded_weights(qwen2: Path) -> None:
    capture, tokens = CountedCapture(warms_up=False), random_tokens()
    worker = load(qwen2, capture=capture, self_check=True)
    before = capture.num_replays
    torch.testing.assert_close(logits_of(worker, tokens), rounded_logits(qwen2, tokens), rtol=0, atol=1e-4)
    assert capture.num_replays == before + 1
    assert worker.shape.dtype == "int8"


@pytest.mark.parametrize("architecture", ["qwen3", "gpt_neox"])
def test_eager_steps_and_other_architectures_give_the_logits_of_the_rounded_weights(
    architecture: str, tmp_path: Path
) -> None:
    directory, tokens = build(architecture, tmp_path), random_tokens()
    worker = load(directory, "eager")
    torch.testing.assert_close(logits_of(worker, tokens), rounded_logits(directory, tokens), rtol=0, atol=1e-4)


def test_weights_are_rounded_before_the_kv_pool_is_sized(qwen2: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = {}

    def look(part: WholeModel, count: Callable[[], int]) -> int:
        model = part.model
        linears = [module for module in model.modules() if isinstance(module, torch.nn.Linear)]
        held = [module for module in model.modules() if isinstance(module, Int8Linear)]
        seen["plain"] = [module for module in linears if module is not model.get_output_embeddings()]
        seen["bytes"] = sum(part.nbytes for module in held for part in module.held)
        seen["weights"] = sum(module.out_features * module.in_features for module in held)
        seen["outputs"] = sum(module.out_features for module in held)
        return count()

    monkeypatch.setattr(WholeModel, "agree_on_blocks", look)
    load(qwen2, "eager")
    assert seen["plain"] == []
    assert seen["bytes"] == seen["weights"] + 4 * seen["outputs"]  # a byte each, and a scale for each output


@pytest.mark.parametrize("backend", ["aot_eager", "native"])
def test_backends_without_an_int8_product_are_refused_by_name(qwen2: Path, backend: str) -> None:
    with pytest.raises(Unsupported, match="dtype int8 on cpu runs in CUDA graphs and eager steps only") as refusal:
        load(qwen2, backend)
    assert refusal.value.field == "compile_backend"


def test_int8_without_triton_is_refused(qwen2: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "triton", None)
    with pytest.raises(Unsupported, match="dtype needs Triton, which cannot be imported"):
        load(qwen2)


def test_on_a_gpu_everything_except_int8_weights_has_sixteen_bits() -> None:
    assert pick_dtype("int8", CUDA, torch.float32) == torch.bfloat16
    assert pick_dtype("int8", CUDA, torch.float16) == torch.float16
    assert pick_dtype("int8", CUDA) == torch.bfloat16
    assert pick_dtype("int8", torch.device("cpu"), torch.bfloat16) == torch.float32


def test_a_gpu_uses_row_products_for_int8_and_pytorch_otherwise() -> None:
    options = CompileOptions()
    assert options.multiplies_rows(CUDA, is_int8=True)
    assert not options.multiplies_rows(CUDA, is_int8=False)
    assert not options.multiplies_rows(torch.device("cpu"), is_int8=True)


def test_wrong_int8_products_are_refused_at_start(qwen2: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control of the comparison with the model's own forward pass."""
    joined = Int8Linear.joined

    def wrong(self: Int8Linear, others: list[Int8Linear]) -> object:
        for linear in (self, *others):
            linear.held = linear.held._replace(scales=linear.held.scales.roll(1))
        return joined(self, others)

    monkeypatch.setattr(Int8Linear, "joined", wrong)
    with pytest.raises(Unsupported, match="computed differently here than by transformers"):
        load(qwen2, "eager", self_check=True)
