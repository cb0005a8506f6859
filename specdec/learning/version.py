"""What is trained on, as it is stored, and the new version that becomes of it.

A new version appears whole or not at all, beside the old one, with a file that says where it comes from. Not here: the
training. Called by `distill`.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging as transformers_logging

from specdec.checkpoints.locate import locate_checkpoint
from specdec.errors import InvalidRequest, Unsupported

#: Beside the new version's weights.
PROVENANCE = "distilled.json"

_WEIGHTS = ("*.safetensors", "*.safetensors.index.json", "*.bin", "*.gguf", "config.json", "generation_config.json")


def load_model(model: str, flag: str = "--draft") -> PreTrainedModel:
    """A model in float32, on the CPU; `flag` is what it was given by.

    Raises:
        InvalidRequest: it is no checkpoint.
        Unsupported: Transformers cannot load it as a causal language model.
    """
    transformers_logging.disable_progress_bar()
    directory = locate_checkpoint(model)
    try:
        loaded: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            directory, dtype=torch.float32, trust_remote_code=False, local_files_only=True, use_safetensors=True
        )
    # Whatever a damaged checkpoint makes Transformers raise means the same to the caller.
    except Exception as error:
        first = str(error).splitlines()[0][:200] if str(error) else type(error).__name__
        raise Unsupported(f"{flag}: {model} cannot be loaded for training: {first}") from error
    return loaded


def stored_dtype(model: str) -> torch.dtype:
    """That a checkpoint's weights are stored in."""
    config = json.loads((locate_checkpoint(model) / "config.json").read_text())
    stored = getattr(torch, str(config.get("dtype") or config.get("torch_dtype")), torch.float32)
    return stored if isinstance(stored, torch.dtype) else torch.float32


def require_new(out: Path) -> None:
    """Raises InvalidRequest where there is something already, or nothing can be."""
    if out.exists():
        raise InvalidRequest(f"--out: {out} already exists; a version is never overwritten", field="out")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=out.parent).close()
    except OSError as error:
        raise InvalidRequest(f"--out: {out.parent} cannot be written: {error.strerror}", field="out") from error


def write_model(model: PreTrainedModel, parent: str, out: Path, provenance: Mapping[str, Any]) -> None:
    """Writes a checkpoint in its parent's dtype, with the parent's tokenizer.

    Raises:
        InvalidRequest: it cannot be written; nothing is left of it.
    """
    source = locate_checkpoint(parent)
    with _made_whole(out, provenance) as made:
        torch.nn.Module.to(model, stored_dtype(parent))
        model.save_pretrained(made)
        for path in source.iterdir():
            if path.is_file() and not any(path.match(pattern) for pattern in _WEIGHTS) and path.name != PROVENANCE:
                shutil.copy(path, made)


def write_tensors(
    tensors: Mapping[str, torch.Tensor],
    out: Path,
    provenance: Mapping[str, Any],
    *,
    file: str,
    metadata: Mapping[str, str],
    config: Mapping[str, Any],
) -> None:
    """Writes what a target drafts with by itself.

    Args:
        tensors: by name, in the numbers that they are stored in.
        out: the directory.
        provenance: stored beside them.
        file: their name there.
        metadata: of the file.
        config: of `config.json`; {}: there is none.

    Raises:
        InvalidRequest: it cannot be written; nothing is left of it.
    """
    with _made_whole(out, provenance) as made:
        # Copies: two names may be of one tensor, which safetensors refuses.
        stored = {name: tensor.detach().clone().contiguous() for name, tensor in tensors.items()}
        save_file(stored, made / file, dict(metadata))
        if config:
            (made / "config.json").write_text(json.dumps(config, indent=1) + "\n")


@contextlib.contextmanager
def _made_whole(out: Path, provenance: Mapping[str, Any]) -> Iterator[Path]:
    """A directory to write into, which becomes `out` in the end, or nothing."""
    made = Path(tempfile.mkdtemp(prefix=f".{out.name}-", dir=out.parent))
    try:
        yield made
        (made / PROVENANCE).write_text(json.dumps(provenance, indent=1) + "\n")
        for file in made.iterdir():
            file.chmod(0o644)  # safetensors writes for the owner alone, and a service is often another user
        made.chmod(0o755)
        made.rename(out)
    except (OSError, SafetensorError) as error:
        why = getattr(error, "strerror", None) or str(error)[:200]
        raise InvalidRequest(f"--out: {out} cannot be written: {why}", field="out") from error
    finally:
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(made)
