"""llama.cpp as the peer, by `llama-cpp-python`: one greedy stream at a time, in a process of its own.

The batching server of llama.cpp is measured by the suite `peers`. Called by `bench.suites.real.suite`; `python -m
bench.systems.llama_cpp` is the child.
"""

import argparse
import time
from dataclasses import asdict
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any

from bench.harness.line_child import LineChild, answer_lines
from bench.systems.transformers import PeerRun

_CONTEXT_TOKENS = 2048


def is_installed() -> bool:
    """Return whether `llama-cpp-python` is installed."""
    return find_spec("llama_cpp") is not None


class LlamaProcess(LineChild):
    """A GGUF file in llama.cpp, in a child process."""

    def __init__(self, path: Path, num_threads: int) -> None:
        super().__init__("bench.systems.llama_cpp", "--model", str(path), num_threads=num_threads)

    def run(self, prompt_token_ids: list[int], max_new_tokens: int) -> PeerRun:
        """Generates greedily, past any end token; the times are the child's own, without the pipe."""
        return PeerRun(**self.ask([prompt_token_ids, max_new_tokens]))


def main() -> None:
    """Answer one request a line until the input ends."""
    from llama_cpp import Llama

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--threads", type=int, required=True)
    asked = parser.parse_args()
    model = Llama(
        asked.model, n_ctx=_CONTEXT_TOKENS, n_threads=asked.threads, n_threads_batch=asked.threads, verbose=False
    )

    def answer(request: tuple[list[int], int]) -> dict[str, Any]:
        prompt_token_ids, max_new_tokens = request
        started, first, token_ids = time.perf_counter(), 0.0, []
        for token_id in islice(model.generate(prompt_token_ids, top_k=1, temp=0.0, repeat_penalty=1.0), max_new_tokens):
            first = first or time.perf_counter()
            token_ids.append(token_id)
        return asdict(PeerRun(token_ids, first - started, time.perf_counter() - started))

    answer_lines({}, answer)


if __name__ == "__main__":
    main()
