"""Metrics: vLLM's names, observed values, and a separate registry for each service."""

from __future__ import annotations

import urllib.request

import pytest
from prometheus_client.parser import text_string_to_metric_families

import specdec
from specdec.contract.engine_api import EngineStats
from specdec.contract.errors import KvMiss, ResourceExhausted, Unavailable
from specdec.observability.coordinator_metrics import CoordinatorMetrics
from specdec.observability.engine_metrics import EngineMetrics
from specdec.observability.metrics_server import start_metrics_server
from specdec.observability.series import served_name
from tests.support.arithmetic_engines import ArithmeticDraft
from tests.support.stack import free_port

MODEL = {"model_name": "m"}
REPLICA = {**MODEL, "role": "target", "pool": "default"}


def test_a_round_counts_drafts_tokens_and_acceptance_by_position() -> None:
    metrics = CoordinatorMetrics("m")
    for num_accepted in (0, 2, 4):
        metrics.rounds.observe_round(
            pool="small",
            num_requested=5,
            num_draft_tokens=4,
            num_accepted=num_accepted,
            draft_s=0.5,
            verify_s=0.25,
            wire_bytes=100,
        )
    value = metrics.registry.get_sample_value
    labels = {**MODEL, "pool": "small"}
    assert value("specdec:spec_decode_num_drafts_total", labels) == 3
    assert value("specdec:spec_decode_num_draft_tokens_total", labels) == 12
    assert value("specdec:spec_decode_num_accepted_tokens_total", labels) == 6
    per_position = [
        value("specdec:spec_decode_num_accepted_tokens_per_pos_total", {**labels, "position": str(position)})
        for position in range(4)
    ]
    assert per_position == [2, 2, 1, 1]
    assert value("specdec:draft_gamma_sum", labels) == 15
    assert value("specdec:draft_latency_seconds_count", labels) == 3
    assert value("specdec:wire_bytes_total", MODEL) == 300
    waits = [value("specdec:round_wait_seconds_total", {**MODEL, "on": on}) for on in ("draft", "target", "store")]
    assert waits == [1.5, 0.75, 0]


def test_a_late_draft_is_counted_by_its_pool_and_says_nothing_about_gamma() -> None:
    metrics = CoordinatorMetrics("m")
    for cause in ("late", "off"):
        metrics.rounds.observe_target_only_step(pool="small", cause=cause, draft_s=0.0, verify_s=0.1, wire_bytes=1)
    value = metrics.registry.get_sample_value
    labels = {**MODEL, "pool": "small"}
    assert value("specdec:draft_late_total", labels) == 1
    assert value("specdec:target_only_steps_total", {**labels, "cause": "late"}) == 1
    assert value("specdec:draft_gamma_count", labels) == 1
    assert value("specdec:draft_gamma_sum", labels) == 0


def test_a_finished_request_is_observed_under_the_documented_names() -> None:
    metrics = CoordinatorMetrics("m")
    metrics.request_running(+1)
    metrics.observe_queue(0.125)
    metrics.observe_first_token(0.25, 0.125)
    metrics.observe_tokens(1, None)
    metrics.observe_tokens(3, 0.5)
    metrics.observe_finished(
        finish_reason="stop",
        num_prompt_tokens=10,
        num_cached_prompt_tokens=6,
        num_output_tokens=4,
        ttft_s=0.25,
        e2el_s=1.75,
    )
    metrics.request_running(-1)
    value = metrics.registry.get_sample_value
    assert value("specdec:time_to_first_token_seconds_sum", MODEL) == 0.25
    assert value("specdec:e2e_request_latency_seconds_sum", MODEL) == 1.75
    assert value("specdec:request_queue_time_seconds_sum", MODEL) == 0.125
    assert value("specdec:request_prefill_time_seconds_sum", MODEL) == 0.125
    assert value("specdec:request_decode_time_seconds_sum", MODEL) == 1.5
    assert value("specdec:inter_token_latency_seconds_count", MODEL) == 1
    assert value("specdec:request_time_per_output_token_seconds_sum", MODEL) == 0.5
    assert value("specdec:generation_tokens_total", MODEL) == 4
    assert value("specdec:request_prompt_tokens_sum", MODEL) == 10
    assert value("specdec:prompt_tokens_total", MODEL) == 10
    assert value("specdec:request_success_total", {**MODEL, "finished_reason": "stop"}) == 1
    assert value("specdec:num_requests_running", MODEL) == 0


def test_replicas_are_counted_by_state_and_a_pool_that_is_gone_stays_at_zero() -> None:
    metrics, replicas = CoordinatorMetrics("m"), [("draft", "small", "up"), ("draft", "small", "late")]
    metrics.watch_replicas(lambda: replicas, lambda: ["small"])

    def count(role: str, pool: str, state: str) -> float | None:
        labels = {**MODEL, "role": role, "pool": pool, "state": state}
        return metrics.registry.get_sample_value("specdec:replicas", labels)

    assert [count("draft", "small", state) for state in ("up", "late", "draining", "down")] == [1, 1, 0, 0]
    assert count("target", "", "up") == 0
    replicas.clear()
    assert count("draft", "small", "up") == 0
    assert metrics.registry.get_sample_value("specdec:draft_late_total", {**MODEL, "pool": "small"}) == 0


