"""The parser of `specdec up` and `specdec serve`.

Flags that are settings of services (`_SERVICE_FLAGS`) take type, choices, limits and help from the settings models.
Which combinations make no sense is in `up_flags`.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import Any, Literal, get_args, get_origin

from specdec.cli import Usage
from specdec.cli.listening import DEFAULT_HTTP
from specdec.cli.service_settings import SETTINGS_TYPES, GivenSettings
from specdec.cli.up_flags import DEFAULT_UTILIZATION, LOOKUPS, MEMORY_STORE, ROLES, UTILIZATION_ALONE
from specdec.settings.cluster_names import DEFAULT_CLUSTER
from specdec.settings.draft_specs import is_local_draft, parse_local_drafts
from specdec.settings.reading import flag_of, value_name


@dataclass(frozen=True, slots=True)
class _ServiceFlag:
    """A flag of `specdec up` that is a setting of services."""

    name: str
    services: tuple[str, ...]
    flag: str = ""
    """Name of the flag if it is not that of the setting."""
    prefix: str = ""
    """Text before the setting's own help."""
    help: str = ""
    """Text instead of the setting's own help."""
    default: str = ""
    """Default of the flag if it is not that of the setting."""

    @property
    def flag_name(self) -> str:
        return self.flag or flag_of(self.name)


_SERVICE_FLAGS = (
    _ServiceFlag("tokenizer", ("coordinator",), default="the target's"),
    _ServiceFlag("route", ("coordinator",), default="none, and auto among the demo's drafts"),
    _ServiceFlag("tenant", ("coordinator",)),
    _ServiceFlag("learning_log", ("coordinator",)),
    _ServiceFlag("allow_grammars", ("coordinator",)),
    _ServiceFlag("otlp_endpoint", ("coordinator", "gateway")),
    _ServiceFlag("trace_share", ("coordinator", "gateway")),
    _ServiceFlag("api_keys", ("coordinator", "gateway")),
    _ServiceFlag("jwt_jwks", ("coordinator", "gateway")),
    _ServiceFlag("jwt_issuer", ("coordinator", "gateway")),
    _ServiceFlag("jwt_audience", ("coordinator", "gateway")),
    _ServiceFlag("admin", ("coordinator",)),
    _ServiceFlag("api_key", ("gateway",), prefix="Of --http: "),
    _ServiceFlag(
        "tls_cert", ("coordinator", "gateway"),
        help="PEM file with the certificate of --listen and --http, followed by those of intermediate authorities. "
        "Both are encrypted then. The file is read again when it changes. Services talk to each other on loopback, in "
        "plaintext unless --tls-ca is given. Default: plaintext.",
    ),
    _ServiceFlag("tls_key", ("coordinator", "gateway")),
    _ServiceFlag(
        "tls_ca", ("coordinator",),
        help="PEM file with the authorities that coordinator and replicas trust. They use mutual TLS then, with the "
        "certificate of --tls-cert on both sides. Default: coordinator and replicas speak plaintext.",
    ),
    _ServiceFlag("tls_server_name", ("coordinator",)),
    _ServiceFlag(
        "insecure", ("coordinator", "gateway"),
        help="Serve in plaintext at addresses that other machines can reach. Without it, such an address needs "
        "--tls-cert.",
    ),
    _ServiceFlag("backend", ("target",)),
    *(_ServiceFlag(f"backend_{name}", ("target",), prefix="Of --backend: ") for name in ("url", "key", "ca", "model")),
    _ServiceFlag("adapter", ("target",)),
    _ServiceFlag("device", ROLES),
    _ServiceFlag("dtype", ROLES),
    _ServiceFlag("compile_backend", ROLES),
    _ServiceFlag("self_check", ROLES),
    _ServiceFlag("deterministic", ROLES),
    _ServiceFlag("max_context_tokens", ROLES),
    _ServiceFlag("kv_tier_url", ROLES),
    _ServiceFlag("tensor_parallel", ("target",), prefix="Of each target replica: "),
    _ServiceFlag("tensor_parallel", ("draft",), "--tensor-parallel-draft", prefix="Of each draft replica: "),
    *(
        flag
        for role in ROLES
        for flag in (
            _ServiceFlag(
                "gpu_memory_utilization", (role,), f"--gpu-memory-utilization-{role}",
                help=f"Share of a GPU's memory that all {role} replicas together may take. --kv-cache-bytes-{role} "
                "wins over it.",
                default=f"{DEFAULT_UTILIZATION[role]:g}"
                + (f", without a draft model {UTILIZATION_ALONE:g}" if role == "target" else ""),
            ),
            _ServiceFlag("kv_cache_bytes", (role,), f"--kv-cache-bytes-{role}", prefix=f"Of each {role} replica: "),
            _ServiceFlag("num_threads", (role,), f"--num-threads-{role}", prefix=f"Of each {role} replica: "),
        )
    ),
)  # fmt: skip


