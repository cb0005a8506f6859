"""The flags of `specdec up`: what they are, and which make no sense.

Not here: what each service gets of them (`launching`), starting and keeping the services (`up`, `fleet`).
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import specdec
from specdec.cli.draft_pools import DraftPool, draft_pools
from specdec.engine_api import SIMULATED_PREFIX
from specdec.errors import InvalidRequest, Unavailable
from specdec.rpc.server import require_free
from specdec.settings.addresses import WILDCARD_HOSTS, join_address, split_address
from specdec.settings.base import checked_redis_url, checked_tier_url
from specdec.settings.draft_specs import is_local_draft, parse_local_drafts
from specdec.supervision.processes import free_ports
from specdec.tenant import DEFAULT_TENANT, check_tenant

ROLES = ("target", "draft")

#: Shares of the device's memory where nothing is said. A small draft keeps the keys and values of as many tokens as its
#: target and needs nearly as much for each, but few weights. The rest is for what each process holds beside its model.
_UTILIZATION = {"target": 0.6, "draft": 0.3}
UTILIZATION_ALONE = 0.9

_LOG_LEVELS = ("debug", "info", "warning", "error")

#: Values of `--draft` that name no model.
LOOKUPS = ("ngram", "suffix")


class Usage(Exception):
    """Flags that make no sense, alone or together."""


@dataclass(frozen=True, slots=True)
class Models:
    """What is served."""

    target: str
    drafts: tuple[DraftPool, ...]
    """None for target-only."""
    local_drafts: tuple[str, ...] = ()
    """As `--local-draft` takes them."""


class _Model(argparse.Action):
    """Refuses an empty name, which an unset variable leaves: what is served by default was not asked for."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, given: Any, option: str | None = None
    ) -> None:
        if not given:
            raise argparse.ArgumentError(self, "must name a model, not ''")
        setattr(namespace, self.dest, given)


