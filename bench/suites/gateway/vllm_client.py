"""vLLM's own benchmark client, `vllm bench serve`, which reads the acceptance of draft tokens from /metrics itself.

Part of the suite `gateway`, whose `peer_clients` runs it.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.harness.workload import NUM_NEW_TOKENS
from bench.suites.gateway.peer_clients import MAX_CONCURRENCY, PeerClient
from bench.systems.models import DEMO

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
