"""The alerts under promtool: faults in the series of whole systems, and what fires, how often and at which severity.

Each case is a system in a namespace of its own, with two replicas of each service. One Prometheus watches several.
A fault changes some of its series after 20 minutes of normal work. The names and labels are those of real services.
"""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import pytest

from k8s.validation.series import exported_series
from tests.support.prometheus import FOLDER, NO_PROMETHEUS, PROMTOOL, RULE_FILES, rules

#: Normal work before a fault, usual time of a fault, and time from its begin to the end of the test.
NORMAL_MIN, FAULT_MIN, END_MIN = 20, 30, 95
#: Value of a series that nothing exports any more, and of one that changes every few minutes.
GONE, ALWAYS_NEW = float("nan"), float("inf")
MODEL = "m"
SERVICES = ("coordinator", "gateway", "draft", "target")
STATES = ("up", "late", "draining", "down", "refused")
REASONS = ("INTERNAL", "INVALID_REQUEST", "QUEUE_FULL", "REPLICA_UNAVAILABLE", "STORE_UNAVAILABLE")

#: Alerts that fire, with their severity and how often each does so: instances, and times after the first.
Fired = dict[tuple[str, str], int]


@dataclass(frozen=True)
class Series:
    """A series: a gauge has a value, a counter or bucket its increase a minute."""

    name: str
    labels: Mapping[str, str]
    value: float

    @property
    def selector(self) -> str:
        return self.name + "{" + ", ".join(f'{key}="{value}"' for key, value in self.labels.items()) + "}"

    @property
    def is_counter(self) -> bool:
        return re.search(r"_(total|bucket|count)$", self.name) is not None


@dataclass(frozen=True)
class Change:
    """A value that a fault gives to all series with a name and some labels."""

    name: str
    value: float
    labels: Mapping[str, str] = field(default_factory=dict)

    def concerns(self, series: Series) -> bool:
        return re.fullmatch(self.name, series.name) is not None and self.labels.items() <= series.labels.items()


def change(name: str, value: float, **labels: str) -> Change:
    return Change(name, value, labels)


def histogram(name: str, labels: Mapping[str, str], *bounds: str) -> Iterator[Series]:
    """A histogram whose values are all below the first bound, one a second."""
    for bound in (*bounds, "+Inf"):
        yield Series(f"{name}_bucket", {**labels, "le": bound}, 60)
    yield Series(f"{name}_count", labels, 60)


def system(namespace: str) -> Iterator[Series]:
    """A system in normal work, 60 requests a minute at each coordinator."""
    for service in SERVICES:
        for number in (1, 2):
            where = {"namespace": namespace, "job": f"specdec-{service}", "instance": f"{service}-{number}"}
            yield Series("up", where, 1)
            yield Series("process_start_time_seconds", where, 1000)
            if service == "gateway":
                yield from gateway(where)
            else:
                known = where | {"model_name": MODEL}
                yield from coordinator(known) if service == "coordinator" else replica(known, service)


def gateway(where: Mapping[str, str]) -> Iterator[Series]:
    for status, per_min in (("200", 60), ("400", 2), ("500", 0), ("503", 0)):
        yield Series("specdec:http_requests_total", {**where, "route": "/v1/completions", "status": status}, per_min)
    yield Series("specdec:http_requests_total", {**where, "route": "/ready", "status": "503"}, 30)