class _Draft(argparse.Action):
    """Tells models from the kinds of drafts that need none: `draft` are the models, `lookup` are the kinds that are
    found in text, `local_draft` those that targets draft by themselves."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, given: Any, option: str | None = None
    ) -> None:
        if not given:
            raise argparse.ArgumentError(self, "must name a model or a kind of drafts, not ''")
        if given in LOOKUPS:
            namespace.lookup = tuple(dict.fromkeys((*namespace.lookup, given)))
        elif is_local_draft(given):
            namespace.local_draft = (*namespace.local_draft, given)
            try:
                parse_local_drafts(namespace.local_draft)
            except ValueError as error:
                raise argparse.ArgumentError(self, str(error)) from None
        else:
            namespace.draft = (*namespace.draft, given)


def add_parser(commands: Any) -> None:
    parser = commands.add_parser("up", help="run the whole system on this machine", allow_abbrev=False)
    parser.add_argument(
        "--target", metavar="PATH_OR_HUB_ID", default="", action=_Model,
        help="target model; default: the pair in models/demo",
    )  # fmt: skip
    parser.add_argument(
        "--draft", metavar="[NAME=]PATH_OR_HUB_ID", default=(), action=_Draft,
        help="draft model, for speculation; default: the demo pair's, beside another target none. Or ngram or suffix: "
        "drafts found in the session's text, or in other outputs as well, without a model. Or early-exit:N[:PATH]: "
        "the target's own first N layers. Repeatable: where nothing is found the target or a model is asked, and each "
        "model is a pool of its own, which requests ask for by NAME; default: the last part of its path",
    )  # fmt: skip
    parser.set_defaults(lookup=(), local_draft=())
    parser.add_argument(
        "--route", default="none", choices=["auto", "none"],
        help="auto: of several draft models, each request gets the one that its kind of requests goes fastest with; "
        "none: the first one given, where it asks for none; default none",
    )  # fmt: skip
    parser.add_argument(
        "--tokenizer", metavar="PATH_OR_HUB_ID", default="", action=_Model,
        help="of the coordinator; default: the target's",
    )  # fmt: skip
    parser.add_argument("--listen", default="127.0.0.1:50051", metavar="HOST:PORT", help="default 127.0.0.1:50051")
    parser.add_argument(
        "--metrics", default="", metavar="HOST:PORT",
        help="Prometheus metrics of the coordinator, and at the ports after it of each target, then of each draft; "
        "port 0 takes free ones",
    )  # fmt: skip
    parser.add_argument(
        "--ray-address", metavar="ADDRESS", default="",
        help="place replicas on the nodes of this Ray cluster: HOST:PORT, auto (the one this machine belongs to) or "
        "local (one started for this); needs the package ray",
    )  # fmt: skip
    parser.add_argument(
        "--learning-log", metavar="DIR", default="",
        help="log what the target says there, users' texts included, for specdec distill; default: nothing is logged",
    )  # fmt: skip
    parser.add_argument(
        "--timeline", metavar="FILE", default="",
        help="note there when every round did what, for specdec timeline; default: nothing is noted",
    )  # fmt: skip
    parser.add_argument("--redis-url", default="memory://", metavar="URL", help="default: an embedded store")
    parser.add_argument(
        "--tenant", default=DEFAULT_TENANT, metavar="NAME", help=f"whose sessions these are; default {DEFAULT_TENANT}"
    )
    parser.add_argument(
        "--kv-tier-url", default="", metavar="URL",
        help="a second Redis (maxmemory-policy allkeys-lru) for KV that replicas do not hold; default: none",
    )  # fmt: skip
    parser.add_argument("--device", default="auto", metavar="NAME", help="cpu, cuda, ...; default auto")
    parser.add_argument("--dtype", default="auto", choices=["auto", "float32", "bfloat16", "float16", "int8"])
    parser.add_argument(
        "--compile-backend",
        default="auto",
        metavar="NAME",
        help="native, cuda-graphs, eager, inductor, ...; default auto",
    )
    parser.add_argument(
        "--self-check", default="on", choices=["on", "off"], help="refuse models that are computed wrongly; default on"
    )
    parser.add_argument(
        "--deterministic", action="store_true",
        help="greedy text is the same alone and in company, on a GPU too, where that is slower; what cannot keep it is "
        "refused",
    )  # fmt: skip
    parser.add_argument(
        "--max-context-tokens", type=int, metavar="N", help="longest sequence served; default: as the models have it"
    )
    parser.add_argument(
        "--log-level", default="warning", choices=_LOG_LEVELS,
        help="least severe log records of the services that are shown once they serve; default warning",
    )  # fmt: skip
    parser.add_argument("--replicas-draft", type=int, metavar="N", help="of each draft; default 1; 0: target-only")
    parser.add_argument("--replicas-target", type=int, default=1, metavar="N", help="default 1")
    parser.add_argument(
        "--tensor-parallel", type=int, metavar="N", dest="tensor_parallel_target",
        help="processes, or GPUs, that hold each target replica's model together; default 1",
    )  # fmt: skip
    parser.add_argument("--tensor-parallel-draft", type=int, metavar="N", help="the same of each draft replica")
    for role, share in _UTILIZATION.items():
        parser.add_argument(
            f"--gpu-memory-utilization-{role}", type=float, metavar="SHARE",
            help=f"share of a GPU's memory for all {role} replicas together; default {share}"
            + (f", without a draft {UTILIZATION_ALONE}" if role == "target" else ""),
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
    for flag, checked in (("--redis-url", checked_redis_url), ("--kv-tier-url", checked_tier_url)):
        try:
            checked(value(args, flag))
        except ValueError as error:
            raise Usage(f"{flag} {error}") from None
    if args.replicas_target < 1 or (args.replicas_draft or 0) < 0:
        raise Usage("--replicas-target must be at least 1 and --replicas-draft at least 0")
    if args.target and not args.draft and args.replicas_draft:
        raise Usage("--replicas-draft without --draft: name a draft for the target")
    if args.ray_address not in ("", "auto", "local"):
        _split("--ray-address", args.ray_address)
    if args.ray_address not in ("", "local") and args.redis_url == "memory://":
        raise Usage("--ray-address needs --redis-url: a Redis that every node of the cluster reaches")
    if args.target.startswith(SIMULATED_PREFIX) and not args.tokenizer:
        raise Usage("a simulated target has no tokenizer: name one with --tokenizer")
    if args.max_context_tokens is not None and args.max_context_tokens < 1:
        raise Usage("--max-context-tokens must be at least 1")
    if any(num_ranks(args, role) < 1 for role in ROLES):
        raise Usage("--tensor-parallel and --tensor-parallel-draft must be at least 1")
    for role in ROLES:
        if not 0 < utilization(args, role) <= 1:
            raise Usage(f"--gpu-memory-utilization-{role} must be above 0 and at most 1")
        for flag in (f"--kv-cache-bytes-{role}", f"--num-threads-{role}"):
            if (number := value(args, flag)) is not None and number < 1:
                raise Usage(f"{flag} must be at least 1")
    _pools_given(args)
    if args.local_draft and num_ranks(args, "target") > 1:
        raise Usage(f"--draft {args.local_draft[0]} does not go with --tensor-parallel: ranks do not draft")
    target, draft = (utilization(args, role) for role in ROLES)
    if num_drafts(args) and target + draft > 1:
        raise Usage(
            f"--gpu-memory-utilization-target {target:g} and --gpu-memory-utilization-draft {draft:g} are more than 1 "
            "together"
        )


def num_drafts(args: argparse.Namespace) -> int:
    """Replicas of each draft model: none beside a target of the caller's that comes alone, or where only text is looked
    at."""
    if args.replicas_draft is not None:
        return int(args.replicas_draft)
    return 0 if (args.target or args.lookup or args.local_draft) and not args.draft else 1


def num_ranks(args: argparse.Namespace, role: str) -> int:
    """Of each replica."""
    given: int | None = value(args, f"--tensor-parallel-{role}")
    return 1 if given is None else given


def models(args: argparse.Namespace) -> Models:
    """What to serve.

    Raises:
        Usage: the demo pair is wanted, and this installation has none.
    """
    demo = Path(specdec.__file__).resolve().parents[1] / "models" / "demo"
    if not (args.target and (args.draft or not num_drafts(args))) and not (demo / "target").is_dir():
        raise Usage(f"no demo pair in {demo}: give --target and --draft")
    target = args.target or str(demo / "target")
    drafts: tuple[DraftPool, ...] = ()
    if num_drafts(args):
        drafts = _pools_given(args) or draft_pools([str(demo / "draft")], LOOKUPS)
    local_drafts = args.local_draft
    if args.ray_address:  # a relative path is another one on another machine
        target, drafts = _elsewhere(target), tuple(replace(pool, model=_elsewhere(pool.model)) for pool in drafts)
        specs = parse_local_drafts(local_drafts)
        local_drafts = tuple(f"{spec.name}={replace(spec, path=_elsewhere(spec.path))}" for spec in specs)
    return Models(target, drafts, local_drafts)


def _elsewhere(model: str) -> str:
    """The same files from any directory; a hub id, or nothing, stays what it is."""
    return str(Path(model).absolute()) if model and Path(model).exists() else model


def _pools_given(args: argparse.Namespace) -> tuple[DraftPool, ...]:
    try:
        return draft_pools(args.draft, LOOKUPS)
    except ValueError as error:
        raise Usage(f"--draft: {error}") from None


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


def metrics_addresses(args: argparse.Namespace, names: list[str], endpoint: str) -> dict[str, str]:
    """Where each of the named services serves its metrics; empty where nobody wants them.

    Args:
        args: the flags.
        names: of the services.
        endpoint: where the coordinator is to listen, from `listen_address`.

    Raises:
        Usage: `--metrics` is no address, has no room for so many ports after it, or would take the coordinator's.
        Unavailable: one is taken.
    """
    if not args.metrics:
        return {}
    host, port = _split("--metrics", args.metrics)
    ports = list(range(port, port + len(names))) if port else free_ports(len(names))
    if ports[-1] > 65535:
        raise Usage(f"--metrics: {len(names)} ports are needed from {port} on")
    listening_host, listening_port = split_address(endpoint)
    is_one_host = host == listening_host or host in WILDCARD_HOSTS or listening_host in WILDCARD_HOSTS
    if is_one_host and listening_port in ports:
        raise Usage(f"--metrics {args.metrics} takes the ports {ports[0]} to {ports[-1]}, and --listen is {endpoint}")
    addresses = {name: join_address(host, each) for name, each in zip(names, ports, strict=True)}
    for address in addresses.values():
        require_free(address)
    return addresses


def later_metrics_address(args: argparse.Namespace, taken: Collection[str]) -> str:
    """Where a service that is started later serves its metrics: at the next port, or a free one.

    Args:
        args: with `--metrics`.
        taken: addresses that were given out.
    """
    host, port = _split("--metrics", args.metrics)
    following = max(split_address(address)[1] for address in taken) + 1
    if port and following <= 65535:
        with contextlib.suppress(Unavailable):
            require_free(join_address(host, following))
            return join_address(host, following)
    return join_address(host, free_ports(1)[0])


def names_of(args: argparse.Namespace) -> list[str]:
    """The services that are started on this machine, the coordinator first."""
    if args.ray_address:
        return ["coordinator"]
    return ["coordinator", *(f"{group}-{index}" for group, count in counts(args).items() for index in range(count))]


def counts(args: argparse.Namespace) -> dict[str, int]:
    """Replicas that are started: targets, and drafts, of each pool where there are several."""
    groups = [pool.group for pool in _pools_given(args)] or ["draft"]
    return {"target": int(args.replicas_target)} | dict.fromkeys(groups, num_drafts(args))


def num_replicas(args: argparse.Namespace, role: str) -> int:
    """Replicas of a role that are started, of all its pools."""
    return sum(count for group, count in counts(args).items() if role_of_group(group) == role)


def role_of_group(group: str) -> str:
    """target, or draft: of one pool or of all."""
    return group.partition("-")[0]


def utilization(args: argparse.Namespace, role: str) -> float:
    """Share of the device's memory for all replicas of a role."""
    given: float | None = value(args, f"--gpu-memory-utilization-{role}")
    if given is not None:
        return given
    return _UTILIZATION[role] if num_drafts(args) else UTILIZATION_ALONE


def value(args: argparse.Namespace, flag: str) -> Any:
    return getattr(args, flag.removeprefix("--").replace("-", "_"))


def _split(flag: str, address: str) -> tuple[str, int]:
    try:
        return split_address(address)
    except ValueError as error:
        raise Usage(f"{flag}: {error}") from None
