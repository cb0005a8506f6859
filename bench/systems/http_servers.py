"""Servers over HTTP: specdec's gateway, and vLLM and llama.cpp as the suite `peers` measures them.

`make peers` prepares both. Each computes in float32 where its model is float32, keeps its KV cache in the same dtype,
and drafts `GAMMA` tokens a round where it has a draft model. Answers arrive by `http_stream`.
"""

import asyncio
import json
import socket
import sys
import time
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.harness.http_stream import get_status, stream_events
from bench.harness.workload import GAMMA, NUM_THREADS
from bench.systems.process import Answer, AnswerClock, PeerServer, ServerProcess
from specdec.supervision.service_process import SERVICE_ENVIRONMENT

MAX_STREAMS = 8
CONTEXT_TOKENS = 1024
_POLL_S = 0.1


class HttpProcess(ServerProcess):
    """A server that is ready once it answers a GET request."""

    port: int
    _ready_path = "/health"

    async def _wait_until_ready(self) -> None:
        while not await self._is_ready():  # noqa: ASYNC110 (another process sets no event of ours)
            await asyncio.sleep(_POLL_S)

    async def _is_ready(self) -> bool:
        try:
            return await get_status(self.port, self._ready_path) == 200
        except (OSError, asyncio.IncompleteReadError):
            return False


class GatewayServer(HttpProcess):
    """`python -m gateway` in the environment that `specdec up` gives it, in front of a system that runs already.

    It is ready once it reaches a target through its coordinator.
    """

    _ready_path = "/ready"

    def __init__(self, coordinator: str) -> None:
        """Describe the gateway of the coordinator at HOST:PORT."""
        self.port = free_port()
        command = [sys.executable, "-m", "gateway", "--listen", f"127.0.0.1:{self.port}", "--coordinator", coordinator]
        super().__init__("gateway", [*command, "--redis-url", "memory://"], SERVICE_ENVIRONMENT)


class HttpServer(HttpProcess, PeerServer):
    """A server that answers with server-sent events."""

    _path: str

    def _listen_on(self, port: int) -> list[str]:
        """Remember the port and return the flags that make the server listen on it."""
        self.port = port
        return ["--host", "127.0.0.1", "--port", str(port)]

    async def answer(self, prompts: Sequence[list[int]], num_tokens: int) -> list[Answer]:
        began_s = time.perf_counter()
        return list(await asyncio.gather(*(self._stream(prompt, num_tokens, began_s) for prompt in prompts)))

    async def _stream(self, prompt: list[int], num_tokens: int, began_s: float) -> Answer:
        clock = AnswerClock(began_s)
        async for event in stream_events(self.port, self._path, self._request(prompt, num_tokens)):
            clock.take(self._token_ids(event))
        return clock.answer(num_tokens)

    @abstractmethod
    def _request(self, prompt: list[int], num_tokens: int) -> dict[str, Any]:
        """Return the body of a request."""

    @abstractmethod
    def _token_ids(self, event: Any) -> list[int]:
        """Return the tokens that an event brings."""


class VllmServer(HttpServer):
    """vLLM's OpenAI-compatible server on a CPU.

    Its first start compiles the models for minutes; later ones find the compiled code in vLLM's own cache.
    """

    _path = "/v1/completions"

    def __init__(
        self,
        name: str,
        python: Path,
        target: Path,
        dtype: str,
        *,
        max_streams: int = MAX_STREAMS,
        speculation: Mapping[str, object] | None = None,
        flags: Sequence[str] = (),
        environ: Mapping[str, str] | None = None,
    ) -> None:
        """Describe the server.

        Args:
            name: Name of the system in the rows.
            python: Interpreter of the environment in which vLLM is installed.
            target: A checkpoint directory.
            dtype: As vLLM's `--dtype` takes it.
            max_streams: Number of streams in one step.
            speculation: As vLLM's `--speculative-config` takes it, without the number of draft tokens; None serves the
                target alone.
            flags: Further flags.
            environ: Variables set beside those that vLLM needs on a CPU.
        """
        command = [str(python), "-P", "-m", "vllm.entrypoints.openai.api_server", *self._listen_on(free_port())]
        command += ["--model", str(target), "--served-model-name", "target", "--dtype", dtype]
        command += ["--max-model-len", str(CONTEXT_TOKENS), "--max-num-seqs", str(max_streams), *flags]
        if speculation:
            command += ["--speculative-config", json.dumps({**speculation, "num_speculative_tokens": GAMMA})]
        own_environ = {
            "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": f"0-{NUM_THREADS - 1}",
            "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": "",
        }  # fmt: skip
        super().__init__(name, command, own_environ | dict(environ or {}))

    @property
    def url(self) -> str:
        """Base URL of the server."""
        return f"http://127.0.0.1:{self.port}"

    def _request(self, prompt: list[int], num_tokens: int) -> dict[str, Any]:
        return {
            "model": "target", "prompt": prompt, "max_tokens": num_tokens, "temperature": 0.0, "ignore_eos": True,
            "stream": True, "return_token_ids": True,
        }  # fmt: skip

    def _token_ids(self, event: Any) -> list[int]:
        return [token_id for choice in event["choices"] for token_id in choice["token_ids"] or ()]


class LlamaServer(HttpServer):
    """llama.cpp's server."""

    _path = "/completion"

    def __init__(
        self, name: str, program: Path, target: Path, draft: Path | None, kv_type: str, max_streams: int = MAX_STREAMS
    ) -> None:
        """Describe the server.

        Args:
            name: Name of the system in the rows.
            program: `llama-server`.
            target: A GGUF file.
            draft: Likewise; None serves the target alone.
            kv_type: Type of the KV cache, as `--cache-type-k` takes it.
            max_streams: Number of streams in one step.
        """
        command = [str(program), *self._listen_on(free_port()), "--model", str(target)]
        command += ["--parallel", str(max_streams), "--ctx-size", str(max_streams * CONTEXT_TOKENS)]
        command += ["--threads", str(NUM_THREADS), "--cache-type-k", kv_type, "--cache-type-v", kv_type]
        if draft:
            command += ["--spec-type", "draft-simple", "--spec-draft-model", str(draft)]
            command += ["--spec-draft-n-max", str(GAMMA), "--spec-draft-threads", str(NUM_THREADS)]
            command += ["--spec-draft-type-k", kv_type, "--spec-draft-type-v", kv_type]
        super().__init__(name, command)

    def _request(self, prompt: list[int], num_tokens: int) -> dict[str, Any]:
        # With `ignore_eos` an end token is never chosen; elsewhere it is chosen and ends nothing.
        return {
            "prompt": prompt, "n_predict": num_tokens, "temperature": 0.0, "ignore_eos": True, "stream": True,
        }  # fmt: skip

    def _token_ids(self, event: Any) -> list[int]:
        return event["tokens"]


def free_port() -> int:
    """Return a port of the loopback interface that nothing listens on now."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port
