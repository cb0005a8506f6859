"""An engine's HTTP server over a table model: OpenAI's completions, and vLLM's native endpoint.

It stands for servers that tests cannot start everywhere (`make test-engines` starts real ones). Requests, answers and
refusals have the form of vLLM 0.32, and so do its traps: a prefix cache in blocks, and rows of cached positions that
hold what an earlier request left there. Its sampler is its own: numpy's generator, seeded by the request.
"""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse

from specdec.contract.types import SamplingFilters
from specdec.core.reference import filtered_distribution
from tests.support.table_worker import TableWorker

#: Limit of vLLM.
_MAX_TEMPERATURE = 2.0

#: Tokens of a block of the prefix cache.
CACHE_BLOCK_TOKENS = 4


@dataclass
class EngineOptions:
    """Flags with which the server was started, in vLLM's terms."""

    name: str = "served"
    key: str = ""
    max_logprobs: int = 20
    has_scale_out: bool = True
    reports_cached_tokens: bool = True
    caches_prefixes: bool = True
    speculates: bool = False
    returns_token_ids: bool = True
    has_nan_in_memory: bool = False
    """Rows of cached positions hold numbers that JSON does not have, and such a request is refused."""
    ignored: tuple[str, ...] = ()
    """Fields of sampling parameters that the server does not apply."""
    text: str = ""
    """Text of every completion."""
    owner: str = "vllm"
    max_model_len: int = 512
    adapters: dict[str, TableWorker] = field(default_factory=dict)
    """Adapters by name, each as the model that it makes of the base model. They may change while the server runs."""
    roots: dict[str, str] = field(default_factory=dict)
    """Paths of adapters that were not loaded from /adapters/NAME."""
    names_join: bool = False
    """An adapter is selected as in SGLang, by MODEL:NAME, and any other name is the model itself."""
    checks_names: bool = True
    """False: any name that is none is the model itself, as with VLLM_SKIP_MODEL_NAME_VALIDATION."""


@dataclass
class Asked:
    """Requests that the server has received."""

    completions: list[dict[str, Any]] = field(default_factory=list)
    generations: list[dict[str, Any]] = field(default_factory=list)


