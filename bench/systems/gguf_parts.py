"""A GGUF file that came in parts: joined once into one file.

Called by `bench.systems.real_models`. Parts that `llama-gguf-split` made each have a header, and are merged by it
alone.
"""

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

_MAGIC = b"GGUF"
_BLOCK_BYTES = 1 << 24


def join_parts(parts: Sequence[Path], whole: Path, after_block: Callable[[int], None] = lambda num_bytes: None) -> Path:
    """Write the parts one after another into a file, unless it holds them already; return the file.

    Args:
        parts: Existing files, in order.
        whole: The file; it appears complete or not at all.
        after_block: Called with the number of bytes after each block that is written.

    Raises:
        ValueError: the first part does not begin as a GGUF file does.
    """
    with parts[0].open("rb") as first:
        if first.read(len(_MAGIC)) != _MAGIC:
            raise ValueError(
                f"{parts[0]} does not begin with {_MAGIC.decode()}: it is not the first part of a GGUF file"
            )
    if whole.is_file() and whole.stat().st_size == total_bytes(parts):
        return whole
    whole.parent.mkdir(parents=True, exist_ok=True)
    unfinished = whole.with_name(f"{whole.name}.unfinished")
    with unfinished.open("wb") as file:
        for part in parts:
            with part.open("rb") as piece:
                while block := piece.read(_BLOCK_BYTES):
                    file.write(block)
                    after_block(len(block))
    # The time of the file is part of its conversion's name: a file joined anew must not be converted anew.
    shutil.copystat(parts[0], unfinished)
    return unfinished.rename(whole)


def total_bytes(parts: Sequence[Path]) -> int:
    """Return how many bytes the whole file has."""
    return sum(part.stat().st_size for part in parts)
