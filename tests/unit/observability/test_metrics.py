"""Metrics: vLLM's names, observed values, and a separate registry for each service."""

from __future__ import annotations

import urllib.request
from dataclasses import dataclass

import pytest

from specdec.errors import KvMiss, Unavailable
from specdec.observability.metrics import CoordinatorMetrics, EngineMetrics, start_metrics_server
from tests.support.stack import free_port

MODEL = {"model_name": "m"}


def test_a_round_counts_drafts_tokens_and_acceptance_by_position() -> None:
    metrics = CoordinatorMetrics("m")
    for num_accepted in (0, 2, 4):
        metrics.observe_round(
            draft_pool="small", num_draft_tokens=4, num_accepted=num_accepted, wire_bytes=100, verify_s=0.01
        )
    value = metrics.registry.get_sample_value
    labels = {**MODEL, "draft_pool": "small"}
    assert value("specdec:spec_decode_num_drafts_total", labels) == 3
    assert value("specdec:spec_decode_num_draft_tokens_total", labels) == 12
    assert value("specdec:spec_decode_num_accepted_tokens_total", labels) == 6
    per_position = [
        value("specdec:spec_decode_num_accepted_tokens_per_pos_total", {**labels, "position": str(position)})
        for position in range(4)
    ]
    assert per_position == [2, 2, 1, 1]
    assert value("specdec:wire_bytes_total", MODEL) == 300


def test_a_finished_request_is_observed_under_the_documented_names() -> None:
    metrics = CoordinatorMetrics("m")
    metrics.request_running(+1)
    metrics.observe_first_token(0.25)
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
    assert value("specdec:inter_token_latency_seconds_count", MODEL) == 1
    assert value("specdec:request_time_per_output_token_seconds_sum", MODEL) == 0.5
    assert value("specdec:generation_tokens_total", MODEL) == 4
    assert value("specdec:prompt_tokens_total", MODEL) == 10
    assert value("specdec:request_success_total", {**MODEL, "finished_reason": "stop"}) == 1
    assert value("specdec:num_requests_running", MODEL) == 0


@dataclass
class Load:
    kv_usage: float
    num_sessions: int


def test_load_is_read_when_scraped() -> None:
    metrics, load = EngineMetrics("m", role="draft"), Load(0.0, 0)
    metrics.watch_load(lambda: load)
    load.kv_usage, load.num_sessions = 0.5, 3
    labels = {**MODEL, "role": "draft"}
    assert metrics.registry.get_sample_value("specdec:kv_cache_usage_perc", labels) == 0.5
    assert metrics.registry.get_sample_value("specdec:num_sessions", labels) == 3


def test_time_in_steps_adds_up() -> None:
    metrics = EngineMetrics("m", role="target")
    for seconds in (0.25, 0.5):
        metrics.observe_step(num_sequences=2, num_tokens=9, seconds=seconds)
    labels = {**MODEL, "role": "target"}
    assert metrics.registry.get_sample_value("specdec:busy_seconds_total", labels) == 0.75
    assert metrics.registry.get_sample_value("specdec:iteration_tokens_total_sum", labels) == 18


def test_a_failed_call_is_counted_by_reason_and_no_longer_running() -> None:
    metrics = EngineMetrics("m", role="target")
    with pytest.raises(KvMiss), metrics.call():
        raise KvMiss("more", have=0)
    labels = {**MODEL, "role": "target"}
    assert metrics.registry.get_sample_value("specdec:call_failures_total", {**labels, "reason": "KV_MISS"}) == 1
    assert metrics.registry.get_sample_value("specdec:num_requests_running", labels) == 0


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
