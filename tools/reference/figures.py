"""Tables of measured figures in README.md and docs/performance.md, read from bench/results.

A table stands between `<!-- figures NAME -->` and `<!-- end of figures -->`. Every number in it was printed by a
command of the repository. Not here: the picture at the top of README.md (`speed_chart`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from tools.reference.markdown import paragraph

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "bench" / "results"
PLACE = re.compile(r"(?P<begin><!-- figures (?P<name>[\w-]+) -->\n).*?(?P<end><!-- end of figures -->)", re.DOTALL)

Record = dict[str, Any]

#: Files of bench/results with rows of the suite `peers`, one for each pair of models.
_PEERS = ("peers", "peers_qwen")
#: Names of the systems of the suite `peers`, by their beginnings in its rows.
_PEER_NAMES = {"specdec_int8": "int8", "specdec": "float32", "vllm": "vLLM", "llama.cpp": "llama.cpp",
               "transformers": "Transformers"}  # fmt: skip


#: Columns of the table of what a system takes, by the metrics of the suite `engines`.
_FOOTPRINT = {"memory_mib": "memory, MiB (PSS)", "idle_cpu": "idle, % of a core", "second_start_s": "second start, s"}


#: What the table of the suite `crowd` compares, and its words for both sides.
_CROWD_PAIRS = {
    ("specdec_auto", "specdec_alone"): ("draft model, gamma auto", "no draft"),
    ("specdec_auto", "hf_padded_batch"): ("draft model, gamma auto", "Transformers, padded batch"),
    ("specdec_alone", "ideal_alone"): ("no draft", "the ideal"),
    ("specdec_alone", "vllm_alone"): ("no draft", "vLLM, no draft"),
    ("specdec_alone", "llama.cpp_alone"): ("no draft", "llama.cpp, no draft"),
}


class Comparison(NamedTuple):
    """A ratio of one run: which record it is, and how the table names the two sides."""

    suite: str
    case: str
    """Beginning of the record's case."""
    system: str
    ratio_to: str
    what: str
    ours: str
    other: str
    metric: str = "tokens_per_s_ratio"
    x: float | None = None
    """Place in a sweep."""


_DEEP = "deep(18, 0.02), 1 stream, greedy"
_SMOL = "SmolLM2-135M-Instruct, one stream"
_SMOL_FILE, _QWEN_FILE = "SmolLM2-135M Q4_1", "Qwen2.5-Coder 1.5B Q4_K_M"
_REPEATS = "deep(18, 0.02), text that repeats"
_ONE_STREAM = "one stream, greedy"
_8B = "random Llama-3.1-8B shape, bf16, 1 stream"
_DEMO_PAIR, _QWEN_PAIR = "demo pair, float32", "Qwen2.5-Coder 1.5B with 0.5B"

