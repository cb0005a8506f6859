"""Load a model for training and store the trained one as a new version.

A new version appears whole or not at all, in a directory of its own, with a file that records its provenance. Called
by `distill`.
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
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging as transformers_logging

from specdec.checkpoints.locate import locate_checkpoint
from specdec.contract.errors import InvalidRequest, SpecdecError, Unsupported
from specdec.engine.model.checkpoint_model import reading

#: Name of the provenance file beside the new version's weights.
PROVENANCE = "distilled.json"

_WEIGHTS = ("*.safetensors", "*.safetensors.index.json", "*.bin", "*.gguf", "config.json", "generation_config.json")


def load_model(model: str, flag: str = "--draft") -> PreTrainedModel:
    """Return a model in float32 on the CPU; error messages begin with `flag`.

    Raises:
        InvalidRequest: `model` is not a checkpoint.
        Unsupported: transformers cannot load it as a causal language model.
    """
    transformers_logging.disable_progress_bar()
    directory = locate_checkpoint(model)
    try:
        config = AutoConfig.from_pretrained(directory, trust_remote_code=False)
        with reading(model, AutoModelForCausalLM, directory, config) as from_pretrained:
            return from_pretrained(
                dtype=torch.float32, trust_remote_code=False, local_files_only=True, use_safetensors=True
            )
    except SpecdecError:
        raise
    # A damaged checkpoint makes transformers raise errors of many types, which mean the same to the caller.
    except Exception as error:
        first = str(error).splitlines()[0][:200] if str(error) else type(error).__name__
        raise Unsupported(f"{flag}: {model} cannot be loaded for training: {first}") from error


def stored_dtype(model: str) -> torch.dtype:
    """Return the dtype in which a checkpoint's weights are stored."""
    config = json.loads((locate_checkpoint(model) / "config.json").read_text())
    stored = getattr(torch, str(config.get("dtype") or config.get("torch_dtype")), torch.float32)
    return stored if isinstance(stored, torch.dtype) else torch.float32


def require_new(out: Path) -> None:
    """Raise InvalidRequest if `out` exists already or its parent folder is not writable."""
    if out.exists():
        raise InvalidRequest(f"--out: {out} already exists; a version is never overwritten", field="out")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=out.parent).close()
    except OSError as error:
        raise InvalidRequest(f"--out: {out.parent} cannot be written: {error.strerror}", field="out") from error


def write_model(model: PreTrainedModel, parent: str, out: Path, provenance: Mapping[str, Any]) -> None:
    """Write a checkpoint in its parent's dtype, with the parent's tokenizer.

    Raises:
        InvalidRequest: the checkpoint cannot be written. No part of it is left behind.
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
    """Write the tensors of a local draft (a head or an early-exit adapter).

    Args:
        tensors: tensors by name, in the dtypes in which they are stored.
        out: new directory.
        provenance: content of the provenance file.
        file: name of the tensors' file in `out`.
        metadata: metadata of that file.
        config: content of `config.json`; {}: no such file.

    Raises:
        InvalidRequest: the directory cannot be written. No part of it is left behind.
    """
    with _made_whole(out, provenance) as made:
        # Copy the tensors: safetensors refuses two names that share a tensor's memory.
        stored = {name: tensor.detach().clone().contiguous() for name, tensor in tensors.items()}
        save_file(stored, made / file, dict(metadata))
        if config:
            (made / "config.json").write_text(json.dumps(config, indent=1) + "\n")


@contextlib.contextmanager
def _made_whole(out: Path, provenance: Mapping[str, Any]) -> Iterator[Path]:
    """Yield a temporary directory that is renamed to `out` at the end, or removed after an error."""
    made = Path(tempfile.mkdtemp(prefix=f".{out.name}-", dir=out.parent))
    try:
        yield made
        (made / PROVENANCE).write_text(json.dumps(provenance, indent=1) + "\n")
        for file in made.iterdir():
            file.chmod(0o644)  # a service often runs as another user, and safetensors lets only the owner read
        made.chmod(0o755)
        made.rename(out)
    except (OSError, SafetensorError) as error:
        why = getattr(error, "strerror", None) or str(error)[:200]
        raise InvalidRequest(f"--out: {out} cannot be written: {why}", field="out") from error
    finally:
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(made)
