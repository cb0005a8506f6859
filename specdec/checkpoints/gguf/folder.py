"""The small files of a GGUF file's model: config.json and the tokenizer's, made from its header and kept in the cache.

The weights stay in the GGUF file. The folder's name is a hash of the file's size, modification time and samples of its
content: a changed file gets another folder, a moved file does not. A folder appears whole or not at all; when several
processes need the same one, each makes it and the first stays. Called by `specdec.checkpoints.locate`.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
import time
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

from specdec.checkpoints import artifact_cache
from specdec.checkpoints.gguf.architectures import config_of
from specdec.checkpoints.gguf.file import GgufFile, parts_of
from specdec.checkpoints.gguf.tokenizer import write_tokenizer
from specdec.checkpoints.gguf.weights import weights_of
from specdec.contract.errors import InvalidRequest, Unsupported

#: Version of the small files, part of the folder's name. Increase it when the same header is to give other files.
_FORMAT = 4
#: File of the folder that tells whose small files it has.
DIGEST_NAME = "gguf.digest"
_CONFIG = "config.json"
_UNFINISHED, _INTERRUPTED_S = ".unfinished-", 3600.0

_NUM_SAMPLES = 256
_SAMPLE_BYTES = 1 << 16


def gguf_folder(path: Path, *, tokenizer_only: bool = False) -> Path:
    """Return the folder with the small files of a GGUF file.

    Args:
        path: the file; of a file in parts, any of them.
        tokenizer_only: accept a model that only other engines can run; the folder then has no config.json.

    Raises:
        InvalidRequest: the file is damaged, its header states what its tensors are not, or the cache is not writable.
        Unsupported: the model is of a type, or states a number, that transformers' classes do not have.
    """
    try:
        folder = _folder(path)
        if not folder.is_dir():
            _make(path, folder, needs_config=not tokenizer_only)
        if not tokenizer_only and not (folder / _CONFIG).is_file():
            # Raises what kept it from being written, unless a newer version knows the model.
            _write_config(_config(GgufFile(path)), folder)
        return folder
    except OSError as error:
        raise InvalidRequest(
            f"{error.filename or path} cannot be read or written: {error.strerror}; the tokenizer of a GGUF file is "
            "kept in the folder that XDG_CACHE_HOME names",
            field="model",
        ) from error


def made_folder(path: Path) -> Path | None:
    """Return the folder of a GGUF file if it was made before. Raises OSError: the file cannot be read."""
    folder = _folder(path)
    return folder if folder.is_dir() else None


def _folder(path: Path) -> Path:
    return artifact_cache.cache_directory(os.environ) / "gguf" / _digest(path)


def _config(file: GgufFile) -> dict[str, Any]:
    config = config_of(file)
    weights_of(file, config)  # refuses tensors that do not fit
    return config


def _make(path: Path, folder: Path, *, needs_config: bool) -> None:
    file, config = GgufFile(path), None
    with nullcontext() if needs_config else suppress(Unsupported):
        config = _config(file)
    artifact_cache.make_folder(folder.parent)
    _remove_interrupted(folder.parent)
    with tempfile.TemporaryDirectory(prefix=_UNFINISHED, dir=folder.parent) as temporary:
        unfinished = Path(temporary) / "model"
        unfinished.mkdir(mode=0o700)
        write_tokenizer(file, unfinished)
        (unfinished / DIGEST_NAME).write_text(folder.name, "utf-8")
        if config is not None:
            _write_config(config, unfinished)
        try:
            unfinished.rename(folder)
        except OSError:  # another process may have been faster
            if not folder.is_dir():
                raise


def _write_config(config: dict[str, Any], folder: Path) -> None:
    with tempfile.NamedTemporaryFile("w", dir=folder, delete=False, encoding="utf-8") as file:
        json.dump(config, file)
    os.replace(file.name, folder / _CONFIG)


def _remove_interrupted(cache: Path) -> None:
    """Remove what processes left that were killed while they made a folder, which takes seconds."""
    for left in cache.glob(f"{_UNFINISHED}*"):
        with suppress(OSError):  # another process may have removed it
            if left.stat().st_mtime < time.time() - _INTERRUPTED_S:
                shutil.rmtree(left)


def _digest(path: Path) -> str:
    """Return a hash of everything that the folder depends on: 32 hex digits."""
    digest = hashlib.blake2b(repr(_FORMAT).encode(), digest_size=16)
    for part in parts_of(path):
        status = part.stat()
        digest.update(repr((status.st_size, status.st_mtime_ns)).encode())
        with part.open("rb") as file:
            for offset in range(0, status.st_size, max(_SAMPLE_BYTES, status.st_size // _NUM_SAMPLES)):
                file.seek(offset)
                digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()
