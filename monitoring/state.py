"""Dashboard of state: the session store, leases and turns, coordinators, and processes."""

from __future__ import annotations

from grafana_foundation_sdk.builders.dashboard import Dashboard

from monitoring.panels import (
    BYTES,
    COUNT,
    HALF,
    MODEL,
    PER_S,
    SECONDS,
    SHARE,
    SYSTEM,
    frame,
    lines,
    number,
    quantiles,
    rate,
    row,
)

_SERVICES = f'{SYSTEM}, job=~"specdec.*"'
_INSTANCE = "{{instance}}"
_JOB = "{{job}} {{instance}}"


def build() -> Dashboard:
    """Return the dashboard."""
    return _processes(_coordinators(_store(_overview(frame("state", "state", "Session store, leases, coordinators.")))))


def _overview(board: Dashboard) -> Dashboard:
    return (
        board.with_row(row("Now"))
        .with_panel(number("Store errors in an hour", "Calls that failed after their retries.", COUNT,
                           f"sum(increase(specdec:store_errors_total{{{MODEL}}}[1h]))"))
        .with_panel(number("Leases lost in an hour", "Turns whose session another coordinator took.", COUNT,
                           f"sum(increase(specdec:leases_lost_total{{{MODEL}}}[1h]))"))
        .with_panel(number("Turns resumed in an hour", "Unfinished turns that went on.", COUNT,
                           f"sum(increase(specdec:resumed_turns_total{{{MODEL}}}[1h]))"))
        .with_panel(number("Requests in use", "Running and admitted requests, of the capacity.", SHARE,
                           f'(sum(specdec:num_requests_running{{{MODEL}, role=""}}) + '
                           f"sum(specdec:num_requests_admitting{{{MODEL}}})) / "
                           f"sum(specdec:request_capacity{{{MODEL}}})"))
    )  # fmt: skip


def _store(board: Dashboard) -> Dashboard:
    return (
        board.with_row(row("Session store"))
        .with_panel(lines("Commit of a round", "Retries included.", SECONDS, *quantiles("commit_seconds")))
        .with_panel(lines("Errors and lost leases", "By coordinator.", PER_S,
                          (rate("store_errors_total", by="instance"), "store errors: {{instance}}"),
                          (rate("leases_lost_total", by="instance"), "leases lost: {{instance}}")))
        .with_panel(lines("Turns", "Begun, by the target model's fingerprint; resumed; on another model than the turn "
                          "before.", PER_S,
                          (rate("turns_total", by="model_fingerprint"), "begun: {{model_fingerprint}}"),
                          (rate("resumed_turns_total"), "resumed"),
                          (rate("target_changes_total"), "on another model")))
    )  # fmt: skip


def _coordinators(board: Dashboard) -> Dashboard:
    return (
        board.with_row(row("Coordinators"))
        .with_panel(lines("Requests", "Running, admitting and the capacity.", COUNT,
                          (f'specdec:num_requests_running{{{MODEL}, role=""}}', "running: {{instance}}"),
                          (f"specdec:num_requests_admitting{{{MODEL}}}", "admitting: {{instance}}"),
                          (f"specdec:request_capacity{{{MODEL}}}", "capacity: {{instance}}")))
        .with_panel(lines("Event loop lag, p99", "Lateness of a timer.", SECONDS,
                          (f"specdec:event_loop_lag_seconds:p99_5m{{{MODEL}}}", _INSTANCE)))
        .with_panel(lines("Wait for clients", "Seconds in a second until clients take tokens.", COUNT,
                          (rate("round_wait_seconds_total", f'{MODEL}, on="client"', by="instance"), _INSTANCE)))
    )  # fmt: skip


def _processes(board: Dashboard) -> Dashboard:
    return (
        board.with_row(row("Processes"))
        .with_panel(lines("Up", "1 for each service that answers scrapes.", COUNT, (f"up{{{_SERVICES}}}", _JOB)))
        .with_panel(lines("Processor", "Processors in use.", COUNT,
                          (f"rate(process_cpu_seconds_total{{{_SERVICES}}}[$__rate_interval])", _JOB)))
        .with_panel(lines("Memory", "Resident memory.", BYTES,
                          (f"process_resident_memory_bytes{{{_SERVICES}}}", _JOB)))
        .with_panel(lines("Age", "Time since the start of the process.", SECONDS,
                          (f"time() - process_start_time_seconds{{{_SERVICES}}}", _JOB), width=HALF))
        .with_panel(lines("Versions", "Services by version.", COUNT,
                          (f"count by (version) (specdec:build_info{{{SYSTEM}}})", "{{version}}"), width=HALF))
    )  # fmt: skip
