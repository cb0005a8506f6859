"""Names of the files of packed weights that `specdec.engine.kept_worker` keeps, and whether a model has one.

A name tells the model and the kernels that read it. `specdec up` looks for the model alone, without torch and without
the kernels, to decide what its replicas will import.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path

from specdec.checkpoints.artifact_cache import cache_directory
from specdec.checkpoints.gguf.file import is_gguf
from specdec.checkpoints.gguf.folder import made_folder
from specdec.checkpoints.locate import checkpoint_fingerprint


def packed_folder(environ: Mapping[str, str]) -> Path:
    """Return the folder of this user's packed weights."""
    return cache_directory(environ) / "packed"


def packed_name(directory: Path, dtype: str, kernels: bytes) -> str:
    """Return the name of the file that holds a model as some kernels read it.

    Args:
        directory: the checkpoint's.
        dtype: how its weights are rounded, as `--dtype` takes it.
        kernels: content of the library of kernels.
    """
    return f"{_model_digest(directory, dtype)}-{hashlib.blake2b(kernels, digest_size=8).hexdigest()}.packed"


def is_packed(model: str, dtype: str) -> bool:
    """Return whether a model on this machine was probably packed by an earlier start; other kernels may have done it.

    Args:
        model: a checkpoint directory or a GGUF file; a hub id counts as not packed.
        dtype: how its weights are rounded, as `--dtype` takes it.
    """
    try:
        path = Path(model).expanduser()
        directory = made_folder(path) if is_gguf(path) else path
        if directory is None or not directory.is_dir():
            return False
        return any(packed_folder(os.environ).glob(f"{_model_digest(directory, dtype)}-*.packed"))
    except OSError:
        return False


def _model_digest(directory: Path, dtype: str) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for path in sorted(directory.glob("*.json")):  # the vocabulary and the tokens that end a text are in these
        digest.update(f"{path.name}:{path.stat().st_size}".encode() + path.read_bytes())
    digest.update(checkpoint_fingerprint(directory, dtype).encode())
    return digest.hexdigest()
