"""Missing devices are refused before torch is loaded."""

from __future__ import annotations

import subprocess
import sys

import pytest

from specdec.contract.errors import InvalidRequest
from specdec.settings import devices
from specdec.settings.devices import require_device, require_gpu_each


@pytest.mark.parametrize(
    ("name", "num_gpus", "words"),
    [
        ("cuda", 0, "device 'cuda' is not present on this machine, which has no GPU"),
        ("cuda:1", 1, "device 'cuda:1' is not present on this machine, which has one GPU"),
        ("tpu", 8, "'tpu' must be auto, cpu, cuda or cuda:N"),
        ("cuda:-1", 8, "'cuda:-1' must be auto"),
    ],
)
def test_a_device_that_the_machine_lacks_is_refused(
    name: str, num_gpus: int, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devices, "num_gpus", lambda: num_gpus)
    with pytest.raises(InvalidRequest) as refusal:
        require_device(name)
    assert refusal.value.message.startswith(f"--device: {words}")
    assert refusal.value.field == "device"


@pytest.mark.parametrize(
    ("name", "num_gpus"), [("auto", 0), ("cpu", 0), ("cuda", 1), ("cuda:1", 2), ("cuda", None), ("cuda:7", None)]
)
def test_a_present_device_passes_and_so_does_one_that_only_torch_can_check(
    name: str, num_gpus: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devices, "num_gpus", lambda: num_gpus)
    require_device(name)


@pytest.mark.parametrize(("name", "num_gpus", "words"), [("cuda", 1, "has one GPU"), ("auto", 3, "has 3 GPUs")])
def test_more_ranks_than_gpus_are_refused_by_the_flag(
    name: str, num_gpus: int, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devices, "num_gpus", lambda: num_gpus)
    with pytest.raises(InvalidRequest, match=f"--tensor-parallel-draft 4 needs a GPU for each rank, .* {words}"):
        require_gpu_each(name, 4, flag="--tensor-parallel-draft")


@pytest.mark.parametrize(("name", "num_gpus"), [("cpu", 1), ("auto", 0), ("cuda", 4), ("cuda", None)])
def test_as_many_gpus_as_ranks_pass_and_so_do_ranks_on_the_cpu(
    name: str, num_gpus: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devices, "num_gpus", lambda: num_gpus)
    require_gpu_each(name, 4, flag="--tensor-parallel")


def test_gpus_are_counted_as_torch_counts_them() -> None:
    program = (
        "import torch; from specdec.settings.devices import num_gpus; "
        "print(num_gpus() in (None, torch.cuda.device_count()))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "True\n"
