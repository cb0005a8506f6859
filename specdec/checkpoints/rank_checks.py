"""Whether a model can be divided among ranks, as far as settings and small files tell: every refusal in one place.

Not the last word: a rank sees the model itself (`specdec.engine.parallel`). Reads JSON, never weights, and imports no
torch. Called where a group starts, and by each of its ranks.
"""

from __future__ import annotations

from pathlib import Path

from specdec.checkpoints.gguf import is_gguf
from specdec.checkpoints.locate import locate_checkpoint
from specdec.checkpoints.preflight import read_config
from specdec.errors import InvalidRequest, Unsupported

#: What refusals begin with: the flag that somebody gave.
FLAG = "--tensor-parallel"

_BACKENDS = ("auto", "eager", "cuda-graphs")


def require_supported(*, device: str, dtype: str, compile_backend: str, deterministic: bool) -> None:
    """Looks at settings that are fine for one process.

    Args:
        device: as given; what `auto` means there, the ranks find out.
        dtype: as given.
        compile_backend: as given.
        deterministic: whether a row is to have the same bits in any company.

    Raises:
        Unsupported: ranks do not run such steps, or not on that device.
        InvalidRequest: a GPU is named that all ranks would share.
    """
    if compile_backend not in _BACKENDS:
        raise Unsupported(
            f"{FLAG} runs eager steps and CUDA graphs: "
            f"--compile-backend {', '.join(_BACKENDS[:-1])} or {_BACKENDS[-1]}, not {compile_backend}",
            field="compile_backend",
        )
    if device == "cpu":
        if compile_backend == "cuda-graphs":
            raise Unsupported(f"{FLAG} records CUDA graphs on GPUs, not on a CPU", field="compile_backend")
        if dtype == "int8":
            raise Unsupported(f"{FLAG} divides int8 weights among GPUs: on a CPU take float32 or bfloat16",
                              field="dtype")  # fmt: skip
        if deterministic:
            raise Unsupported(f"{FLAG} keeps --deterministic in CUDA graphs, on GPUs, not on a CPU",
                              field="deterministic")  # fmt: skip
    if deterministic and compile_backend == "eager":
        raise Unsupported(f"--deterministic with {FLAG} needs CUDA graphs, not --compile-backend eager",
                          field="deterministic")  # fmt: skip
    if ":" in device:
        raise InvalidRequest(f"{FLAG} gives each rank a device of its own: --device cuda, not {device}", field="device")


def require_divisible(model: str, num_ranks: int) -> None:
    """Looks at a checkpoint's configuration; of a GGUF file its conversion tells.

    Raises:
        InvalidRequest: the attention heads cannot be divided among that many ranks.
    """
    if is_gguf(Path(model).expanduser()):
        return
    config = read_config(model, locate_checkpoint(model, small_files_only=True))
    text = config.get("text_config")
    heads = (text if isinstance(text, dict) else config).get("num_attention_heads")
    if isinstance(heads, int):
        require_even_heads(heads, num_ranks)


def require_even_heads(num_heads: int, num_ranks: int) -> None:
    """Raises InvalidRequest: that many attention heads cannot be divided among that many ranks."""
    if num_heads % num_ranks:
        raise InvalidRequest(
            f"{FLAG} {num_ranks} does not divide the model's {num_heads} attention heads", field="tensor_parallel"
        )


def require_even_kv_heads(num_kv_heads: int, num_ranks: int, *, may_share: bool) -> None:
    """Raises InvalidRequest: that many KV heads can neither be divided among the ranks nor, if they may, be shared."""
    if num_kv_heads % num_ranks == 0 or (may_share and num_ranks % num_kv_heads == 0):
        return
    shared = " nor is a multiple of them" if may_share else ", and ranks of a model of this type cannot share one"
    raise InvalidRequest(
        f"{FLAG} {num_ranks} {'neither divides' if may_share else 'does not divide'} the model's {num_kv_heads} KV "
        f"heads{shared}",
        field="tensor_parallel",
    )
