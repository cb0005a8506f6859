"""Services whose calls of their metrics are timed, as the suite `observability` runs them."""

from __future__ import annotations

from pathlib import Path

from bench.harness.streams import StreamProcess, StreamRequest
from bench.suites.observability.calls import read_observed
from bench.systems.simulated import ProcessSystem, simulated_replicas, write_tokenizer

SERVICES = {"coordinator", "draft_service", "target_service"}


def test_each_round_is_counted_by_its_services_within_its_own_time(tmp_path: Path) -> None:
    tokenizer_dir = write_tokenizer(tmp_path / "tokenizer")
    (folder := tmp_path / "calls").mkdir()
    options = {"max_new_tokens": 60, "ignore_eos": True, "temperature": 0.0, "gamma": 4}
    with (
        ProcessSystem(
            tokenizer_dir,
            simulated_replicas("simulated:8b-0.6b,predraft=off"),
            runner=("bench.suites.observability.calls", str(folder)),
        ) as system,
        StreamProcess(system.endpoint) as client,
    ):
        before = read_observed(folder)
        (run,) = client.run([StreamRequest([1, 2, 3], options)])
        counted = {service: each.since(before[service]) for service, each in read_observed(folder).items()}
    assert counted.keys() == SERVICES
    num_rounds = run.stats["num_rounds"]
    # A coordinator counts a round, its chunk and its commit; a replica counts a call and a step at the least.
    assert counted["coordinator"].num_calls >= 3 * num_rounds
    assert counted["target_service"].num_calls >= 2 * num_rounds
    assert counted["draft_service"].num_calls >= 2 * (num_rounds - run.stats["num_target_only_steps"])
    assert all(0.0 < calls.seconds < run.chunk_s[-1] for calls in counted.values())
