"""The flags of `specdec up`: what they are, which make no sense, and what each child gets of them.

Not here: starting and keeping the children (`up`, `supervision`).
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import specdec
from specdec.cli.processes import Child, free_ports
from specdec.config import join_address, split_address
from specdec.errors import InvalidRequest
from specdec.rpc.server import require_free
from specdec.tenant import DEFAULT_TENANT, check_tenant

ROLES = ("target", "draft")

#: Shares of the device's memory where nothing is said. A small draft keeps the keys and values of as many tokens as its
#: target and needs nearly as much for each, but few weights. The rest is for what each process holds beside its model.
_UTILIZATION = {"target": 0.6, "draft": 0.3}
_UTILIZATION_ALONE = 0.9

_LOG_LEVELS = ("debug", "info", "warning", "error")
_DRAIN_GRACE_S = 3


class Usage(Exception):
    """Flags that make no sense, alone or together."""


@dataclass(frozen=True, slots=True)
class Models:
    """What is served."""

    target: str
    draft: str
    """"" for target-only."""


def add_parser(commands: Any) -> None:
    parser = commands.add_parser("up", help="run the whole system on this machine", allow_abbrev=False)
    model = {"metavar": "PATH_OR_HUB_ID", "default": ""}
    parser.add_argument("--target", **model, help="target model; default: the pair in models/demo")
    parser.add_argument(
        "--draft", **model, help="draft model, for speculation; default: the demo pair's, beside another target none"
    )
    parser.add_argument("--listen", default="127.0.0.1:50051", metavar="HOST:PORT", help="default 127.0.0.1:50051")
    parser.add_argument(
        "--metrics", default="", metavar="HOST:PORT",
        help="Prometheus metrics of the coordinator, and at the ports after it of each target, then of each draft; "
        "port 0 takes free ones",
    )  # fmt: skip
    parser.add_argument("--redis-url", default="memory://", metavar="URL", help="default: an embedded store")
    parser.add_argument(
        "--tenant", default=DEFAULT_TENANT, metavar="NAME", help=f"whose sessions these are; default {DEFAULT_TENANT}"
    )
    parser.add_argument("--device", default="auto", metavar="NAME", help="cpu, cuda, ...; default auto")
    parser.add_argument("--dtype", default="auto", choices=["auto", "float32", "bfloat16", "float16", "int8"])
    parser.add_argument(
        "--compile-backend", default="auto", metavar="NAME", help="native, captured, eager, inductor, ...; default auto"
    )
    parser.add_argument(
        "--self-check", default="on", choices=["on", "off"], help="refuse models that are computed wrongly; default on"
    )
    parser.add_argument(
        "--max-context-tokens", type=int, metavar="N", help="longest sequence served; default: as the models have it"
    )
    parser.add_argument(
        "--log-level", default="warning", choices=_LOG_LEVELS,
        help="least severe log records of the services that are shown once they serve; default warning",
    )  # fmt: skip
    parser.add_argument("--replicas-draft", type=int, metavar="N", help="default 1; 0: target-only")
    parser.add_argument("--replicas-target", type=int, default=1, metavar="N", help="default 1")
    for role, share in _UTILIZATION.items():
        parser.add_argument(
            f"--gpu-memory-utilization-{role}", type=float, metavar="SHARE",
            help=f"share of a GPU's memory for all {role} replicas together; default {share}"
            + (f", without a draft {_UTILIZATION_ALONE}" if role == "target" else ""),
        )  # fmt: skip
        parser.add_argument(
            f"--kv-cache-bytes-{role}", type=int, metavar="N",
            help=f"size of each {role} replica's KV cache, instead of what that share leaves",
        )  # fmt: skip
        parser.add_argument(
            f"--num-threads-{role}", type=int, metavar="N",
            help=f"CPU threads of each {role} replica; default: whichever number makes its rounds fastest",
        )  # fmt: skip


def check(args: argparse.Namespace) -> None:
    """Looks at the flags alone.

    Raises:
        Usage: they make no sense.
    """
    try:
        check_tenant(args.tenant, field="--tenant")
    except InvalidRequest as error:
        raise Usage(error.message) from None
    if args.replicas_target < 1 or (args.replicas_draft or 0) < 0:
        raise Usage("--replicas-target must be at least 1 and --replicas-draft at least 0")
    if args.target and not args.draft and args.replicas_draft:
        raise Usage("--replicas-draft without --draft: name a draft with the target's vocabulary")
    if args.max_context_tokens is not None and args.max_context_tokens < 1:
        raise Usage("--max-context-tokens must be at least 1")
    for role in ROLES:
        if not 0 < _utilization(args, role) <= 1:
            raise Usage(f"--gpu-memory-utilization-{role} must be above 0 and at most 1")
        for flag in (f"--kv-cache-bytes-{role}", f"--num-threads-{role}"):
            if (number := _value(args, flag)) is not None and number < 1:
                raise Usage(f"{flag} must be at least 1")
    target, draft = (_utilization(args, role) for role in ROLES)
    if num_drafts(args) and target + draft > 1:
        raise Usage(
            f"--gpu-memory-utilization-target {target:g} and --gpu-memory-utilization-draft {draft:g} are more than 1 "
            "together"
        )


def num_drafts(args: argparse.Namespace) -> int:
    """Draft replicas: none beside a target of the caller's that comes alone."""
    if args.replicas_draft is not None:
        return int(args.replicas_draft)
    return 0 if args.target and not args.draft else 1


def models(args: argparse.Namespace) -> Models:
    """What to serve.

    Raises:
        Usage: the demo pair is wanted, and this installation has none.
    """
    demo = Path(specdec.__file__).resolve().parents[1] / "models" / "demo"
    target, draft = args.target or str(demo / "target"), args.draft or str(demo / "draft")
    if not (args.target and (args.draft or not num_drafts(args))) and not (demo / "target").is_dir():
        raise Usage(f"no demo pair in {demo}: give --target and --draft")
    return Models(target, draft if num_drafts(args) else "")


