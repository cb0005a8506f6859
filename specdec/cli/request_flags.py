"""Flags of subcommands that call a running system: its endpoint, an API key, and the options of a request."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, cast

from specdec.cli import Usage
from specdec.client import Budgets, Client, GenerateOptions, Tls
from specdec.client.endpoints import DEFAULT_ENDPOINT, ENDPOINT_VARIABLE, check_endpoint
from specdec.client.transport import CA_VARIABLE, CERT_VARIABLE, KEY_VARIABLE, SERVER_NAME_VARIABLE, exposes_key, tls_of
from specdec.contract.errors import InvalidRequest
from specdec.contract.types import FILTER_RANGES, Mode

#: Variable that holds the API key of client commands.
_API_KEY_VARIABLE = "SPECDEC_API_KEY"

#: Connecting has a short budget, so that a wrong endpoint is reported at once.
BUDGETS = Budgets(connect_s=1.0)
#: Budgets of commands that wait for a text and show what they wait for: `specdec up` restarts a lost target.
PATIENT_BUDGETS = replace(BUDGETS, target_s=60.0)


def add_endpoint_flag(parser: argparse.ArgumentParser, environ: Mapping[str, str]) -> None:
    endpoint = environ.get(ENDPOINT_VARIABLE) or DEFAULT_ENDPOINT
    parser.add_argument(
        "--endpoint", type=address, default=endpoint, metavar="HOST:PORT",
        help=f"address of the coordinator; default: {ENDPOINT_VARIABLE}, else {DEFAULT_ENDPOINT}",
    )  # fmt: skip


def add_client_flags(parser: argparse.ArgumentParser, environ: Mapping[str, str]) -> None:
    """Add the flags of every subcommand that calls the coordinator: endpoint and API key."""
    add_endpoint_flag(parser, environ)
    parser.add_argument(
        "--api-key", default=environ.get(_API_KEY_VARIABLE) or None, metavar="KEY",
        help=f"key to send with every call; default: {_API_KEY_VARIABLE}, which other users of the machine cannot see",
    )  # fmt: skip
    parser.add_argument(
        "--insecure", action="store_true",
        help="send the key without --tls-ca to an endpoint beyond this machine, although the network can read it",
    )  # fmt: skip
    add_tls_flags(parser, environ)


def add_admin_flag(parser: argparse.ArgumentParser) -> None:
    """Add the flag of subcommands that make operator calls."""
    parser.add_argument(
        "--admin", type=address, metavar="HOST:PORT",
        help="address of the coordinator for operator calls; default: the one that it names at --endpoint",
    )  # fmt: skip


def add_tls_flags(parser: argparse.ArgumentParser, environ: Mapping[str, str]) -> None:
    """Add the flags of every subcommand that dials: the authorities that it trusts, and its own certificate."""
    for flag, variable, metavar, meaning in (
        ("--tls-ca", CA_VARIABLE, "FILE", "PEM file of the authorities of the server's certificate; encrypts the "
         "connection"),
        ("--tls-cert", CERT_VARIABLE, "FILE", "PEM file of this command's certificate, for a server that demands one"),
        ("--tls-key", KEY_VARIABLE, "FILE", "PEM file of its key"),
        ("--tls-server-name", SERVER_NAME_VARIABLE, "NAME", "name in the server's certificate, if it is not the host "
         "of the address"),
    ):  # fmt: skip
        parser.add_argument(
            flag, default=environ.get(variable, ""), metavar=metavar, help=f"{meaning}; default: {variable}"
        )


def tls_of_flags(args: argparse.Namespace) -> Tls | None:
    """Return the credentials of the flags of `add_tls_flags`; None: plaintext. Raises Usage if they cannot be used."""
    try:
        tls = tls_of(args.tls_ca, args.tls_cert, args.tls_key, server_name=args.tls_server_name)
        if tls is not None:
            tls.check()
    except InvalidRequest as error:
        raise Usage(Tls.with_flag(error)) from None
    return tls


def connect(
    args: argparse.Namespace, budgets: Budgets = BUDGETS, *, endpoint: str = "", timeout: float | None = None
) -> Client:
    """Return a client for the flags of `add_client_flags`.

    Args:
        args: the flags.
        budgets: limits on the time for which calls are retried.
        endpoint: another address of the same coordinator, to call in place of that of the flags.
        timeout: seconds that each call may take as a whole; None: no limit.

    Raises:
        InvalidRequest: the API key is malformed.
        Usage: a certificate file cannot be used, or the key would be sent in plaintext beyond this machine.
    """
    tls = tls_of_flags(args)
    if endpoint and tls is not None:
        tls = replace(tls, server_name=tls.server_name or args.endpoint.rpartition(":")[0].strip("[]"))
    endpoint = endpoint or args.endpoint
    require_private(args, tls, endpoint)
    return Client(
        endpoint, budgets=budgets, api_key=args.api_key, timeout=timeout, tls=tls or False, insecure=args.insecure
    )


def require_private(args: argparse.Namespace, tls: Tls | None, endpoint: str) -> None:
    """Raise Usage if the key of the flags would be sent in plaintext beyond this machine without `--insecure`."""
    if exposes_key(endpoint, tls, args.api_key) and not args.insecure:
        raise Usage(
            f"--api-key: the way to {endpoint} is not encrypted, and every machine on it could read the key: give "
            "--tls-ca, or --insecure to send it in plaintext"
        )


def address(text: str) -> str:
    """Return an argument that is an address to dial. Raises ArgumentTypeError for anything else."""
    try:
        return check_endpoint(text)
    except InvalidRequest as error:
        raise argparse.ArgumentTypeError(error.message) from None


def token_limit(text: str) -> int:
    """Return an argument that is a number of tokens. Raises ArgumentTypeError for anything else."""
    if text.isdecimal() and 1 <= int(text) < 1 << 32:
        return int(text)
    raise argparse.ArgumentTypeError(f"must be at least 1, got {text!r}")


def _filter_flag(name: str, metavar: str) -> Mapping[str, Any]:
    """Return the arguments of `add_argument` for the flag of a filter."""
    range_ = FILTER_RANGES[name]
    default = "{temperature:g}" if name == "temperature" else f"{range_.default:g}"
    return {
        "type": type(range_.default),
        "metavar": metavar,
        "help": f"{range_.meaning}, {range_.words}; default {default}",
    }


#: Arguments of `add_argument` for each flag that is an option of the SDK, by the option's name. In help texts,
#: {temperature} is the default of `--temperature`.
_REQUEST_FLAGS: Mapping[str, Mapping[str, Any]] = {
    "max_new_tokens": {"type": token_limit, "metavar": "N", "help": "most tokens of the output; default 256"},
    "temperature": _filter_flag("temperature", "T"),
    "top_p": _filter_flag("top_p", "P"),
    "top_k": _filter_flag("top_k", "K"),
    "min_p": _filter_flag("min_p", "P"),
    "stop": {"action": "append", "metavar": "TEXT", "help": "text that ends the output and is left out; repeatable"},
    "seed": {"type": int, "metavar": "SEED",
             "help": "seed from -2^63 to 2^64-1, which gives one text; default: drawn by the server"},
    "gamma": {"type": int, "metavar": "G", "help": "draft tokens per round; default: the server's choice"},
    "mode": {"choices": [mode.name.lower() for mode in Mode],
             "help": "acceptance rule; off: without drafts; default: rejection; coupled with --seed"},
    "adapter": {"metavar": "NAME",
                "help": "adapter of the target (see specdec status); default: the session's, else the base model"},
    "draft_pool": {"metavar": "POOL", "help": "draft pool (see specdec pools); default: the server's choice"},
    "task": {"metavar": "LABEL", "help": "label of the kind of request, for up --route auto"},
}  # fmt: skip


def add_request_flags(
    parser: argparse.ArgumentParser, environ: Mapping[str, str], *, temperature: float | None = None
) -> None:
    """Add the flags of every subcommand that generates. The server chooses what is not given.

    Args:
        parser: parser of the subcommand.
        environ: environment of the command.
        temperature: default of `--temperature`; None: the server's.
    """
    add_client_flags(parser, environ)
    for name, flag in _REQUEST_FLAGS.items():
        meaning = flag["help"].format(temperature=1.0 if temperature is None else temperature)
        parser.add_argument(f"--{name.replace('_', '-')}", **{**flag, "help": meaning})
    parser.set_defaults(temperature=temperature)


def request_options(args: argparse.Namespace) -> GenerateOptions:
    """Return the shared flags as options of the SDK."""
    return cast(GenerateOptions, {name: getattr(args, name) for name in _REQUEST_FLAGS})
