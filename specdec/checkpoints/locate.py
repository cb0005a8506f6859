"""Find the directory of a checkpoint given as a local directory, a GGUF file or a Hugging Face hub id.

The small files of a GGUF file are made from its header, and a hub id is downloaded first. This module loads no weights
and imports neither torch nor transformers. Called by `specdec.checkpoints.vocabulary` (tokenizer files only) and
`specdec.engine.loader` (all files).
"""

from __future__ import annotations

import hashlib
import logging
import re
from pathlib import Path

from specdec.checkpoints.gguf.file import is_gguf
from specdec.checkpoints.gguf.folder import DIGEST_NAME, gguf_folder
from specdec.contract.errors import InvalidRequest

_log = logging.getLogger(__name__)

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")
_SMALL_FILES = [
    "config.json",
    "generation_config.json",
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "*.jinja",
    "chat_template.json",
]
_MODEL_FILES = [*_SMALL_FILES, "*.json", "*.safetensors"]

# Weight files up to this size are hashed completely, larger ones by this number of evenly spaced samples.
_WHOLE_BYTES = 64 << 20
_NUM_SAMPLES = 256
_SAMPLE_BYTES = 1 << 16


def locate_checkpoint(model: str | Path, *, small_files_only: bool = False) -> Path:
    """Return the directory of a checkpoint.

    Args:
        model: a directory, a GGUF file, or a hub id such as `Qwen/Qwen3-0.6B`, which is downloaded unless it is in the
            cache (with `HF_HUB_OFFLINE=1` only the cache is used). The directory of a GGUF file has small files only.
        small_files_only: fetch only the configuration and the tokenizer; of a GGUF file that only other engines can
            run, the tokenizer alone.

    Raises:
        InvalidRequest: the model is neither a directory nor available from the hub, or see `gguf_folder`.
        Unsupported: see `gguf_folder`.
    """
    name, path = str(model), Path(model).expanduser()
    if name and path.is_dir():
        return path
    if path.is_file():
        if is_gguf(path):
            return gguf_folder(path, tokenizer_only=small_files_only)
        raise InvalidRequest(
            f"model {name!r} is a file but not a GGUF file; give a checkpoint directory, a GGUF file or a hub id",
            field="model",
        )
    if not _HUB_ID.fullmatch(name) or Path(name.split("/", maxsplit=1)[0]).is_dir():
        raise InvalidRequest(f"model {name!r} is not a directory on this machine", field="model")
    return _download(name, _SMALL_FILES if small_files_only else _MODEL_FILES)


def _download(hub_id: str, patterns: list[str]) -> Path:
    # Imported here because the hub client takes 0.3 s to load and local directories do not need it.
    from huggingface_hub import snapshot_download

    _log.info("locating model in the hub cache, or downloading it: model=%s", hub_id)
    try:
        return Path(snapshot_download(hub_id, allow_patterns=patterns))
    # Errors of the hub client, of its HTTP library and of the disk mean the same to the caller.
    except Exception as error:
        raise InvalidRequest(
            f"model {hub_id!r} is neither a directory on this machine nor available from the Hugging Face hub "
            f"({type(error).__name__})",
            field="model",
        ) from error


def checkpoint_fingerprint(directory: Path, *served_as: str) -> str:
    """Return a hash of a checkpoint's configuration and weights and of `served_as`: 32 hex digits.

    `served_as` holds settings that change the model's output, such as the dtype and the tokenizer.

    Small weight files are hashed completely. Of large files the size, the header and evenly spaced samples are hashed.
    The hash therefore differs after any training run, but may miss a change of a few numbers in the middle of a large
    file.
    """
    digest = hashlib.blake2b(repr(served_as).encode(), digest_size=16)
    digest.update((directory / "config.json").read_bytes())
    if (of_gguf := directory / DIGEST_NAME).is_file():
        digest.update(of_gguf.read_bytes())
    for path in sorted([*directory.glob("*.safetensors"), *directory.glob("*.bin")]):
        size = path.stat().st_size
        digest.update(f"{path.name}:{size}".encode())
        step = _SAMPLE_BYTES if size <= _WHOLE_BYTES else size // _NUM_SAMPLES
        with path.open("rb") as file:
            for offset in range(0, size, step):
                file.seek(offset)
                digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()
