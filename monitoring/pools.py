"""Dashboard of pools: replicas, their queues, steps and KV."""

from __future__ import annotations

from grafana_foundation_sdk.builders.dashboard import Dashboard

from monitoring.panels import (
    COUNT,
    HALF,
    MODEL,
    PER_S,
    SECONDS,
    SHARE,
    THIRD,
    TOKENS_PER_S,
    frame,
    lines,
    number,
    quantile,
    rate,
    row,
)

#: Series of replicas have a role; the pool of targets is no draft pool.
_REPLICA = f'{MODEL}, role!=""'
_LEGEND = "{{role}} {{pool}} {{instance}}"


def build() -> Dashboard:
    """Return the dashboard."""
    board = frame("pools", "pools", "Draft and target replicas: queues, steps and KV.")
    return _start(_kv(_device(_calls(_overview(board)))))


def _overview(board: Dashboard) -> Dashboard:
    return (
        board.with_row(row("Now"))
        .with_panel(number("Targets up", "Fewest that a coordinator sees.", COUNT,
                           f'min(sum by (instance) (specdec:replicas{{{MODEL}, role="target", state="up"}}))',
                           width=THIRD))
        .with_panel(number("Drafts up", "Fewest that a coordinator sees.", COUNT,
                           f'min(sum by (instance) (specdec:replicas{{{MODEL}, role="draft", state="up"}}))',
                           width=THIRD))
        .with_panel(number("Devices stalled", "A step far exceeds its time limit.", COUNT,
                           f"sum(specdec:device_stalled{{{_REPLICA}}})", width=THIRD))
    )  # fmt: skip


def _calls(board: Dashboard) -> Dashboard:
    return (
        board.with_row(row("Replicas and calls"))
        .with_panel(lines("Replicas", "By role, pool and state, as coordinators see them.", COUNT,
                          (f"max by (role, pool, state) (specdec:replicas{{{MODEL}}})", "{{role}} {{pool}} {{state}}")))
        .with_panel(lines("Calls waiting", "Calls that no step has taken yet.", COUNT,
                          (f"specdec:num_requests_waiting{{{_REPLICA}}}", _LEGEND)))
        .with_panel(lines("Calls running", "Calls that are in the steps of the device.", COUNT,
                          (f"specdec:num_requests_running{{{_REPLICA}}}", _LEGEND)))
        .with_panel(lines("Wait of a call, p95", "Arrival of an answered call to its first step.", SECONDS,
                          (quantile(0.95, "queue_seconds", _REPLICA, by="role, pool"), "{{role}} {{pool}}")))
        .with_panel(lines("Time of a call, p95", "Arrival to answer.", SECONDS,
                          (quantile(0.95, "call_latency_seconds", _REPLICA, by="role, pool"), "{{role}} {{pool}}")))
        .with_panel(lines("Failures and repeats", "Calls that failed; calls sent again with more tokens.", PER_S,
                          (rate("call_failures_total", _REPLICA, by="role, reason"), "{{role}} {{reason}}"),
                          (rate("call_repeats_total", _REPLICA, by="role, reason"), "{{role}} {{reason}}, repeated")))
    )  # fmt: skip


def _device(board: Dashboard) -> Dashboard:
    sequences = f"{rate('step_num_sequences_sum', _REPLICA, by='role, pool')} / " \
                f"{rate('step_num_sequences_count', _REPLICA, by='role, pool')}"  # fmt: skip
    return (
        board.with_row(row("Device"))
        .with_panel(lines("Busy", "Share of the time in steps.", SHARE,
                          (f"specdec:device_busy:ratio_5m{{{_REPLICA}}}", _LEGEND)))
        .with_panel(lines("Time of a step, p95", "Forward pass and logits.", SECONDS,
                          (quantile(0.95, "step_seconds", _REPLICA, by="role, pool"), "{{role}} {{pool}}")))
        .with_panel(lines("Sequences of a step, mean", "Size of the batch.", COUNT, (sequences, "{{role}} {{pool}}")))
        .with_panel(lines("Tokens in steps", "Tokens of forward passes.", TOKENS_PER_S,
                          (rate("iteration_tokens_total_sum", _REPLICA, by="role, pool"), "{{role}} {{pool}}")))
        .with_panel(lines("Prefill backlog", "Tokens of admitted prompts that have not run.", COUNT,
                          (f"specdec:prefill_backlog_tokens{{{_REPLICA}}}", _LEGEND)))
        .with_panel(lines("Draft tokens", "Made by drafts, verified by targets.", TOKENS_PER_S,
                          (rate("draft_tokens_total", _REPLICA, by="role, pool"), "{{role}} {{pool}}")))
    )  # fmt: skip


def _kv(board: Dashboard) -> Dashboard:
    cached = f"{rate('committed_tokens_cached_total', _REPLICA, by='role, pool')} / " \
             f"{rate('committed_tokens_total', _REPLICA, by='role, pool')}"  # fmt: skip
    return (
        board.with_row(row("KV"))
        .with_panel(lines("KV in use", "Share of KV blocks that running sessions hold.", SHARE,
                          (f"specdec:kv_cache_usage_perc{{{_REPLICA}}}", _LEGEND)))
        .with_panel(lines("KV blocks", "Active, idle (given up when blocks are needed) and free.", COUNT,
                          (f"sum by (role, pool, state) (specdec:kv_blocks{{{_REPLICA}}})",
                           "{{role}} {{pool}} {{state}}"),
                          stacked=True))
        .with_panel(lines("KV exhausted and preemptions", "Calls refused for want of a KV block; calls that gave up "
                          "their KV and ran it again.", PER_S,
                          (rate("kv_exhausted_total", _REPLICA, by="role, pool"), "{{role}} {{pool}}, exhausted"),
                          (rate("num_preemptions_total", _REPLICA, by="role, pool"), "{{role}} {{pool}}, preempted")))
        .with_panel(lines("Committed tokens from KV", "Share that needed no forward pass.", SHARE,
                          (cached, "{{role}} {{pool}}"), width=HALF))
        .with_panel(lines("Sessions", "Sessions with KV.", COUNT,
                          (f"specdec:num_sessions{{{_REPLICA}}}", _LEGEND), width=HALF))
    )  # fmt: skip


def _start(board: Dashboard) -> Dashboard:
    return (
        board.with_row(row("Start"))
        .with_panel(lines("Time to serve", "Rises until a replica serves.", SECONDS,
                          (f"specdec:load_seconds{{{_REPLICA}}}", _LEGEND), width=HALF))
        .with_panel(lines("Replicas by phase", "Starting, loading, warming up or serving.", COUNT,
                          (f"sum by (role, pool, phase) (specdec:load_phase{{{_REPLICA}}})",
                           "{{role}} {{pool}} {{phase}}"), width=HALF))
    )  # fmt: skip
