"""The pieces of a round on their own: a model's step, and a message there and back.

`BareProcess` keeps a child that loads models with our own engine and nothing around it; the same child answers an open
gRPC stream with what it is sent, for the round trip of one link. They make the ideal that our services are held
against. Called by the suites `latency` and `real`; `python -m bench.bare` is the child.
"""

import argparse
import asyncio
import json
import sys
import time
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import grpc
import numpy as np

from bench.line_child import LineChild

_ECHO = "/specdec.bench.Echo/Echo"
_NUM_MESSAGES = 50
_MESSAGE_BYTES = 100
_NUM_STEPS = 30


class BareProcess(LineChild):
    """The child."""

    def __init__(self, models: Mapping[str, tuple[Path, str]], num_threads: int) -> None:
        """Loads `models`: by name, a checkpoint and the dtype to serve it in."""
        described = {name: (str(directory), dtype) for name, (directory, dtype) in models.items()}
        super().__init__("bench.bare", "--models", json.dumps(described), num_threads=num_threads)

    def step_s(self, name: str, context_tokens: int, num_tokens: int) -> float:
        """Median seconds of a step of `num_tokens` rows of one session after its context, greedy choice included."""
        return float(self.ask({"name": name, "context_tokens": context_tokens, "num_tokens": num_tokens}))

    def round_trip_s(self) -> float:
        """A small message to the child and back on an open stream: the median of many, now."""
        return asyncio.run(_time_echo(self.greeting))


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

    def __init__(self, model_dir: str, dtype: str, num_threads: int) -> None:
        from specdec.engine.loader import load_worker

        self._worker = load_worker(model_dir, device="cpu", dtype=dtype, num_kv_blocks=64, num_threads=num_threads)

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
    models = {name: _BareModel(*model, arguments.threads) for name, model in json.loads(arguments.models).items()}
    server = grpc.aio.server()
    service, _, method = _ECHO.strip("/").partition("/")
    handlers = {method: grpc.stream_stream_rpc_method_handler(_echo)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    print(json.dumps(f"127.0.0.1:{port}"), flush=True)
    while line := await asyncio.to_thread(sys.stdin.readline):
        asked = json.loads(line)
        print(models[asked.pop("name")].step_s(**asked), flush=True)
    await server.stop(None)


def main() -> None:
    """Answer one request a line until the input ends."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", required=True, help="JSON: name to [checkpoint, dtype]")
    parser.add_argument("--threads", type=int, required=True)
    asyncio.run(_serve(parser.parse_args()))


if __name__ == "__main__":
    main()
