"""The section of docs/reference/models.md on published quantised checkpoints, with the bytes that a weight takes.

The bytes are those of a random weight that is written in each form, read and packed for the native kernels. Called by
`tools.model_list`; `tests.integration.test_quantised_checkpoints` compares the section with the page.
"""

from __future__ import annotations

import torch

from specdec.checkpoints.quantised.statement import METHODS
from specdec.engine.native.weight_formats import pack_shortest
from tests.support.quantised_checkpoints import FORMS, WIDE_FORMS

#: Description and form of each row.
_ROWS = (
    ("FP8 in blocks, as DeepSeek and Qwen publish it", "fp8 in blocks"),
    ("the same with scales that are powers of two", "fp8 in blocks, powers of two"),
    ("FP8 with one scale a weight", "fp8, one scale"),
    ("FP8 with one scale a row", "fp8, one scale a row"),
    ("`float-quantized`: FP8 a weight, a row or in blocks", "float-quantized"),
    ("`int-quantized`: int8 (W8A8)", "int-quantized"),
    ("`int-quantized` with zero points", "int-quantized with zero points"),
    ("`pack-quantized`: int8 (W8A16)", "pack-quantized, 8 bits a row"),
    ("`pack-quantized`: int4 in groups (W4A16)", "pack-quantized"),
    ("`pack-quantized` with zero points", "pack-quantized with zero points"),
    ("AWQ, `gemm`, 4 bits", "awq"),
    ("GPTQ, 4 bits, `gptq` or `gptq_v2`", "gptq"),
    ("GPTQ, 4 bits, `desc_act`", "gptq, shuffled"),
    ("GPTQ, 8 bits, with zero points", "gptq v2, 8 bits"),
)

_SECTION = """## Quantised checkpoints

The own engine reads these published forms, without the packages that wrote them. A weight is its integer minus the
zero point, times the scale, in float32 and rounded once, so the logits are those of the plain checkpoint with these
numbers. "Held" is the memory of a weight in bytes with native kernels and `--dtype auto`, in the shortest layout that
holds all numbers exactly. Other ways to run steps hold four bytes on a CPU. A GPU holds two and rounds each weight once
to its 16 bits.

| Published as | `quant_method` | Held |
|---|---|---|
{rows}
| MXFP4, as GPT-OSS publishes it | `mxfp4` | 4 |

- **Activations are not rounded.** Many FP8 and int8 checkpoints state that their activations, and some that their KV
  cache, are rounded at run time as well (W8A8). A warning says so when the weights are read. Texts are those of the
  plain checkpoint with the same weights; vLLM rounds activations, so its texts may differ.
- **Weights are not rounded to 16 bits first**, as transformers does with `dequantize=True` and scales of 16 bits.
- Which tensor is quantised is read from the files: dtypes, names and shapes decide, and must fit the configuration.
- Scales, zero points and groups are checked in the headers of the files before anything is loaded.
- Every other method and variant is refused by name, such as bitsandbytes, NVFP4, AWQ `gemv`, Marlin layouts, 2:4 sparse
  weights and rotated activations. Serve it with vLLM and put specdec in front (`--backend vllm`, see
  [in front of vLLM](../how-to/front-of-vllm.md)). A GGUF file of any quantisation runs with `--backend llama-cpp`.
- `--tensor-parallel` and the draft `mtp` do not read quantised weights.
"""


def section() -> str:
    """Return the section as it should be."""
    assert {FORMS[form].settings["quant_method"] for _, form in _ROWS} | {"mxfp4"} == set(METHODS)
    return _SECTION.format(rows="\n".join(_row(*row) for row in _ROWS))


def _row(description: str, form: str) -> str:
    weight = torch.randn(64, 512, generator=torch.Generator().manual_seed(0))
    _, meant = WIDE_FORMS.get(form, FORMS[form]).write(weight)
    _, packed = pack_shortest(meant, len(meant) // 2)
    held = packed.nbytes / weight.numel()
    return f"| {description} | `{FORMS[form].settings['quant_method']}` | {held:g} |"
