"""A draft or target service whose device a test can injure from outside: `python -m tests.support.injured_service
MODULE DIR`.

Runs the `main` of MODULE with the arguments that follow, on the worker that it loads itself. Before every step that
worker looks at three files in DIR: while `hang` is there the step waits; the text of `fail` is raised as RuntimeError;
the text of `slow` is the number of seconds that the step takes longer, and the number that it takes longer for each of
its sequences, if there is a second one. The first two take effect with the first step that reaches position
HEALTHY_TOKENS of a session, and last while a file is there. So a test can injure the device before its request begins,
and the request gets that far on any machine. Called by tests that need a process.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from specdec.engine import kept_worker, loader
from specdec.engine.base import StepPlan, Worker
from specdec.service.lifecycle import end_process

#: Position of a session from which on a step is injured.
HEALTHY_TOKENS = 32

_POLL_S = 0.01


class InjuredWorker(Worker):
    """Implements `specdec.engine.base.Worker` by another one."""

    def __init__(self, worker: Worker, directory: Path) -> None:
        self.shape = worker.shape
        self._worker = worker
        self._directory = directory
        self._is_injured = False

    def execute(self, plan: StepPlan) -> torch.Tensor:
        reached = max((part.start + len(part.token_ids) for part in plan.slices), default=0)
        has_injury = any((self._directory / injury).exists() for injury in ("hang", "fail"))
        self._is_injured = has_injury and (self._is_injured or reached >= HEALTHY_TOKENS)
        if self._is_injured:
            self._suffer()
        with contextlib.suppress(FileNotFoundError):
            step_s, *sequence_s = map(float, (self._directory / "slow").read_text().split())
            time.sleep(step_s + sum(sequence_s) * len(plan.slices))
        return self._worker.execute(plan)

    def _suffer(self) -> None:
        while (self._directory / "hang").exists():
            time.sleep(_POLL_S)
        if (self._directory / "fail").exists():
            raise RuntimeError((self._directory / "fail").read_text())


def _main(module: str, directory: str, *arguments: str) -> int:
    def injuring(load: Callable[..., Worker | None]) -> Callable[..., Any]:
        def load_injured(*args: Any, **options: Any) -> Worker | None:
            worker = load(*args, **options)
            return worker and InjuredWorker(worker, Path(directory))

        return load_injured

    loader.load_worker = injuring(loader.load_worker)
    kept_worker.load_kept_worker = injuring(kept_worker.load_kept_worker)
    exit_code: int = importlib.import_module(f"{module}.__main__").main(arguments)
    return exit_code


if __name__ == "__main__":
    end_process(_main(*sys.argv[1:]))
