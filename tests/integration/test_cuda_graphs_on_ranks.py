"""A model on three ranks whose steps are recorded as on a GPU, but on a tape and with Triton's interpreter.

Sums over ranks are operations of a recording like any other. The references are one process and Hugging Face. The
self-check runs where steps are compared with those; it would only repeat that elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from specdec.contract.errors import SpecdecError, Unsupported
from specdec.engine.base import StepPlan, Worker
from specdec.engine.loader import load_worker
from specdec.engine.options import EAGER, CompileOptions, LoadRequest
from tests.support.cuda_graphs_rig import NUM_BLOCKS, CountedCapture, piece, random_tokens
from tests.support.interpreted_kernels import require_interpreter
from tests.support.rank_rig import RankRig
from tests.support.tiny_models import build_tiny_model

NUM_RANKS = 3
#: Embedding, MLP and head do not divide by three, so some ranks have padding rows.
OVERRIDES = {"num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 16, "intermediate_size": 100}
RECORDED = {"backend": "cuda-graphs", "row_counts": [1, 3], "records": True}
PAGED = RECORDED | {"attention": "paged"}
#: The pool's last block belongs to a session; the scratch block for padding follows it.
TABLES = (NUM_BLOCKS - 1, 1, 2, 0, 9), (5, 7, 4, 6, 8)


@pytest.fixture(scope="module")
def rig() -> Iterator[RankRig]:
    require_interpreter()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with RankRig(NUM_RANKS, interprets_kernels=True) as rig:
        yield rig
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_model("qwen3", tmp_path_factory.mktemp("model"), vocabulary_size=97, context=256, num_layers=1,
                            gain=1.0, logit_spread=1.0, config_overrides=OVERRIDES)  # fmt: skip


def plans() -> list[StepPlan]:
    """Return a prompt, a verification, one beside a draft step, a draft step, and a step too large to be recorded."""
    one, two = random_tokens(1, 70), random_tokens(2, 70)
    return [
        StepPlan((piece(one, 0, 40, TABLES[0], 5), piece(two, 0, 9, TABLES[1], 1))),
        StepPlan((piece(one, 40, 43, TABLES[0], 3),)),
        StepPlan((piece(one, 43, 46, TABLES[0], 2), piece(two, 9, 10, TABLES[1], 1))),
        StepPlan((piece(one, 46, 47, TABLES[0], 1),)),
        StepPlan((piece(one, 47, 60, TABLES[0], 1), piece(two, 10, 30, TABLES[1], 2))),
    ]


NUM_RECORDED_PLANS = 3


def load_alone(model: Path, **fields: Any) -> Worker:
    return load_worker(LoadRequest(str(model), device="cpu", num_kv_blocks=NUM_BLOCKS, **fields))


@pytest.mark.full
@pytest.mark.parametrize("options", [RECORDED, PAGED], ids=["gathered", "paged"])
def test_recorded_steps_of_three_ranks_give_the_logits_of_one_process(
    options: dict[str, Any], model: Path, rig: RankRig
) -> None:
    divided = rig.load(model, num_kv_blocks=NUM_BLOCKS, compiling=options)
    alone = load_alone(model, dtype="float32", compiling=CompileOptions(EAGER))
    before = rig.capture.num_replays
    for plan in plans():
        torch.testing.assert_close(divided.execute(plan), alone.execute(plan), rtol=0, atol=1e-5)
    assert rig.capture.num_replays == before + NUM_RECORDED_PLANS
    eager = AutoModelForCausalLM.from_pretrained(model, attn_implementation="eager").eval()
    with torch.no_grad():
        expected = eager(torch.tensor([random_tokens(2, 70)[:30]])).logits[0, -2:]
    torch.testing.assert_close(divided.execute(plans()[-1])[-2:], expected, rtol=0, atol=1e-5)


def test_parts_are_rounded_to_int8_as_the_whole_model_is(model: Path, rig: RankRig) -> None:
    """A scale depends on all inputs of an output, of which a rank holds a third."""
    divided = rig.load(model, dtype="int8", num_kv_blocks=NUM_BLOCKS, compiling=PAGED, self_check=False)
    compiling = CompileOptions("cuda-graphs", (1, 3), capture=CountedCapture(warms_up=False))
    alone = load_alone(model, dtype="int8", compiling=compiling, self_check=False)
    assert divided.shape.dtype == "int8"
    for plan in plans():
        torch.testing.assert_close(divided.execute(plan), alone.execute(plan), rtol=0, atol=1e-5)


def bits_alone_and_in_a_batch(worker: Worker) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the logits of the same token as the only one of a step, and beside other tokens."""
    first, verification, company, *_ = plans()
    worker.execute(first)
    worker.execute(verification)
    one = random_tokens(1, 70)
    alone = worker.execute(StepPlan((piece(one, 43, 44, TABLES[0], 1),)))
    beside = StepPlan((piece(one, 43, 46, TABLES[0], 3), *company.slices[1:]))
    return alone[0], worker.execute(beside)[0]


@pytest.mark.full
def test_deterministic_ranks_give_a_row_the_same_bits_alone_and_in_a_batch(model: Path, rig: RankRig) -> None:
    try:
        worker = rig.load(model, dtype="bfloat16", num_kv_blocks=NUM_BLOCKS, self_check=False,
                          compiling=PAGED | {"backend": "auto", "is_deterministic": True})  # fmt: skip
    except Unsupported as error:
        if "logits of a row alone and in a batch differ" not in error.message:
            raise
        pytest.skip(f"the self-check refuses the option on this machine: {error}")
    alone, beside = bits_alone_and_in_a_batch(worker)
    assert torch.equal(alone, beside)


@pytest.mark.full
def test_without_that_option_a_row_has_other_bits_in_a_batch(model: Path, rig: RankRig) -> None:
    """Negative control of the test above."""
    worker = rig.load(model, dtype="bfloat16", num_kv_blocks=NUM_BLOCKS, compiling=PAGED, self_check=False)
    alone, beside = bits_alone_and_in_a_batch(worker)
    assert not torch.equal(alone, beside)


def test_unsupported_recordings_of_several_ranks_are_refused_by_name(model: Path, rig: RankRig, tmp_path: Path) -> None:
    def refusal(directory: Path, **fields: Any) -> SpecdecError:
        with pytest.raises(SpecdecError) as caught:
            rig.load(directory, num_kv_blocks=NUM_BLOCKS, **fields)
        return caught.value

    overrides = {"num_attention_heads": 3, "num_key_value_heads": 3, "hidden_size": 96, "intermediate_size": 96}
    gemma = build_tiny_model("gemma3", tmp_path, vocabulary_size=96, config_overrides=overrides)
    error = refusal(gemma, compiling=RECORDED)
    assert (error.message, error.field) == ("a model of type gemma3_text cannot run as CUDA graphs", "compile_backend")
    error = refusal(gemma, dtype="int8", compiling=RECORDED)
    assert error.message == "--tensor-parallel does not divide int8 weights of a model of type gemma3_text"
    error = refusal(model, compiling=RECORDED | {"backend": "eager", "is_deterministic": True})
    assert error.message == "--deterministic with --tensor-parallel needs CUDA graphs, not --compile-backend eager"