TABLES: dict[str, Sequence[Comparison]] = {
    "summary": (
        Comparison("latency", _DEEP, "specdec", "hf_plain", _ONE_STREAM, "draft model", "Transformers"),
        Comparison("latency", _DEEP, "specdec", "hf_assisted", _ONE_STREAM, "draft model", "Transformers, assisted"),
        Comparison("latency", _DEEP, "specdec", "specdec_target_only", _ONE_STREAM, "draft model", "specdec, no draft"),
        Comparison("drafts", _REPEATS, "suffix", "target_only", "text that repeats", "`suffix`", "specdec, no draft"),
        Comparison(
            "crowd", "deep(18, 0.02)", "specdec_auto", "hf_padded_batch",
            "16 streams", "draft model", "Transformers, padded batch", x=16,
        ),
        Comparison("real", _SMOL, "specdec", "hf_plain", "SmolLM2 135M, one stream", "no draft", "Transformers"),
        Comparison(
            "real", f"{_SMOL_FILE}, 1 stream", "specdec", "llama.cpp", "SmolLM2 135M, Q4_1", "no draft", "llama.cpp"
        ),
    ),
    "peers-summary": (
        *(
            Comparison("peers", f"{_DEMO_PAIR}, 1 stream", "specdec_drafted", f"{peer}_drafted",
                       "demo pair, 1 stream", "draft, float32", f"{_PEER_NAMES[peer]}, draft")
            for peer in ("vllm", "llama.cpp")
        ),
        *(
            Comparison("real", case, "specdec", "llama.cpp", "Qwen 1.5B with 0.5B, 1 stream",
                       f"{what}, 4 bits", f"llama.cpp, {what}, 4 bits")
            for case, what in ((f"{_QWEN_FILE} with 0.5B", "draft"), (f"{_QWEN_FILE}, 1 stream", "no draft"))
        ),
        Comparison("peers_qwen", f"{_QWEN_PAIR}, 8 streams", "specdec_int8_drafted", "llama.cpp_drafted",
                   "Qwen 1.5B with 0.5B, 8 streams", "draft, int8", "llama.cpp, draft, 4 bits"),
    ),
    "latency": (
        Comparison("latency", _DEEP, "specdec", "hf_plain", _ONE_STREAM, "draft model", "Transformers"),
        Comparison("latency", _DEEP, "specdec", "hf_assisted", _ONE_STREAM, "draft model", "Transformers, assisted"),
        Comparison(
            "latency", _DEEP, "specdec", "hf_prompt_lookup", _ONE_STREAM, "draft model", "Transformers, prompt lookup"
        ),
        Comparison("latency", _DEEP, "specdec_target_only", "hf_plain", _ONE_STREAM, "no draft", "Transformers"),
        Comparison("latency", _DEEP, "specdec", "specdec_target_only", _ONE_STREAM, "draft model", "no draft"),
        Comparison(
            "latency", "demo pair, 1 stream, T = 1", "specdec", "hf_assisted",
            "demo pair, T = 1", "draft model", "Transformers, assisted",
        ),
        Comparison(
            "latency", "demo pair, 1 stream, greedy", "int8", "float32", "demo pair, no draft", "int8", "float32"
        ),
    ),
    "drafts": (
        Comparison("drafts", _REPEATS, "suffix", "target_only", "text that repeats", "`suffix`", "no draft"),
        Comparison("drafts", _REPEATS, "ngram", "target_only", "text that repeats", "`ngram`", "no draft"),
        Comparison(
            "drafts", _REPEATS, "suffix", "hf_prompt_lookup", "text that repeats", "`suffix`",
            "Transformers, prompt lookup",
        ),
        Comparison("drafts", _DEEP, "eagle3_local", "target_only", _ONE_STREAM, "EAGLE-3 head", "no draft"),
        Comparison(
            "drafts", _DEEP, "eagle3_local", "draft_model_remote", _ONE_STREAM, "EAGLE-3 head", "draft model"
        ),
        Comparison(
            "drafts", "deep(18, 0.02), greedy, 1 stream, 3 layers with adapter", "early_exit", "target_only",
            _ONE_STREAM, "early exit with adapter", "no draft",
        ),
        Comparison(
            "drafts", "deep(18, 0.02), mixed requests", "route_auto", "best_single_pool (ngram)",
            "code, prose and repeating text", "`--route auto`", "`ngram` for all",
        ),
    ),
    "gateway": tuple(
        Comparison("gateway", f"{pair}, {streams}, greedy", "http", "grpc", f"{what}, {streams}", "HTTP", "gRPC")
        for pair, what in (("deep(18, 0.02)", "deep pair"), ("demo pair", "demo pair"))
        for streams in ("1 stream", "16 streams")
    ),
    "engines": (
        *(
            Comparison("engines", f"{model} through vllm", f"specdec_vllm_{drafts}", "vllm_alone",
                       f"{model}, one stream", f"vLLM as the target, {what}", "vLLM")
            for model, drafts, what in (
                ("demo pair", "alone", "no draft"), ("demo pair", "drafted", "draft model"),
                ("SmolLM2", "alone", "no draft"),
            )
        ),
        Comparison("engines", "demo pair inside vllm", "vllm_with_pool", "vllm_with_draft_model",
                   "demo pair, one stream", "draft pool inside vLLM", "vLLM's own draft model"),
        *(
            Comparison("engines", _QWEN_PAIR, "specdec_llama.cpp_drafted", other,
                       f"{_QWEN_PAIR}, one stream", "llama.cpp inside, draft", what)
            for other, what in (
                ("llama.cpp_drafted", "llama.cpp, draft"), ("llama.cpp_alone", "llama.cpp, no draft"),
                ("specdec_int8_drafted", "specdec, int8, draft"),
            )
        ),
    ),
    "gpu": tuple(
        Comparison("gpu", _8B, ours, other, _ONE_STREAM, what, against)
        for ours, other, what, against in (
            ("specdec", "specdec_target_only", "draft model", "no draft"),
            ("specdec", "hf_assisted", "draft model", "Transformers, assisted"),
            ("specdec", "hf_plain", "draft model", "Transformers"),
            ("specdec_target_only", "hf_plain", "no draft", "Transformers"),
        )
    ),
    "real": (
        Comparison("real", _SMOL, "specdec", "hf_plain", "SmolLM2 135M, one stream", "Q4_1 file", "Transformers"),
        Comparison(
            "real", "SmolLM2-135M-Instruct, 8 streams", "specdec", "hf_padded_batch",
            "SmolLM2 135M, 8 streams", "Q4_1 file", "Transformers, padded batch",
        ),
        *(
            Comparison("real", case, "specdec", "llama.cpp", shown, f"{what}, the same file", f"llama.cpp, {what}")
            for case, shown, what in (
                (f"{_SMOL_FILE}, 1 stream", "SmolLM2 135M Q4_1, one stream", "no draft"),
                (f"{_SMOL_FILE}, 8 streams", "SmolLM2 135M Q4_1, 8 streams", "no draft"),
                (f"{_QWEN_FILE}, 1 stream", "Qwen2.5-Coder 1.5B Q4_K_M, one stream", "no draft"),
                (f"{_QWEN_FILE} with 0.5B", "Qwen2.5-Coder 1.5B Q4_K_M with 0.5B, one stream", "draft"),
            )
        ),
    ),
}  # fmt: skip


