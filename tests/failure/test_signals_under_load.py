"""Every operational signal moves the right way within two scrapes of a step of load, and back: `SIGNALS` is the table.

A coordinator, a gateway, a draft and a target run as processes on a Redis. The KV of the target is small, and each of
its steps takes a fifth of a second, so that the target is what requests wait for on any machine. One stream runs all
the time. A step has taken hold, or has ended, when clients see it: in their streams, in refusals, in health checks.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from tests.support.injured_stack import Injured
from tests.support.load_steps import NUM_STREAMS, STEPS, running_stream, started
from tests.support.redis_fixture import RedisServer
from tests.support.signals import Observed, Reading, Signal, falls, for_good, rises, scrape_twice, stays
from tests.support.stack import Stack

pytestmark = pytest.mark.full

EVENTS, MEAN, RATE = Reading.EVENTS, Reading.MEAN, Reading.RATE

SIGNALS: dict[str, tuple[Signal, ...]] = {
    "1 to 32 streams": (
        rises("gateway", "http_requests_in_flight"),
        rises("coordinator", "num_requests_running"),
        rises("coordinator", "request_refusals_total", EVENTS, reason="QUEUE_FULL"),
        rises("coordinator", "request_queue_time_seconds_sum", EVENTS),
        rises("coordinator", "turns_total", EVENTS),
        rises("coordinator", "generation_tokens_total", RATE),
        rises("coordinator", "round_wait_seconds_total", RATE, on="draft"),
        rises("coordinator", "round_wait_seconds_total", RATE, on="target"),
        rises("coordinator", "round_wait_seconds_total", RATE, on="client"),
        rises("draft", "busy_seconds_total", RATE),
        rises("draft", "kv_blocks", state="active"),
        rises("target", "num_requests_running"),
        rises("target", "num_requests_waiting"),
        rises("target", "queue_seconds", MEAN),
        rises("target", "step_num_sequences", MEAN),
        rises("target", "num_sessions"),
        rises("target", "kv_blocks", state="active"),
        rises("target", "kv_cache_usage_perc"),
        stays("target", "num_preemptions_total"),
        stays("coordinator", "request_failures_total"),
    ),
    "KV filled": (
        rises("target", "kv_blocks", state="active"),
        # Afterwards the blocks are idle: later prompts may find their tokens there.
        for_good(falls("target", "kv_blocks", state="free")),
        rises("target", "kv_cache_usage_perc"),
        rises("target", "prefill_backlog_tokens"),
        rises("target", "num_requests_waiting"),
        rises("target", "num_preemptions_total", EVENTS),
        rises("target", "call_repeats_total", EVENTS, reason="KV_MISS"),
        # Every call fits alone, so all wait for their turn, and none is refused.
        stays("target", "kv_exhausted_total"),
        stays("coordinator", "request_interruptions_total"),
    ),
    "draft frozen": (
        falls("draft", "up"),
        falls("coordinator", "replicas", role="draft", pool="default", state="up"),
        rises("coordinator", "replicas", role="draft", pool="default", state="late"),
        rises("coordinator", "draft_late_total", EVENTS, pool="default"),
        rises("coordinator", "target_only_steps_total", RATE, pool="default"),
        falls("coordinator", "spec_decode_num_drafts_total", RATE, pool="default"),
        falls("coordinator", "draft_gamma_sum", RATE, pool="default"),
        stays("coordinator", "request_interruptions_total"),
    ),
    "draft gone": (
        falls("draft", "up"),
        falls("coordinator", "replicas", role="draft", pool="default", state="up"),
        rises("coordinator", "replicas", role="draft", pool="default", state="down"),
        rises("coordinator", "target_only_steps_total", RATE, pool="default", cause="no_replica"),
        falls("coordinator", "spec_decode_num_drafts_total", RATE, pool="default"),
        falls("coordinator", "draft_gamma_sum", RATE, pool="default"),
        stays("coordinator", "request_interruptions_total"),
    ),
    "device slow": (
        rises("target", "step_seconds", MEAN),
        rises("coordinator", "verify_latency_seconds", MEAN),
        rises("coordinator", "inter_token_latency_seconds", MEAN),
    ),
    "device stalled": (
        rises("target", "device_stalled"),
        falls("coordinator", "replicas", role="target", state="up"),
        rises("coordinator", "replicas", role="target", state="down"),
        stays("coordinator", "request_interruptions_total"),
    ),
    "store slow": (
        rises("coordinator", "commit_seconds", MEAN),
        # No round waits: four of them may be decided before the store answers.
        stays("coordinator", "round_wait_seconds_total", RATE, on="store"),
        stays("coordinator", "store_errors_total"),
    ),
    "coordinator held up": (rises("coordinator", "event_loop_lag_seconds", MEAN),),
}


@pytest.fixture(scope="module")
def observed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Observed]]:
    """What scrapes see around each step, one step after the other."""
    with started(tmp_path_factory.mktemp("system")) as parts:
        yield asyncio.run(observe(*parts))


async def observe(stack: Stack, injured: Injured, redis: RedisServer) -> dict[str, Observed]:
    records: dict[str, Observed] = {}
    async with running_stream(stack, injured, redis) as system:
        after = await scrape_twice(system.endpoints)
        for name, step in STEPS.items():
            before = after
            async with step(system):
                during = await scrape_twice(system.endpoints)
            after = await scrape_twice(system.endpoints)
            records[name] = Observed(before, during, after)
    return records


CASES = [pytest.param(step, signal, id=f"{step}: {signal}") for step, row in SIGNALS.items() for signal in row]


@pytest.mark.parametrize(("step", "signal"), CASES)
def test_a_signal_moves_the_right_way_within_two_scrapes_and_back(
    observed: dict[str, Observed], step: str, signal: Signal
) -> None:
    seen = observed[step]
    values = seen.value_before(signal), seen.values_during(signal), seen.values_after(signal)
    assert seen.moves_right(signal), values
    assert seen.returns(signal), values


@pytest.mark.parametrize("step", [name for name in SIGNALS if name != "device stalled"])
def test_a_signal_of_another_step_does_not_move(observed: dict[str, Observed], step: str) -> None:
    assert not observed[step].moves_right(rises("target", "device_stalled"))
    assert not observed[step].moves_right(falls("coordinator", "replicas", role="target", state="up"))


def test_every_step_has_its_row_in_the_table() -> None:
    assert SIGNALS.keys() == STEPS.keys()


def test_requests_are_refused_when_as_many_run_as_the_coordinator_has_capacity_for(
    observed: dict[str, Observed],
) -> None:
    pages = [scrape.pages["coordinator"] for scrape in observed["1 to 32 streams"].during]
    levels = [(page.value("num_requests_running"), page.value("request_capacity")) for page in pages if page]
    assert (NUM_STREAMS, NUM_STREAMS) in levels
