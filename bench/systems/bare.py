"""A model's step on its own.

`BareProcess` keeps a child that loads models with our own engine and nothing around it. Its steps, together with the
message round trips of `bare_messages`, are the ideal time that the services are compared with. Called by the suites
`latency` and `real`; `python -m bench.systems.bare` is the child.
"""

import argparse
import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path

from bench.harness.line_child import LineChild, answer_lines
from bench.harness.pairs import median_s

_NUM_STEPS = 30


class BareProcess(LineChild):
    """The child."""

    def __init__(self, models: Mapping[str, tuple[Path, str]], num_threads: int) -> None:
        """Loads `models`: by name, a checkpoint and the dtype to serve it in."""
        described = {name: (str(directory), dtype) for name, (directory, dtype) in models.items()}
        super().__init__("bench.systems.bare", "--models", json.dumps(described), num_threads=num_threads)

    def step_s(self, name: str, context_tokens: int, num_tokens: int) -> float:
        """Median seconds of a step of `num_tokens` rows of one session after its context, greedy choice included."""
        return float(self.ask({"name": name, "context_tokens": context_tokens, "num_tokens": num_tokens}))


class _BareModel:
    """One worker and a session of zeros."""

    def __init__(self, model_dir: str, dtype: str, num_threads: int) -> None:
        from specdec.engine.loader import load_worker
        from specdec.engine.options import LoadRequest

        self._worker = load_worker(
            LoadRequest(model_dir, device="cpu", dtype=dtype, num_kv_blocks=64, num_threads=num_threads)
        )

    def step_s(self, context_tokens: int, num_tokens: int) -> float:
        """Median time of a step of `num_tokens` rows after the context."""
        self._execute(0, context_tokens)
        return median_s(partial(self._execute, context_tokens, num_tokens), _NUM_STEPS)

    def _execute(self, start: int, num_tokens: int) -> list[int]:
        import torch

        from specdec.engine.base import SequenceSlice, StepPlan
        from specdec.engine.sessions.block_manager import blocks_for

        blocks = tuple(range(blocks_for(start + num_tokens)))
        plan = StepPlan((SequenceSlice((5,) * num_tokens, start, blocks, num_tokens),))
        with torch.inference_mode():
            return self._worker.execute(plan).argmax(dim=-1).tolist()


def main() -> None:
    """Answer one request a line until the input ends."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", required=True, help="JSON: name to [checkpoint, dtype]")
    parser.add_argument("--threads", type=int, required=True)
    given = parser.parse_args()
    models = {name: _BareModel(*model, given.threads) for name, model in json.loads(given.models).items()}
    answer_lines(list(models), lambda asked: models[asked.pop("name")].step_s(**asked))


if __name__ == "__main__":
    main()
