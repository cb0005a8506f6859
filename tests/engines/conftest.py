"""A real vLLM server on a CPU with the demo target, from `make peers`; tests are left out where it is missing."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.support.stack import free_port

ROOT = Path(__file__).resolve().parents[2]
DEMO = ROOT / "models" / "demo"
VLLM = ROOT / ".peers" / "vllm" / "bin" / "python"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker("engines")


@dataclass
class VllmServer:
    """vLLM's OpenAI-compatible server with the flags that a target in front of it needs."""

    model: Path
    flags: tuple[str, ...] = ("--enable-scale-out", "--enable-prompt-tokens-details")
    environ: Mapping[str, str] = field(default_factory=dict)
    port: int = field(default_factory=free_port)
    process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self, model: Path | None = None) -> None:
        """Start the server, with another model if one is given, and wait until it serves."""
        command = [str(VLLM), "-P", "-m", "vllm.entrypoints.openai.api_server", "--host", "127.0.0.1"]
        command += ["--port", str(self.port), "--model", str(model or self.model), "--served-model-name", "target"]
        command += ["--dtype", "float32", "--max-model-len", "512", "--max-num-seqs", "16", "--enforce-eager"]
        command += self.flags
        environ = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "0-0", "VLLM_NO_USAGE_STATS": "1"}
        environ |= {"HF_HUB_OFFLINE": "1", "PYTHONPATH": "", "VLLM_SERVER_DEV_MODE": "1"}  # for reset_cache
        with tempfile.TemporaryFile() as log:
            self.process = subprocess.Popen(
                command, env=os.environ | environ | self.environ, start_new_session=True, stdout=log, stderr=log
            )
            while not self._is_healthy():
                if self.process.poll() is not None:
                    log.seek(0)
                    pytest.fail("vLLM ended while it started:\n" + log.read().decode()[-4000:], pytrace=False)
                time.sleep(0.5)

    def signal(self, number: int) -> None:
        """Send a signal to all processes of the server."""
        assert self.process is not None
        os.killpg(self.process.pid, number)

    def kill(self) -> None:
        """End the server at once. Idempotent."""
        if self.process is not None:
            if self.process.poll() is None:
                self.signal(signal.SIGKILL)
            self.process.wait()
            self.process = None

    def ask(self, path: str, body: dict[str, Any]) -> Any:
        """Return the answer to a request."""
        data = json.dumps(body).encode()
        asked = urllib.request.Request(self.url + path, data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(asked) as answer:
            return json.load(answer)

    def reset_cache(self) -> None:
        """Drop the prefix cache."""
        asked = urllib.request.Request(self.url + "/reset_prefix_cache", method="POST")
        urllib.request.urlopen(asked).close()

    def greedy_continuation(self, token_ids: list[int], num_tokens: int, model: str = "target") -> list[int]:
        """Return the server's own greedy tokens; `model` may name an adapter."""
        body = {"model": model, "prompt": [token_ids], "max_tokens": num_tokens, "temperature": 0}
        answer = self.ask("/v1/completions", body | {"return_token_ids": True, "ignore_eos": True})
        own: list[int] = answer["choices"][0]["token_ids"]
        return own

    def logprobs_after(self, token_ids: list[int]) -> dict[int, float]:
        """Return the server's 20 likeliest next tokens with their logarithms of probabilities."""
        params = {"max_tokens": 1, "temperature": 0.0, "logprobs": 20, "detokenize": False}
        answer = self.ask("/inference/v1/generate", {"token_ids": token_ids, "sampling_params": params})
        row = answer["choices"][0]["logprobs"]["content"][0]
        return {entry["token_id"]: entry["logprob"] for entry in [row, *row["top_logprobs"]]}

    def _is_healthy(self) -> bool:
        try:
            with urllib.request.urlopen(self.url + "/health", timeout=5) as answer:
                return bool(answer.status == 200)
        except (OSError, urllib.error.URLError):
            return False


@pytest.fixture(scope="session")
def vllm() -> Iterator[VllmServer]:
    if not VLLM.exists():
        pytest.skip(f"vLLM is not installed in {VLLM.parent.parent}: run make peers")
    server = VllmServer(DEMO / "target")
    server.start()
    yield server
    server.kill()
