"""What each service of `specdec up` is started with: its module, its flags, its environment.

Not here: what the user may say (`up_flags`), when a service is started and how many there are (`up`, `fleet`).
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from dataclasses import replace

from specdec.cli.draft_pools import joining_pool
from specdec.cli.up_flags import (
    LOOKUPS,
    UTILIZATION_ALONE,
    Models,
    later_metrics_address,
    num_ranks,
    num_replicas,
    role_of_group,
    utilization,
    value,
)
from specdec.errors import InvalidRequest, Unsupported
from specdec.supervision.fleet import COORDINATOR, role_of
from specdec.supervision.processes import Child, free_ports
from specdec.supervision.services import Service

_DRAIN_GRACE_S = 3
#: Idle threads spin for microseconds only (docs/history/log.md).
_QUIET = {"GOMP_SPINCOUNT": "20000", "KMP_BLOCKTIME": "0"}


class Launcher:
    """Starts the services of one system, each by its name: "coordinator", or a role and a number."""

    def __init__(
        self,
        args: argparse.Namespace,
        served: Models,
        *,
        endpoint: str,
        redis_url: str,
        metrics: Mapping[str, str],
        environ: Mapping[str, str],
        ray_address: str = "",
    ) -> None:
        """
        Args:
            args: the flags of `up`.
            served: the models.
            endpoint: where the coordinator listens.
            redis_url: what all of them share.
            metrics: where the services that are started first serve theirs, by name; empty where nobody wants them.
            environ: of the caller.
            ray_address: of the cluster whose nodes replicas are placed on; "" for this machine alone.
        """
        self._args, self._served, self._endpoint, self._redis_url = args, served, endpoint, redis_url
        self._metrics, self._environ, self._ray_address = dict(metrics), environ, ray_address
        self._ports: set[int] = set()
        """Given to replicas so far: one that starts may not listen yet."""

    @property
    def roles(self) -> tuple[str, ...]:
        """That have a model; where there are several draft pools, each is one."""
        return ("target", *(pool.group for pool in self._served.drafts))

    def join(self, name: str, model: str) -> str:
        """A further draft model, from now on, as a shadow; returns the role of its replicas.

        Raises:
            InvalidRequest: it cannot be called so.
            Unsupported: nothing would ever tell whether it is good.
        """
        if self._args.route != "auto":
            raise Unsupported("this specdec up runs without --route auto: a draft that joins is scored first")
        try:
            pool = joining_pool(name, model, [pool.name for pool in self._served.drafts], LOOKUPS)
        except ValueError as error:
            raise InvalidRequest(str(error), field="pool") from None
        self._served = replace(self._served, drafts=(*self._served.drafts, pool))
        return pool.group

    def forget(self, role: str) -> None:
        """A draft model that joined, and none of whose replicas runs: its name is free again."""
        drafts = tuple(pool for pool in self._served.drafts if pool.group != role)
        self._served = replace(self._served, drafts=drafts)

    def coordinator(self) -> Service:
        """Starts the coordinator."""
        tokenizer = self._args.tokenizer or self._served.target
        arguments = ["--tokenizer", tokenizer, "--listen", self._endpoint, "--poll-interval-s", "0.2"]
        arguments += ["--tenant", self._args.tenant]
        arguments += [word for kind in self._args.lookup for word in ("--lookup", kind)]
        arguments += ["--learning-log", self._args.learning_log] if self._args.learning_log else []
        arguments += ["--timeline", self._args.timeline] if self._args.timeline else []
        arguments += ["--route", "auto"] if self._args.route == "auto" else []
        arguments += ["--default-draft-pool", self._served.drafts[0].name] if len(self._served.drafts) > 1 else []
        arguments += [*self._common(), *self._metrics_flag(COORDINATOR)]
        return Child(COORDINATOR, "coordinator", arguments, self._environ, shown_level=self._args.log_level)

    def replica(self, name: str, num_alike: int) -> Service:
        """Starts a replica.

        Args:
            name: of one that does not run.
            num_alike: replicas of its role that there are to be.
        """
        role = role_of_group(role_of(name))
        if self._ray_address:
            return self._placed_replica(name, role)
        arguments = [*self._replica_arguments(name), "--listen", f"127.0.0.1:{self._free_port()}"]
        return Child(
            name,
            f"{role}_service",
            [*arguments, *self._metrics_flag(name)],
            self._replica_environ(role, num_alike),
            shown_level=self._args.log_level,
        )

    def _placed_replica(self, name: str, role: str) -> Service:
        """Starts what keeps a replica on a node of the cluster, with resources of its own."""
        args = self._args
        num_cpus = value(args, f"--num-threads-{role}") or self._environ.get("OMP_NUM_THREADS") or 1
        placed = ["--ray-address", self._ray_address, "--name", name, "--role", role, "--cpus", str(num_cpus)]
        placed += ["--ranks", str(num_ranks(args, role))]
        placed += ["--gpus", "none" if args.device == "cpu" else "auto", *(["--metrics"] if args.metrics else [])]
        share = f"SPECDEC_{role.upper()}__GPU_MEMORY_UTILIZATION"
        of_device = value(args, f"--gpu-memory-utilization-{role}") or UTILIZATION_ALONE  # no other rank is on its GPU
        own = {**_QUIET, "OMP_NUM_THREADS": str(num_cpus), share: str(of_device)}
        return Child(
            name,
            "specdec.cluster.placed_replica",
            [*placed, "--", *self._replica_arguments(name)],
            {**own, **self._environ},
            shown_level=args.log_level,
        )

    def require_room(self, added: Mapping[str, int]) -> None:
        """Whether so many more replicas of each role fit is found out by starting them."""

    def _replica_arguments(self, name: str) -> list[str]:
        args, group = self._args, role_of(name)
        role = role_of_group(group)
        own = ["--model", self._served.target]
        if role == "draft":
            pool = next(pool for pool in self._served.drafts if pool.group == group)
            own = ["--model", pool.model, "--pool", pool.name]
            own += ["--for-tokenizer", pool.for_tokenizer] if pool.for_tokenizer else []
            own += ["--shadow", "on"] if pool.is_shadow else []
        return [
            *own,
            *("--device", args.device, "--dtype", args.dtype, "--compile-backend", args.compile_backend),
            *("--self-check", args.self_check, *(["--deterministic"] if args.deterministic else [])),
            *(*self._limits(role), *self._common()),
            *(word for kind in self._served.local_drafts if role == "target" for word in ("--local-draft", kind)),
        ]

    def _limits(self, role: str) -> list[str]:
        given = []
        if value(self._args, f"--gpu-memory-utilization-{role}") is not None:
            given += ["--gpu-memory-utilization", self._share(role)]
        for flag in ("--kv-cache-bytes", "--num-threads", "--tensor-parallel"):
            if (number := value(self._args, f"{flag}-{role}")) is not None:
                given += [flag, str(number)]
        if self._args.max_context_tokens is not None:
            given += ["--max-context-tokens", str(self._args.max_context_tokens)]
        if self._args.kv_tier_url:
            given += ["--kv-tier-url", self._args.kv_tier_url]
        return given

    def _common(self) -> list[str]:
        given = ["--redis-url", self._redis_url, "--log-format", "json", "--drain-grace-s", str(_DRAIN_GRACE_S)]
        # Else as they have it: their info records tell what a start is doing, whatever is shown later.
        return [*given, "--log-level", "debug"] if self._args.log_level == "debug" else given

    def _metrics_flag(self, name: str) -> list[str]:
        if self._args.metrics and name not in self._metrics:
            self._metrics[name] = later_metrics_address(self._args, self._metrics.values())
        return ["--metrics", self._metrics[name]] if name in self._metrics else []

    def _replica_environ(self, role: str, num_alike: int) -> Mapping[str, str]:
        quiet = dict(_QUIET)
        # Draft and target work by turns, so a replica of each role may use all cores, and finds out whether it should.
        # Several of a role share them; one core is left to coordinator, store and client.
        if num_alike > 1:
            num_processes = num_alike * num_ranks(self._args, role)
            quiet["OMP_NUM_THREADS"] = str(max(1, ((os.cpu_count() or 1) - 1) // num_processes))
        # Not a flag, which would win over the same variable of the caller's.
        quiet[f"SPECDEC_{role.upper()}__GPU_MEMORY_UTILIZATION"] = self._share(role)
        return {**quiet, **self._environ}

    def _share(self, role: str) -> str:
        """Share of the device's memory of each replica; one that is added gets as much as the first ones."""
        return str(utilization(self._args, role) / max(1, num_replicas(self._args, role)))

    def _free_port(self) -> int:
        """One that no replica was given before."""
        while (port := free_ports(1)[0]) in self._ports:
            pass
        self._ports.add(port)
        return port
