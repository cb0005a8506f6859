"""GuideLLM, `guidellm run`, whose report has no acceptance of draft tokens: it is read from /metrics afterwards.

Part of the suite `gateway`, whose `peer_clients` runs it.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from bench.harness.scrape import page_of
from bench.harness.workload import NUM_NEW_TOKENS
from bench.suites.gateway.peer_clients import MAX_CONCURRENCY, PeerClient
from bench.systems.models import DEMO

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
