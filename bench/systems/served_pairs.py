"""The pairs of models that every server of the suite `peers` serves, in the form that each server reads.

specdec takes what a user would give it; vLLM and Transformers take a checkpoint of the same weights, llama.cpp a GGUF
file of them. Called by `bench.suites.peers.suite`.
"""

from dataclasses import dataclass
from pathlib import Path

from bench.harness.workload import prompt_texts
from bench.systems.models import DEMO
from bench.systems.real_models import QWEN_DRAFT, QWEN_TARGET, PackagedModel
from specdec.checkpoints.locate import locate_checkpoint
from specdec.checkpoints.vocabulary import load_tokenizer

PROMPT_TOKENS = 48


@dataclass(frozen=True)
class ModelFiles:
    """One model in its three forms."""

    served: Path
    """Path that specdec is given."""
    checkpoint: Path
    gguf: Path


@dataclass(frozen=True)
class ServedPair:
    """A target with its draft and what they are asked."""

    name: str
    target: ModelFiles
    draft: ModelFiles
    dtype: str
    """Dtype in which specdec, vLLM and Transformers compute."""
    kv_type: str
    """Type of llama.cpp's KV cache."""
    llama_rounds_alike: bool
    """True where llama.cpp computes with the same numbers, so that its texts must be equal too."""
    num_tokens: int
    note: str

    def prompts(self) -> list[list[int]]:
        """Return the prompts as token ids, all of one length."""
        return prompts_of(self.target.checkpoint)


def prompts_of(checkpoint: Path) -> list[list[int]]:
    """Return the prompts as token ids of a checkpoint's tokenizer, all of one length."""
    tokenizer = load_tokenizer(checkpoint)
    texts = [tokenizer.encode(text) for text in prompt_texts()]
    length = min(PROMPT_TOKENS, *map(len, texts))
    return [ids[:1] + ids[1:][-(length - 1) :] for ids in texts]


def demo_pair(folder: Path) -> ServedPair:
    """Return the demo pair in float32, with GGUF files of it written into `folder`."""
    from bench.systems.gguf_writing import write_gguf  # needs the gguf extra

    def files(name: str) -> ModelFiles:
        # The padding token takes the place of the end token: llama.cpp never chooses one that would end the text.
        ends_on_padding = {"tokenizer.ggml.eos_token_id": 0}
        gguf = write_gguf(DEMO / name, folder / f"{name}.gguf", "F32", metadata=ends_on_padding)
        return ModelFiles(DEMO / name, DEMO / name, gguf)

    return ServedPair(
        "demo pair, float32", files("target"), files("draft"), "float32", "f32", llama_rounds_alike=True,
        num_tokens=128, note="Demo pair: every server computes in float32.",
    )  # fmt: skip


def qwen_pair() -> ServedPair:
    """Return Qwen2.5-Coder 1.5B with 0.5B, converted where it has not been yet.

    Raises:
        FileNotFoundError: its packages are not installed.
    """

    def files(model: PackagedModel) -> ModelFiles:
        path = model.path()
        return ModelFiles(path, locate_checkpoint(path), path)

    return ServedPair(
        "Qwen2.5-Coder 1.5B with 0.5B", files(QWEN_TARGET), files(QWEN_DRAFT), "float32", "f16",
        llama_rounds_alike=False, num_tokens=32,
        note="Qwen pair: llama.cpp computes with the file's 4-bit weights, every other server with the same weights "
        "widened to float32.",
    )  # fmt: skip