def coordinator(where: Mapping[str, str]) -> Iterator[Series]:
    pool = {**where, "pool": "default"}
    for role, name in (("draft", ""), ("draft", "default"), ("target", ""), ("target", "default")):
        for state in STATES:
            number = 2 if name and state == "up" else 0
            yield Series("specdec:replicas", {**where, "role": role, "pool": name, "state": state}, number)
    yield Series("specdec:request_success_total", {**where, "finished_reason": "stop"}, 60)
    for reason in REASONS:
        yield Series("specdec:request_failures_total", {**where, "reason": reason}, 0)
        yield Series("specdec:request_refusals_total", {**where, "reason": reason}, reason == "INVALID_REQUEST")
    yield from histogram("specdec:time_to_first_token_seconds", where, "2.5", "5.0")
    yield from histogram("specdec:request_time_per_output_token_seconds", where, "0.25", "0.5")
    yield from histogram("specdec:event_loop_lag_seconds", where, "0.1", "0.25")
    for result, per_min in (("equal", 10), ("tie", 1), ("mismatch", 0)):
        yield Series("specdec:audit_rounds_total", {**where, "mode": "greedy", "result": result}, per_min)
    yield Series("specdec:audit_acceptance_z", {**where, "mode": "rejection"}, 2)
    yield Series("specdec:spec_decode_num_drafts_total", pool, 99)
    yield Series("specdec:spec_decode_num_draft_tokens_total", pool, 600)
    yield Series("specdec:spec_decode_num_accepted_tokens_total", pool, 480)
    yield Series("specdec:draft_late_total", pool, 1)
    yield Series("specdec:target_only_steps_total", {**pool, "cause": "no_replica"}, 0)
    for name in ("store_errors", "leases_lost", "target_changes"):
        yield Series(f"specdec:{name}_total", where, 0)


def replica(where: Mapping[str, str], role: str) -> Iterator[Series]:
    where = {**where, "role": role, "pool": "default"}
    yield Series("specdec:load_seconds", where, 40)
    for phase in ("loading", "serving"):
        yield Series("specdec:load_phase", {**where, "phase": phase}, phase == "serving")
    for name, value in (("device_stalled", 0), ("num_requests_waiting", 2), ("kv_cache_usage_perc", 0.8)):
        yield Series(f"specdec:{name}", where, value)
    yield Series("specdec:kv_exhausted_total", where, 0)


# ---- faults ----------------------------------------------------------------------------------------------------------

FAILURES, REFUSALS, HTTP = "specdec:request_failures_total", "specdec:request_refusals_total", "specdec:http_.*_total"
TARGETS_LOST = (
    change("specdec:replicas", 0, role="target", state="up"), change("specdec:replicas", 2, role="target", state="down")
)  # fmt: skip
NO_ANSWERS = (change(HTTP, 0, status="200"), change(HTTP, 60, status="503"))


def ended(**labels: str) -> tuple[Change, ...]:
    """Processes that no longer answer scrapes: all of their series end but `up`, which is 0."""
    return change("(specdec|process).*", GONE, **labels), change("up", 0, **labels)


def slow(name: str, bound: str) -> tuple[Change, ...]:
    """Values of a histogram, all of them beyond a bound."""
    return (change(f"{name}_bucket", 0, le=bound),)


PAGES: dict[str, tuple[str, tuple[Change, ...]]] = {
    "the whole system is down": ("SpecdecDown", ended()),
    "everything is gone from discovery": ("SpecdecDown", (change(".*", GONE),)),
    "coordinators are gone from discovery": (
        "SpecdecDown", (change(".*", GONE, job="specdec-coordinator"), *NO_ANSWERS)
    ),
    "coordinators are down": ("SpecdecDown", (*ended(job="specdec-coordinator"), *NO_ANSWERS)),
    "targets are down": (
        "SpecdecNoTarget",
        (*ended(job="specdec-target"), *TARGETS_LOST, change(FAILURES, 5, reason="REPLICA_UNAVAILABLE"), *NO_ANSWERS),
    ),
    "targets run and cannot be reached": (
        "SpecdecNoTarget", (*TARGETS_LOST, change(REFUSALS, 60, reason="REPLICA_UNAVAILABLE"), *NO_ANSWERS)
    ),
    "gateways are down": ("SpecdecGatewayDown", ended(job="specdec-gateway")),
    "gateways are gone from discovery": ("SpecdecGatewayDown", (change(".*", GONE, job="specdec-gateway"),)),
    "Redis is down": (
        "SpecdecErrorBudgetBurns", (change(REFUSALS, 60, reason="STORE_UNAVAILABLE"), *NO_ANSWERS)
    ),
    "one request in fifty fails": ("SpecdecErrorBudgetBurns", (change(FAILURES, 2, reason="INTERNAL"),)),
    "one request in ten finds the queue full": ("SpecdecErrorBudgetBurns", (change(REFUSALS, 6, reason="QUEUE_FULL"),)),
    "one gateway answers 500": (
        "SpecdecErrorBudgetBurns", (change(HTTP, 60, status="500", instance="gateway-1"),)
    ),
    "first tokens are late": (
        "SpecdecLatencyBudgetBurns", slow("specdec:time_to_first_token_seconds", "2.5")
    ),
    "tokens are slow": (
        "SpecdecLatencyBudgetBurns", slow("specdec:request_time_per_output_token_seconds", "0.25")
    ),
    "overload: late first tokens and a full queue": (
        "SpecdecErrorBudgetBurns",
        (change(REFUSALS, 6, reason="QUEUE_FULL"), *slow("specdec:time_to_first_token_seconds", "2.5")),
    ),
    "audited rounds differ": (
        "SpecdecOutputsDiffer", (change("specdec:audit_rounds_total", 1, result="mismatch"),)
    ),
    "acceptance is not what p and q let expect": ("SpecdecOutputsDiffer", (change("specdec:audit_acceptance_z", -6),)),
}  # fmt: skip

