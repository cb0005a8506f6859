"""Benchmark clients of other projects against the gateway, each unmodified, from the folder that `make peers` fills.

A client sends the prompts of every suite to /v1/completions with 16 streams at once and 128 tokens each, on the demo
pair, and must get them all. The acceptance of draft tokens comes from the gateway's /metrics, under vLLM's names. Part
of the suite `gateway`, which calls this; `vllm_client` and `guidellm_client` are the clients.
"""

import asyncio
import os
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from bench.harness.report import waiting
from bench.harness.rows import Row
from bench.harness.workload import prompt_texts
from bench.systems.gateway import GatewayServer
from bench.systems.models import DEMO
from bench.systems.ours import RunningSystem

MAX_CONCURRENCY = 16
_TIMEOUT_S = 600.0
_SHOWN_CHARACTERS = 2_000
#: Figures that a client reports, with their units.
_FIGURES = {
    "completed": "requests",
    "failed": "requests",
    "output_throughput": "tokens/s",
    "median_ttft_ms": "ms",
    "median_tpot_ms": "ms",
    "spec_decode_acceptance_rate": "%",
    "spec_decode_acceptance_length": "tokens",
    "spec_decode_num_drafts": "drafts",
}


class PeerClient(ABC):
    """One client."""

    name: ClassVar[str]
    """Value of `--peer-bench`, and folder of the client's environment among the peers."""
    title: ClassVar[str]
    """Command by which the client is known."""

    @abstractmethod
    def command(self, python: Path, port: int, folder: Path, texts: Sequence[str]) -> list[str]:
        """Write the prompts into `folder`, and return the command that sends them to the gateway at a port.

        Args:
            python: interpreter of the client's environment.
            port: port of the gateway on the loopback interface.
            folder: empty folder for the client's files.
            texts: prompts, each of which is sent once.
        """

    @abstractmethod
    def figures(self, folder: Path, port: int) -> Mapping[str, Any]:
        """Return what the client reported in `folder`, by the names of `_FIGURES`, while the gateway still runs."""


async def run_peer_client(client: PeerClient, row: Any, folder: Path, peers_folder: Path, quick: bool) -> list[Row]:
    """Run the client to its end and return what it reported; `row(...)` makes a row.

    Raises:
        SystemExit: `make peers` has not prepared the client, or it failed.
    """
    python = peers_folder / client.name / "bin/python"
    if not python.is_file():
        raise SystemExit(f"error: {python} does not exist: run make peers")
    texts = prompt_texts()[: 4 if quick else None]
    with RunningSystem(DEMO / "target", DEMO / "draft") as system:
        gateway = GatewayServer(system.endpoint)
        await gateway.start()
        try:
            with waiting(client.title):
                await _run(client.title, client.command(python, gateway.port, folder, texts))
            figures = await asyncio.to_thread(client.figures, folder, gateway.port)
        finally:
            await gateway.stop()
    return client_rows(row, client.title, figures, len(texts))


async def _run(title: str, command: Sequence[str]) -> None:
    environ = os.environ | {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "PYTHONPATH": ""}
    process = await asyncio.create_subprocess_exec(
        *command, env=environ, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    try:
        said, _ = await asyncio.wait_for(process.communicate(), _TIMEOUT_S)
    except TimeoutError:
        process.kill()
        await process.wait()
        raise SystemExit(f"error: {title} did not end within {_TIMEOUT_S:g} s") from None
    if process.returncode:
        raise SystemExit(f"error: {title} failed: {said.decode(errors='replace')[-_SHOWN_CHARACTERS:]}")


def client_rows(row: Any, title: str, figures: Mapping[str, Any], num_prompts: int) -> list[Row]:
    """Return the client's figures. A run without acceptance, or with a failed request, falls short."""
    required = {"completed": num_prompts, "spec_decode_num_drafts": 1}
    case = f"demo pair, {title}, {MAX_CONCURRENCY} streams"
    return [
        row(
            case=case, system="http", metric=name, value=float(figures.get(name) or 0.0), unit=unit,
            required=required.get(name), at_most=0.0 if name == "failed" else None,
        )
        for name, unit in _FIGURES.items()
    ]  # fmt: skip
