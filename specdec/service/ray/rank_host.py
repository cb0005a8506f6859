"""The Ray actor that keeps the process of one rank of a replica, on the node where Ray has placed the actor.

The rank is a child process, because a service needs a main thread and signals of its own. Its stdin is a pipe that the
actor holds, so the rank never outlives the actor.
"""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import Iterator, Mapping, Sequence

from specdec.supervision.forked_process import ForkedProcess
from specdec.supervision.service_process import outcome_of, start_service

#: Variables that a rank gets from its node's environment and from the caller's. All others are left out: launchers of
#: other process groups, and Ray itself, leave variables that torch and transformers would follow.
NODE_VARIABLES = (
    *("PATH", "HOME", "USER", "LANG", "LC_", "TZ", "TMPDIR", "PYTHONPATH", "LD_LIBRARY_PATH", "XDG_CACHE_HOME"),
    *(
        "CUDA_",
        "NVIDIA_",
        "NCCL_",
        "TORCH_NCCL_",
        "PYTORCH_CUDA_ALLOC_CONF",
        "GLOO_",
        "HF_",
        "SSL_CERT_",
        "HTTP_PROXY",
        "HTTPS_PROXY",
        "NO_PROXY",
    ),
)
CALLER_VARIABLES = ("HF_", "SPECDEC_", "TOKENIZERS_", "OMP_", "GOMP_", "KMP_", "MKL_", "GRPC_")


def only(environ: Mapping[str, str], names: Sequence[str]) -> dict[str, str]:
    """Return the variables that have one of `names`, or begin with one that ends in an underscore."""
    return {
        name: value
        for name, value in environ.items()
        if any(name.upper() == known or (known.endswith("_") and name.upper().startswith(known)) for known in names)
    }


class RankHost:
    """A Ray actor with several threads, so that it can be asked to stop while it yields lines."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | ForkedProcess | None = None
        self._is_stopping = False

    def place(self) -> tuple[str, int]:
        """Return the address of this node and a free port on it."""
        import ray

        address = str(ray.util.get_node_ip_address())
        with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as probe:
            probe.bind((address, 0))
            return address, int(probe.getsockname()[1])

    def run(self, module: str, arguments: Sequence[str], environ: Mapping[str, str]) -> Iterator[tuple[str, bool]]:
        """Start the rank; yield each line that it writes with False, then how it ended with True. Call it once."""
        own = {**only(os.environ, NODE_VARIABLES), **environ}
        self._process = process = start_service(module, arguments, own)
        if self._is_stopping:
            process.terminate()
        assert process.stdout is not None  # start_service opens it
        for line in process.stdout:
            yield line.rstrip("\n"), False
        yield outcome_of(process.wait()), True

    def ask_to_stop(self) -> None:
        """Ask the rank to drain and end. Returns at once."""
        self._is_stopping = True
        if self._process is not None:
            self._process.terminate()

    def end(self) -> None:
        """Kill the process, which works for a stopped one too."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
