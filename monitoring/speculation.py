"""Dashboard of speculation: what drafts are worth, what rounds wait for, and the losslessness audit."""

from __future__ import annotations

from grafana_foundation_sdk.builders.dashboard import Dashboard

from monitoring.panels import (
    BYTES,
    COUNT,
    HALF,
    MODEL,
    PER_S,
    POOL,
    SECONDS,
    SHARE,
    frame,
    lines,
    number,
    quantile,
    rate,
    row,
)

_ACCEPTED = rate("spec_decode_num_accepted_tokens_total", POOL)
_DRAFTED = rate("spec_decode_num_draft_tokens_total", POOL)
_ROUNDS = rate("spec_decode_num_drafts_total", POOL)


def build() -> Dashboard:
    """Return the dashboard."""
    board = frame("speculation", "speculation", "What drafts are worth, and what rounds wait for.")
    return _audit(_constraints(_rounds(_acceptance(_overview(board)))))


def _overview(board: Dashboard) -> Dashboard:
    return (
        board.with_row(row("Now"))
        .with_panel(number("Acceptance", "Draft tokens accepted, of those verified.", SHARE,
                           f"{_ACCEPTED} / {_DRAFTED}"))
        .with_panel(number("Tokens of a round", "Accepted draft tokens and the target's own token.", COUNT,
                           f"1 + {_ACCEPTED} / {_ROUNDS}"))
        .with_panel(number("Rounds with a draft", "Decided rounds with draft tokens.", PER_S, _ROUNDS))
        .with_panel(number("Audited rounds that differ", "Since the coordinators began.", COUNT,
                           f'sum(specdec:audit_rounds_total{{{MODEL}, result="mismatch"}})'))
    )  # fmt: skip


def _acceptance(board: Dashboard) -> Dashboard:
    accepted = rate("spec_decode_num_accepted_tokens_total", POOL, by="pool")
    drafted = rate("spec_decode_num_draft_tokens_total", POOL, by="pool")
    at_position = rate("spec_decode_num_accepted_tokens_per_pos_total", POOL, by="pool, position")
    rounds = rate("spec_decode_num_drafts_total", POOL, by="pool")
    return (
        board.with_row(row("Acceptance"))
        .with_panel(lines("Acceptance by pool", "Draft tokens accepted, of those verified.", SHARE,
                          (f"{accepted} / {drafted}", "{{pool}}"),
                          (f"specdec:draft_tokens_accepted:ratio_1d{{{POOL}}}", "{{pool}}, last day")))
        .with_panel(lines("Acceptance by position", "Rounds whose draft token at the position was accepted.", SHARE,
                          (f"{at_position} / on (pool) group_left () {rounds}", "{{pool}} {{position}}")))
        .with_panel(lines("Gamma", "Draft tokens requested in a round: mean and p95.", COUNT,
                          (f"{rate('draft_gamma_sum', POOL, by='pool')} / {rate('draft_gamma_count', POOL, by='pool')}",
                           "{{pool}}, mean"),
                          (quantile(0.95, "draft_gamma", POOL, by="pool"), "{{pool}}, p95")))
    )  # fmt: skip


def _constraints(board: Dashboard) -> Dashboard:
    return (
        board.with_row(row("Structured output"))
        .with_panel(lines("Constrained requests", "Requests with a constraint, by its kind.", PER_S,
                          (rate("constrained_requests_total", by="kind"), "{{kind}}")))
        .with_panel(lines("Time of constraints, p95", "Compilation at admission, and the masks of a step.", SECONDS,
                          (quantile(0.95, "constraint_compile_seconds"), "compilation"),
                          (quantile(0.95, "constraint_mask_seconds"), "masks")))
    )  # fmt: skip


def _rounds(board: Dashboard) -> Dashboard:
    return (
        board.with_row(row("Rounds"))
        .with_panel(lines("Waits", "Seconds that requests wait in a second, by what they wait for.", COUNT,
                          (rate("round_wait_seconds_total", by="on"), "{{on}}"), stacked=True))
        .with_panel(lines("Draft and verification, p95", "Calls of replicas, network included.", SECONDS,
                          (quantile(0.95, "draft_latency_seconds", POOL, by="pool"), "draft: {{pool}}"),
                          (quantile(0.95, "verify_latency_seconds"), "verification")))
        .with_panel(lines("Rounds without a draft", "By the pool that should have drafted, and cause.", PER_S,
                          (rate("target_only_steps_total", POOL, by="pool, cause"), "{{pool}}: {{cause}}")))
        .with_panel(lines("Late drafts", "Share of rounds whose draft missed its deadline.", SHARE,
                          (f"specdec:drafts_late:ratio_5m{{{POOL}}}", "{{pool}}"), width=HALF))
        .with_panel(lines("Bytes of a round", "Serialised messages of both links.", BYTES,
                          (f"{rate('wire_bytes_total')} / ({_ROUNDS} + {rate('target_only_steps_total', POOL)})",
                           "bytes"), width=HALF))
    )  # fmt: skip


def _audit(board: Dashboard) -> Dashboard:
    return (
        board.with_row(row("Losslessness audit"))
        .with_panel(lines("Audited rounds", "Rounds verified again, by mode and result.", PER_S,
                          (rate("audit_rounds_total", by="mode, result"), "{{mode}}: {{result}}")))
        .with_panel(lines("z", "Accepted minus expected draft tokens in standard deviations, since the start of each "
                          "coordinator and over all in the last day.", COUNT,
                          (f"specdec:audit_acceptance_z{{{MODEL}}}", "{{instance}} {{mode}}"),
                          (f"specdec:audit_acceptance:z_1d{{{MODEL}}}", "last day: {{mode}}"), signed=True))
        .with_panel(lines("Left out", "Rounds chosen for an audit that had none.", PER_S,
                          (rate("audit_rounds_dropped_total", by="reason"), "{{reason}}")))
    )  # fmt: skip
