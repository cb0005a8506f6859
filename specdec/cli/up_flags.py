"""Interprets the flags of `specdec up` together: models, replicas, ranks, shares of memory, and contradictions.

The flags themselves are in `up_parser`, the settings of single services in `service_settings`, addresses in
`listening`.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace
from pathlib import Path

import specdec
from specdec.cli import Usage
from specdec.cli.draft_pools import DraftPoolSpec, draft_pools
from specdec.cli.listening import split_flag
from specdec.cli.service_settings import SETTINGS_TYPES
from specdec.client import Tls
from specdec.contract.errors import InvalidRequest
from specdec.contract.types import SIMULATED_PREFIX
from specdec.settings.draft_specs import EARLY_EXIT, parse_local_drafts
from specdec.settings.reading import checked_value, flag_of
from specdec.settings.target import check_adapters

ROLES = ("target", "draft")

#: Default shares of the device's memory. A small draft keeps the keys and values of as many tokens as its target and
#: needs nearly as much for each, but few weights. What is left is for the processes' other memory.
DEFAULT_UTILIZATION = {"target": 0.6, "draft": 0.3}
UTILIZATION_ALONE = 0.9

#: Values of `--draft` that name no model.
LOOKUPS = ("ngram", "suffix")

MEMORY_STORE = "memory://"

#: Kind of the head that drafts for the demo's target, and its folder.
_DEMO_HEAD = "eagle3"


@dataclass(frozen=True, slots=True)
class Models:
    """The models and in-target drafts of one system."""

    target: str
    drafts: tuple[DraftPoolSpec, ...]
    """Draft models; empty for a system without any."""
    local_drafts: tuple[str, ...] = ()
    """In-target drafts, as `--local-draft` of the target takes them."""
    is_demo: bool = False
    """True for the demo pair with its own drafts, among which requests are routed."""


def check(args: argparse.Namespace) -> None:
    """Check the flags alone, without looking at models or devices.

    Raises:
        Usage: they make no sense.
    """
    for name in ("redis_url", "cluster"):
        try:
            checked_value(SETTINGS_TYPES["coordinator"], name, getattr(args, name))
        except ValueError as error:
            raise Usage(f"{flag_of(name)} {error}") from None
    _check_tls(args)
    if args.settings.value("target", "backend") != "own" and not args.target:
        raise Usage("--backend needs --target with the checkpoint whose tokenizer the engine uses")
    try:
        check_adapters(args.settings.value("target", "adapter"), args.settings.value("target", "backend"))
    except ValueError as error:
        raise Usage(str(error)) from None
    if args.replicas_target < 1 or (args.replicas_draft or 0) < 0:
        raise Usage("--replicas-target must be at least 1 and --replicas-draft at least 0")
    if args.target and not args.draft and args.replicas_draft:
        raise Usage("--replicas-draft without --draft: name a draft model for the target")
    if args.ray_address not in ("", "auto", "local"):
        split_flag("--ray-address", args.ray_address)
    if args.ray_address not in ("", "local") and not any(
        args.settings.value("coordinator", name) for name in ("tls_ca", "insecure")
    ):
        raise Usage(
            "--ray-address places replicas on other machines: give --tls-ca, --tls-cert and --tls-key, or --insecure "
            "to reach them in plaintext"
        )
    if args.ray_address not in ("", "local") and args.redis_url == MEMORY_STORE:
        raise Usage("--ray-address needs --redis-url with a Redis that every node of the cluster reaches")
    if args.target.startswith(SIMULATED_PREFIX) and not tokenizer(args):
        raise Usage("a simulated target has no tokenizer: name one with --tokenizer")
    _pools_given(args)
    if args.local_draft and num_ranks(args, "target") > 1:
        raise Usage(f"--draft {args.local_draft[0]} does not go with --tensor-parallel: ranks do not draft")
    target, draft = (utilization(args, role) for role in ROLES)
    if num_drafts(args) and target + draft > 1:
        raise Usage(
            f"--gpu-memory-utilization-target {target:g} and --gpu-memory-utilization-draft {draft:g} are more than 1 "
            "together"
        )


def _check_tls(args: argparse.Namespace) -> None:
    tls = _tls(args)
    if tls.ca and not tls.cert:
        raise Usage("--tls-ca needs --tls-cert and --tls-key beside it")
    if tls.server_name and not tls.ca:
        raise Usage("--tls-server-name needs --tls-ca beside it")


def check_certificate_files(args: argparse.Namespace) -> None:
    """Check the files of the TLS flags. Raises Usage."""
    try:
        _tls(args).check()
    except InvalidRequest as error:
        raise Usage(Tls.with_flag(error)) from None


def _tls(args: argparse.Namespace) -> Tls:
    ca, cert, key, name = (
        str(args.settings.value("coordinator", f"tls_{each}")) for each in ("ca", "cert", "key", "server_name")
    )
    return Tls(ca=ca, cert=cert, key=key, server_name=name)


def needs_of_drafts(args: argparse.Namespace) -> list[str]:
    """Return what the chosen drafts need to pay, one warning for each draft that may lack it."""
    warnings = []
    for spec in parse_local_drafts(args.local_draft):
        if spec.kind == EARLY_EXIT and not spec.path:
            warnings.append(
                f"warning: --draft {spec} has no trained adapter: the first {spec.num_layers} layers alone are seldom "
                f"right, and drafting may not pay; train one with specdec distill --draft {spec} and pass it as "
                f"{EARLY_EXIT}:{spec.num_layers}:ADAPTER"
            )
    if "suffix" in args.lookup and not (args.draft or args.local_draft):
        warnings.append(
            "warning: --draft suffix alone needs text that repeats, such as edits of code, summaries or similar "
            "requests: on other text it finds nothing, and every token takes a step of the target; add a draft model"
        )
    return warnings


def num_drafts(args: argparse.Namespace) -> int:
    """Return the replicas of each draft model: 0 if only lookup or in-target drafts, or a target alone, are given."""
    if args.replicas_draft is not None:
        return int(args.replicas_draft)
    return 0 if (args.target or args.lookup or args.local_draft) and not args.draft else 1


def num_ranks(args: argparse.Namespace, role: str) -> int:
    """Return the ranks of each replica of a role."""
    return int(args.settings.value(role, "tensor_parallel"))


def tokenizer(args: argparse.Namespace) -> str:
    """Return the tokenizer that the flags name; "" for the target's own."""
    return str(args.settings.value("coordinator", "tokenizer"))


