"""What the suite `gateway` makes of streams, and what clients of other projects report, as rows."""

from __future__ import annotations

from functools import partial

import pytest

from bench.harness.pairs import median_difference
from bench.harness.rows import Origin, Row
from bench.suites.gateway.peer_clients import acceptance_figures, client_rows, report_figures
from bench.suites.gateway.suite import Batch, batch_rows
from bench.systems.text_streams import GRPC, HTTP, TextStream, tokens_per_s

ORIGIN = Origin(hardware="2 cores, a processor", commit="abc123", date="2026-01-02T03:04:05Z")
ROW = partial(Row, suite="gateway", row=None, origin=ORIGIN)


def batch(ttft_s: float, end_s: float, *, cpu_s: float = 0.0) -> Batch:
    return Batch([TextStream("s", [ttft_s, end_s], end_s, 100, "text")], cpu_s)


def row_of(rows: list[Row], system: str, metric: str) -> Row:
    (found,) = (row for row in rows if (row.system, row.metric) == (system, metric))
    return found


def test_http_is_compared_with_grpc_pair_by_pair() -> None:
    batches = {
        HTTP: [batch(0.102, 1.0, cpu_s=0.01), batch(0.202, 2.0, cpu_s=0.03)],
        GRPC: [batch(0.100, 0.8), batch(0.200, 1.6)],
    }
    rows = batch_rows(partial(ROW, case="a pair"), batches, most_ttft_ms=3.0)
    ratio = row_of(rows, HTTP, "tokens_per_s_ratio")
    assert (ratio.value, ratio.ratio_to) == (pytest.approx(0.8), GRPC)
    assert ratio.falls_short
    added = row_of(rows, HTTP, "ttft_added_ms")
    assert added.value == pytest.approx(2.0)
    assert not added.falls_short
    assert row_of(rows, "gateway", "cpu_us_per_token").value == pytest.approx(200.0)
    assert row_of(rows, GRPC, "tokens_per_s").value == pytest.approx((125.0 + 62.5) / 2)


def test_a_delay_of_the_first_token_beyond_the_limit_falls_short() -> None:
    batches = {HTTP: [batch(0.105, 1.0), batch(0.206, 1.0)], GRPC: [batch(0.1, 1.0), batch(0.2, 1.0)]}
    limited = batch_rows(partial(ROW, case="a pair"), batches, most_ttft_ms=3.0)
    assert row_of(limited, HTTP, "ttft_added_ms").falls_short
    unlimited = batch_rows(partial(ROW, case="a pair"), batches, most_ttft_ms=None)
    assert not row_of(unlimited, HTTP, "ttft_added_ms").falls_short


def test_the_rate_of_a_batch_counts_until_its_last_stream_ends() -> None:
    streams = [TextStream("a", [0.1], 1.0, 100, "a"), TextStream("b", [0.1], 2.0, 100, "b")]
    assert tokens_per_s(streams) == 100.0


def test_differences_of_pairs_cancel_what_changes_between_pairs() -> None:
    difference = median_difference([1.5, 10.5, 100.5], [1.0, 10.0, 100.0])
    assert (difference.median, difference.low, difference.high, difference.num_pairs) == (0.5, 0.5, 0.5, 3)
    with pytest.raises(ValueError, match="two sides of equal length"):
        median_difference([1.0], [])


def test_a_run_of_the_client_without_acceptance_or_with_a_failed_request_falls_short() -> None:
    result = {"completed": 20, "failed": 0, "output_throughput": 900.5, "spec_decode_num_drafts": 7}
    assert not any(row.falls_short for row in client_rows(ROW, "a client", result, 20))
    assert row_of(client_rows(ROW, "a client", result, 20), HTTP, "output_throughput").value == 900.5
    short = client_rows(ROW, "a client", {"completed": 19, "failed": 1}, 20)
    assert {row.metric for row in short if row.falls_short} == {"completed", "failed", "spec_decode_num_drafts"}


def test_the_report_of_guidellm_and_a_page_of_metrics_give_the_figures_of_vllms_client() -> None:
    summaries = {
        "output_tokens_per_second": {"successful": {"mean": 900.5}},
        "time_to_first_token_ms": {"successful": {"median": 20.0}},
        "inter_token_latency_ms": {"successful": {"median": 2.5}},
    }
    totals = {"successful": 20, "errored": 0, "incomplete": 0, "total": 20}
    page = (
        'vllm:spec_decode_num_drafts_total{model_name="target"} 100.0\n'
        'vllm:spec_decode_num_draft_tokens_total{model_name="target"} 400.0\n'
        'vllm:spec_decode_num_accepted_tokens_total{model_name="target"} 250.0\n'
        'vllm:spec_decode_num_accepted_tokens_per_pos_total{model_name="target",position="0"} 90.0\n'
    )
    figures = report_figures({"benchmarks": [{"metrics": summaries | {"request_totals": totals}}]})
    rows = client_rows(ROW, "a client", figures | acceptance_figures(page), 20)
    assert not any(row.falls_short for row in rows)
    assert {row.metric: row.value for row in rows} == {
        "completed": 20.0, "failed": 0.0, "output_throughput": 900.5, "median_ttft_ms": 20.0, "median_tpot_ms": 2.5,
        "spec_decode_acceptance_rate": 62.5, "spec_decode_acceptance_length": 3.5, "spec_decode_num_drafts": 100.0,
    }  # fmt: skip
    totals["errored"] = 1
    figures = report_figures({"benchmarks": [{"metrics": summaries | {"request_totals": totals}}]})
    short = client_rows(ROW, "a client", figures, 20)
    assert {row.metric for row in short if row.falls_short} == {"failed", "spec_decode_num_drafts"}
