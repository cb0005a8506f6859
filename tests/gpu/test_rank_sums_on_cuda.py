"""Sums over ranks in a recorded step. With one rank only torch records them: NCCL has nothing to send."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from specdec.engine.base import StepPlan
from specdec.engine.cuda_graphs.capture import CudaCapture
from specdec.engine.parallel.group import RankGroup, Seat, open_store
from tests.support.cuda_graphs_rig import VOCABULARY_SIZE, load, piece, random_tokens

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine: nothing was recorded"),
]
CUDA = torch.device("cuda:0")


@pytest.fixture
def lone_rank() -> Iterator[RankGroup]:
    listener = socket.create_server(("127.0.0.1", 0))
    seat = Seat(0, 1, "127.0.0.1", listener.getsockname()[1], listener)
    yield RankGroup(seat, open_store(seat), CUDA)
    dist.destroy_process_group()


def test_sums_over_ranks_are_recorded_like_any_other_kernel(lone_rank: RankGroup) -> None:
    numbers, total = torch.ones(3, 64, device=CUDA, dtype=torch.bfloat16), torch.zeros(3, 64, device=CUDA)

    def step() -> None:
        summed = lone_rank.add_up(numbers * 2) + lone_rank.add_in_order(numbers)
        total.copy_(summed + lone_rank.gather_first(numbers))

    replay = CudaCapture(CUDA)(step)
    numbers.fill_(3)
    replay()
    assert (total == 12).all()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two GPUs on this machine: no two ranks ran")
@pytest.mark.parametrize(
    ("dtype", "options"),
    [
        ("float32", {"backend": "eager"}),
        ("float32", {"backend": "cuda-graphs"}),
        ("bfloat16", {"backend": "cuda-graphs", "is_deterministic": True}),
        ("int8", {"backend": "cuda-graphs"}),
    ],
    ids=["eager", "cuda-graphs", "deterministic", "int8"],
)
def test_two_ranks_give_the_logits_of_one_gpu(dtype: str, options: dict[str, object], tmp_path: Path) -> None:
    from tests.support.rank_rig import RankRig
    from tests.support.tiny_models import build_tiny_model

    build_tiny_model("qwen3", tmp_path, vocabulary_size=VOCABULARY_SIZE, context=256, gain=1.0, logit_spread=1.0,
                     config_overrides={"head_dim": 64})  # fmt: skip
    alone = load(tmp_path, device="cuda:0", dtype=dtype, row_counts=(1, 3), **options)
    tokens, table = random_tokens(1, 60), (3, 1, 2, 0)
    with RankRig(2, device="cuda") as rig:
        divided = rig.load(tmp_path, dtype=dtype, num_kv_blocks=16, compiling=options | {"row_counts": (1, 3)})
        for start, end in ((0, 40), (40, 43), (43, 44), (44, 60)):
            step = StepPlan((piece(tokens, start, end, table, min(3, end - start)),))
            difference = (divided.execute(step).cpu() - alone.execute(step).cpu()).abs().max()
            assert difference < (1e-3 if dtype == "float32" else 0.1)