def test_the_state_of_an_engine_is_read_when_scraped() -> None:
    metrics = EngineMetrics("m", role="target")
    value = metrics.registry.get_sample_value
    assert value("specdec:kv_exhausted_total", REPLICA) == 0  # also before there is an engine
    stats = EngineStats(num_waiting_calls=3, num_kv_blocks=10, num_active_kv_blocks=4, num_free_kv_blocks=1)
    metrics.watch_engine(lambda: stats, ArithmeticDraft().info)
    assert value("specdec:num_requests_waiting", REPLICA) == 3
    blocks = [value("specdec:kv_blocks", {**REPLICA, "state": state}) for state in ("active", "idle", "free")]
    assert blocks == [4, 5, 1]
    assert value("specdec:kv_cache_usage_perc", REPLICA) == 0.4
    layout = {"block_size": "16", "num_gpu_blocks": "100", "cache_dtype": "float32"}
    assert value("specdec:cache_config_info", {**REPLICA, **layout}) == 1


def test_the_phase_of_a_start_is_the_one_noted_last_and_its_time_stands_still_once_it_serves() -> None:
    metrics = EngineMetrics("m", role="target")
    value = metrics.registry.get_sample_value
    for phase in ("loading", "warming_up", "serving"):
        metrics.note_phase(phase)
        phases = ("starting", "loading", "warming_up", "serving")
        assert [value("specdec:load_phase", {**REPLICA, "phase": name}) for name in phases] == [
            float(name == phase) for name in phases
        ]
    assert value("specdec:load_seconds", REPLICA) == value("specdec:load_seconds", REPLICA)


def test_the_share_of_loaded_weights_is_the_one_noted_last_and_all_once_the_replica_serves() -> None:
    metrics = EngineMetrics("m", role="target")
    value = metrics.registry.get_sample_value
    assert value("specdec:load_progress", REPLICA) == 0
    for share in (0.25, 0.5):
        metrics.note_loaded(share)
        assert value("specdec:load_progress", REPLICA) == share
    metrics.note_phase("serving")
    assert value("specdec:load_progress", REPLICA) == 1


def test_time_in_steps_adds_up() -> None:
    metrics = EngineMetrics("m", role="target")
    for seconds in (0.25, 0.5):
        metrics.observe_step(num_sequences=2, num_tokens=9, seconds=seconds)
    assert metrics.registry.get_sample_value("specdec:busy_seconds_total", REPLICA) == 0.75
    assert metrics.registry.get_sample_value("specdec:step_seconds_sum", REPLICA) == 0.75
    assert metrics.registry.get_sample_value("specdec:iteration_tokens_total_sum", REPLICA) == 18


def test_a_failed_call_is_counted_by_reason_and_a_call_that_is_sent_again_is_none() -> None:
    metrics = EngineMetrics("m", role="target")
    metrics.observe_failure(ResourceExhausted("no block", reason="KV_EXHAUSTED"))
    metrics.observe_failure(KvMiss("more", have=0))
    value = metrics.registry.get_sample_value
    assert value("specdec:call_failures_total", {**REPLICA, "reason": "KV_EXHAUSTED"}) == 1
    assert value("specdec:call_failures_total", {**REPLICA, "reason": "KV_MISS"}) is None
    assert value("specdec:call_repeats_total", {**REPLICA, "reason": "KV_MISS"}) == 1


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("models/demo/target", "target"),
        ("/models/demo/target/", "target"),
        ("Qwen/Qwen2.5-Coder-1.5B", "Qwen2.5-Coder-1.5B"),
        ("simulated:70b-1b", "simulated:70b-1b"),
        ("/", "/"),
    ],
)
def test_a_model_is_served_under_the_last_part_of_its_path(model: str, name: str) -> None:
    assert served_name(model) == name


@pytest.mark.parametrize("metrics", [CoordinatorMetrics("m"), EngineMetrics("m", role="draft", pool="p")])
def test_every_service_says_its_version_and_the_resources_of_its_process(
    metrics: CoordinatorMetrics | EngineMetrics,
) -> None:
    names = {sample.name: sample for family in metrics.registry.collect() for sample in family.samples}
    assert names["specdec:build_info"].labels["version"] == specdec.__version__
    assert names["process_resident_memory_bytes"].value > 0


def test_two_services_of_one_process_do_not_share_metrics_and_serve_them_over_http() -> None:
    first, second = EngineMetrics("a", role="draft"), EngineMetrics("b", role="draft")
    port = free_port()
    stop = start_metrics_server(first.registry, "127.0.0.1", port)
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as response:
            text = response.read().decode()
        with pytest.raises(Unavailable, match="already in use"):
            start_metrics_server(second.registry, "127.0.0.1", port)
    finally:
        stop()
    assert 'model_name="a"' in text
    assert 'model_name="b"' not in text
    assert "specdec:queue_seconds" in {family.name for family in text_string_to_metric_families(text)}
