"""`specdec doctor`: checks an installation and a running system, and says what is wrong and what to do.

Each check is one line. The checks are in `specdec.cli.checks`, one subject a file; they run one after another, each
within a time limit. Only the parts of a system that were named or found are checked.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import textwrap
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any
from urllib.parse import urlsplit

from rich.color import ColorSystem
from rich.style import Style

from specdec.cli.checks import (
    certificates,
    clocks,
    coordinators,
    device_checks,
    gateway_checks,
    installation,
    ports,
    redis_checks,
    redis_writes,
    rounds,
    tier_checks,
)
from specdec.cli.checks.finding import Check, Finding, Status, findings_of
from specdec.cli.checks.system import System, SystemAddresses
from specdec.cli.json_output import add_json_flag, print_json
from specdec.cli.request_flags import BUDGETS, add_client_flags, address, require_private
from specdec.cli.terminal import wants_colour
from specdec.cli.top import metrics_addresses_of
from specdec.client import Client, Tls
from specdec.client.endpoints import DEFAULT_ENDPOINT, ENDPOINT_VARIABLE
from specdec.contract.errors import InvalidRequest
from specdec.rpc.credentials import service_metadata

_STYLES = {Status.OK: Style(color="green"), Status.WARN: Style(color="yellow"), Status.FAIL: Style(color="red")}
_STATUS_COLUMNS, _NAME_COLUMNS = 6, 20
#: Narrowest text beside the names.
_MIN_TEXT_COLUMNS = 30

_CALL_TIMEOUT_S = 5.0
#: Time limits of checks that only read files, that connect, and that compile or import torch.
_FILE_S, _CONNECT_S, _COMPILE_S = 10.0, 30.0, 300.0
#: Time limit of checks that generate, in every draft pool one after another, and that may wait in a queue.
_GENERATE_S = 120.0
#: Longest wait for one generation.
_GENERATION_TIMEOUT_S = 20.0

#: Variables from which the flags take their defaults: those of the services, so that a doctor in a service's container
#: checks what the service uses.
_VARIABLES = {
    "redis_url": ("SPECDEC_COORDINATOR__REDIS_URL", "SPECDEC_TARGET__REDIS_URL", "SPECDEC_DRAFT__REDIS_URL"),
    "cluster": ("SPECDEC_COORDINATOR__CLUSTER", "SPECDEC_TARGET__CLUSTER", "SPECDEC_DRAFT__CLUSTER"),
    "service_key": ("SPECDEC_COORDINATOR__SERVICE_KEY", "SPECDEC_TARGET__SERVICE_KEY", "SPECDEC_DRAFT__SERVICE_KEY"),
    "kv_tier_url": ("SPECDEC_TARGET__KV_TIER_URL", "SPECDEC_DRAFT__KV_TIER_URL"),
}


def add_parser(commands: Any, environ: Mapping[str, str]) -> None:
    parser = commands.add_parser(
        "doctor", description="Check the installation and a running system: what is wrong, and what to do.",
        allow_abbrev=False,
    )  # fmt: skip
    add_client_flags(parser, environ)
    _add_flag(parser, environ, "--redis-url", "URL", "Redis of the sessions and the registry, to check it")
    _add_flag(parser, environ, "--cluster", "NAME", "cluster of the registry in that Redis", "default")
    parser.add_argument("--http", type=_http_url, metavar="URL", help="HTTP gateway, to complete a prompt there")
    _add_flag(
        parser, environ, "--service-key", "FILE|env:NAME", "service key, to call the replicas of a system with one"
    )
    _add_flag(parser, environ, "--kv-tier-url", "URL", "Redis of the KV tier, to check and measure it")
    for role in ("draft", "target"):
        parser.add_argument(
            f"--{role}-endpoint", action="append", default=[], type=address, metavar="HOST:PORT",
            help=f"{role} replica that neither the registry nor the coordinator lists; repeatable",
        )  # fmt: skip
    parser.add_argument(
        "--metrics", action="append", default=[], type=address, metavar="HOST:PORT",
        help="metrics address of a service, whose clock is checked; repeatable; default: those of the specdec up at "
        "--endpoint",
    )  # fmt: skip
    add_json_flag(parser, "lines")


def _http_url(text: str) -> str:
    """Return an argument that is the URL of a gateway. Raises ArgumentTypeError for anything else."""
    try:
        parts = urlsplit(text)
        if parts.scheme in ("http", "https") and parts.hostname and (parts.port is None or parts.port):
            return text
    except ValueError:  # the port is not a number
        pass
    raise argparse.ArgumentTypeError(f"must be http://HOST:PORT or https://HOST:PORT, got {text[:64]!r}")


def _add_flag(
    parser: argparse.ArgumentParser, environ: Mapping[str, str], flag: str, metavar: str, text: str, otherwise: str = ""
) -> None:
    variables = _VARIABLES[flag.removeprefix("--").replace("-", "_")]
    default = next((environ[name] for name in variables if environ.get(name)), otherwise)
    source = f"{variables[0]}, else {otherwise}" if otherwise else variables[0]
    parser.add_argument(flag, default=default, metavar=metavar, help=f"{text}; default: {source}")


def run(args: argparse.Namespace, environ: Mapping[str, str]) -> int:
    """Print what is found; return 1 if something fails."""
    findings = []
    for finding in _all_findings(_checks(args, environ)):
        findings.append(finding)
        if not args.json:
            print(_line(finding, environ), flush=True)
    counts = Counter(finding.status for finding in findings)
    absent = _not_checked(args)
    if args.json:
        print_json({
            "checks": [asdict(finding) for finding in findings],
            "counts": {str(status): counts[status] for status in Status},
            "not_checked": absent,
        })  # fmt: skip
    else:
        print(f"\n{counts[Status.OK]} ok, {counts[Status.WARN]} warnings, {counts[Status.FAIL]} failures")
        if absent:
            print(_wrapped(f"not checked: {', '.join(absent)}", 0))
    return 1 if counts[Status.FAIL] else 0


def _checks(args: argparse.Namespace, environ: Mapping[str, str]) -> Sequence[Check]:
    static = [(role, each) for role in ("draft", "target") for each in getattr(args, f"{role}_endpoint")]
    is_given = bool(environ.get(ENDPOINT_VARIABLE)) or args.endpoint != DEFAULT_ENDPOINT
    tls = _usable_tls(args)
    require_private(args, tls, args.endpoint)
    if args.http and args.http.startswith("http:"):
        require_private(args, None, urlsplit(args.http).netloc)
    addresses = SystemAddresses(
        args.endpoint,
        is_given,
        partial(_connect, args, tls, _CALL_TIMEOUT_S),
        args.redis_url,
        args.cluster,
        static,
        tls,
        bool(args.api_key),
        service_metadata(args.service_key, environ),
    )
    system = System(addresses)
    generating = partial(_connect, args, tls, _GENERATION_TIMEOUT_S)
    metrics = args.metrics or list(metrics_addresses_of(args.endpoint))
    checks = [
        Check("registry", system.check_registry, _CONNECT_S),
        Check("versions", installation.check_packages, _FILE_S),
        Check("native kernels", installation.check_kernels, _COMPILE_S),
        Check("cache folder", partial(installation.check_cache, environ), _FILE_S),
        Check("processors", device_checks.check_processors, _FILE_S),
        Check("memory", device_checks.check_memory, _FILE_S),
        Check("gpu", device_checks.check_gpus, _COMPILE_S),
        Check("coordinator", system.check_coordinator, _CONNECT_S),
        Check("replicas", system.check_replicas, _CONNECT_S),
        Check("coordinators", partial(coordinators.check_coordinators, system), 2 * _CONNECT_S),
        Check("round", partial(rounds.check_rounds, system, generating), _GENERATE_S),
    ]
    if args.tls_cert or args.tls_key or args.tls_ca:
        files = partial(certificates.check_certificates, args.tls_cert, args.tls_key, args.tls_ca)
        checks.append(Check("tls certificate", files, _FILE_S))
    checks.append(Check("open ports", lambda: ports.check_ports(_known_ports(system)), _CONNECT_S))
    if args.redis_url:
        checks.append(Check("redis", partial(redis_checks.check_redis, args.redis_url), _CONNECT_S))
        writes = partial(redis_writes.check_writes, args.redis_url, args.cluster)
        checks.append(Check("redis writes", writes, _CONNECT_S))
    if args.http:
        trusted = Tls(ca=args.tls_ca, cert=args.tls_cert, key=args.tls_key)
        gateway = gateway_checks.GatewayAddress(args.http, args.api_key, trusted)
        checks.append(Check("gateway", partial(gateway_checks.check_gateway, gateway, system), _GENERATE_S))
    if metrics:
        checks.append(Check("clocks", partial(clocks.check_clocks, metrics), _CONNECT_S))
    if args.kv_tier_url:
        tier = partial(tier_checks.check_kv_tier, args.kv_tier_url, args.redis_url, system.target_model, metrics)
        checks.append(Check("kv tier", tier, _CONNECT_S))
    return checks


def _connect(
    args: argparse.Namespace, tls: Tls | None, timeout_s: float, endpoint: str, *, has_key: bool = True
) -> Client:
    """Return a client of the coordinator at an address; another one than `--endpoint` has the same certificate."""
    if tls is not None and endpoint != args.endpoint:
        tls = replace(tls, server_name=tls.server_name or args.endpoint.rpartition(":")[0].strip("[]"))
    return Client(
        endpoint, budgets=BUDGETS, api_key=args.api_key if has_key else None, timeout=timeout_s, tls=tls or False,
        insecure=args.insecure,
    )  # fmt: skip


def _usable_tls(args: argparse.Namespace) -> Tls | None:
    """Return the credentials to dial with; None: plaintext. Files that cannot be used fail a check of their own."""
    tls = Tls(ca=args.tls_ca, cert=args.tls_cert, key=args.tls_key, server_name=args.tls_server_name)
    try:
        tls.check()
    except InvalidRequest:
        return None
    return tls if tls.ca else None


def _known_ports(system: System) -> Iterator[ports.Port]:
    """Yield the ports of the system that other machines may have."""
    if system.info is not None:
        yield ports.Port(system.addresses.endpoint, "coordinator")
    for where, engine in {**system.coordinators, **system.engines}.items():
        yield ports.Port(where, f"{engine.role} {engine.replica_id}")


def _all_findings(checks: Sequence[Check]) -> Iterator[Finding]:
    for check in checks:
        yield from findings_of(check)


def _not_checked(args: argparse.Namespace) -> list[str]:
    """Return what was not named, with the flags that name it."""
    absent = {
        "the session store (--redis-url)": args.redis_url,
        "the HTTP gateway (--http)": args.http,
        "the KV tier (--kv-tier-url)": args.kv_tier_url,
        "certificate files (--tls-cert, --tls-key, --tls-ca)": args.tls_cert or args.tls_ca,
    }
    return [name for name, given in absent.items() if not given]


def _line(finding: Finding, environ: Mapping[str, str]) -> str:
    """Return a finding as one line, which is wrapped in a terminal."""
    text = f"{finding.found}. To do: {finding.advice}" if finding.advice else finding.found
    name = f"{finding.check:<{_NAME_COLUMNS - 1}} "
    status = f"{finding.status:<{_STATUS_COLUMNS}}"
    wrapped = _wrapped(f"{status}{name}{text}", _STATUS_COLUMNS + _NAME_COLUMNS)
    if wants_colour(sys.stdout, environ):
        painted = _STYLES[finding.status].render(status, color_system=ColorSystem.STANDARD)
        return painted + wrapped.removeprefix(status)
    return wrapped


def _wrapped(text: str, indent: int) -> str:
    if not sys.stdout.isatty():
        return text
    width = max(indent + _MIN_TEXT_COLUMNS, shutil.get_terminal_size().columns)
    return textwrap.fill(text, width, subsequent_indent=" " * indent, break_on_hyphens=False)