TICKETS: dict[str, tuple[str, tuple[Change, ...]]] = {
    "one coordinator is down": ("SpecdecReplicaDown", ended(instance="coordinator-1")),
    "one target is down": (
        "SpecdecReplicaDown",
        (*ended(instance="target-1"), change("specdec:replicas", 1, pool="default", role="target", state="up"),
         change("specdec:replicas", 1, pool="default", role="target", state="down")),
    ),
    "one draft cannot be reached": (
        "SpecdecReplicaUnreachable",
        (change("specdec:replicas", 1, pool="default", role="draft", state="up"),
         change("specdec:replicas", 1, pool="default", role="draft", state="down")),
    ),
    "a draft has another vocabulary": (
        "SpecdecReplicaUnreachable", (change("specdec:replicas", 1, role="draft", pool="", state="refused"),)
    ),
    "one coordinator is cut off": (
        "SpecdecCoordinatorCutOff",
        (change("specdec:replicas", 0, role="target", state="up", instance="coordinator-1"),
         change("specdec:replicas", 2, role="target", pool="default", state="down", instance="coordinator-1")),
    ),
    "all drafts are down": (
        "SpecdecPoolWithoutReplicas",
        (*ended(job="specdec-draft"), change("specdec:replicas", 0, role="draft", state="up"),
         change("specdec:target_only_steps_total", 600), change("specdec:(spec_decode|draft_late).*", 0)),
    ),
    "a target reads its weights for an hour": (
        "SpecdecReplicaDoesNotStart",
        (change("specdec:load_seconds", 3000, instance="target-2"),
         change("specdec:load_phase", 0, instance="target-2", phase="serving"),
         change("specdec:load_phase", 1, instance="target-2", phase="loading")),
    ),
    "a draft restarts all the time": (
        "SpecdecRestarts", (change("process_start_time_seconds", ALWAYS_NEW, instance="draft-1"),)
    ),
    "a step hangs": ("SpecdecDeviceStalled", (change("specdec:device_stalled", 1, instance="target-1"),)),
    "nothing scrapes the targets": ("SpecdecScrapesMissing", (change(".*", GONE, job="specdec-target"),)),
    "calls queue": ("SpecdecCallsWaiting", (change("specdec:num_requests_waiting", 9, instance="target-1"),)),
    "KV is nearly full": ("SpecdecKvShort", (change("specdec:kv_cache_usage_perc", 0.97, job="specdec-target"),)),
    "calls find no KV block": ("SpecdecKvShort", (change("specdec:kv_exhausted_total", 2, instance="draft-1"),)),
    "a coordinator's timers are late": ("SpecdecEventLoopLag", slow("specdec:event_loop_lag_seconds", "0.1")),
    "commits fail and are repeated": ("SpecdecStoreErrors", (change("specdec:store_errors_total", 1),)),
    "sessions move between coordinators": ("SpecdecLeasesLost", (change("specdec:leases_lost_total", 1),)),
    "the draft no longer fits": (
        "SpecdecAcceptanceFell", (change("specdec:spec_decode_num_accepted_tokens_total", 120),)
    ),
    "half of the drafts are late": (
        "SpecdecDraftsLate",
        (change("specdec:draft_late_total", 50), change("specdec:spec_decode_num_drafts_total", 50)),
    ),
}  # fmt: skip