class EngineServer:
    """Use as an async context manager; the server runs on a thread of its own."""

    def __init__(self, worker: TableWorker, options: EngineOptions | None = None, port: int = 0) -> None:
        """`worker` is only asked for logits, so several servers may share it. Port 0 takes a free one."""
        self.worker = worker
        self.options = options or EngineOptions()
        self.asked = Asked()
        self._cached: set[tuple[str, tuple[int, ...]]] = set()
        self._stale_rows: dict[int, dict[str, Any]] = {}
        self._server = uvicorn.Server(uvicorn.Config(self._app(), log_config=None, lifespan="off"))
        # Asyncio disables Nagle's algorithm for sockets of this protocol only; otherwise each answer takes 40 ms.
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._socket.bind(("127.0.0.1", port))
        self._thread = threading.Thread(target=self._server.run, args=([self._socket],), daemon=True)
        self.refuse_next: int | None = None
        """Status with which the next round is refused."""
        self.gate = threading.Event()
        """Cleared: requests wait for it before they are answered."""
        self.gate.set()

    @property
    def port(self) -> int:
        return int(self._socket.getsockname()[1])

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def __aenter__(self) -> EngineServer:
        self._thread.start()
        while not self._server.started:  # noqa: ASYNC110 - set by another thread
            await asyncio.sleep(0.01)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def stop(self) -> None:
        """End the server and break its connections. Idempotent."""
        self.gate.set()
        self._server.should_exit = self._server.force_exit = True
        await asyncio.to_thread(self._thread.join)
        self._socket.close()

    def forget_cache(self) -> None:
        """Drop the prefix cache."""
        self._cached.clear()

    def _app(self) -> FastAPI:
        app = FastAPI()
        app.get("/v1/models")(self._models)
        app.get("/version")(lambda: {"version": "0.32.0"})
        app.get("/metrics")(self._metrics)
        app.post("/v1/completions")(self._completions)
        if self.options.has_scale_out:
            app.post("/inference/v1/generate")(self._generate)
        app.middleware("http")(self._check_key)
        return app

    async def _check_key(self, request: Request, call_next: Any) -> Any:
        if self.options.key and request.headers.get("authorization") != f"Bearer {self.options.key}":
            return _refusal("Unauthorized", 401)
        await asyncio.to_thread(self.gate.wait)
        if self.refuse_next is not None and request.method == "POST":
            status, self.refuse_next = self.refuse_next, None
            return _refusal("Rate limited: upstream key sk-secret", status)
        return await call_next(request)

    async def _models(self) -> Any:
        options = self.options
        model = {"id": options.name, "owned_by": options.owner, "max_model_len": options.max_model_len}
        adapters = [
            {"id": name, "parent": options.name, "root": options.roots.get(name, f"/adapters/{name}")}
            for name in options.adapters
        ]
        return {"object": "list", "data": [model, *adapters]}

    def _worker_of(self, name: str) -> TableWorker | None:
        """Return the model that answers a request for a name; None if it is refused."""
        options = self.options
        if options.names_join:
            _, is_joined, adapter = name.partition(":")
            return options.adapters.get(adapter) if is_joined else self.worker
        return options.adapters.get(name) or (self.worker if name == options.name or not options.checks_names else None)

    async def _metrics(self) -> Any:
        text = "vllm:spec_decode_num_drafts_total 0\n" if self.options.speculates else "vllm:num_requests_running 0\n"
        return JSONResponse(text)

    async def _completions(self, request: Request) -> Any:
        body = await request.json()
        self.asked.completions.append(body)
        worker = self._worker_of(body["model"])
        if worker is None:
            return _refusal("The model does not exist", 404)
        if body["temperature"] > _MAX_TEMPERATURE:
            return _refusal(f"temperature must be in [0, 2], got {body['temperature']}", 400)
        choices = []
        for index, prompt in enumerate(body["prompt"]):
            token_ids = self._continue(worker, prompt, body)
            choices.append(
                {"index": index, "text": self.options.text, "token_ids": token_ids, "finish_reason": "length"}
            )
            if not self.options.returns_token_ids:
                del choices[-1]["token_ids"]
        return {"choices": choices[::-1], "model": self.options.name}  # the order is not promised

    async def _generate(self, request: Request) -> Any:
        body = await request.json()
        self.asked.generations.append(body)
        worker = self._worker_of(body["model"])
        if worker is None:
            return _refusal("The model does not exist", 404)
        params, prompt = body["sampling_params"], body["token_ids"]
        for name in ("logprobs", "prompt_logprobs"):
            if params.get(name) is not None and params[name] > self.options.max_logprobs:
                return _refusal(f"Requested {name} of {params[name]}, max allowed: {self.options.max_logprobs}", 400)
        if len(prompt) >= self.options.max_model_len:
            return _refusal("The prompt is longer than the maximum model length", 400)
        num_cached = self._take_cached(f"{body['model']} {body.get('cache_salt', '')}", prompt)
        num_cached = 0 if params.get("skip_reading_prefix_cache") else num_cached
        token_ids = self._continue(worker, prompt, params)
        choice: dict[str, Any] = {"index": 0, "token_ids": token_ids, "logprobs": None}
        if params.get("logprobs") is not None:
            choice["logprobs"] = {"content": [self._output_row(worker, prompt, token_ids[0], params["logprobs"])]}
        usage: dict[str, Any] = {"prompt_tokens": len(prompt), "prompt_tokens_details": None}
        if self.options.reports_cached_tokens:
            usage["prompt_tokens_details"] = {"cached_tokens": num_cached}
        rows = self._prompt_rows(worker, prompt, num_cached, params.get("prompt_logprobs"))
        if rows is not None and num_cached and self.options.has_nan_in_memory:
            return _refusal("Out of range float values are not JSON compliant", 400)
        return {"choices": [choice], "usage": usage, "prompt_logprobs": rows}

    def _take_cached(self, salt: str, prompt: Sequence[int]) -> int:
        """Return how many tokens the prefix cache has, and enter the prompt's full blocks."""
        if not self.options.caches_prefixes:
            return 0
        ends = range(CACHE_BLOCK_TOKENS, len(prompt) + 1, CACHE_BLOCK_TOKENS)
        known = [end for end in ends if (salt, tuple(prompt[:end])) in self._cached and end < len(prompt)]
        self._cached.update((salt, tuple(prompt[:end])) for end in ends)
        return max(known, default=0)

    def _continue(self, worker: TableWorker, prompt: Sequence[int], params: dict[str, Any]) -> list[int]:
        params = {name: value for name, value in params.items() if name not in self.options.ignored}
        tokens = list(prompt)
        generator = np.random.default_rng(params.get("seed"))
        for _ in range(params.get("max_tokens", 1)):
            distribution = filtered_distribution(
                self._logits(worker, tokens, params), _filters(params), tokens, len(prompt)
            )
            tokens.append(int(generator.choice(len(distribution), p=distribution)))
        return tokens[len(prompt) :]

    def _logits(self, worker: TableWorker, tokens: Sequence[int], params: dict[str, Any]) -> np.ndarray:
        logits = worker.logits_after(tokens).astype(np.float64)
        if params.get("min_tokens"):
            logits[[*worker.shape.eos_token_ids, *params.get("stop_token_ids", ())]] = -np.inf
        return logits

    def _logprobs(self, worker: TableWorker, prefix: Sequence[int]) -> np.ndarray:
        logits = worker.logits_after(prefix).astype(np.float64)
        return np.asarray(logits - np.log(np.exp(logits).sum()))

    def _output_row(self, worker: TableWorker, prompt: Sequence[int], token_id: int, num_top: int) -> dict[str, Any]:
        logprobs = self._logprobs(worker, prompt)
        top = np.argsort(-logprobs, kind="stable")[:num_top].tolist()
        entries = [{"token_id": each, "logprob": float(logprobs[each])} for each in [token_id, *top]]
        return {**entries[0], "top_logprobs": entries if token_id not in top else entries[1:]}

    def _prompt_rows(
        self, worker: TableWorker, prompt: Sequence[int], num_cached: int, num_top: int | None
    ) -> list[Any] | None:
        """Return a row for each token of the prompt; those of cached positions are an earlier request's."""
        if num_top is None:
            return None
        rows: list[Any] = [None]
        for at in range(1, len(prompt)):
            if at > num_cached:
                logprobs = self._logprobs(worker, prompt[:at])
                order = np.argsort(-logprobs, kind="stable").tolist()
                shown = sorted({*order[:num_top], prompt[at]}, key=lambda each: each != prompt[at])
                self._stale_rows[at] = {
                    str(each): {"logprob": float(logprobs[each]), "rank": order.index(each) + 1} for each in shown
                }
            rows.append(self._stale_rows.get(at, {"0": {"logprob": -1e19, "rank": 1}}))
        return rows


def _filters(params: dict[str, Any]) -> SamplingFilters:
    return SamplingFilters(
        temperature=params.get("temperature", 1.0),
        top_p=params.get("top_p", 1.0),
        top_k=max(0, params.get("top_k", 0)),
        min_p=params.get("min_p", 0.0),
    )


def _refusal(message: str, status: int) -> JSONResponse:
    return JSONResponse({"error": {"message": message, "code": status}}, status_code=status)
