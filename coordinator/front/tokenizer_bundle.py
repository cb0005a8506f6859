"""Packs a tokenizer's files for a router that encodes prompts itself and does not have them."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path

#: Files of a checkpoint that the router reads: the tokenizer, its chat template and the model's configuration.
_PATTERNS = (
    "config.json",
    "generation_config.json",
    "tokenizer*.json",
    "special_tokens_map.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "*.jinja",
)


def tokenizer_bundle(directory: Path) -> bytes:
    """Return a ZIP archive of the tokenizer's files in a checkpoint's directory. Blocks."""
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        for path in sorted({path for pattern in _PATTERNS for path in directory.glob(pattern)}):
            archive.write(path, path.name)
    return packed.getvalue()
