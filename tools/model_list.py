"""`python -m tools.model_list [--check]`: write docs/reference/models.md, or fail when it is not what the
engine does now.

Several minutes: it loads a tiny model of every architecture. `tests.integration.test_every_architecture` compares row
by row as it goes.
"""

from __future__ import annotations

import re
import sys
import tempfile
from functools import cache
from pathlib import Path

import transformers

from tests.support.architecture_rig import judge
from tests.support.tiny_architectures import MODEL_TYPES, CannotBuild
from tools import gguf_table, quantisation_table

PAGE = Path(__file__).resolve().parents[1] / "docs" / "reference" / "models.md"
_VERSION_LINE = "The list is that of transformers {version},"

_WIDTH = 120

_HEAD = """# Supported models

This page lists every decoder-only architecture of transformers, and every one that also reads images, sound or video. A
supported one gives the logits of the model's own eager forward pass and the greedy text of `generate()`. Any other one
is refused at load with an `UNSUPPORTED` error.
{version_line}
and each row is the result of running a tiny random model. `make model-list` writes this page.

## Models that also read images

Of a checkpoint such as Qwen3-VL, Gemma 3, Mistral 3 or Llama 4 the text half is served: decoder, embedding table and
head. Its text is that of `generate()` of the whole checkpoint for a prompt of text.

- The other half is neither loaded nor counted by `specdec plan` and `specdec advise`, and files that hold nothing else
  need not exist.
- If the decoder is a Llama-shaped model under another name, such as that of Qwen3-VL, native kernels or CUDA graphs
  run it.
- Parts of requests that are images, sound or files are refused by their type. A placeholder of an image in a prompt,
  such as `<|image_pad|>`, is a token like any other, as in `generate()` without images.

## Self-check

Every replica makes the same comparison for its own checkpoint before it serves (`--self-check`, on by default), so a
newer architecture is served correctly or refused, too. The comparison covers the smallest attention window or
chunk of up to 1,024 tokens. A longer one is read from the model's mask and not compared beyond 1,024 tokens.

## What was run

| Family | Real weights, compared with Transformers token by token |
|---|---|
| Llama | SmolLM2-135M-Instruct from a GGUF file in Q4_1, on a CPU |
| Qwen | Qwen2.5-Coder 1.5B with 0.5B as its draft, from GGUF files in Q4_K_M, on a CPU |
| Gemma | Gemma 3 270M from a GGUF file in Q4_K_M, on a CPU |
| all families below | none: tiny random models on a CPU, and some of them on an NVIDIA H100 |

{gguf}
{quantised}
## Architectures

| Architecture | Status | Reason |
|---|---|---|
"""


def row(model_type: str, reason: str = "", *, is_built: bool = True, is_cache_right: bool = True) -> str:
    """The line of one architecture; `reason` is why it is refused, or not built."""
    if not is_built:
        return _line(model_type, "not tested", f"no tiny model: {_plain(reason)}")
    if reason:
        return _line(model_type, "refused", _plain(reason))
    note = "" if is_cache_right else "`generate()` agrees with the model's own forward only with `use_cache=False`"
    return _line(model_type, "supported", note)


def _line(model_type: str, status: str, reason: str) -> str:
    """Return a table row of at most `_WIDTH` characters; a longer reason is cut."""
    room = _WIDTH - len(f"| {model_type} | {status} |  |")
    shown = reason if len(reason) <= room else f"{reason[: room - 1].rstrip(' `')}…"
    return f"| {model_type} | {status} | {shown} |"


def _plain(reason: str) -> str:
    """Without what differs from run to run."""
    reason = re.sub(r"^model '[^']*'", "it", reason)
    reason = re.sub(r": its logits differ by .*", "", reason)
    return re.sub(r"\s+", " ", reason).replace("|", "/").strip()[:160]


@cache
def documented_rows() -> frozenset[str]:
    return frozenset(PAGE.read_text().splitlines())


def is_documented_version() -> bool:
    """Return whether the page is about the transformers that are installed."""
    return _VERSION_LINE.format(version=transformers.__version__) in PAGE.read_text()


def page() -> str:
    """Return docs/reference/models.md as it should be."""
    lines = []
    for model_type in MODEL_TYPES:
        with tempfile.TemporaryDirectory() as directory:
            try:
                verdict = judge(model_type, Path(directory))
                lines.append(row(model_type, verdict.refusal, is_cache_right=verdict.is_cache_right))
            except CannotBuild as error:
                lines.append(row(model_type, str(error), is_built=False))
    head = _HEAD.format(
        version_line=_VERSION_LINE.format(version=transformers.__version__),
        gguf=gguf_table.section(),
        quantised=quantisation_table.section(),
    )
    return head + "\n".join(lines) + "\n"


def main(argv: list[str]) -> int:
    """Returns the exit code."""
    text = page()
    if argv == ["--check"]:
        is_same = PAGE.read_text() == text
        print(f"{PAGE.name} is what the engine does" if is_same else f"error: {PAGE.name} drifted: run make model-list")
        return 0 if is_same else 1
    PAGE.write_text(text)
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
