"""`specdec plan`: sizes for loads, what it refuses, and the folder that it writes. Nothing is measured here."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml

from coordinator.admission import speeds
from k8s.simulation.manifests import hpa_autoscalers, keda_autoscalers, quantity
from specdec.cli.__main__ import run
from specdec.cli.planning.cards import CALLS, CARDS, MEMORY_SHARE, PlacedModel, card_of
from specdec.cli.planning.component import thresholds
from specdec.cli.planning.deployment import (
    BASE_STREAMS,
    PEAK_FACTOR,
    SLOT_GAIN,
    ExpectedLoad,
    base_tpot_s,
    formula_speedup,
    placed,
    tokens_per_round,
)
from specdec.cli.planning.links import LINKS
from specdec.cli.planning.search import best_deployment, lone_stream
from specdec.cli.planning.steady_state import SteadyState, steady_state

_8B = {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32}
_1B = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32}
_70B = {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64}


@pytest.fixture
def models(tmp_path: Path) -> Path:
    """Write config.json of Llamas of three sizes; there are no weights."""
    for name, shape in {"8b": _8B, "1b": _1B | {"tie_word_embeddings": True}, "70b": _70B}.items():
        config = {"model_type": "llama", "num_key_value_heads": 8, "vocab_size": 128_256, **shape}
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(config))
    return tmp_path


def plan(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert run(["plan", "--json", *words], {}) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def words_of(models: Path, **changes: str) -> list[str]:
    """Return arguments of a possible plan, with changed ones."""
    flags = {"--draft": str(models / "1b"), "--alpha": "0.8", "--rate": "20", "--gpu": "h100", "--tpot-ms": "15"}
    flags |= {f"--{name.replace('_', '-')}": value for name, value in changes.items() if name != "model"}
    return [changes.get("model", str(models / "8b")), *(word for pair in flags.items() for word in pair)]


def test_a_plan_holds_its_limits_and_costs_less_than_the_target_alone(
    models: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = plan(capsys, *words_of(models, gpu_price_per_hour="2", tpot_ms="8"))
    assert found["tpot_s"] <= found["at_peak"]["tpot_s"] <= 0.008
    assert found["ttft_s"] <= found["at_peak"]["ttft_s"] <= 1.0
    assert found["kv_bytes_per_target"] <= found["kv_bytes_free_per_target"]
    assert found["num_gpus"] == found["replicas"]["target"] + found["replicas"]["draft"]
    hours = found["gpu_hours_per_million_tokens"]
    assert hours["speculating"] < hours["target_only"]
    assert hours["speculating"] == pytest.approx(found["num_gpus"] / (20 * 300 * 3600 / 1e6))
    assert found["cost_per_million_tokens"]["speculating"] == pytest.approx(2 * hours["speculating"])
    # Little's law.
    assert found["num_streams"] == pytest.approx(20 * (found["ttft_s"] + 299 * found["tpot_s"]))


def test_twice_the_load_needs_about_twice_the_gpus_and_writes(models: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, two = (plan(capsys, *words_of(models, rate=rate)) for rate in ("200", "400"))
    assert two["num_gpus"] == pytest.approx(2 * one["num_gpus"], rel=0.1)
    for found, rate in ((one, 200), (two, 400)):
        assert found["redis_writes_per_s"] == pytest.approx(rate * 300 / tokens_per_round(0.8, found["gamma"]))


def test_a_model_that_one_card_does_not_hold_is_divided(models: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = plan(capsys, *words_of(models, model=str(models / "70b"), tpot_ms="40", rate="1"))
    assert found["gpus_per_replica"] == {"target": 4, "draft": 1}  # 141 GB and KV on cards of 80 GB


def test_a_useless_draft_is_not_faster_than_the_target_alone(models: Path, capsys: pytest.CaptureFixture[str]) -> None:
    useless, good = (plan(capsys, *words_of(models, alpha=alpha)) for alpha in ("0", "0.9"))
    assert useless["speedup"]["one_stream"] < 1.0 < good["speedup"]["one_stream"]
    assert useless["speedup"]["formula"] < 1.0 < good["speedup"]["formula"]


@pytest.mark.parametrize(("alpha", "verdict"), [("0", "serve without drafts: "), ("0.9", "serve with drafts: ")])
def test_a_verdict_says_whether_to_serve_with_drafts(
    alpha: str, verdict: str, models: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = plan(capsys, *words_of(models, alpha=alpha))
    alone = plan(capsys, str(models / "8b"), "--rate", "20", "--gpu", "h100", "--tpot-ms", "15")
    assert found["verdict"].startswith(verdict)
    better, other = sorted([found["num_gpus"], alone["num_gpus"]])
    assert f": {better} GPUs instead of {other}, " in found["verdict"]
    has_fewer = (found["num_gpus"], found["tpot_s"]) < (alone["num_gpus"], alone["tpot_s"])
    assert has_fewer == (alpha == "0.9")
    assert run(["plan", *words_of(models, alpha=alpha)], {}) == 0
    assert f"  {verdict}" in capsys.readouterr().out


def test_a_plan_without_a_draft_has_no_verdict(models: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert plan(capsys, str(models / "8b"), "--rate", "20", "--gpu", "h100")["verdict"] == ""


def test_the_calculated_steps_are_those_of_the_measured_card() -> None:
    """docs/performance.md, "On a GPU": within the spread of the two machines that were measured, and the rounds.

    Steps without a draft were measured before the target went on by itself, so they are not compared.
    """
    card = card_of("h100")
    weights = 32 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336) + 128_256 * 4096  # without the embedding
    target = PlacedModel("8B", weights, 32, 131_072, 2 * weights, card, 1)
    few = 3 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336) + 128_256 * 4096
    draft = PlacedModel("3 layers", few, 3, 12_288, 2 * few, card, 1)
    assert target.step_s(1, 1, 512) == pytest.approx(6.7e-3, rel=0.05)
    assert draft.step_s(1, 1, 512) == pytest.approx(1.33e-3, rel=0.15)
    load = ExpectedLoad(1, 48, 64, 1, 1)
    speculating = 3.16 / lone_stream(load, 0.0, target, draft, 4).round_s
    assert speculating == pytest.approx(189, rel=0.1)


def target_alone(target: PlacedModel, num_targets: int, rate_per_s: float) -> SteadyState | None:
    requests = ExpectedLoad(rate_per_s, 1000, 300, 1.0, 0.05).requests(0, 0.0)
    return steady_state(requests, CALLS, target, None, num_targets, 0)


def test_a_plan_leaves_room_for_peaks_and_for_the_slots_of_coordinators() -> None:
    target = PlacedModel("8B", 8_000_000_000, 32, 131_072, 16_000_000_000, CARDS["h100"], 1)
    for rate in (20, 50, 200):
        found = best_deployment(ExpectedLoad(rate, 1000, 300, 1.0, 0.05), 0.0, target, None)
        fewer = best_deployment(ExpectedLoad(rate / PEAK_FACTOR, 1000, 300, 1.0, 0.05), 0.0, target, None)
        assert found.expected.num_streams < found.peak.num_streams
        assert fewer.num_targets <= found.num_targets
        # The line through its times per token with 16 streams and at the peak: what one stream more would gain there.
        num_streams = found.peak.num_streams / found.num_targets
        base_s = base_tpot_s(partial(target_alone, target, found.num_targets), rate, found.num_targets)
        gain = speeds.stream_gain(base_s, found.peak.tpot_s, num_streams, num_streams)
        assert 1.0 > gain == pytest.approx(found.slot_gain, rel=0.05)
        assert found.slot_gain >= SLOT_GAIN


def test_drafts_have_memory_for_the_kv_of_their_streams() -> None:
    load, card = ExpectedLoad(5, 1000, 300, 1.0, 0.05), CARDS["h100"]
    target = PlacedModel("8B", 8_000_000_000, 32, 131_072, 16_000_000_000, card, 1)
    stream_gb = (load.prompt_tokens + load.output_tokens) * 32_768 / 1e9
    num_drafts = {}
    for num_streams in (6, 1000):
        small = replace(card, memory_gb=(2 + num_streams * stream_gb) / MEMORY_SHARE)
        found = best_deployment(
            load, 0.8, target, PlacedModel("1B", 1_000_000_000, 16, 32_768, 2_000_000_000, small, 1)
        )
        assert found.peak.num_streams <= found.num_drafts * num_streams
        assert (found.limits(load) == "KV memory of the drafts") == (num_streams == 6)
        num_drafts[num_streams] = found.num_drafts
    assert num_drafts[6] > num_drafts[1000] == 1


def test_the_slots_of_a_plan_are_those_of_coordinators() -> None:
    assert (BASE_STREAMS, SLOT_GAIN) == (speeds.BASE_STREAMS, speeds.RAISE_GAIN)


def test_the_formula_is_that_of_the_paper() -> None:
    """Leviathan et al. 2023: for alpha 0.8 and gamma 4 a round has (1 - 0.8^5) / 0.2 tokens."""
    assert tokens_per_round(0.8, 4) == pytest.approx((1 - 0.8**5) / 0.2)
    assert formula_speedup(0.8, 4, 0.05) == pytest.approx((1 - 0.8**5) / 0.2 / 1.2)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rate": "-1"}, "argument --rate: must be from 1e-09 to 1e+09, got -1"),
        ({"rate": "nan"}, "argument --rate: must be from 1e-09 to 1e+09, got nan"),
        ({"rate": "1e300"}, "argument --rate: must be from 1e-09 to 1e+09, got 1e300"),
        ({"tpot_ms": "1e-10"}, "argument --tpot-ms: must be from 1e-09 to 1e+09, got 1e-10"),
        ({"output_tokens": "9" * 5000}, "argument --output-tokens: must be a whole number from 1 to 10000000, got 999"),
        ({"alpha": "1.5"}, "argument --alpha: must be from 0 to 1, got 1.5"),
        ({"gpu": "h1000"}, "--gpu: unknown GPU 'h1000'; did you mean h100?"),
        ({"link": "nvlink4"}, "--link: unknown link 'nvlink4'; did you mean nvlink-4?"),
        ({"peak": "0.5"}, "argument --peak: must be from 1 to 1000, got 0.5"),
        ({"model": "70b", "gpu": "t4"}, "--gpu: 70b needs 141 GB and 8 x t4 have 128 GB"),
        ({"tpot_ms": "2"}, "--tpot-ms must be at least"),
        ({"ttft_ms": "1", "prompt_tokens": "10000"}, "--ttft-ms must be at least"),
        ({"output_tokens": "0"}, "argument --output-tokens: must be a whole number from 1 to 10000000, got 0"),
        ({"model": "encoder"}, "is of type bert, which is an encoder and not a decoder-only language model"),
        ({"model": "nothing"}, "MODEL: "),
    ],
)
def test_an_impossible_plan_is_one_line_and_writes_nothing(
    models: Path, changes: dict[str, str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (models / "encoder").mkdir()
    (models / "encoder" / "config.json").write_text(json.dumps({"model_type": "bert", **_1B}))
    if "model" in changes:
        changes = changes | {"model": str(models / changes["model"])}
    assert run(["plan", *words_of(models, **changes, write=str(models / "overlay"))], {}) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line
    assert not (models / "overlay").exists()


def patches_of(folder: Path) -> dict[tuple[str, str], dict[str, Any]]:
    """Return the values that a component writes, by kind, name and path."""
    component = yaml.safe_load((folder / "kustomization.yaml").read_text())
    return {
        (patch["target"]["kind"], patch["target"]["name"]): {
            each["path"]: each["value"] for each in yaml.safe_load(patch["patch"])
        }
        for patch in component["patches"]
    }


def test_the_written_component_has_the_planned_sizes(models: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = models / "overlay"
    found = plan(capsys, *words_of(models, model=str(models / "70b"), tpot_ms="40", rate="5", write=str(folder)))
    patches = patches_of(folder)
    for pool, count in found["replicas"].items():
        hpa, keda = patches["HorizontalPodAutoscaler", pool], patches["ScaledObject", pool]
        assert hpa["/spec/minReplicas"] == count
        assert hpa["/spec/maxReplicas"] == keda["/spec/maxReplicaCount"] >= count
        assert keda.get("/spec/minReplicaCount") == (None if pool == "draft" else count)
    deployment = patches["Deployment", "target"]
    assert deployment["/spec/template/spec/containers/0/resources/limits/nvidia.com~1gpu"] == 4
    ranks = {"name": "SPECDEC_TARGET__TENSOR_PARALLEL", "value": "4"}
    assert deployment["/spec/template/spec/containers/0/env/-"] == ranks
    assert json.loads((folder / "plan.json").read_text()) == found
    again = words_of(models, model=str(models / "70b"), tpot_ms="40", write=str(folder))
    assert run(["plan", *again], {}) == 2
    assert "is not an empty folder" in capsys.readouterr().err


def test_both_autoscalers_get_the_same_thresholds_at_signals_that_they_have(
    models: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = models / "overlay"
    plan(capsys, *words_of(models, write=str(folder)))
    patches = patches_of(folder)
    for pool, hpa in hpa_autoscalers().items():
        written = patches["HorizontalPodAutoscaler", pool]
        (place,) = [path for path in written if path.endswith("/metric/name")]
        assert hpa.signals[int(place.split("/")[3])].name == written[place]
        (value,) = [quantity(text) for path, text in written.items() if path.endswith("/averageValue")]
        trigger = patches["ScaledObject", pool]
        (place,) = [path for path in trigger if path.endswith("/name")]
        assert keda_autoscalers()[pool].signals[int(place.split("/")[3])].name == trigger[place]
        (threshold,) = [text for path, text in trigger.items() if path.endswith("/threshold")]
        assert isinstance(threshold, str)  # as KEDA's schema has it
        assert float(threshold) == pytest.approx(value, abs=0.002)
        assert 0.1 < value < 1000


def test_a_threshold_is_the_signal_of_a_replica_below_the_largest_load() -> None:
    target = PlacedModel("8B", 8_000_000_000, 32, 131_072, 16_000_000_000, CARDS["h100"], 1)
    load = ExpectedLoad(50, 1000, 300, 1.0, 0.05)
    found = best_deployment(load, 0.0, target, None)
    root = thresholds(load, 0.0, found)["target"].value
    # A target of the plan has fewer calls at the planned load, and more where it no longer holds the limits.
    at_the_plan = (found.expected.num_streams / found.num_targets) ** 0.5
    most = max(found.target.kv_bytes / found.target.session_bytes(1300), 1.0) ** 0.5
    assert at_the_plan / 2 < root < most
    twice = replace(load, rate_per_s=100.0)
    again = thresholds(twice, 0.0, best_deployment(twice, 0.0, target, None))["target"].value
    assert again == pytest.approx(root, rel=0.1)  # a matter of the model and the limits


def test_a_divided_model_has_a_warning_and_links_decide_its_time(
    models: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [str(models / "70b"), "--rate", "5", "--gpu", "h100", "--tpot-ms", "60"]
    nvlink, pcie, network = (
        plan(capsys, *words, *link) for link in ((), ("--link", "pcie-4"), ("--link", "network-100g"))
    )
    assert nvlink["num_gpus"] <= pcie["num_gpus"] <= network["num_gpus"]
    assert nvlink["tpot_s"] < pcie["tpot_s"]
    for found in (nvlink, pcie, network):
        (warning,) = found["warnings"]
        assert "tensor parallelism has never run on several GPUs" in warning
    assert run(["plan", *words], {}) == 0
    assert "\nwarning: 70b on 4 GPUs" in capsys.readouterr().out
    assert plan(capsys, *words_of(models))["warnings"] == []


def test_a_sum_over_ranks_takes_the_time_of_its_bytes_and_its_messages() -> None:
    link = LINKS["nvlink-4"]
    assert link.sum_s(1, 1e6) == 0.0
    # A ring of 4 sends three halves of the bytes at 78 % of 450 GB/s.
    assert link.sum_s(4, 1e9) == pytest.approx(1.5e9 / (0.78 * 450e9), rel=0.02)
    assert link.sum_s(4, 0) == pytest.approx(3.6e-6 + 6 * 0.47e-6)
    times = [LINKS[name].sum_s(4, 2 * 8192 * 100) for name in ("nvlink-5", "nvlink-4", "pcie-5", "pcie-3")]
    assert times == sorted(times)


def test_a_plan_leaves_the_room_that_it_is_asked_for(models: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [str(models / "8b"), "--rate", "200", "--gpu", "h100"]
    usual, roomy = plan(capsys, *words), plan(capsys, *words, "--peak", "1.5")
    assert (usual["at_peak"]["rate_per_s"], roomy["at_peak"]["rate_per_s"]) == (pytest.approx(210), pytest.approx(300))
    assert usual["num_gpus"] < roomy["num_gpus"]
    assert roomy["at_peak"]["tpot_s"] <= 0.05


def test_the_acceptance_of_a_system_that_has_measured_none_is_refused(
    models: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [str(models / "8b"), "--draft", str(models / "1b"), "--rate", "1", "--gpu", "h100"]
    assert run(["plan", *words], {}) == 2
    assert "--draft needs --alpha SHARE or --measured HOST:PORT" in capsys.readouterr().err
    assert run(["plan", *words, "--measured", "127.0.0.1:1"], {}) == 2


def test_a_card_is_held_with_room_for_one_stream() -> None:
    card = CARDS["l4"]
    model = PlacedModel("tight", 10_000_000_000, 32, 1_000_000, 20_000_000_000, card, 1)
    assert placed(model, card, 1000).num_gpus == 1
    assert placed(model, card, 2000).num_gpus == 2
