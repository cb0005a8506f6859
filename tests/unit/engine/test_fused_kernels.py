"""The kernels between a step's products in Triton's interpreter, against float64 and the modules of transformers.

Numbers that a kernel must not read are NaN: rows after the last, rows that are not selected, every slot of the cache.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from triton.runtime.interpreter import GridExecutor

from specdec.engine.cuda_graphs import fused_operations as fused
from specdec.engine.cuda_graphs import paged_attention
from specdec.engine.cuda_graphs.fused_operations import Norm, ProgramSizes
from specdec.engine.cuda_graphs.paged_attention import ContextSplit
from specdec.engine.loader import load_worker
from specdec.engine.options import CompileOptions, LoadRequest
from tests.support.fused_rig import DTYPES, EPS, Heads, close, llama_norm, random, round_bfloat16
from tests.support.tiny_models import build_tiny_model


class KernelCount(TorchDispatchMode):
    """Counts launches by name while it is active."""

    def __init__(self) -> None:
        super().__init__()
        self.names: Counter[str] = Counter()
        self._launch = GridExecutor.__call__

    def __enter__(self) -> KernelCount:
        counted, launch = self.names, self._launch

        def count_launch(executor: Any, *args: Any, **kwargs: Any) -> Any:
            counted[executor.fn.__name__] += 1
            with _disable_current_modes():
                return launch(executor, *args, **kwargs)

        GridExecutor.__call__ = count_launch
        super().__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        GridExecutor.__call__ = self._launch

    def __torch_dispatch__(
        self, operation: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = operation.overloadpacket.__name__
        if not operation.is_view and not name.startswith(("empty", "_unsafe_view", "detach")):
            self.names[name] += 1
        return operation(*args, **(kwargs or {}))


def counted(counts: list[Counter[str]]) -> Callable[[Callable[[], None]], Callable[[], None]]:
    """Return a `Capture` that counts the launches of each step."""

    def capture(step: Callable[[], None]) -> Callable[[], None]:
        with torch.inference_mode(), KernelCount() as seen:
            step()
        counts.append(seen.names)
        return step

    return capture


pytest.importorskip("triton", reason="Triton is not installed here: its kernels were not interpreted")
pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="kernels are compiled on this machine: see tests/gpu"
)


@pytest.fixture(autouse=True, params=[ProgramSizes(rows=2, heads=8, numbers=64)], ids=["tiled"])
def tiling(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> ProgramSizes:
    """Vary the tiling, in few programs because the interpreter takes some milliseconds for each."""
    chosen: ProgramSizes = request.param
    monkeypatch.setattr(fused, "ProgramSizes", lambda: chosen)
    return chosen


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [64, 80])
def test_a_sum_and_its_norm_equal_those_of_transformers(width: int, dtype: torch.dtype) -> None:
    residual, delta = random(5, width, dtype=dtype), random(5, width, dtype=dtype, seed=1)
    gains = random(width, dtype=dtype, seed=2)
    total = residual + delta
    normed = fused.normalise(residual, delta, Norm(gains, EPS))
    assert torch.equal(residual, total)
    close(normed, llama_norm(gains, total))
    exact = total.double()
    close(normed, exact * (exact.square().mean(-1, keepdim=True) + EPS).rsqrt() * gains.double())


def test_a_norm_without_a_sum_does_not_change_its_input() -> None:
    x, gains = random(3, 64, dtype=torch.float32), random(64, dtype=torch.float32, seed=2)
    before = x.clone()
    close(fused.normalise(x, None, Norm(gains, EPS)), llama_norm(gains, before))
    assert torch.equal(x, before)


def test_only_selected_rows_are_read_and_the_sum_is_not_stored() -> None:
    residual, delta = random(6, 64, dtype=torch.float32), random(6, 64, dtype=torch.float32, seed=1)
    gains, rows = random(64, dtype=torch.float32, seed=2), torch.tensor([4, 1, 4])
    for unwanted in (0, 2, 3, 5):
        residual[unwanted] = delta[unwanted] = torch.nan
    before = residual.clone()
    close(fused.normalise(residual, delta, Norm(gains, EPS), rows), llama_norm(gains, (residual + delta)[rows]))
    assert torch.equal(residual.nan_to_num(), before.nan_to_num())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num", "num_kv", "dim", "is_normed"), [(4, 2, 64, False), (3, 1, 80, True), (8, 8, 16, True)])
def test_heads_are_rotated_as_in_transformers_and_stored(
    num: int, num_kv: int, dim: int, is_normed: bool, dtype: torch.dtype
) -> None:
    heads = Heads(num, num_kv, dim, dtype, is_normed=is_normed)
    query, rows = heads.expected()
    close(heads.rotate(), query)
    close(heads.layer.rows[heads.slots], rows)
    others = torch.ones(len(heads.layer.rows), dtype=torch.bool)
    others[heads.slots] = False
    assert heads.layer.rows[others].isnan().all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_gate_equals_that_of_transformers(dtype: torch.dtype) -> None:
    gate_up = random(5, 2 * 24, dtype=dtype) * 8
    gate, up = gate_up.chunk(2, dim=1)
    close(fused.gated(gate_up), torch.nn.functional.silu(gate) * up)
    exact = gate.double()
    close(fused.gated(gate_up), exact * exact.sigmoid() * up.double())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tiling", [ProgramSizes(), ProgramSizes(rows=2, heads=8, numbers=64)], indirect=True)
def test_a_row_has_the_same_bits_alone_and_among_other_rows(dtype: torch.dtype, tiling: ProgramSizes) -> None:
    norm = Norm(random(64, dtype=dtype, seed=2), EPS)
    residual, delta = random(5, 64, dtype=dtype), random(5, 64, dtype=dtype, seed=1)
    gate_up, heads = random(5, 48, dtype=dtype), Heads(3, 1, 16, dtype, is_normed=True)
    in_company = (
        fused.normalise(residual.clone(), delta, norm), heads.rotate(), heads.layer.rows[heads.slots].clone(),
        fused.gated(gate_up),
    )  # fmt: skip
    for row in range(5):
        own = slice(row, row + 1)
        alone = (
            fused.normalise(residual[own].clone(), delta[own].clone(), norm), heads.rotate(own),
            heads.layer.rows[heads.slots[own]], fused.gated(gate_up[own].clone()),
        )  # fmt: skip
        assert all(torch.equal(one[0], all_rows[row]) for one, all_rows in zip(alone, in_company, strict=True))


@pytest.fixture(autouse=True)
def rounded(monkeypatch: pytest.MonkeyPatch) -> None:
    round_bfloat16(monkeypatch)


def test_kernels_compile_for_a_hopper_gpu(tmp_path: Path) -> None:
    """No kernel spills registers."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    report = subprocess.run(
        [sys.executable, "-m", "tests.support.kernel_compilation", "between_products"],
        cwd=Path(__file__).parents[3], env=environment | {"TRITON_CACHE_DIR": str(tmp_path)},
        check=True, capture_output=True, text=True,
    )  # fmt: skip
    compiled = json.loads(report.stdout)
    assert len(compiled) == 5
    for kernel in compiled.values():
        assert kernel["machine_code_bytes"] > 0
        assert kernel["stack_bytes"] == 0