def listen_address(args: argparse.Namespace) -> str:
    """Where the coordinator is to listen; port 0 becomes a free one.

    Raises:
        Usage: that is no address.
        Unavailable: it is taken.
    """
    host, port = _split("--listen", args.listen)
    address = join_address(host, port or free_ports(1)[0])
    require_free(address)  # else whoever listens there already would be taken for our coordinator
    return address


def metrics_addresses(args: argparse.Namespace, names: list[str]) -> dict[str, str]:
    """Where each of the named children serves its metrics; empty where nobody wants them.

    Raises:
        Usage: `--metrics` is no address, or has no room for so many ports after it.
        Unavailable: one is taken.
    """
    if not args.metrics:
        return {}
    host, port = _split("--metrics", args.metrics)
    ports = list(range(port, port + len(names))) if port else free_ports(len(names))
    if ports[-1] > 65535:
        raise Usage(f"--metrics: {len(names)} ports are needed from {port} on")
    addresses = {name: join_address(host, each) for name, each in zip(names, ports, strict=True)}
    for address in addresses.values():
        require_free(address)
    return addresses


def names_of(args: argparse.Namespace) -> list[str]:
    """The children, the coordinator first."""
    counts = {"target": args.replicas_target, "draft": num_drafts(args)}
    return ["coordinator", *(f"{role}-{index}" for role in ROLES for index in range(counts[role]))]


def replicas(
    args: argparse.Namespace, served: Models, redis_url: str, metrics: Mapping[str, str], environ: Mapping[str, str]
) -> list[Child]:
    """Starts the target replicas, then the draft replicas."""
    names = names_of(args)[1:]
    return [
        Child(
            name,
            f"{role}_service",
            [
                *("--model", served.target if role == "target" else served.draft),
                *("--device", args.device, "--dtype", args.dtype, "--compile-backend", args.compile_backend),
                *("--self-check", args.self_check, *_limits(args, role)),
                *("--listen", f"127.0.0.1:{port}", *_common(args, redis_url, metrics.get(name, ""))),
            ],
            _replica_environ(args, role, environ),
            shown_level=args.log_level,
        )
        for name, port in zip(names, free_ports(len(names)), strict=True)
        for role in [name.rpartition("-")[0]]
    ]


def coordinator(
    args: argparse.Namespace, served: Models, address: str, redis_url: str, metrics: Mapping[str, str],
    environ: Mapping[str, str],
) -> Child:  # fmt: skip
    """Starts the coordinator."""
    arguments = ["--tokenizer", served.target, "--listen", address, "--poll-interval-s", "0.2"]
    arguments += ["--tenant", args.tenant]
    common = _common(args, redis_url, metrics.get("coordinator", ""))
    return Child("coordinator", "coordinator", [*arguments, *common], environ, shown_level=args.log_level)


def _replica_environ(args: argparse.Namespace, role: str, environ: Mapping[str, str]) -> Mapping[str, str]:
    # Idle threads spin for microseconds only (docs/LOG.md).
    quiet = {"GOMP_SPINCOUNT": "20000", "KMP_BLOCKTIME": "0"}
    # Draft and target work by turns, so a replica of each role may use all cores, and finds out whether it should.
    # Several of a role share them; one core is left to coordinator, store and client.
    if (count := _num_replicas(args, role)) > 1:
        quiet["OMP_NUM_THREADS"] = str(max(1, ((os.cpu_count() or 1) - 1) // count))
    # Not a flag, which would win over the same variable of the caller's.
    quiet[f"SPECDEC_{role.upper()}__GPU_MEMORY_UTILIZATION"] = _share(args, role)
    return {**quiet, **environ}


def _limits(args: argparse.Namespace, role: str) -> list[str]:
    given = []
    if _value(args, f"--gpu-memory-utilization-{role}") is not None:
        given += ["--gpu-memory-utilization", _share(args, role)]
    for flag in ("--kv-cache-bytes", "--num-threads"):
        if (number := _value(args, f"{flag}-{role}")) is not None:
            given += [flag, str(number)]
    if args.max_context_tokens is not None:
        given += ["--max-context-tokens", str(args.max_context_tokens)]
    return given


def _common(args: argparse.Namespace, redis_url: str, metrics: str) -> list[str]:
    given = ["--redis-url", redis_url, "--log-format", "json", "--drain-grace-s", str(_DRAIN_GRACE_S)]
    # Else as they have it: their info records tell what a start is doing, whatever is shown later.
    if args.log_level == "debug":
        given += ["--log-level", args.log_level]
    return [*given, "--metrics", metrics] if metrics else given


def _num_replicas(args: argparse.Namespace, role: str) -> int:
    return int(args.replicas_target) if role == "target" else num_drafts(args)


def _share(args: argparse.Namespace, role: str) -> str:
    """Share of the device's memory of each replica."""
    return str(_utilization(args, role) / max(1, _num_replicas(args, role)))


def _utilization(args: argparse.Namespace, role: str) -> float:
    """Share of the device's memory for all replicas of a role."""
    given: float | None = _value(args, f"--gpu-memory-utilization-{role}")
    if given is not None:
        return given
    return _UTILIZATION[role] if num_drafts(args) else _UTILIZATION_ALONE


def _value(args: argparse.Namespace, flag: str) -> Any:
    return getattr(args, flag.removeprefix("--").replace("-", "_"))


def _split(flag: str, address: str) -> tuple[str, int]:
    try:
        return split_address(address)
    except ValueError as error:
        raise Usage(f"{flag}: {error}") from None
