"""The section of docs/reference/models.md on GGUF files, from the table of their architectures.

Called by `tools.model_list`; `tests.integration.test_gguf_numbers` compares the section with the page.
"""

from __future__ import annotations

import textwrap

from specdec.checkpoints.gguf.table import ARCHITECTURES

_SECTION = """## GGUF files

{architectures}

A key of the header that is neither used nor equal to what the model has anyway is refused by its name, as is a tensor
that is missing, left over or of another shape. Models of the type llama, mistral, qwen2 and qwen3 run on native kernels
with the file's own blocks:

| Types of blocks | Held as |
|---|---|
| Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K, Q5_K, Q6_K | they are, in at most 1.11 times the bytes |
| Q3_K, IQ4_NL | the same numbers in 1.9 and 2.0 times the bytes |
| Q2_K, other IQ types, TQ, MXFP4 | the same numbers in 10 to 32 bits; a warning tells how much |

Other models, and every model on a GPU, hold the numbers in the narrowest of bfloat16, float16 and float32 that is
exact. `--backend llama-cpp` runs every file as it is.
"""


def section() -> str:
    """Return the section as it should be."""
    names = ", ".join(f"`{name}`" for name in sorted(ARCHITECTURES))
    words = f"The own engine reads files of these values of `general.architecture`: {names}."
    return _SECTION.format(architectures=textwrap.fill(words, 120, break_on_hyphens=False, break_long_words=False))
