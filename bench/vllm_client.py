"""vLLM's own benchmark client against the gateway: `vllm bench serve`, unmodified, from the folder of `make peers`.

It sends the prompts of every suite to /v1/completions, streams the answers, and reads the acceptance of draft tokens
from the gateway's /metrics under vLLM's names. Part of the suite `gateway`, which calls this.
"""

import argparse
import asyncio
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bench.models import DEMO
from bench.report import waiting
from bench.rows import Row
from bench.servers.gateway_server import GatewayServer
from bench.servers.suite import PEERS_FOLDER
from bench.system import RunningSystem
from bench.workload import NUM_NEW_TOKENS, prompt_texts

VLLM = "vllm"
MAX_CONCURRENCY = 16
#: What `vllm bench serve` runs. The command itself looks for a package called vllm, and the build for CPUs has another
#: name, so it ends with an error before it reads its arguments.
_PROGRAM = (
    "from vllm.benchmarks.serve import add_cli_args, main;"
    "from vllm.utils.argparse_utils import FlexibleArgumentParser;"
    "parser = FlexibleArgumentParser(); add_cli_args(parser); main(parser.parse_args())"
)
_TIMEOUT_S = 600.0
_SHOWN_CHARACTERS = 2_000
#: Fields of the client's result that become rows, with their units.
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


def add_peer_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of clients of other projects."""
    parser.add_argument(
        "--peer-bench", choices=[VLLM], help="run this project's benchmark client against the gateway, and no more"
    )
    parser.add_argument(
        "--peers-folder", type=Path, default=PEERS_FOLDER, metavar="DIR", help="folder that `make peers` has filled"
    )


async def run_vllm_client(row: Any, folder: Path, arguments: argparse.Namespace) -> list[Row]:
    """Run the client to its end and return what it reported; `row(...)` makes a row.

    Raises:
        SystemExit: `make peers` has not prepared vLLM, or the client failed.
    """
    python = arguments.peers_folder / "vllm/bin/python"
    if not python.is_file():
        raise SystemExit(f"error: {python} does not exist: run make peers")
    texts = prompt_texts()[: 4 if arguments.quick else None]
    (folder / "prompts.json").write_text(json.dumps(list(map(_conversation, texts))))
    with RunningSystem(DEMO / "target", DEMO / "draft") as system:
        gateway = GatewayServer(system.endpoint)
        await gateway.start()
        try:
            with waiting("vllm bench serve"):
                await _run([str(python), "-P", "-c", _PROGRAM, *_flags(gateway.port, folder, len(texts))])
        finally:
            await gateway.stop()
    return client_rows(row, json.loads((folder / "result.json").read_text()), len(texts))


def _flags(port: int, folder: Path, num_prompts: int) -> list[str]:
    flags: Mapping[str, object] = {
        "--backend": "openai", "--base-url": f"http://127.0.0.1:{port}", "--endpoint": "/v1/completions",
        "--model": "target", "--tokenizer": DEMO / "target", "--dataset-name": "sharegpt",
        "--dataset-path": folder / "prompts.json", "--sharegpt-output-len": NUM_NEW_TOKENS,
        "--num-prompts": num_prompts, "--max-concurrency": MAX_CONCURRENCY, "--temperature": 0, "--result-dir": folder,
        "--result-filename": "result.json",
    }  # fmt: skip
    words = [word for name, value in flags.items() for word in (name, str(value))]
    return [*words, "--ignore-eos", "--save-result", "--disable-tqdm"]


def _conversation(text: str) -> dict[str, object]:
    """Return a prompt in the form of ShareGPT's file, the only one that the client reads without further packages."""
    return {"conversations": [{"value": text}, {"value": text}]}


async def _run(command: list[str]) -> None:
    environ = os.environ | {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "PYTHONPATH": ""}
    process = await asyncio.create_subprocess_exec(
        *command, env=environ, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    try:
        said, _ = await asyncio.wait_for(process.communicate(), _TIMEOUT_S)
    except TimeoutError:
        process.kill()
        await process.wait()
        raise SystemExit(f"error: vllm bench serve did not end within {_TIMEOUT_S:g} s") from None
    if process.returncode:
        raise SystemExit(f"error: vllm bench serve failed: {said.decode(errors='replace')[-_SHOWN_CHARACTERS:]}")


def client_rows(row: Any, result: Mapping[str, Any], num_prompts: int) -> list[Row]:
    """Return the client's figures. A run without acceptance, or with a failed request, falls short."""
    required = {"completed": num_prompts, "spec_decode_num_drafts": 1}
    case = f"demo pair, vllm bench serve, {MAX_CONCURRENCY} streams"
    return [
        row(
            case=case, system="http", metric=name, value=float(result.get(name) or 0.0), unit=unit,
            required=required.get(name), at_most=0.0 if name == "failed" else None,
        )
        for name, unit in _FIGURES.items()
    ]  # fmt: skip
