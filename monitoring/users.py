"""Dashboard of users: what requests ask for, how long they wait, and how they end."""

from __future__ import annotations

from grafana_foundation_sdk.builders.dashboard import Dashboard

from monitoring.panels import (
    COUNT,
    HALF,
    MODEL,
    PER_S,
    SECONDS,
    SHARE,
    SYSTEM,
    TOKENS_PER_S,
    frame,
    lines,
    number,
    quantile,
    quantiles,
    rate,
    row,
)

#: Series of the gateway have no model; requests of other tools are left out.
_ANSWERS = f'{SYSTEM}, route!~"/health|/ready|/metrics"'
_ERRORS = f'{_ANSWERS}, status=~"5.."'


def build() -> Dashboard:
    """Return the dashboard."""
    return _http(_ends(_budgets(_latencies(_overview(frame("users", "users", "What users of the API notice."))))))


def _overview(board: Dashboard) -> Dashboard:
    return (
        board.with_row(row("Now"))
        .with_panel(number("Tokens", "Tokens emitted.", TOKENS_PER_S, rate("generation_tokens_total")))
        .with_panel(number("Requests running", "Requests that are generating.", COUNT,
                           f'sum(specdec:num_requests_running{{{MODEL}, role=""}})'))
        .with_panel(number("Time to first token, p95", "Arrival to first token.", SECONDS,
                           quantile(0.95, "time_to_first_token_seconds")))
        .with_panel(number("Failures in an hour", "Requests that an error ended and that were not resumed.", COUNT,
                           f"sum(increase(specdec:request_failures_total{{{MODEL}}}[1h]))"))
    )  # fmt: skip


def _latencies(board: Dashboard) -> Dashboard:
    return (
        board.with_row(row("Latency"))
        .with_panel(lines("Time to first token", "Arrival to first token.", SECONDS,
                          *quantiles("time_to_first_token_seconds")))
        .with_panel(lines("Time between tokens", "Time between chunks of a stream.", SECONDS,
                          *quantiles("inter_token_latency_seconds")))
        .with_panel(lines("Time of a request", "Arrival to last token.", SECONDS,
                          *quantiles("e2e_request_latency_seconds")))
        .with_panel(lines("Parts of a request, p95", "Queue: arrival to first round. Prefill: first round to first "
                          "token. Decode: first to last token.", SECONDS,
                          (quantile(0.95, "request_queue_time_seconds"), "queue"),
                          (quantile(0.95, "request_prefill_time_seconds"), "prefill"),
                          (quantile(0.95, "request_decode_time_seconds"), "decode")))
        .with_panel(lines("Tokens of a request, median", "Prompt and output.", COUNT,
                          (quantile(0.5, "request_prompt_tokens"), "prompt"),
                          (quantile(0.5, "request_generation_tokens"), "output")))
        .with_panel(lines("Tokens", "Prompt tokens of finished requests, those of them that needed no forward pass, "
                          "and tokens emitted.", TOKENS_PER_S,
                          (rate("prompt_tokens_total"), "prompt"),
                          (rate("prompt_tokens_cached_total"), "prompt, cached"),
                          (rate("generation_tokens_total"), "output")))
    )  # fmt: skip


def _ends(board: Dashboard) -> Dashboard:
    return (
        board.with_row(row("Requests"))
        .with_panel(lines("Finished", "Requests that finished, by reason.", PER_S,
                          (rate("request_success_total", by="finished_reason"), "{{finished_reason}}"), stacked=True))
        .with_panel(lines("Failed and interrupted", "Failed: not resumed in time. Interrupted: ended by an error, "
                          "resumed later or not.", PER_S,
                          (rate("request_failures_total", by="reason"), "failed: {{reason}}"),
                          (rate("request_interruptions_total", by="reason"), "interrupted: {{reason}}")))
        .with_panel(lines("Refused and cancelled", "Refused: did not start. Cancelled: ended by the client.", PER_S,
                          (rate("request_refusals_total", by="reason"), "refused: {{reason}}"),
                          (rate("request_cancellations_total", by="cause"), "cancelled: {{cause}}")))
    )  # fmt: skip


def _budgets(board: Dashboard) -> Dashboard:
    selector = f"{{{SYSTEM}}}"
    return (
        board.with_row(row("Budgets"))
        .with_panel(lines("Burn rate over an hour", "Requests that missed an objective, over those that may. At 14.4 "
                          "an alert pages.", COUNT,
                          (f"specdec:budget_burn:ratio_1h{selector}", "{{objective}}, {{seen_by}}"), width=HALF))
        .with_panel(lines("Burn rate over three days", "At 1 the budget of a period lasts for the period.", COUNT,
                          (f"specdec:budget_burn:ratio_3d{selector}", "{{objective}}, {{seen_by}}"), width=HALF))
    )  # fmt: skip


def _http(board: Dashboard) -> Dashboard:
    return (
        board.with_row(row("HTTP gateway"))
        .with_panel(lines("Answers", "Answers by route and status.", PER_S,
                          (rate("http_requests_total", _ANSWERS, by="route, status"), "{{route}} {{status}}"),
                          width=HALF))
        .with_panel(lines("Errors", "Share of answers with a status of 500 or above.", SHARE,
                          (f"{rate('http_requests_total', _ERRORS, by='instance')} / "
                           f"{rate('http_requests_total', _ANSWERS, by='instance')}", "{{instance}}"), width=HALF))
        .with_panel(lines("Time to first token at the gateway", "Start of the outputs to the first token.", SECONDS,
                          *quantiles("http_time_to_first_token_seconds", SYSTEM)))
        .with_panel(lines("Time of an answer, p95", "Arrival to the last byte.", SECONDS,
                          (quantile(0.95, "http_request_duration_seconds", _ANSWERS, by="route"), "{{route}}")))
        .with_panel(lines("In flight and disconnects", "Answers under way; requests whose client went away.", COUNT,
                          (f"sum(specdec:http_requests_in_flight{{{SYSTEM}}})", "in flight"),
                          (f"sum(increase(specdec:http_disconnects_total{{{SYSTEM}}}[$__rate_interval]))",
                           "disconnects")))
    )  # fmt: skip
