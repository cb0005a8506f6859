"""`specdec status`: prints the models, pools and replicas of a running system. `specdec health` checks one service."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

from specdec.cli.json_output import add_json_flag, print_json
from specdec.cli.pool_tables import adapter_acceptance, model_name, pool_acceptance, print_table
from specdec.cli.promote import describe_target
from specdec.cli.request_flags import add_client_flags, connect
from specdec.client import Adapter, Pool, ServerInfo

_POOL_COLUMNS = dict.fromkeys(("role", "pool", "model", "dtype", "accepted", "draft length"), "left")
_REPLICA_COLUMNS = {
    **dict.fromkeys(("role", "pool", "replica", "address"), "left"),
    **dict.fromkeys(("sessions", "KV used"), "right"),
}


_ADAPTER_COLUMNS = {
    **dict.fromkeys(("adapter", "model", "fingerprint"), "left"),
    **dict.fromkeys(("replicas",), "right"),
    **dict.fromkeys(("accepted", "draft length"), "left"),
}


def add_parser(commands: Any, environ: Mapping[str, str]) -> None:
    parser = commands.add_parser("status", help="pools, replicas and sessions of a running system", allow_abbrev=False)
    add_client_flags(parser, environ)
    add_json_flag(parser, "tables")


def run(args: argparse.Namespace, environ: Mapping[str, str]) -> int:
    """Print the state of the system. Raises SpecdecError if the coordinator cannot be reached."""
    with connect(args) as client:
        info = client.info()
    if args.json:
        print_json(asdict(info))
        return 0
    print(
        f"specdec {info.version} serves {model_name(info.target_model)}: context {info.max_context_tokens} tokens, "
        f"at most {info.max_gamma} draft tokens a step\n"
    )
    print_table(_POOL_COLUMNS, list(map(_pool_row, info.pools)), environ)
    print()
    print_table(_REPLICA_COLUMNS, list(_replica_rows(info)), environ)
    if len(info.target_models) > 1:
        print()
        for model in info.target_models:
            print(describe_target(model))
    if info.adapters:
        print()
        print_table(_ADAPTER_COLUMNS, list(map(_adapter_row, info.adapters)), environ)
    if not any(pool.role == "target" and pool.replicas for pool in info.pools):
        print("no target replica is alive: requests wait, or fail", file=sys.stderr)
    return 0


def _pool_row(pool: Pool) -> list[str]:
    name = f"{pool.name} (shadow)" if pool.shadow else pool.name
    row = [pool.role, name, model_name(pool.model), pool.dtype]
    return [*row, pool_acceptance(pool), _draft_length(pool)] if pool.role == "draft" else [*row, "", ""]


def _adapter_row(adapter: Adapter) -> list[str]:
    row = [adapter.name, model_name(adapter.model), adapter.fingerprint]
    return [*row, str(adapter.num_replicas), adapter_acceptance(adapter), _draft_length(adapter)]


def _draft_length(pool: Pool | Adapter) -> str:
    return "not known yet" if pool.gamma is None else f"{pool.gamma:.1f} tokens/step"


def _replica_rows(info: ServerInfo) -> Iterator[list[str]]:
    for pool in info.pools:
        for replica in pool.replicas:
            name = f"{replica.replica_id} (draining)" if replica.draining else replica.replica_id
            usage = f"{replica.kv_usage:.0%}"
            yield [pool.role, pool.name, name, replica.address, str(replica.num_sessions), usage]
    if info.coordinator_id:  # the name by which `specdec drain` takes it out of use
        yield ["coordinator", "", info.coordinator_id, "", "", ""]