#: What is normal, with its duration in minutes.
SILENT: dict[str, tuple[int, tuple[Change, ...]]] = {
    "normal work": (FAULT_MIN, ()),
    "one request fails": (1, (change(FAILURES, 1, reason="INTERNAL", instance="coordinator-1"),)),
    "one answer has status 500": (1, (change(HTTP, 1, status="500", instance="gateway-1"),)),
    "one request is refused": (1, (change(REFUSALS, 1, reason="STORE_UNAVAILABLE", instance="coordinator-1"),)),
    "a rolling update": (3, ended(instance="target-1")),
    "clients send what is refused": (FAULT_MIN, (change(REFUSALS, 60, reason="INVALID_REQUEST"),)),
    "an autoscaler has stopped the drafts of an idle system": (
        FAULT_MIN,
        (change(".*", GONE, job="specdec-draft"), change("specdec:replicas", 0, role="draft"),
         change("specdec:request.*|specdec:http.*|specdec:time.*|specdec:spec_decode.*", 0)),
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A system, its fault, and the alerts that it raises."""

    changes: tuple[Change, ...]
    expected: Fired
    duration_min: int = FAULT_MIN
    quiet: float = 1.0
    """Factor on the requests of normal work."""


CASES = {
    **{fault: Case(changes, {(name, "page"): 1}) for fault, (name, changes) in PAGES.items()},
    **{fault: Case(changes, {(name, "ticket"): 1}) for fault, (name, changes) in TICKETS.items()},
    "another target model": Case((change("specdec:target_changes_total", 1),), {("SpecdecTargetChanged", "info"): 1}),
    **{case: Case(changes, {}, duration_min) for case, (duration_min, changes) in SILENT.items()},
    **{
        f"{case}, few requests": Case(changes, {}, length, 0.02)
        for case, (length, changes) in SILENT.items()
        if case.startswith("one ")
    },
}
#: Systems that one Prometheus watches. It takes some ten seconds of processor time to evaluate the rules over them.
GROUP_SIZE = 7
GROUPS = [list(CASES)[begin : begin + GROUP_SIZE] for begin in range(0, len(CASES), GROUP_SIZE)]
#: Three requests in a thousand fail, for hours.
SLOWLY = Case((change(FAILURES, 0.18, reason="INTERNAL"),), {("SpecdecBudgetBurnsSlowly", "ticket"): 1}, 180)


# ---- promtool --------------------------------------------------------------------------------------------------------


def samples(series: Series, fault: Case) -> str:
    """The samples of a series in promtool's notation, one a minute."""
    usual = series.value * (fault.quiet if series.is_counter else 1.0)
    during = usual
    for each in fault.changes:
        during = each.value if each.concerns(series) else during
    total, texts = 0.0, []
    for value, num_min in (
        (usual, NORMAL_MIN),
        (during, fault.duration_min),
        (usual, max(1, END_MIN - fault.duration_min)),
    ):
        if value != value:
            texts += ["stale", f"_x{num_min - 1}"]
        elif value == ALWAYS_NEW:
            texts += [str(1000 + minute // 3) for minute in range(num_min)]
        elif series.is_counter:
            texts.append(f"{total + value}+{value}x{num_min - 1}")
            total += value * num_min
        else:
            texts.append(f"{value}x{num_min - 1}")
    return " ".join(texts)


def alerts_of(folder: Path, cases: Mapping[str, Case], expressions: Mapping[str, int]) -> list[dict[str, Fired]]:
    """Return what each expression gives at a minute, by the case whose system has the namespace.

    All of them are in one Prometheus. promtool compares with nothing, and says what it got instead.
    """
    test = {
        "interval": "1m",
        "input_series": [
            {"series": each.selector, "values": samples(each, case)}
            for name, case in cases.items()
            for each in system(name)
        ],
        "promql_expr_test": [
            {"expr": expression, "eval_time": f"{minute}m", "exp_samples": [{"labels": "{}", "value": -1}]}
            for expression, minute in expressions.items()
        ],
    }
    path = folder / "test.yml"
    path.write_text(json.dumps({"rule_files": [str(file) for file in RULE_FILES], "tests": [test]}))
    assert PROMTOOL is not None
    done = subprocess.run([PROMTOOL, "test", "rules", str(path)], capture_output=True, text=True)
    answers = [line for line in (done.stdout + done.stderr).splitlines() if line.lstrip().startswith("got:")]
    assert len(answers) == len(expressions), done.stdout + done.stderr
    return [_by_case(answer, cases) for answer in answers]


def _by_case(answer: str, cases: Iterable[str]) -> dict[str, Fired]:
    found: dict[str, Fired] = {name: {} for name in cases}
    for labels, value in re.findall(r"(\{.*?\}) ([\d.E+]+)", answer):
        of = dict(re.findall(r'(\w+)="(.*?)"', labels))
        found[of["namespace"]][of["alertname"], of["severity"]] = int(float(value))
    return found


@cache
def fired(folder: Path, group: int) -> list[dict[str, Fired]]:
    """Alerts that fire before the faults, that have fired until the end, and that fire at the end, of some cases."""
    firing, end_min = 'ALERTS{alertstate="firing"}', NORMAL_MIN + END_MIN - 1
    instances = f"count by (namespace, alertname, severity) (last_over_time({firing}[{end_min}m]))"
    # An alert that fires again has another time since when it is active.
    times = f"changes((ALERTS_FOR_STATE and ignoring (alertstate) {firing})[{end_min}m:1m])"
    count = f"{instances} + on (namespace, alertname) group_left () sum by (namespace, alertname) ({times})"
    expressions = {f"{firing} * 1": NORMAL_MIN - 1, count: end_min, f"{firing} * 2": end_min}
    return alerts_of(folder, {name: CASES[name] for name in GROUPS[group]}, expressions)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("alerts")


needs_promtool = pytest.mark.skipif(PROMTOOL is None, reason=NO_PROMETHEUS)


@needs_promtool
@pytest.mark.parametrize("case", CASES)
def test_a_fault_raises_one_alert_of_its_severity_once(case: str, folder: Path) -> None:
    group = list(CASES).index(case) // GROUP_SIZE
    before, during, after = (found[case] for found in fired(folder, group))
    assert (before, during, after) == ({}, CASES[case].expected, {})


@needs_promtool
def test_a_budget_that_burns_slowly_opens_a_ticket(tmp_path: Path) -> None:
    expressions = {'1 * ALERTS{alertstate="firing"}': NORMAL_MIN + SLOWLY.duration_min}
    assert alerts_of(tmp_path, {"slow": SLOWLY}, expressions) == [{"slow": SLOWLY.expected}]


def test_every_alert_has_a_fault_and_twenty_faults_page_or_open_a_ticket() -> None:
    cases = [SLOWLY, *CASES.values()]
    expected = {name: severity for case in cases for name, severity in case.expected}
    assert expected == {rule["alert"]: rule["labels"]["severity"] for rule in rules() if "alert" in rule}
    assert sum(bool(case.expected) for case in cases) >= 20


def test_the_system_has_series_as_services_export_them() -> None:
    exported = exported_series(FOLDER.parents[1])
    for series in system("n"):
        assert series.labels.keys() <= exported[series.name] | {"le"}, series.selector


def test_faults_change_series_that_the_system_has() -> None:
    for name, case in CASES.items():
        for each in case.changes:
            assert any(each.concerns(series) for series in system(name)), (name, each)