class _Model(argparse.Action):
    """Refuses an empty name, which an unset shell variable leaves: the default model was not asked for."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, given: Any, option: str | None = None
    ) -> None:
        if not given:
            raise argparse.ArgumentError(self, "must name a model, not ''")
        setattr(namespace, self.dest, given)


class _Draft(argparse.Action):
    """Sorts values of `--draft` by kind: `draft` holds models, `lookup` lookup drafts, `local_draft` in-target ones."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, given: Any, option: str | None = None
    ) -> None:
        if not given:
            raise argparse.ArgumentError(self, "must name a model or a kind of draft, not ''")
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


class _Setting(argparse.Action):
    """Adds a checked setting of services to `namespace.settings`."""

    def __init__(self, *args: Any, services: tuple[str, ...] = (), name: str = "", **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._services, self._name = services, name

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, given: Any, option: str | None = None
    ) -> None:
        text = given if isinstance(given, str) else "true"  # a switch has no value
        try:
            for service in self._services:
                namespace.settings = namespace.settings.with_flag(service, self._name, text)
            if not self._services:
                namespace.settings = namespace.settings.with_set(text)
        except ValueError as error:
            raise argparse.ArgumentError(None, f"{option} {error}") from None
        except Usage as error:
            raise argparse.ArgumentError(None, str(error)) from None


def add_parser(commands: Any) -> None:
    """Add `specdec up`."""
    parser = commands.add_parser("up", description="Run the whole system on this machine, until SIGTERM, Ctrl-C or "
                                 "`specdec down`.", allow_abbrev=False)  # fmt: skip
    parser.add_argument(
        "--target", metavar="PATH_OR_HUB_ID", default="", action=_Model,
        help="Target model. Default: the pair in models/demo.",
    )  # fmt: skip
    _add_flags(parser)


def add_serve_parser(commands: Any) -> None:
    """Add `specdec serve MODEL`, which is `specdec up --target MODEL`."""
    parser = commands.add_parser("serve", description="Run the whole system on this machine; the same as `specdec up "
                                 "--target MODEL`.", allow_abbrev=False)  # fmt: skip
    parser.add_argument("target", metavar="MODEL", action=_Model, help="Target model: a path or a hub id.")
    _add_flags(parser, default_http=DEFAULT_HTTP)


