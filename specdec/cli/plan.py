"""`specdec plan MODEL`: sizes a deployment for a load, without running anything.

It prints the replicas of each pool, GPUs of a replica, gamma, memory of KV and Redis, coordinators, start time, the
speedup to expect, GPU hours per million tokens beside the target alone, and what limits. Step times are calculated from
the sizes of the models and a card's data sheet (`planning`). The acceptance is given, or read from a running system by
`--measured`.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from specdec.checkpoints.model_size import model_size
from specdec.checkpoints.preflight import model_config, naming_flag, require_decoder_only
from specdec.cli import Usage
from specdec.cli.json_output import add_json_flag, print_json
from specdec.cli.planning.cards import CARDS, Card, PlacedModel, card_of
from specdec.cli.planning.component import thresholds, write_overlay
from specdec.cli.planning.deployment import PEAK_FACTOR, Deployment, ExpectedLoad, formula_speedup, placed
from specdec.cli.planning.links import LINKS, link_of
from specdec.cli.planning.search import best_deployment, lone_stream
from specdec.cli.pool_tables import model_name, print_table
from specdec.cli.request_flags import add_tls_flags, tls_of_flags
from specdec.client import Client
from specdec.contract.errors import SpecdecError

_DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "int8": 1}
#: Most digits of a number that is read; Python refuses to read the longest ones.
_MOST_DIGITS = 64
_COORDINATOR, _DRAFT, _TARGET = "coordinator", "draft", "target"


@dataclass(frozen=True, slots=True)
class Plan:
    """A deployment beside that of the target alone."""

    load: ExpectedLoad
    alpha: float
    alpha_source: str
    chosen: Deployment
    alone: Deployment | None
    """Deployment without a draft; None if none holds the limits."""
    price_per_gpu_hour: float | None
    load_s: float
    """Time in which a target reads its weights."""


def add_parser(commands: Any, environ: Mapping[str, str]) -> None:
    parser = commands.add_parser(
        "plan", allow_abbrev=False,
        description="Size a deployment: replicas, GPUs, gamma and memory for a load. Everything is calculated.",
    )  # fmt: skip
    parser.add_argument("model", metavar="MODEL", help="target: directory with a config.json, GGUF file or hub id")
    parser.add_argument("--draft", metavar="MODEL", help="draft model; without it the target alone is planned")
    parser.add_argument("--dtype", choices=_DTYPE_BYTES, default="bfloat16", help="type of the weights")
    parser.add_argument("--gpu", required=True, metavar="NAME", help=f"one of {', '.join(CARDS)}")
    parser.add_argument("--link", metavar="NAME", help="link between the GPUs of a replica, one of "
                        f"{', '.join(LINKS)}; default that of the GPU's data sheet")  # fmt: skip
    parser.add_argument("--gpu-price-per-hour", type=_positive, metavar="AMOUNT", help="adds costs to the plan")
    parser.add_argument("--rate", type=_positive, required=True, metavar="N", help="requests per second")
    parser.add_argument("--prompt-tokens", type=_count, default=1000, metavar="N", help="of a request; default 1000")
    parser.add_argument("--output-tokens", type=_count, default=300, metavar="N", help="of a request; default 300")
    parser.add_argument("--ttft-ms", type=_positive, default=1000.0, metavar="MS",
                        help="limit of the time to the first token; default 1000")  # fmt: skip
    parser.add_argument("--tpot-ms", type=_positive, default=50.0, metavar="MS",
                        help="limit of the time per further token; default 50")  # fmt: skip
    parser.add_argument("--peak", type=_factor, default=PEAK_FACTOR, metavar="FACTOR",
                        help="load at which the limits still hold, over --rate; default 1.05, for chance")  # fmt: skip
    parser.add_argument("--load-gb-per-s", type=_positive, default=1.0, metavar="GB",
                        help="rate at which a replica reads its weights; default 1, an assumption")  # fmt: skip
    acceptance = parser.add_mutually_exclusive_group()
    acceptance.add_argument("--alpha", type=_share, metavar="SHARE", help="acceptance rate of the draft, 0 to 1")
    acceptance.add_argument("--measured", metavar="HOST:PORT", help="running system that measures the acceptance rate")
    parser.add_argument("--write", type=Path, metavar="DIR", help="write the sizes as a kustomize component")
    add_tls_flags(parser, environ)
    add_json_flag(parser, "a table")


def run(args: argparse.Namespace, environ: Mapping[str, str]) -> int:
    """Print the plan. Raises Usage, before anything is written, if it is impossible."""
    try:
        plan = _plan(args)
        report = _as_json(plan)
        if args.write is not None:
            signals = thresholds(plan.load, plan.alpha, plan.chosen)
            write_overlay(args.write, _replicas(plan), _gpus(plan.chosen), signals, report)
    except SpecdecError as error:
        raise Usage(error.message) from error
    if args.json:
        print_json(report)
        return 0
    _print(plan, environ)
    return 0


def _plan(args: argparse.Namespace) -> Plan:
    if args.draft and args.alpha is None and args.measured is None:
        raise Usage("--draft needs --alpha SHARE or --measured HOST:PORT")
    card = card_of(args.gpu)
    if args.link is not None:
        card = replace(card, link=link_of(args.link))
    load = ExpectedLoad(
        args.rate, args.prompt_tokens, args.output_tokens, args.ttft_ms / 1e3, args.tpot_ms / 1e3,
        peak_factor=args.peak,
    )  # fmt: skip
    room_tokens = load.prompt_tokens + load.output_tokens
    target = placed(_sized("MODEL", args.model, args.dtype, card), card, room_tokens)
    draft, alpha, source = None, 0.0, "no draft"
    if args.draft:
        draft = placed(_sized("--draft", args.draft, args.dtype, card), card, room_tokens)
        alpha, source = (args.alpha, "given") if args.measured is None else (_measured_alpha(args), "measured")
    chosen = best_deployment(load, alpha, target, draft)
    alone: Deployment | None = chosen
    if draft is not None:
        try:
            alone = best_deployment(load, 0.0, target, None)
        except SpecdecError:
            alone = None
    load_s = target.weight_bytes / target.num_gpus / (args.load_gb_per_s * 1e9)
    return Plan(load, alpha, source, chosen, alone, args.gpu_price_per_hour, load_s)


def _sized(flag: str, model: str, dtype: str, card: Card) -> PlacedModel:
    with naming_flag(flag):
        require_decoder_only(model, model_config(model))
        size = model_size(model)
    weight_bytes = size.num_parameters * _DTYPE_BYTES[dtype]
    return PlacedModel(
        model_name(model), size.num_parameters, size.num_layers, size.kv_bytes_per_token, weight_bytes, card, 1,
        size.state_bytes, size.hidden_size,
    )  # fmt: skip


def _measured_alpha(args: argparse.Namespace) -> float:
    with Client(args.measured, tls=tls_of_flags(args)) as client:
        pools = [pool for pool in client.info().pools if pool.role == _DRAFT and pool.alpha is not None]
    named = [pool for pool in pools if model_name(pool.model) == model_name(args.draft)] or pools
    if not named or named[0].alpha is None:
        raise Usage(f"--measured: {args.measured} has not measured the acceptance of a draft yet")
    return named[0].alpha


def _replicas(plan: Plan) -> dict[str, int]:
    found = {_TARGET: plan.chosen.num_targets, _COORDINATOR: plan.chosen.num_coordinators(plan.load)}
    return found | ({_DRAFT: plan.chosen.num_drafts} if plan.chosen.draft else {})


def _gpus(chosen: Deployment) -> dict[str, int]:
    return {_TARGET: chosen.target.num_gpus} | ({_DRAFT: chosen.draft.num_gpus} if chosen.draft else {})


def _one_stream_speedup(plan: Plan) -> float:
    """Return tokens per second of one stream against the target alone, messages and host included."""
    chosen, load = plan.chosen, plan.load
    speculating = lone_stream(load, plan.alpha, chosen.target, chosen.draft, chosen.gamma).round_s
    return lone_stream(load, 0.0, chosen.target, None, 0).round_s * chosen.tokens_per_round / speculating


def _formula(plan: Plan) -> float:
    chosen, context = plan.chosen, plan.load.context_tokens
    if chosen.draft is None:
        return 1.0
    cost = chosen.draft.step_s(1, 1, context) / chosen.target.step_s(1, 1, context)
    return formula_speedup(plan.alpha, chosen.gamma, cost)


def _verdict(plan: Plan) -> str:
    """Return whether to serve with drafts, by GPUs and then by the time per token; "" if no draft was named."""
    chosen, alone = plan.chosen, plan.alone
    if chosen.draft is None:
        return ""
    if alone is None:
        return "serve with drafts: the target alone does not hold the limits"
    with_drafts, without = ((each.num_gpus, each.expected.tpot_s) for each in (chosen, alone))
    better, other = sorted((with_drafts, without))
    words = "with" if better == with_drafts else "without"
    gpus = f"{better[0]} GPUs instead of {other[0]}"
    return f"serve {words} drafts: {gpus}, {better[1] * 1e3:.1f} ms a token instead of {other[1] * 1e3:.1f}"


def _warnings(chosen: Deployment) -> list[str]:
    models = [model for model in (chosen.target, chosen.draft) if model is not None and model.num_gpus > 1]
    return [
        f"{model.name} on {model.num_gpus} GPUs: tensor parallelism has never run on several GPUs; sums are calculated "
        f"for {model.card.link.name}"
        for model in models
    ]


def _as_json(plan: Plan) -> dict[str, Any]:
    chosen, load, price = plan.chosen, plan.load, plan.price_per_gpu_hour
    expected, peak = chosen.expected, chosen.peak
    hours = {
        "speculating": chosen.gpu_hours_per_million_tokens(load),
        "target_only": plan.alone.gpu_hours_per_million_tokens(load) if plan.alone else None,
    }
    return {
        "load": asdict(load),
        "alpha": plan.alpha,
        "alpha_source": plan.alpha_source,
        "replicas": _replicas(plan),
        "gpus_per_replica": _gpus(chosen),
        "gpu": chosen.target.card.name,
        "num_gpus": chosen.num_gpus,
        "gamma": chosen.gamma,
        "num_streams": expected.num_streams,
        "ttft_s": expected.ttft_s,
        "tpot_s": expected.tpot_s,
        "busy_share": {_TARGET: expected.target_busy_share, _DRAFT: expected.draft_busy_share},
        "at_peak": {"rate_per_s": load.peak_per_s, "ttft_s": peak.ttft_s, "tpot_s": peak.tpot_s},
        "kv_bytes_per_target": chosen.kv_bytes_per_target(load),
        "kv_bytes_free_per_target": chosen.target.kv_bytes,
        "redis_bytes": chosen.redis_bytes(load),
        "redis_writes_per_s": chosen.redis_writes_per_s(load),
        "start_s": plan.load_s,
        "speedup": {"formula": _formula(plan), "one_stream": _one_stream_speedup(plan)},
        "gpu_hours_per_million_tokens": hours,
        "cost_per_million_tokens": {
            name: None if each is None or price is None else each * price for name, each in hours.items()
        },
        "limited_by": chosen.limits(load),
        "verdict": _verdict(plan),
        "warnings": _warnings(chosen),
    }


def _print(plan: Plan, environ: Mapping[str, str]) -> None:
    chosen, load, report = plan.chosen, plan.load, _as_json(plan)
    expected, peak = chosen.expected, chosen.peak
    rows = [_pool_row(_TARGET, chosen.num_targets, chosen.target, expected.target_busy_share)]
    if chosen.draft is not None:
        rows.append(_pool_row(_DRAFT, chosen.num_drafts, chosen.draft, expected.draft_busy_share))
    rows.append([_COORDINATOR, str(chosen.num_coordinators(load)), "", "", ""])
    aligned = {"pool": "left", "replicas": "right", "each on": "left", "busy": "right", "model": "left"}
    print_table(aligned, rows, environ)
    hours = report["gpu_hours_per_million_tokens"]
    lines = {
        "GPUs": f"{chosen.num_gpus}",
        "gamma": f"{chosen.gamma}" if chosen.draft else "no draft",
        "streams at once": f"{expected.num_streams:.0f}",
        "first token": f"{expected.ttft_s * 1e3:.0f} ms, {peak.ttft_s * 1e3:.0f} at the peak, "
        f"limit {load.ttft_s * 1e3:g}",
        "further token": f"{expected.tpot_s * 1e3:.1f} ms, {peak.tpot_s * 1e3:.1f} at the peak, "
        f"limit {load.tpot_s * 1e3:g}",
        "peak": f"{load.peak_per_s:g} requests/s",
        "KV of a target": f"{report['kv_bytes_per_target'] / 1e9:.1f} of {chosen.target.kv_bytes / 1e9:.1f} GB",
        "Redis": f"{report['redis_bytes'] / 1e9:.2f} GB, {report['redis_writes_per_s']:.0f} writes/s",
        "start of a target": f"{plan.load_s:.0f} s to read its weights",
        "one stream": f"{report['speedup']['one_stream']:.2f} times the target alone "
        f"({report['speedup']['formula']:.2f} by the formula without messages)",
        "GPU hours": f"{hours['speculating']:.2f} per million tokens, {_amount(hours['target_only'])} target only",
        "limited by": chosen.limits(load),
    }
    if report["verdict"]:
        lines["verdict"] = report["verdict"]
    if plan.price_per_gpu_hour is not None:
        cost = report["cost_per_million_tokens"]
        lines["cost"] = f"{cost['speculating']:.2f} per million tokens, {_amount(cost['target_only'])} target only"
    width = max(map(len, lines))
    print()
    for name, text in lines.items():
        print(f"{name:<{width}}  {text}")
    print()
    for warning in report["warnings"]:
        print(f"warning: {warning}")
    alpha = f"; alpha is {plan.alpha_source}" if plan.alpha else ""
    print(f"Calculated from the data sheet of {chosen.target.card.name}, not measured{alpha}.")


def _pool_row(name: str, count: int, model: PlacedModel, busy_share: float) -> list[str]:
    return [name, str(count), f"{model.num_gpus} x {model.card.name}", f"{busy_share:.0%}", model.name]


def _amount(value: float | None) -> str:
    return "not possible" if value is None else f"{value:.2f}"


def _number(least: float, most: float) -> Callable[[str], float]:
    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(f"must be from {least:g} to {most:g}, got {text:.64}")
        return value

    return parse


_positive = _number(1e-9, 1e9)
_factor = _number(1.0, 1e3)
_share = _number(0.0, 1.0)


def _count(text: str) -> int:
    if not text.isdecimal() or len(text) > _MOST_DIGITS or not 1 <= int(text) <= 10_000_000:
        raise argparse.ArgumentTypeError(f"must be a whole number from 1 to 10000000, got {text:.64}")
    return int(text)
