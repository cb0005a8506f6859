"""The pieces of a round on their own: a draft step, a verification, and a message there and back.

`BareProcess` keeps a child that loads both models with our own engine and nothing around it; the same child answers an
open gRPC stream with what it is sent, for the round trip of one link. They make the ideal that our services are held
against. Called by the `latency` suite; `python -m bench.bare` is the child.
"""

import argparse
import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import grpc
import numpy as np

_ECHO = "/specdec.bench.Echo/Echo"
_NUM_MESSAGES = 50
_MESSAGE_BYTES = 100
_NUM_STEPS = 30


@dataclass(frozen=True)
class BareTimes:
    """Medians, in seconds."""

    draft_step_s: float
    """One token of one session through the draft, greedy choice included."""
    verify_s: float
    """gamma + 1 tokens through the target, likewise."""


class BareProcess:
    """The child. Use it by `with`; one call at a time."""

    def __init__(self, target_dir: Path, draft_dir: Path, num_threads: int) -> None:
        command = [sys.executable, "-m", "bench.bare", "--target", str(target_dir), "--draft", str(draft_dir)]
        self._process = subprocess.Popen(
            [*command, "--threads", str(num_threads)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": str(num_threads), "TRANSFORMERS_VERBOSITY": "error"},
            cwd=Path(__file__).resolve().parents[1],
        )
        self._address = self._read()

    def times(self, context_tokens: int, gamma: int) -> BareTimes:
        """Measures now, after a context of so many tokens."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"context_tokens": context_tokens, "gamma": gamma}) + "\n")
        self._process.stdin.flush()
        return BareTimes(**self._read())

    def round_trip_s(self) -> float:
        """A small message to the child and back on an open stream: the median of many, now."""
        return asyncio.run(_time_echo(self._address))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # The child ends at the end of its input.
        self._process.communicate()

    def _read(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the bare engine ended with exit code {self._process.wait()}")
        return json.loads(line)


async def _time_echo(address: str) -> float:
    async with grpc.aio.insecure_channel(address) as channel:
        call = channel.stream_stream(_ECHO)()
        seconds = []
        for _ in range(_NUM_MESSAGES):
            began = time.perf_counter()
            await call.write(bytes(_MESSAGE_BYTES))
            await call.read()
            seconds.append(time.perf_counter() - began)
        call.cancel()
    return float(np.median(seconds))


class _BareModel:
    """One worker and a session of zeros."""

    def __init__(self, model_dir: str, num_threads: int) -> None:
        from specdec.engine.loader import load_worker

        self._worker = load_worker(model_dir, device="cpu", dtype="float32", num_kv_blocks=64, num_threads=num_threads)

    def step_s(self, context_tokens: int, num_tokens: int) -> float:
        """Median time of a step of `num_tokens` rows after the context."""
        self._execute(0, context_tokens)
        seconds = []
        for _ in range(_NUM_STEPS):
            began = time.perf_counter()
            self._execute(context_tokens, num_tokens)
            seconds.append(time.perf_counter() - began)
        return float(np.median(seconds))

    def _execute(self, start: int, num_tokens: int) -> list[int]:
        import torch

        from specdec.engine.base import SequenceSlice, StepPlan
        from specdec.engine.sessions.block_manager import blocks_for

        blocks = tuple(range(blocks_for(start + num_tokens)))
        plan = StepPlan((SequenceSlice((5,) * num_tokens, start, blocks, num_tokens),))
        with torch.inference_mode():
            return self._worker.execute(plan).argmax(dim=-1).tolist()


async def _echo(messages: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
    async for message in messages:
        yield message


async def _serve(arguments: argparse.Namespace) -> None:
    models = [_BareModel(directory, arguments.threads) for directory in (arguments.target, arguments.draft)]
    server = grpc.aio.server()
    service, _, method = _ECHO.strip("/").partition("/")
    handlers = {method: grpc.stream_stream_rpc_method_handler(_echo)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    print(json.dumps(f"127.0.0.1:{port}"), flush=True)
    while line := await asyncio.to_thread(sys.stdin.readline):
        asked = json.loads(line)
        verify_s = models[0].step_s(asked["context_tokens"], asked["gamma"] + 1)
        draft_step_s = models[1].step_s(asked["context_tokens"], 1)
        print(json.dumps(asdict(BareTimes(draft_step_s, verify_s))), flush=True)
    await server.stop(None)


def main() -> None:
    """Answer one request a line until the input ends."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", required=True)
    parser.add_argument("--draft", required=True)
    parser.add_argument("--threads", type=int, required=True)
    asyncio.run(_serve(parser.parse_args()))


if __name__ == "__main__":
    main()
