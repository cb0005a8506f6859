"""Check from settings and small files whether a model can be divided among tensor-parallel ranks.

These checks read JSON but no weights, and import no torch. A rank checks the loaded model again
(`specdec.engine.parallel`). Called when a group starts and by each of its ranks.
"""

from __future__ import annotations

from specdec.checkpoints.preflight import read_sizes
from specdec.contract.errors import InvalidRequest, Unsupported

#: Command-line flag that error messages begin with.
FLAG = "--tensor-parallel"

_BACKENDS = ("auto", "eager", "cuda-graphs")


def require_supported(*, device: str, dtype: str, compile_backend: str, deterministic: bool) -> None:
    """Refuse settings that one process supports and a group of ranks does not.

    Args:
        device: value of `--device`. The ranks resolve `auto` later.
        dtype: value of `--dtype`.
        compile_backend: value of `--compile-backend`.
        deterministic: a row's result must not depend on the other rows of its step.

    Raises:
        Unsupported: ranks do not support the backend, or not on this device.
        InvalidRequest: `device` names one GPU, which all ranks would share.
    """
    if compile_backend not in _BACKENDS:
        raise Unsupported(
            f"{FLAG} needs --compile-backend {', '.join(_BACKENDS[:-1])} or {_BACKENDS[-1]}, not {compile_backend}",
            field="compile_backend",
        )
    if device == "cpu":
        if compile_backend == "cuda-graphs":
            raise Unsupported(f"{FLAG} with --compile-backend cuda-graphs needs GPUs", field="compile_backend")
        if dtype == "int8":
            raise Unsupported(f"{FLAG} supports int8 weights on GPUs only: on a CPU use float32 or bfloat16",
                              field="dtype")  # fmt: skip
        if deterministic:
            raise Unsupported(f"{FLAG} supports --deterministic on GPUs only, because it needs CUDA graphs",
                              field="deterministic")  # fmt: skip
    if deterministic and compile_backend == "eager":
        raise Unsupported(f"--deterministic with {FLAG} needs CUDA graphs, not --compile-backend eager",
                          field="deterministic")  # fmt: skip
    if ":" in device:
        raise InvalidRequest(f"{FLAG} gives each rank its own device: use --device cuda, not {device}", field="device")


def require_divisible(model: str, num_ranks: int) -> None:
    """Check the number of attention heads in a checkpoint's configuration or a GGUF file's header.

    Raises:
        InvalidRequest: `num_ranks` does not divide the number of attention heads.
    """
    heads = read_sizes(model).get("num_attention_heads")
    if isinstance(heads, int) and heads:
        require_even_heads(heads, num_ranks)


def require_even_heads(num_heads: int, num_ranks: int) -> None:
    """Raise InvalidRequest if `num_ranks` does not divide the number of attention heads."""
    if num_heads % num_ranks:
        raise InvalidRequest(
            f"{FLAG} {num_ranks} does not divide the model's {num_heads} attention heads", field="tensor_parallel"
        )


def require_even_kv_heads(num_kv_heads: int, num_ranks: int, *, may_share: bool) -> None:
    """Raise InvalidRequest if the KV heads can neither be divided among the ranks nor shared by them.

    Args:
        num_kv_heads: number of KV heads of the model.
        num_ranks: number of ranks.
        may_share: several ranks may hold the same KV head.
    """
    if num_kv_heads % num_ranks == 0 or (may_share and num_ranks % num_kv_heads == 0):
        return
    shared = " nor is a multiple of them" if may_share else ", and ranks of a model of this type cannot share one"
    raise InvalidRequest(
        f"{FLAG} {num_ranks} {'neither divides' if may_share else 'does not divide'} the model's {num_kv_heads} KV "
        f"heads{shared}",
        field="tensor_parallel",
    )
