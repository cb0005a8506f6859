"""Compile the Triton kernels for a Hopper GPU, with or without one, and print the result as JSON.

This is a separate program because Triton does not compile in a process that interprets kernels. Its argument is
`attention`, `products` or `between_products`. Called by tests.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from specdec.engine.cuda_graphs.draft_kernels import advance
from specdec.engine.cuda_graphs.fused_kernels import add_and_normalise, gate, rotate_and_store
from specdec.engine.cuda_graphs.paged_attention import num_warps
from specdec.engine.cuda_graphs.paged_kernels import attend_parts, merge_parts
from specdec.engine.linear.row_kernels import multiply_rows
from specdec.engine.linear.row_products import tiling

HOPPER = GPUTarget("cuda", 90, 32)
COUNTS = {"num_rows": "i32", "num_sequences": "i32", "query_stride": "i32", "scratch_block": "i32"}
FACTORS = {"score_factor": "fp32", "softcap": "fp32", "eps": "fp32"}
NUMBERS = {"tables": "*i64", "table_firsts": "*i64", "lengths": "*i64", "first_rows": "*i32"}
PARTS = {"part_sums": "*fp32", "part_maxima": "*fp32", "part_weights": "*fp32"}
#: Heads of Llama 3.1 8B and of a Gemma, with a window, a softcap and a size that is not a power of two.
LLAMA: dict[str, Any] = {
    "WINDOW": 0, "IS_CAPPED": False, "NUM_KV_HEADS": 8, "QUERIES_PER_KV_HEAD": 4, "KEY_DIM": 128, "VALUE_DIM": 128,
    "KEY_PAD": 128, "VALUE_PAD": 128, "PAGE_TOKENS": 16, "TILE_ROWS": 32, "TILE_QUERIES": 8, "TILE_KEYS": 64,
    "UNIT_TILES": 1, "NUM_SPLITS": 16, "MOST_SEQUENCES": 256, "WIDENS_OPERANDS": False,
}  # fmt: skip
GEMMA = LLAMA | {"WINDOW": 512, "IS_CAPPED": True, "KEY_DIM": 80, "VALUE_DIM": 80, "TILE_ROWS": 16, "TILE_QUERIES": 4}
#: Heads of a Gemma 3.
WIDE = GEMMA | {"KEY_DIM": 256, "VALUE_DIM": 256, "KEY_PAD": 256, "VALUE_PAD": 256, "TILE_ROWS": 32, "TILE_QUERIES": 8}
MERGING = {"WINDOW": 0, "NUM_HEADS": 32, "VALUE_DIM": 128, "VALUE_PAD": 128, "UNIT_KEYS": 64, "NUM_SPLITS": 16,
           "MOST_SEQUENCES": 256, "TILE_OUTPUTS": 1}  # fmt: skip
BF16 = dict.fromkeys(("residual", "delta", "gains", "output", "qkv", "cos", "sin", "kv_rows", "gate_up"), "*bf16")
INTEGERS = dict.fromkeys(
    ("rows", "slots", "drawn", "token_ids", "positions", "opened_blocks", "lengths", "firsts", "tables"), "*i64"
)
NORM = {"WIDTH": 4096, "WIDTH_PAD": 4096, "HAS_DELTA": True, "SELECTS_ROWS": False, "TILE_ROWS": 1}
ROTATION = {"NUM_HEADS": 32, "NUM_KV_HEADS": 8, "DIM": 128, "HALF_PAD": 64, "HAS_NORM": True, "TILE_HEADS": 4}


#: What PyTorch allocates begins at such addresses; heads side by side, and rows, are as wide.
ALIGNED = ("query", "kv_rows", "query_stride", "inputs", "weight", "residual", "output", "num_outputs", "input_stride",
           "residual_stride", "delta", "gains", "qkv", "cos", "sin", "gate_up")  # fmt: skip


def compiled(
    kernel: Any, types: dict[str, str], constants: dict[str, Any], num_warps: int = 4, num_stages: int = 3
) -> dict[str, Any]:
    places = {name: place for place, name in enumerate(kernel.arg_names)}
    source = ASTSource(
        kernel,
        {name: types.get(name, "constexpr") for name in places},
        {(places[name],): value for name, value in constants.items()},
        {(places[name],): [["tt.divisibility", 16]] for name in ALIGNED if name in places and name not in constants},
    )
    result = triton.compile(source, target=HOPPER, options={"num_warps": num_warps, "num_stages": num_stages})
    ptx = result.asm["ptx"]
    return {
        "machine_code_bytes": len(result.asm["cubin"]),
        "shared_bytes": result.metadata.shared,
        "uses_tensor_cores": "mma.sync" in ptx or "wgmma" in ptx,
        "products": sorted(set(re.findall(r"wgmma\.mma\S+|mma\.sync\S+", ptx))),
        "copies_ahead": "cp.async" in ptx,
        "stack_bytes": _stack_bytes(result.asm["cubin"]),
    }


def _stack_bytes(machine_code: bytes) -> int:
    """Return the stack bytes of a thread; spills are decided after PTX, which does not show them."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(machine_code)
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
        said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    (num_bytes,) = re.findall(r"STACK:(\d+)", said)
    return int(num_bytes)


