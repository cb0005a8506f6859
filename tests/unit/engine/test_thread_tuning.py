"""The number of threads has the fastest rounds, and uses only cores that save enough time."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import torch

from specdec.engine.base import ModelShape, StepPlan
from specdec.engine.loader import load_worker
from specdec.engine.model.thread_tuning import choose_threads, measure_rounds, settle_threads
from specdec.engine.options import LoadRequest
from tests.support.tiny_models import build_tiny_model


@pytest.fixture(autouse=True)
def restored_threads() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize(
    ("round_s", "num_cores", "chosen"),
    [
        ({1: 0.142, 2: 0.076}, 2, 2),
        ({1: 0.076, 2: 0.142}, 2, 1),
        ({1: 0.0295, 2: 0.0233}, 2, 1),  # the last core for a fifth: others have more use for it
        ({1: 0.100, 2: 0.071}, 2, 1),
        ({1: 0.100, 2: 0.069}, 2, 2),
        ({1: 0.00024, 2: 0.00013}, 2, 1),  # steps so short that a neighbour's turn costs more than is saved
        ({1: 0.009, 2: 0.0045}, 2, 1),
        ({1: 0.011, 2: 0.0055}, 2, 2),
        ({1: 0.00024, 7: 0.0001, 8: 0.0001}, 8, 7),
        ({1: 0.100, 7: 0.089, 8: 0.085}, 8, 7),
        ({1: 0.100, 7: 0.091, 8: 0.085}, 8, 1),
        ({1: 0.100, 7: 0.091, 8: 0.069}, 8, 8),
        ({1: 0.100, 7: 0.020, 8: 0.013}, 8, 8),
        ({4: 0.1}, 4, 4),
    ],
)
def test_more_threads_must_shorten_a_round_by_a_tenth_and_the_last_core_by_more(
    round_s: Mapping[int, float], num_cores: int, chosen: int
) -> None:
    assert choose_threads(round_s, num_cores) == chosen


class TimedWorker:
    """A worker whose steps take the times of a table, by threads and rows."""

    def __init__(self, step_s: Mapping[tuple[int, int], float], device: str = "cpu", context: int = 64) -> None:
        self.shape = ModelShape(8, context, (), "", "", 4, "float32", device)
        self.now_s = 0.0
        self.steps: list[tuple[int, int]] = []
        self._step_s = step_s

    def execute(self, plan: StepPlan) -> torch.Tensor:
        (piece,) = plan.slices
        kind = torch.get_num_threads(), len(piece.token_ids)
        # What comes first is slower, as it is on real machines.
        self.now_s += self._step_s[kind] * (1 if kind in self.steps else 3)
        self.steps.append(kind)
        return torch.zeros(piece.num_logit_rows, 8)


STEPS = {(1, 1): 0.010, (1, 5): 0.016, (2, 1): 0.007, (2, 5): 0.009}


def test_a_round_is_the_fastest_step_of_one_row_plus_the_fastest_of_five_rows() -> None:
    worker = TimedWorker(STEPS)
    round_s = measure_rounds(worker, [1, 2], lambda: worker.now_s)
    assert round_s == pytest.approx({1: 0.026, 2: 0.016})
    assert worker.now_s < 1


class DelayedWorker(TimedWorker):
    """A worker whose steps with two threads are shorter, but wait for a processor that another process has."""

    def execute(self, plan: StepPlan) -> torch.Tensor:
        began_s = time.thread_time()
        while time.thread_time() - began_s < self._step_s[torch.get_num_threads(), len(plan.slices[0].token_ids)]:
            pass
        if torch.get_num_threads() == 2:
            time.sleep(0.1)
        return super().execute(plan)


def test_another_process_that_takes_the_processors_does_not_change_the_choice() -> None:
    round_s = measure_rounds(DelayedWorker({kind: 2 * seconds for kind, seconds in STEPS.items()}), [1, 2])
    assert choose_threads(round_s, 2) == 2


@pytest.mark.parametrize(("num_cores", "chosen"), [(2, 2), (3, 2), (8, 7)])
def test_long_rounds_take_the_cores_without_being_timed_beside_services_that_load(num_cores: int, chosen: int) -> None:
    worker = TimedWorker({(1, 1): 0.040, (1, 5): 0.061})  # a step with more threads would raise KeyError
    torch.set_num_threads(num_cores)
    settle_threads(worker, lambda: worker.now_s)
    assert torch.get_num_threads() == chosen


@pytest.mark.parametrize(("share", "chosen"), [(0.9, 1), (0.5, 2)])
def test_shorter_rounds_take_the_threads_that_are_measured_to_pay(share: float, chosen: int) -> None:
    worker = TimedWorker({(1, 1): 0.040, (1, 5): 0.059, (2, 1): 0.040 * share, (2, 5): 0.059 * share})
    torch.set_num_threads(2)
    settle_threads(worker, lambda: worker.now_s)
    assert torch.get_num_threads() == chosen


def test_long_steps_are_measured_once() -> None:
    worker = TimedWorker({kind: 100 * seconds for kind, seconds in STEPS.items()})
    measure_rounds(worker, [1, 2], lambda: worker.now_s)
    assert worker.steps == [(1, 1), (1, 5), (2, 1), (2, 5)]


def test_measured_steps_stay_within_a_short_context() -> None:
    worker = TimedWorker({(1, 1): 1.0, (1, 3): 1.0}, context=3)
    assert measure_rounds(worker, [1], lambda: worker.now_s) == {1: 6.0}


def test_a_model_on_an_accelerator_is_not_measured() -> None:
    worker = TimedWorker({}, device="cuda")
    torch.set_num_threads(2)
    settle_threads(worker)
    assert (worker.steps, torch.get_num_threads()) == ([], 2)


def test_a_loaded_model_sets_and_logs_the_number_of_threads_for_all_threads(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = build_tiny_model("llama", tmp_path, num_layers=1)
    torch.set_num_threads(2)
    caplog.set_level(logging.INFO)
    settle_threads(load_worker(LoadRequest(str(model), device="cpu", dtype="float32", num_kv_blocks=8)))
    (line,) = (record.getMessage() for record in caplog.records if record.getMessage().startswith("threads: "))
    seen = [torch.get_num_threads()]
    device_thread = threading.Thread(target=lambda: seen.append(torch.get_num_threads()))
    device_thread.start()
    device_thread.join()
    assert seen in ([1, 1], [2, 2])
    assert line.startswith(f"threads: {seen[0]} (")
