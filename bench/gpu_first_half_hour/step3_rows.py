"""Minutes 6 to 8: whether a row of a layer's products has the same bits alone and in company, and what it costs."""

import time

import torch

from bench.gpu_first_half_hour.results import device_name, results_folder, write

# One row of an 8B model's layer, and what it is beside: a verification, streams.
COUNTS = (1, 2, 5, 8, 16, 64)
SHAPES = {"qkv": (6144, 4096), "output": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336)}


def compare(device: str, *, reduced: bool) -> dict[str, dict[str, object]]:
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = reduced
    found: dict[str, dict[str, object]] = {}
    for name, (rows, columns) in SHAPES.items():
        if device == "cpu":
            rows, columns = rows // 16, columns // 16
        weight = torch.randn(rows, columns, device=device).to(torch.bfloat16)
        inputs = torch.randn(max(COUNTS), columns, device=device).to(torch.bfloat16)
        alone = inputs[:1] @ weight.T
        for count in COUNTS:
            began = time.perf_counter()
            for _ in range(20):
                product = inputs[:count] @ weight.T
            if device == "cuda":
                torch.cuda.synchronize()
            each_us = (time.perf_counter() - began) / 20 * 1e6
            found[f"{name}, {count} rows"] = {"same_bits": torch.equal(product[:1], alone), "us": round(each_us, 1)}
    return found


def main() -> None:
    folder, device = results_folder(), device_name()
    found = {"as_it_runs": compare(device, reduced=False), "reduced_precision": compare(device, reduced=True)}
    write(folder, "step3_rows", found)


if __name__ == "__main__":
    main()