def attention() -> dict[str, Any]:
    types = NUMBERS | PARTS | COUNTS | FACTORS | {"query": "*bf16", "kv_rows": "*bf16"}
    return {
        "llama": compiled(attend_parts, types, LLAMA),
        "gemma": compiled(attend_parts, types, GEMMA),
        "wide": compiled(attend_parts, types, WIDE, num_warps(WIDE["KEY_PAD"], WIDE["VALUE_PAD"])),
        "merging": compiled(merge_parts, NUMBERS | PARTS | {"output": "*bf16", **COUNTS}, MERGING),
    }


def between_products() -> dict[str, Any]:
    """Compile the kernels of Llama 3.1 8B between products, and the one between two draft steps."""
    types = BF16 | INTEGERS | COUNTS | FACTORS
    return {
        "norm": compiled(add_and_normalise, types, NORM, num_warps=8),
        "last_norm": compiled(add_and_normalise, types, NORM | {"SELECTS_ROWS": True}, num_warps=8),
        "rotation": compiled(rotate_and_store, types, ROTATION),
        "gate": compiled(gate, types, {"WIDTH": 14336, "TILE_NUMBERS": 1024}),
        "advance": compiled(advance, types, {"PAGE_TOKENS": 16, "TILE": 64}, num_warps=1),
    }


def products() -> dict[str, Any]:
    """Compile the product that adds to the residual of Llama 3.1 8B: all step sizes, 16-bit and 8-bit weights."""
    found = {}
    for weight in ("bf16", "i8"):
        types = dict.fromkeys(("inputs", "residual", "output"), "*bf16") | {"weight": f"*{weight}", "scales": "*fp32"}
        types |= dict.fromkeys(("num_rows", "num_outputs", "input_stride", "residual_stride"), "i32")
        for num_rows in (1, 64, 2048):
            tiles = tiling(num_rows, torch.bfloat16)
            constants: dict[str, Any] = {
                "NUM_INPUTS": 14336, "TILE_ROWS": tiles.rows, "TILE_OUTPUTS": tiles.outputs,
                "TILE_INPUTS": tiles.inputs, "WIDENS_OPERANDS": False, "bias": None,
            }  # fmt: skip
            if weight != "i8":
                constants["scales"] = None
            own = {name: kind for name, kind in types.items() if name not in constants}
            found[f"{weight}, {num_rows}"] = compiled(
                multiply_rows, own, constants, tiles.num_warps, tiles.num_stages
            )  # fmt: skip
    return found


def main() -> None:
    parts = {"attention": attention, "between_products": between_products, "products": products}
    json.dump(parts[sys.argv[1]](), sys.stdout)


if __name__ == "__main__":
    main()
