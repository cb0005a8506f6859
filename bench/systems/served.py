"""The systems of the suite `peers`: the pairs of models, the kinds of servers, and how each is made for a pair.

specdec takes what a user would give it; vLLM and Transformers take a checkpoint of the same weights, llama.cpp a GGUF
file of them.

Called by the suites `peers`, `crowd` and `real`.
"""

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from bench.harness.workload import prompt_texts
from bench.systems.http_servers import LlamaServer, VllmServer
from bench.systems.models import DEMO
from bench.systems.process import PeerServer, ServerFailure
from bench.systems.real_models import QWEN_DRAFT, QWEN_TARGET, SMOLLM2, PackagedModel
from bench.systems.specdec_server import SpecdecServer
from bench.systems.transformers_server import TransformersServer
from specdec.checkpoints.locate import locate_checkpoint
from specdec.checkpoints.vocabulary import load_tokenizer

PROMPT_TOKENS = 48
#: Folder that `make peers` fills.
PEERS_FOLDER = Path(__file__).resolve().parents[2] / ".peers"
SPECDEC = "specdec"
DRAFTED, ALONE = "_drafted", "_alone"


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
    return ServedPair(
        "demo pair, float32", *(float32_files(DEMO / name, folder) for name in ("target", "draft")), "float32", "f32",
        llama_rounds_alike=True, num_tokens=128, note="Demo pair: every server computes in float32.",
    )  # fmt: skip


def float32_files(checkpoint: Path, folder: Path) -> ModelFiles:
    """Return a Llama checkpoint with a float32 GGUF file of it, written into `folder`."""
    from bench.systems.gguf_writing import write_gguf  # needs the gguf extra

    # The padding token takes the place of the end token: llama.cpp never chooses one that would end the text.
    ends_on_padding = {"tokenizer.ggml.eos_token_id": 0}
    gguf = write_gguf(checkpoint, folder / f"{checkpoint.name}.gguf", "F32", metadata=ends_on_padding)
    return ModelFiles(checkpoint, checkpoint, gguf)


def smollm2_bf16(folder: Path) -> ModelFiles:
    """Return SmolLM2 in bfloat16, written into `folder`.

    Raises:
        FileNotFoundError: its package is not installed.
    """
    from bench.systems.gguf_writing import rewrite  # needs the gguf extra

    gguf, checkpoint = rewrite(SMOLLM2.path(), folder / "bf16.gguf", "BF16"), folder / "bf16"
    write_checkpoint(gguf, checkpoint, "bfloat16")
    return ModelFiles(checkpoint, checkpoint, gguf)


def write_checkpoint(gguf: Path, checkpoint: Path, dtype: str) -> None:
    """Write a GGUF file as a Hugging Face checkpoint, for servers that do not read the file."""
    from transformers import AutoConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    from specdec.engine.model.gguf_state import gguf_state

    folder = locate_checkpoint(gguf)
    config = AutoConfig.from_pretrained(folder)
    model = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)].from_pretrained(
        None, config=config, state_dict=gguf_state(gguf), dtype=dtype
    )
    model.save_pretrained(checkpoint)
    for path in folder.iterdir():
        if path.name != "config.json":
            shutil.copy(path, checkpoint)


def qwen_pair() -> ServedPair:
    """Return Qwen2.5-Coder 1.5B with 0.5B, converted where it has not been yet.

    Raises:
        FileNotFoundError: its packages are not installed.
    """

    def files(model: PackagedModel) -> ModelFiles:
        path = model.path()
        if not (checkpoint := path.with_suffix("")).is_dir():
            write_checkpoint(path, checkpoint, "float32")
        return ModelFiles(path, checkpoint, path)

    return ServedPair(
        "Qwen2.5-Coder 1.5B with 0.5B", files(QWEN_TARGET), files(QWEN_DRAFT), "float32", "f16",
        llama_rounds_alike=False, num_tokens=32,
        note="Qwen pair: llama.cpp computes with the file's 4-bit weights, every other server with the same weights "
        "widened to float32.",
    )  # fmt: skip


SPECDEC_INT8 = f"{SPECDEC}_int8"
VLLM, LLAMA, TRANSFORMERS = "vllm", "llama.cpp", "transformers"


class System(NamedTuple):
    """A kind of server, and whether it drafts."""

    kind: str
    drafts: bool

    @property
    def name(self) -> str:
        return self.kind + (DRAFTED if self.drafts else ALONE)


def make_server(system: System, pair: ServedPair, peers: Path) -> PeerServer:
    """Return a server of a pair, not yet started.

    Raises:
        ServerFailure: `make peers` has not prepared it in the folder `peers`.
    """
    models = (pair.target, pair.draft if system.drafts else None)
    checkpoints = (pair.target.checkpoint, pair.draft.checkpoint if system.drafts else None)
    if system.kind in (SPECDEC, SPECDEC_INT8):
        dtype = "int8" if system.kind == SPECDEC_INT8 else pair.dtype
        return SpecdecServer(system.name, *(model and model.served for model in models), dtype)
    if system.kind == TRANSFORMERS:
        return TransformersServer(system.name, *checkpoints, pair.dtype)
    program = peer_program(system.kind, peers)
    if system.kind == VLLM:
        target, draft = checkpoints
        return VllmServer(system.name, program, target, pair.dtype, speculation=own_draft_model(draft))
    return LlamaServer(system.name, program, *(model and model.gguf for model in models), pair.kv_type)


def peer_program(kind: str, peers: Path) -> Path:
    """Return vLLM's interpreter or `llama-server` in the folder `peers`.

    Raises:
        ServerFailure: `make peers` has not prepared it.
    """
    program = peers / ("vllm/bin/python" if kind == VLLM else "llama.cpp/llama-server")
    if not program.is_file():
        raise ServerFailure(f"{program} does not exist: run make peers")
    return program


def own_draft_model(draft: Path | None) -> dict[str, object] | None:
    """Return vLLM's setting for a draft model in its own process; None without a draft."""
    return {"method": "draft_model", "model": str(draft)} if draft else None
