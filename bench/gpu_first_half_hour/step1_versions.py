"""Minutes 0 to 2: versions, PyTorch's choice of attention, its cost of a new length, and the copy bandwidth."""

import importlib.metadata
import platform
import shutil
import subprocess
import time

import torch
from torch.nn.functional import scaled_dot_product_attention

from bench.gpu_engine import copy_bandwidth
from bench.gpu_first_half_hour.results import device_name, results_folder, write

PACKAGES = ("torch", "triton", "transformers", "grpcio", "protobuf", "pydantic", "numpy")


def versions() -> dict[str, object]:
    installed: dict[str, object] = {"python": platform.python_version(), "machine": platform.machine()}
    for name in PACKAGES:
        try:
            installed[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            installed[name] = None
    for program, line in (("gcc", 0), ("nvcc", -1)):
        found = shutil.which(program)
        said = subprocess.run([found, "--version"], capture_output=True, text=True).stdout if found else ""
        installed[program] = said.strip().splitlines()[line] if said.strip() else None
    if torch.cuda.is_available():
        installed["cuda"], installed["cudnn"] = torch.version.cuda, torch.backends.cudnn.version()
        installed["device"] = torch.cuda.get_device_name()
    return installed


def lengths_ms(device: str, *, with_cudnn: bool) -> dict[str, object]:
    """Time a verification of five rows over 20 new lengths; the first call shows the cost of a new length."""
    torch.backends.cuda.enable_cudnn_sdp(with_cudnn)
    times, choice = [], None
    for length in range(500, 520):
        query = torch.randn(1, 8, 20, 128, device=device, dtype=torch.bfloat16)
        keys = torch.randn(1, 8, length, 128, device=device, dtype=torch.bfloat16)
        mask = torch.zeros(1, 1, 20, length, device=device, dtype=torch.bfloat16)
        choice = torch._fused_sdp_choice(query, keys, keys, mask)  # 0 by hand, 1 flash, 2 efficient, 3 cuDNN
        each = []
        for _ in range(2):
            began = time.perf_counter()
            scaled_dot_product_attention(query, keys, keys, attn_mask=mask)
            if device == "cuda":
                torch.cuda.synchronize()
            each.append(round((time.perf_counter() - began) * 1e3, 3))
        times.append(each)
    return {"choice": choice, "first_and_second_ms": times}


def main() -> None:
    folder, device = results_folder(), device_name()
    found = {
        "versions": versions(),
        "copy_gb_per_s": copy_bandwidth(device, 1 << (30 if device == "cuda" else 24)) / 1e9,
        "attention_with_cudnn": lengths_ms(device, with_cudnn=True),
        "attention_without_cudnn": lengths_ms(device, with_cudnn=False),
    }
    write(folder, "step1_versions", found)


if __name__ == "__main__":
    main()
