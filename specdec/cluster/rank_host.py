"""The actor around one rank of a replica: on the node where Ray has put it, it keeps the rank's process.

The rank is a child process, because a service needs a main thread and signals of its own; its stdin is a pipe that this
actor holds, so it never outlives the actor, however that ends. Not here: where actors are placed and what starts when
(`placement`, `placed_replica`), what a rank does.
"""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import Iterator, Mapping, Sequence

from specdec.supervision.service_process import outcome_of, start_service

#: Of a node's environment, and of the caller's, all that a rank gets to see: launchers of other people's process groups
#: leave variables that torch and transformers would believe, and Ray has some of its own.
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
    """The variables that have one of `names`, or begin with one that ends in an underscore."""
    return {
        name: value
        for name, value in environ.items()
        if any(name.upper() == known or (known.endswith("_") and name.upper().startswith(known)) for known in names)
    }


class RankHost:
    """Runs as a Ray actor with several threads: it is asked to stop while it hands out lines."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None
        self._is_stopping = False

    def place(self) -> tuple[str, int]:
        """The address of the node that this is on, and a port that was free there a moment ago."""
        import ray

        address = str(ray.util.get_node_ip_address())
        with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as probe:
            probe.bind((address, 0))
            return address, int(probe.getsockname()[1])

    def run(self, module: str, arguments: Sequence[str], environ: Mapping[str, str]) -> Iterator[tuple[str, bool]]:
        """Starts the rank; each line that it writes, and with True how it ended. Once."""
        own = {**only(os.environ, NODE_VARIABLES), **environ}
        self._process = start_service(module, arguments, own)
        if self._is_stopping:
            self._process.terminate()
        assert self._process.stdout is not None  # start_service has opened it
        for line in self._process.stdout:
            yield line.rstrip("\n"), False
        yield outcome_of(self._process.wait()), True

    def ask_to_stop(self) -> None:
        """Drain and end."""
        self._is_stopping = True
        if self._process is not None:
            self._process.terminate()

    def end(self) -> None:
        """Ends the process at once, a stopped one too."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
