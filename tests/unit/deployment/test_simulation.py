"""The simulation of the autoscalers: their rule, their queries, and what a run shows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from k8s.simulation.cluster import Cluster
from k8s.simulation.keda import KedaRule
from k8s.simulation.limits import Pods, Resource, breaks_at
from k8s.simulation.manifests import (
    Autoscaler,
    Direction,
    Policy,
    Signal,
    hpa_autoscalers,
    keda_autoscalers,
    quantity,
)
from k8s.simulation.metrics import new_scraped, scrape
from k8s.simulation.outcomes import held, largest_difference, num_reversals
from k8s.simulation.queries import UnsupportedQuery, evaluate, rate
from k8s.simulation.scaling_rule import ScalingRule, desired_replicas
from k8s.simulation.scenarios import llama_pair, load_times, run_trace
from k8s.simulation.scraped import Scraped
from k8s.simulation.sizing import SIZED_LOADS, workload_of
from k8s.simulation.traces import steady, step

BOTH = [*hpa_autoscalers().values(), *keda_autoscalers().values()]
BATCHED = "70B, 50 ms"
AT_ONCE = Direction(0.0, (Policy(True, 1000.0, 15.0),))


def autoscaler(**fields: Any) -> Autoscaler:
    given = {"pool": "p", "least": 1, "most": 100, "signals": (Signal("s", "q", 10.0),), "up": AT_ONCE, "down": AT_ONCE}
    return Autoscaler(**(given | fields))


# ---- the rule, by the examples of the Kubernetes documentation ----


def test_a_value_of_twice_the_target_doubles_the_replicas() -> None:
    """Kubernetes: a current value of 200m and a desired one of 100m double the number."""
    assert desired_replicas(3, 3 * 0.2, 0.1) == 6


def test_a_value_of_half_the_target_halves_the_replicas() -> None:
    """Kubernetes: 50m instead of 100m."""
    assert desired_replicas(4, 4 * 0.05, 0.1) == 2


@pytest.mark.parametrize(("ratio", "wanted"), [(1.09, 10), (0.91, 10), (1.11, 12), (0.85, 9)])
def test_a_ratio_within_a_tenth_of_one_changes_nothing(ratio: float, wanted: int) -> None:
    assert desired_replicas(10, 10 * ratio, 1.0) == wanted


def test_the_largest_of_several_metrics_counts() -> None:
    rule = ScalingRule(autoscaler(signals=(Signal("a", "q", 10.0), Signal("b", "q", 1.0))))
    assert rule.decide(0.0, 2, [20.0, 5.0]) == 5


def test_a_missing_metric_keeps_the_number_from_falling() -> None:
    signals = (Signal("a", "q", 10.0), Signal("b", "q", 10.0))
    assert ScalingRule(autoscaler(signals=signals)).decide(0.0, 4, [10.0, None]) == 4
    assert ScalingRule(autoscaler(signals=signals)).decide(0.0, 4, [80.0, None]) == 8


def test_a_lower_number_has_to_hold_for_the_whole_window() -> None:
    rule = ScalingRule(autoscaler(down=Direction(300.0, AT_ONCE.policies)))
    assert rule.decide(0.0, 5, [50.0]) == 5
    decisions = [rule.decide(15.0 * index, 5, [20.0]) for index in range(1, 22)]
    assert decisions == [5] * 20 + [2]


def test_policies_limit_pods_within_a_period() -> None:
    """Kubernetes: 4 pods or 10 % a minute; from 80 replicas 8 leave at first, and from 40 or fewer 4."""
    down = Direction(0.0, (Policy(False, 4.0, 60.0), Policy(True, 10.0, 60.0)))
    first = ScalingRule(autoscaler(down=down))
    assert first.decide(0.0, 80, [100.0]) == 72
    assert first.decide(15.0, 72, [100.0]) == 72
    assert ScalingRule(autoscaler(down=down)).decide(0.0, 20, [100.0]) == 16


def test_the_limits_of_the_autoscaler_hold() -> None:
    rule = ScalingRule(autoscaler(least=2, most=6))
    assert (rule.decide(0.0, 3, [900.0]), rule.decide(15.0, 6, [0.0])) == (6, 2)


def test_keda_starts_the_first_replica_on_activity_and_stops_the_last_after_the_cooldown() -> None:
    signal = Signal("s", "q", 10.0, activation=1.0)
    rule = KedaRule(autoscaler(least=0, signals=(signal,), cooldown_s=60.0))
    assert rule.decide(0.0, 0, [0.5]) == 0
    assert rule.decide(30.0, 0, [2.0]) == 1
    assert [rule.decide(at_s, 1, [0.0]) for at_s in (60.0, 90.0)] == [1, 0]


# ---- manifests and queries ----


def test_quantities_have_the_values_of_kubernetes() -> None:
    assert [quantity(text) for text in ("700m", "4", "2k")] == [pytest.approx(0.7), 4.0, 2000.0]


def test_the_autoscalers_cover_every_pool_with_the_numbers_of_the_manifests() -> None:
    pools = {"target", "draft", "coordinator"}
    assert (hpa_autoscalers().keys(), keda_autoscalers().keys()) == (pools, pools)
    assert hpa_autoscalers()["target"].down == Direction(300.0, (Policy(False, 1.0, 60.0),))
    assert keda_autoscalers()["draft"].cooldown_s == 600.0


def test_both_kinds_of_autoscalers_have_the_same_targets() -> None:
    for pool, hpa in hpa_autoscalers().items():
        ours = {signal.target for signal in hpa.signals}
        assert ours <= {signal.target for signal in keda_autoscalers()[pool].signals}


@pytest.mark.parametrize("scaler", BOTH, ids=lambda each: each.pool)
def test_every_query_of_the_manifests_has_a_value_in_a_running_system(scaler: Autoscaler) -> None:
    cluster = Cluster(llama_pair(20.0), {"target": 1, "draft": 1, "coordinator": 1}, {}, {}, seed=1)
    cluster.run(steady(2.0, 30.0))
    scraped, env = new_scraped(), cluster.system.env
    for _ in range(2):
        scrape(cluster.system, scraped)
        env.run(until=env.now + 15.0)
    for signal in scaler.signals:
        assert evaluate(signal.query, scraped, env.now), signal.query


@pytest.mark.parametrize(
    ("query", "part"),
    [
        ("sum(specdec:prefill_backlog_tokens)", "specdec:prefill_backlog_tokens"),
        ("histogram_quantile(0.9, specdec:busy_seconds_total)", "histogram_quantile"),
        ("max(specdec:busy_seconds_total)", "max"),
        ('specdec:busy_seconds_total{pod=~"a.*"}', "pod"),
    ],
)
def test_a_query_that_is_not_simulated_fails_by_name(query: str, part: str) -> None:
    with pytest.raises(UnsupportedQuery, match=part) as failed:
        evaluate(query, new_scraped(), 0.0)
    assert query in str(failed.value)


def test_a_label_that_a_series_lacks_equals_the_empty_string() -> None:
    scraped = Scraped()
    scraped.declare("n")
    scraped.add(0.0, "n", {"role": "target"}, 3.0)
    scraped.add(0.0, "n", {"pod": "coordinator-1"}, 4.0)
    assert evaluate('sum(n{role=""})', scraped, 1.0) == {(): 4.0}


def test_a_rate_is_extrapolated_to_the_window() -> None:
    """Prometheus: 30 in 45 s of samples are 40 in the minute, and half a gap is added at a late start."""
    samples = [(15.0 * index + 10.0, 10.0 * index) for index in range(4)]
    assert rate(samples, 0.0, 60.0) == pytest.approx(30.0 * 60.0 / 45.0 / 60.0)
    late = samples[2:]
    assert rate(late, 0.0, 60.0) == pytest.approx(10.0 * (15.0 + 7.5 + 5.0) / 15.0 / 60.0)


# ---- runs ----


def calls_of(num_targets: int) -> tuple[float, float, float]:
    """Return calls in a target, arrivals and mean time of the calls, all over the same minutes."""
    cluster = Cluster(llama_pair(20.0), {"target": num_targets, "draft": 1, "coordinator": 4}, {}, {}, seed=3)
    samples: list[int] = []

    def watch() -> Any:
        while True:
            samples.append(sum(target.num_calls for target in cluster.system.targets))
            yield cluster.system.env.timeout(0.0501)

    cluster.system.env.process(watch())
    cluster.run(steady(20.0, 60.0))
    targets, seconds = cluster.system.targets, cluster.system.env.now
    answered = sum(target.num_answered for target in targets)
    mean_s = sum(target.call_seconds for target in targets) / answered
    return sum(samples) / len(samples), answered / seconds, mean_s


def test_the_calls_in_the_targets_follow_littles_law() -> None:
    """Sampled calls against the rate of calls times their mean time, which is what the signal reads."""
    calls, per_s, mean_s = calls_of(2)
    assert calls == pytest.approx(per_s * mean_s, rel=0.05)


def test_the_sum_of_the_roots_of_calls_depends_on_the_load_and_hardly_on_the_number_of_targets() -> None:
    """The calls themselves change by more than a third, which a rule in proportion to them would follow."""
    totals = {number: per_s * mean_s for number in (2, 4) for _, per_s, mean_s in [calls_of(number)]}
    assert totals[4] < totals[2] / 1.3
    roots = {number: number * (total / number) ** 0.5 for number, total in totals.items()}
    assert roots[4] == pytest.approx(roots[2], rel=0.25)


SHORT_STEP = step(20.0, 40.0, (1.0, 5.0, 0.0))


def scaled_targets(factor: float) -> dict[str, Autoscaler]:
    """Return the autoscalers of the manifests with the targets of the target pool multiplied."""
    scalers = hpa_autoscalers()
    signals = tuple(replace(each, target=each.target * factor) for each in scalers["target"].signals)
    return scalers | {"target": replace(scalers["target"], signals=signals)}


def test_a_step_is_held_by_the_thresholds_of_the_manifests_and_missed_by_hundredfold_ones() -> None:
    """Negative control: with a hundred times the thresholds the pool does not grow, and requests miss their limits."""
    workload, ours = run_trace(SHORT_STEP, hpa_autoscalers())
    _, control = run_trace(SHORT_STEP, scaled_targets(100.0))
    assert held(ours, workload).both > held(control, workload).both + 0.3
    assert control.replicas["target"][-1][1] < ours.replicas["target"][-1][1]


def test_the_same_seed_gives_the_same_run() -> None:
    runs = [run_trace(steady(20.0, 20.0), {}, {"target": 2, "draft": 1, "coordinator": 2})[1] for _ in range(2)]
    assert runs[0].served == runs[1].served
    assert runs[0].served


def test_every_request_ends_and_has_its_tokens() -> None:
    cluster = Cluster(llama_pair(20.0), {"target": 2, "draft": 1, "coordinator": 2}, {}, {}, seed=4)
    history = cluster.run(steady(10.0, 30.0))
    assert history.num_arrived == len(history.served) + history.num_refused
    assert [target.num_streams for target in cluster.system.targets] == [0, 0]


def test_a_replica_serves_only_after_its_weights_are_read() -> None:
    times = load_times(llama_pair(20.0))
    assert times["target"] == pytest.approx(16.06, abs=0.01)
    assert times["draft"] < times["target"]


# ---- plans ----


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == BATCHED else pytest.mark.full) for name in SIZED_LOADS]
)
def test_a_plan_has_at_most_a_tenth_more_gpus_than_the_smallest_simulated_system_that_holds(name: str) -> None:
    planned, least = SIZED_LOADS[name].plan().num_gpus, SIZED_LOADS[name].least_gpus()
    assert least <= planned <= 1.1 * least


def test_the_simulated_time_per_token_is_that_of_the_plan_with_its_coordinators_and_not_with_one() -> None:
    workload = llama_pair(20.0)
    deployment, load = workload.deployment, workload.load
    means = {}
    for coordinators in (deployment.num_coordinators(load), 1):
        pods = {"target": deployment.num_targets, "draft": deployment.num_drafts, "coordinator": coordinators}
        history = Cluster(workload, pods, {}, {}, seed=5).run(steady(load.rate_per_s, 40.0))
        means[coordinators] = sum(each.tpot_s for each in history.served) / len(history.served)
    assert means[deployment.num_coordinators(load)] == pytest.approx(deployment.expected.tpot_s, rel=0.1)
    assert means[1] > 1.5 * deployment.expected.tpot_s


def test_streams_without_a_draft_are_in_every_step() -> None:
    """Little's law again: no stream waits for the rest of a step that has begun without it."""
    sized = SIZED_LOADS["8B, 15 ms"]
    plan = sized.plan()
    cluster = Cluster(workload_of(sized.load, 0.0, plan), {"target": 5, "draft": 0, "coordinator": 8}, {}, {}, seed=2)
    history = cluster.run(steady(50.0, 20.0))
    busy_s = sum(target.busy_s for target in cluster.system.targets)
    in_steps_s = sum(target.call_seconds for target in cluster.system.targets)
    served_s = sum(each.ttft_s + 299 * each.tpot_s for each in history.served)
    assert busy_s
    assert in_steps_s == pytest.approx(served_s, rel=0.05)


# ---- outcomes ----


def test_reversals_are_changes_of_direction() -> None:
    numbers = (2, 3, 3, 5, 4, 4, 2, 3)
    assert num_reversals([(float(at_s), number) for at_s, number in enumerate(numbers)]) == 2


def test_a_number_may_follow_an_earlier_plan_but_not_exceed_it() -> None:
    def planned(at_s: float) -> int:
        return 4 if at_s < 100.0 else 2

    assert largest_difference([(0.0, 4), (200.0, 4), (400.0, 2)], planned) == 0
    assert largest_difference([(0.0, 4), (200.0, 7)], planned) == 3
    assert largest_difference([(0.0, 4), (2000.0, 4)], planned) == 2


def test_a_resource_breaks_where_its_share_reaches_the_limit() -> None:
    doubled = Resource("r", lambda pods: pods.replicas * 0.001, limit=0.5)
    assert breaks_at(doubled, lambda rate: Pods(rate / 2, 0.0, 0.0)) == pytest.approx(1000.0)