def fill(text: str) -> str:
    """Return a page with its tables written anew."""
    return PLACE.sub(lambda place: place["begin"] + "\n" + table(place["name"]) + "\n" + place["end"], text)


def table(name: str) -> str:
    """Return a table with a line that says where and how it was measured.

    Raises:
        LookupError: no table has the name, or a record is missing from bench/results.
    """
    if name == "footprint":
        return footprint()
    rows = _KEPT[name]() if name in _KEPT else TABLES[name]
    found = [(row, record(row)) for row in rows]
    lines = ["| Case | specdec with | compared with | times as fast (95 % interval) |", "|---|---|---|---|"]
    lines += [f"| {row.what} | {row.ours} | {row.other} | {_ratio(each)} |" for row, each in found]
    return "\n".join([*lines, "", sources([each for _, each in found])]) + "\n"


def footprint() -> str:
    """Return the table of what a system takes, from the newest records of the suite `engines`."""
    newest = {
        (each["case"], each["metric"]): each
        for each in sorted(records("engines"), key=lambda each: str(each["date"]))
        if each["metric"] in _FOOTPRINT
    }
    lines = [f"| System | {' | '.join(_FOOTPRINT.values())} |", f"|---|{'---|' * len(_FOOTPRINT)}"]
    for case in dict.fromkeys(case for case, metric in newest if metric == "idle_cpu"):
        values = " | ".join(f"{newest[case, metric]['value']:.4g}" for metric in _FOOTPRINT)
        lines.append(f"| {case} | {values} |")
    return "\n".join([*lines, "", sources(list(newest.values()))]) + "\n"


def sources(shown: Sequence[Record]) -> str:
    """Return a paragraph with hardware, commands and dates of the records."""
    newest = {each["suite"]: each for each in sorted(shown, key=lambda each: str(each["date"]))}
    by_hardware: dict[str, list[str]] = {}
    for suite, each in newest.items():
        command = f"`python -m bench {suite}` ({str(each['date'])[:10]})"
        by_hardware.setdefault(each["hardware"], []).append(command)
    runs = [f"{hardware}: {', '.join(commands)}" for hardware, commands in by_hardware.items()]
    return paragraph("; ".join(runs) or "Not measured yet")


def record(row: Comparison) -> Record:
    """Return the newest record of a comparison."""
    found = [
        each
        for each in records(row.suite)
        if (each["system"], each["ratio_to"], each["metric"]) == (row.system, row.ratio_to, row.metric)
        and each["case"].startswith(row.case)
        and row.x in (None, each["x"])
    ]
    if not found:
        raise LookupError(f"bench/results/{row.suite}.json has no {row.metric} of {row.system} to {row.ratio_to}")
    return max(found, key=lambda each: str(each["date"]))


def rate(system: str) -> float:
    """Return the tokens per second of a system of the latency suite, one greedy stream."""
    found = [
        each
        for each in records("latency")
        if (each["system"], each["metric"], each["case"]) == (system, "tokens_per_s", _DEEP)
    ]
    return float(max(found, key=lambda each: str(each["date"]))["value"])


def peer_rows() -> list[Comparison]:
    """Return one row for each ratio that the suite `peers` kept."""
    return [
        Comparison(
            suite, each["case"], each["system"], each["ratio_to"],
            each["case"].partition(", beside")[0], _peer_name(each["system"], ours=True), _peer_name(each["ratio_to"]),
        )
        for suite in _PEERS
        for each in records(suite)
        if each["metric"] == "tokens_per_s_ratio" and each["ratio_to"]
    ]  # fmt: skip


def crowd_rows() -> list[Comparison]:
    """Return one row for each number of streams that the suite `crowd` kept; those of a short run are left out."""
    return [
        Comparison(
            "crowd", each["case"], each["system"], each["ratio_to"],
            f"{each['case']}, {each['x']:g} stream{'s' * (each['x'] > 1)}",
            *_CROWD_PAIRS[each["system"], each["ratio_to"]], x=each["x"],
        )
        for each in records("crowd")
        if (each["system"], each["ratio_to"]) in _CROWD_PAIRS
        and each["x"] and each["metric"] == "tokens_per_s_ratio" and not each["quick"] and "steps" not in each["case"]
    ]  # fmt: skip


#: Tables with a row for each of many records.
_KEPT = {"peers": peer_rows, "crowd": crowd_rows}


def _peer_name(system: str, *, ours: bool = False) -> str:
    """Return the words for a system such as `specdec_int8_drafted`; `ours` leaves out that it is specdec."""
    kind, _, drafts = system.rpartition("_")
    name = "specdec" if kind == "specdec" and not ours else _PEER_NAMES[kind]
    return f"{name}, {'draft' if drafts == 'drafted' else 'no draft'}"


@cache
def records(suite: str) -> list[Record]:
    """Return the kept records of a suite."""
    found: list[Record] = json.loads((RESULTS / f"{suite}.json").read_text(encoding="utf-8"))
    return found


def _ratio(found: Record) -> str:
    return f"**{found['value']:.2f}** ({found['low']:.2f} to {found['high']:.2f})"
