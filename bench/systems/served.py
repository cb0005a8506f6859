"""The systems of the suite `peers`: which kinds of servers there are, and how each is made for a pair.

Called by `bench.suites.peers.suite` and `bench.suites.peers.pair_run`.
"""

from pathlib import Path
from typing import NamedTuple

from bench.suites.peers.figures import ALONE, DRAFTED, SPECDEC
from bench.systems.http_servers import LlamaServer, VllmServer
from bench.systems.process import PeerServer, ServerFailure
from bench.systems.served_pairs import ServedPair
from bench.systems.specdec_server import SpecdecServer
from bench.systems.transformers_server import TransformersServer

SPECDEC_INT8 = f"{SPECDEC}_int8"
VLLM, LLAMA, TRANSFORMERS = "vllm", "llama.cpp", "transformers"


class System(NamedTuple):
    """A kind of server, and whether it drafts."""

    kind: str
    drafts: bool

    @property
    def name(self) -> str:
        return self.kind + (DRAFTED if self.drafts else ALONE)


def make_server(system: System, pair: ServedPair, peers: Path) -> PeerServer:
    """Return a server of a pair, not yet started.

    Raises:
        ServerFailure: `make peers` has not prepared it in the folder `peers`.
    """
    models = (pair.target, pair.draft if system.drafts else None)
    checkpoints = (pair.target.checkpoint, pair.draft.checkpoint if system.drafts else None)
    if system.kind in (SPECDEC, SPECDEC_INT8):
        dtype = "int8" if system.kind == SPECDEC_INT8 else pair.dtype
        return SpecdecServer(system.name, *(model and model.served for model in models), dtype)
    if system.kind == TRANSFORMERS:
        return TransformersServer(system.name, *checkpoints, pair.dtype)
    program = peer_program(system.kind, peers)
    if system.kind == VLLM:
        target, draft = checkpoints
        return VllmServer(system.name, program, target, pair.dtype, speculation=own_draft_model(draft))
    return LlamaServer(system.name, program, *(model and model.gguf for model in models), pair.kv_type)


def peer_program(kind: str, peers: Path) -> Path:
    """Return vLLM's interpreter or `llama-server` in the folder `peers`.

    Raises:
        ServerFailure: `make peers` has not prepared it.
    """
    program = peers / ("vllm/bin/python" if kind == VLLM else "llama.cpp/llama-server")
    if not program.is_file():
        raise ServerFailure(f"{program} does not exist: run make peers")
    return program


def own_draft_model(draft: Path | None) -> dict[str, object] | None:
    """Return vLLM's setting for a draft model in its own process; None without a draft."""
    return {"method": "draft_model", "model": str(draft)} if draft else None
