"""Checkpoints made for measuring: `deep(N, eps)` costs as much as a deep model and generates nearly the text of
the shallow one. `first_layers(N)` is the first layers of a model.

Called by the suites and the tests.
"""

import contextlib
import importlib
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import torch
from transformers import LlamaConfig, LlamaForCausalLM

DEMO = Path(__file__).resolve().parents[2] / "models" / "demo"

#: The modules of a layer that write into the residual stream.
OUTPUT_PROJECTIONS = ("self_attn.o_proj", "mlp.down_proj")


def deep(source_dir: Path, directory: Path, num_layers: int, eps: float, seed: int = 0) -> Path:
    """Append decoder layers to a Llama checkpoint that add almost nothing to what it computes.

    The new layers are initialised as the model's own would be before training; their two output projections are scaled
    by `eps`, so that each adds about eps times what an untrained layer adds to the residual stream. eps dials how far
    the distribution moves, and with it acceptance.

    Args:
        source_dir: a Llama checkpoint with its tokenizer.
        directory: where the new checkpoint goes, in float16 as the source is; made if it does not exist.
        num_layers: layers to append.
        eps: scale of the appended layers' `o_proj` and `down_proj`.
        seed: fixes the appended weights.

    Returns:
        `directory`.
    """
    source = LlamaForCausalLM.from_pretrained(source_dir, dtype=torch.float32)
    config = LlamaConfig.from_pretrained(source_dir)
    first_new = config.num_hidden_layers
    config.num_hidden_layers = first_new + num_layers
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        made = LlamaForCausalLM._from_config(config, dtype=torch.float32)
    made.load_state_dict(source.state_dict(), strict=False)
    with torch.no_grad():
        for layer in made.model.layers[first_new:]:
            for name in OUTPUT_PROJECTIONS:
                layer.get_submodule(name).weight.mul_(eps)
    made.generation_config = source.generation_config
    made.half().save_pretrained(directory)
    copy_tokenizer(source_dir, directory)
    return directory


@contextlib.contextmanager
def deep_target() -> Iterator[Path]:
    """Yield `deep(18, 0.02)` of the demo target, the target of most suites, in a temporary folder."""
    with tempfile.TemporaryDirectory(prefix="specdec-bench-") as folder:
        yield deep(DEMO / "target", Path(folder) / "target", num_layers=18, eps=0.02)


def blurred(source_dir: Path, directory: Path, eps: float, seed: int) -> Path:
    """Add noise to every matrix of a Llama checkpoint: a draft that agrees with its target less.

    Args:
        source_dir: a Llama checkpoint with its tokenizer.
        directory: where the new checkpoint goes, in float16; made if it does not exist.
        eps: standard deviation of the noise, in standard deviations of the matrix that it is added to.
        seed: fixes the noise.

    Returns:
        `directory`.
    """
    made = LlamaForCausalLM.from_pretrained(source_dir, dtype=torch.float32)
    noise = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in made.parameters():
            if weight.dim() > 1:
                weight += eps * weight.std() * torch.randn(weight.shape, generator=noise)
    made.half().save_pretrained(directory)
    copy_tokenizer(source_dir, directory)
    return directory


def first_layers(source_dir: Path, directory: Path, num_layers: int) -> Path:
    """The first layers of a Llama checkpoint with its own norm and head, as a checkpoint; returns `directory`."""
    model = LlamaForCausalLM.from_pretrained(source_dir, dtype=torch.float16)
    model.model.layers = model.model.layers[:num_layers]
    model.config.num_hidden_layers = num_layers
    model.save_pretrained(directory)
    copy_tokenizer(source_dir, directory)
    return directory


def demo_module(name: str) -> ModuleType:
    """Return a module of the program that trained the demo models."""
    sys.path.insert(0, str(DEMO))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(DEMO))


def copy_tokenizer(source_dir: Path, directory: Path) -> None:
    """Gives one checkpoint the tokenizer and chat template of another."""
    for path in Path(source_dir).iterdir():
        if "token" in path.name or path.suffix == ".jinja":
            shutil.copy(path, directory)