def _add_flags(parser: argparse.ArgumentParser, default_http: str = "") -> None:
    parser.add_argument(
        "--draft", metavar="DRAFT", default=(), action=_Draft,
        help="Source of drafts; repeatable. [NAME=]PATH_OR_HUB_ID: a draft model, in a pool that requests select by "
        "NAME (default: the last part of its path). ngram: text that followed before in this session; suffix: in other "
        "sessions too; both need no model. [NAME=]early-exit:N[:ADAPTER]: the first N layers of the target. "
        "medusa:PATH, eagle3:PATH, mtp: heads on the target. If a lookup finds nothing, the other drafts are used. "
        "Default: the demo pair's draft model and an EAGLE-3 head, with --route auto; with --target none.",
    )  # fmt: skip
    parser.set_defaults(lookup=(), local_draft=(), settings=GivenSettings(), default_http=default_http)
    parser.add_argument(
        "--listen", default="127.0.0.1:50051", metavar="HOST:PORT",
        help="Address of the coordinator, for clients over gRPC. Port 0 takes a free one. Default: 127.0.0.1:50051.",
    )  # fmt: skip
    parser.add_argument(
        "--http", metavar="HOST:PORT",
        help="Address of the HTTP gateway, with OpenAI's API and the playground. Port 0 takes a free one; none: no "
        f"gateway. Default: {f'{default_http}, or a free port if it is taken' if default_http else 'none'}.",
    )  # fmt: skip
    parser.add_argument(
        "--detach", action="store_true",
        help="Return once the system is ready, and leave it running in the background. `specdec down`, or SIGTERM to "
        "the process that this prints, ends it. The log goes to a file that this prints too.",
    )  # fmt: skip
    parser.add_argument(
        "--json", action="store_true", help="Print the ready line as one JSON object: grpc, http and metrics addresses."
    )
    parser.add_argument(
        "--metrics", default="", metavar="HOST:PORT",
        help="Address of the coordinator's Prometheus metrics. Each target, each draft replica and then the gateway "
        "takes the next port. Port 0 takes free ones; none: no metrics. Default: free ports of 127.0.0.1, which "
        "`specdec top` finds.",
    )  # fmt: skip
    parser.add_argument(
        "--redis-url", default=MEMORY_STORE, metavar="URL",
        help="Redis of all services. Default: a store that ends with this command.",
    )  # fmt: skip
    parser.add_argument(
        "--cluster", default=DEFAULT_CLUSTER, metavar="NAME",
        help="Name of this system in a Redis that other systems use too. Default: default.",
    )  # fmt: skip
    parser.add_argument(
        "--replicas-draft",
        type=int,
        metavar="N",
        help="Replicas of each draft model; 0: no draft model is started. Default: 1.",
    )
    parser.add_argument("--replicas-target", type=int, default=1, metavar="N", help="Target replicas. Default: 1.")
    parser.add_argument(
        "--ray-address", metavar="ADDRESS", default="",
        help="Place replicas on the nodes of this Ray cluster: HOST:PORT, auto (the cluster of this machine) or local "
        "(start one here). Needs the package ray.",
    )  # fmt: skip
    parser.add_argument(
        "--log-level", default="warning", choices=["debug", "info", "warning", "error"],
        help="Least severe log records of the services that are shown once they serve. Default: warning.",
    )  # fmt: skip
    for each in _SERVICE_FLAGS:
        _add_service_flag(parser, each)
    parser.add_argument(
        "--set", action=_Setting, dest="settings", metavar="SERVICE.FIELD=VALUE",
        help="Any other setting of a service, for instance draft.predraft=on; repeatable. SERVICE is target, draft, "
        "coordinator or gateway; `python -m target_service --help` lists the target's settings. --set wins over "
        "the flags above.",
    )  # fmt: skip


def _add_service_flag(parser: argparse.ArgumentParser, each: _ServiceFlag) -> None:
    info = SETTINGS_TYPES[each.services[0]].model_fields[each.name]
    text = each.help or " ".join((info.description or "").split())
    if each.prefix:
        text = each.prefix + text[0].lower() + text[1:]
    default = each.default or ("" if info.is_required() or info.default in (None, "", False, ()) else str(info.default))
    if default:
        text += f" Default: {default}."
    options: dict[str, Any] = {"help": text.replace("%", "%%")}
    if info.annotation is bool:
        options["nargs"] = 0
    else:
        words = _choices(info.annotation)
        type_name = getattr(_scalar(info.annotation), "__name__", "str")
        options["metavar"] = f"{{{','.join(words)}}}" if words else value_name(flag_of(each.name), type_name)
    parser.add_argument(each.flag_name, action=_Setting, dest="settings", services=each.services, name=each.name,
                        **options)  # fmt: skip


def _scalar(annotation: Any) -> Any:
    """Return the type of an optional setting without None."""
    return next((each for each in get_args(annotation) if each is not type(None)), annotation)


def _choices(annotation: Any) -> tuple[str, ...]:
    """Return the words that a setting may have; empty if it takes other values."""
    scalar = annotation if get_origin(annotation) is Literal else _scalar(annotation)
    words = get_args(scalar) if get_origin(scalar) is Literal else ()
    return (*words, "none") if words and scalar is not annotation else words