def models(args: argparse.Namespace) -> Models:
    """Return the models and drafts to serve.

    Raises:
        Usage: the demo pair is wanted, and this installation has none.
    """
    demo = _demo_folder()
    if not args.target and not (demo / "target").is_dir():
        raise Usage(f"no demo pair in {demo}: give --target and --draft")
    is_demo = not (args.target or args.draft or args.lookup or args.local_draft) and num_drafts(args) > 0
    target = args.target or str(demo / "target")
    drafts: tuple[DraftPoolSpec, ...] = ()
    if num_drafts(args):
        drafts = _pools_given(args) or draft_pools([str(demo / "draft")], LOOKUPS)
    local_drafts = args.local_draft
    if is_demo and num_ranks(args, "target") == 1:  # ranks do not draft
        # A step of this small target takes as long as the messages to a draft model, so that only a head can gain.
        local_drafts = (f"{_DEMO_HEAD}:{demo / _DEMO_HEAD}",)
    if args.ray_address:  # a relative path means another folder on another machine
        target, drafts = _elsewhere(target), tuple(replace(pool, model=_elsewhere(pool.model)) for pool in drafts)
        specs = parse_local_drafts(local_drafts)
        local_drafts = tuple(f"{spec.name}={replace(spec, path=_elsewhere(spec.path))}" for spec in specs)
    return Models(target, drafts, local_drafts, is_demo)


def _elsewhere(model: str) -> str:
    """Return a path that holds in any directory; a hub id or "" stays as it is."""
    return str(Path(model).absolute()) if model and Path(model).exists() else model


def _demo_folder() -> Path:
    """Return the folder of the demo pair: within an installed package, beside the package in a clone."""
    package = Path(specdec.__file__).resolve().parent
    installed = package / "models" / "demo"
    return installed if installed.is_dir() else package.parent / "models" / "demo"


def _pools_given(args: argparse.Namespace) -> tuple[DraftPoolSpec, ...]:
    try:
        return draft_pools(args.draft, LOOKUPS)
    except ValueError as error:
        raise Usage(f"--draft: {error}") from None


def names_of(args: argparse.Namespace) -> list[str]:
    """Return the names of the services that are started on this machine, the coordinator first."""
    if args.ray_address:
        return ["coordinator"]
    return ["coordinator", *(f"{group}-{index}" for group, count in counts(args).items() for index in range(count))]


def counts(args: argparse.Namespace) -> dict[str, int]:
    """Return the numbers of replicas that are started: of targets, and of drafts or of each of several draft pools."""
    groups = [pool.group for pool in _pools_given(args)] or ["draft"]
    return {"target": int(args.replicas_target)} | dict.fromkeys(groups, num_drafts(args))


def num_replicas(args: argparse.Namespace, role: str) -> int:
    """Return the number of replicas of a role that are started, in all its pools."""
    return sum(count for group, count in counts(args).items() if role_of_group(group) == role)


def role_of_group(group: str) -> str:
    """Return the role of a group of replicas: draft for draft-POOL too."""
    return group.partition("-")[0]


def utilization(args: argparse.Namespace, role: str) -> float:
    """Return the share of the device's memory that all replicas of a role may take together."""
    given = args.settings.value(role, "gpu_memory_utilization")
    if given is not None:
        return float(given)
    return DEFAULT_UTILIZATION[role] if num_drafts(args) else UTILIZATION_ALONE