def kernels(model: Path, counts: list[Counter[str]]) -> Counter[str]:
    """Return the launches of a recorded draft step of one sequence."""
    from tests.unit.engine.test_fused_kernels import counted

    compiling = CompileOptions("cuda-graphs", row_counts=(1,), capture=counted(counts), attention="paged")
    load_worker(
        LoadRequest(str(model), device="cpu", dtype="float32", num_kv_blocks=8, compiling=compiling, self_check=False)
    )
    return counts[-1]


@pytest.fixture
def few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    few = ContextSplit(tile_keys=64, unit_tiles=1, num_splits=1, tile_outputs=64)
    monkeypatch.setattr(paged_attention, "ContextSplit", lambda: few)
    monkeypatch.setattr(fused, "ProgramSizes", lambda: ProgramSizes(64, 512, 1 << 14))
    monkeypatch.setattr("specdec.engine.cuda_graphs.buckets._NUM_SEQUENCES", (1,))


@pytest.mark.usefixtures("few_programs")
@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
def test_a_layer_launches_ten_kernels(architecture: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    models = [build_tiny_model(architecture, tmp_path / str(number), num_layers=number) for number in (1, 2)]

    def of_one_layer() -> Counter[str]:
        one, two = (kernels(model, []) for model in models)
        return two - one

    assert of_one_layer().total() <= 10, of_one_layer()
    if architecture == "llama":  # negative control: without fusion there are many more
        monkeypatch.setattr("specdec.engine.cuda_graphs.graph_steps.fuse_stack", lambda *_: None)
        assert of_one_layer().total() >= 15


def wrong_sign(operation: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def rotate(qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *rest: Any) -> torch.Tensor:
        return operation(qkv, cos, -sin, *rest)

    return rotate


def failing(_: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def fail(*_: Any) -> torch.Tensor:
        raise RuntimeError("ptxas fatal: no such architecture\nand much more")

    return fail


@pytest.mark.usefixtures("few_programs")
@pytest.mark.parametrize(
    ("change", "message"),
    [(wrong_sign, r"differ from the eager layer by [0-9.]+, limit"), (failing, "failed their trial: ptxas fatal")],
)
def test_kernels_that_fail_their_trial_log_one_warning_and_the_eager_pass_runs(
    change: Callable[..., Any], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    """Negative control of the trial."""
    monkeypatch.setattr(fused, "rotate", change(fused.rotate))
    counts: list[Counter[str]] = []
    seen = kernels(build_tiny_model("llama", tmp_path, num_layers=1), counts)
    (warning,) = (record.getMessage() for record in caplog.records if record.levelname == "WARNING")
    assert re.search(rf"fused kernels {message}", warning)
    assert "much more" not in warning
    assert not seen["rotate_and_store"]
