"""Minutes 6 to 8: whether a row of a layer's products has the same bits alone and among other rows, and the cost.

It compares PyTorch's products with the Triton kernels for 16-bit and 8-bit weights (`--deterministic`, `--dtype int8`),
which run on a GPU only. The results serve to tune `specdec.engine.linear.row_products.tiling`, whose values are
guesses.
"""

import time
from collections.abc import Callable
from functools import partial

import torch

from bench.gpu_first_half_hour.results import device_name, results_folder, write
from specdec.engine.linear.int8 import round_to_int8
from specdec.engine.linear.row_products import multiply

# One row of an 8B model's layer, and the rows of a verification and of several streams.
COUNTS = (1, 2, 5, 8, 16, 64, 512)
NUM_RUNS = 36
#: Of all weights of a shape together, at the least: more than any cache holds.
MIN_BYTES = 300_000_000
SHAPES = {"qkv": (6144, 4096), "output": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336)}


Product = Callable[[torch.Tensor], torch.Tensor]


def pytorch(weight: torch.Tensor) -> Product:
    return lambda inputs: inputs @ weight.T


def ours(weight: torch.Tensor) -> Product:
    return partial(multiply, weight=weight)


def ours_int8(weight: torch.Tensor) -> Product:
    return partial(multiply, weight=round_to_int8(weight))


def compare(device: str, make: Callable[[torch.Tensor], Product], *, reduced: bool = False) -> dict[str, object]:
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = reduced
    found: dict[str, object] = {}
    for name, (rows, columns) in SHAPES.items():
        if device == "cpu":
            rows, columns = rows // 16, columns // 16
        # Enough weights in turn that none is left in a cache at its next turn.
        num_weights = 1 if device == "cpu" else -(-MIN_BYTES // (rows * columns))
        products_of = [make(torch.randn(rows, columns, device=device).to(torch.bfloat16)) for _ in range(num_weights)]
        inputs = torch.randn(max(COUNTS), columns, device=device).to(torch.bfloat16)
        alone = products_of[0](inputs[:1])
        for count in COUNTS:
            product = products_of[0](inputs[:count])
            if device == "cuda":
                torch.cuda.synchronize()
            began = time.perf_counter()
            for index in range(NUM_RUNS):
                products_of[index % num_weights](inputs[:count])
            if device == "cuda":
                torch.cuda.synchronize()
            each_us = (time.perf_counter() - began) / NUM_RUNS * 1e6
            found[f"{name}, {count} rows"] = {
                "batch_invariance": torch.equal(product[:1], alone),
                "us": round(each_us, 1),
            }
    return found


def main() -> None:
    folder, device = results_folder(), device_name()
    found = {"as_it_runs": compare(device, pytorch), "reduced_precision": compare(device, pytorch, reduced=True)}
    if device == "cuda":
        found |= {"ours": compare(device, ours), "ours_int8": compare(device, ours_int8)}
    write(folder, "step3_rows", found)


if __name__ == "__main__":
    main()
