"""Benchmark clients of other projects against the gateway, each unmodified, from the folder that `make peers` fills.

A client sends the prompts of every suite to /v1/completions with 16 streams at once and 128 tokens each, on the demo
pair, and must get them all. The acceptance of draft tokens comes from the gateway's /metrics, under vLLM's names. Part
of the suite `gateway`, which calls this. vLLM's client reads the acceptance itself.
"""

import asyncio
import json
import os
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from prometheus_client.parser import text_string_to_metric_families

from bench.harness.report import waiting
from bench.harness.rows import Row
from bench.harness.scrape import page_of
from bench.harness.workload import NUM_NEW_TOKENS, prompt_texts
from bench.systems.http_servers import GatewayServer
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


#: What `vllm bench serve` runs. The command itself looks for a package called vllm, and the build for CPUs has another
#: name, so it ends with an error before it reads its arguments.
_PROGRAM = (
    "from vllm.benchmarks.serve import add_cli_args, main;"
    "from vllm.utils.argparse_utils import FlexibleArgumentParser;"
    "parser = FlexibleArgumentParser(); add_cli_args(parser); main(parser.parse_args())"
)
_RESULT = "result.json"


class VllmClient(PeerClient):
    """`vllm bench serve`."""

    name = "vllm"
    title = "vllm bench serve"

    def command(self, python: Path, port: int, folder: Path, texts: Sequence[str]) -> list[str]:
        (folder / "prompts.json").write_text(json.dumps(list(map(_conversation, texts))))
        flags: Mapping[str, object] = {
            "--backend": "openai", "--base-url": f"http://127.0.0.1:{port}", "--endpoint": "/v1/completions",
            "--model": "target", "--tokenizer": DEMO / "target", "--dataset-name": "sharegpt",
            "--dataset-path": folder / "prompts.json", "--sharegpt-output-len": NUM_NEW_TOKENS,
            "--num-prompts": len(texts), "--max-concurrency": MAX_CONCURRENCY, "--temperature": 0,
            "--result-dir": folder, "--result-filename": _RESULT,
        }  # fmt: skip
        words = [word for name, value in flags.items() for word in (name, str(value))]
        return [str(python), "-P", "-c", _PROGRAM, *words, "--ignore-eos", "--save-result", "--disable-tqdm"]

    def figures(self, folder: Path, port: int) -> Mapping[str, Any]:
        result: dict[str, Any] = json.loads((folder / _RESULT).read_text())
        return result


def _conversation(text: str) -> dict[str, object]:
    """Return a prompt in the form of ShareGPT's file, the only one that the client reads without further packages."""
    return {"conversations": [{"value": text}, {"value": text}]}


_REPORT = "report.json"
_SERIES = "vllm:spec_decode_num_"


class GuideLlmClient(PeerClient):
    """`guidellm run`."""

    name = "guidellm"
    title = "guidellm run"

    def command(self, python: Path, port: int, folder: Path, texts: Sequence[str]) -> list[str]:
        # A number of output tokens makes it send `max_tokens` and `ignore_eos`.
        samples = [{"prompt": text, "output_tokens_count": NUM_NEW_TOKENS} for text in texts]
        (folder / "prompts.jsonl").write_text("".join(json.dumps(sample) + "\n" for sample in samples))
        options: Mapping[str, Mapping[str, object]] = {
            "--backend": {
                "kind": "openai_http", "target": f"http://127.0.0.1:{port}", "model": "target",
                "request_format": "/v1/completions", "extras": {"body": {"temperature": 0}},
            },
            "--profile": {"kind": "concurrent", "streams": MAX_CONCURRENCY},
            "--constraint": {"kind": "max_requests", "count": len(texts)},
            "--tokenizer": {"kind": "huggingface_auto", "model": str(DEMO / "target")},
            "--data": {"kind": "json_file", "path": str(folder / "prompts.jsonl")},
            "--output": {"kind": "json", "path": str(folder / _REPORT)},
        }  # fmt: skip
        words = [word for name, value in options.items() for word in (name, json.dumps(value))]
        return [str(python), "-P", "-m", "guidellm", "run", *words, "--disable-console-interactive"]

    def figures(self, folder: Path, port: int) -> Mapping[str, Any]:
        report = json.loads((folder / _REPORT).read_text())
        return report_figures(report) | acceptance_figures(page_of(f"127.0.0.1:{port}"))


def report_figures(report: Mapping[str, Any]) -> dict[str, float]:
    """Return the figures of GuideLLM's report under the names that `vllm bench serve` gives them."""
    (benchmark,) = report["benchmarks"]
    metrics = benchmark["metrics"]
    totals = metrics["request_totals"]
    return {
        "completed": totals["successful"],
        "failed": totals["errored"] + totals["incomplete"],
        "output_throughput": metrics["output_tokens_per_second"]["successful"]["mean"],
        "median_ttft_ms": metrics["time_to_first_token_ms"]["successful"]["median"],
        "median_tpot_ms": metrics["inter_token_latency_ms"]["successful"]["median"],
    }


def acceptance_figures(page: str) -> dict[str, float]:
    """Return the acceptance of draft tokens that a page of metrics tells under vLLM's names, likewise."""
    totals = {
        sample.name.removeprefix(_SERIES): sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
        if sample.name.startswith(_SERIES) and "position" not in sample.labels
    }
    accepted, num_drafts = totals.get("accepted_tokens_total", 0.0), totals.get("drafts_total", 0.0)
    num_draft_tokens = totals.get("draft_tokens_total", 0.0)
    return {
        "spec_decode_acceptance_rate": 100.0 * accepted / num_draft_tokens if num_draft_tokens else 0.0,
        "spec_decode_acceptance_length": 1.0 + accepted / num_drafts if num_drafts else 0.0,
        "spec_decode_num_drafts": num_drafts,
    }
