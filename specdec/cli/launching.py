"""Starts each service of `specdec up` with its module, its flags and its environment.

The user's flags are in `up_flags` and `service_settings`. `up` and `specdec.supervision.fleet` decide when a service is
started and how many there are.
"""

from __future__ import annotations

import argparse
import os
import secrets
import sys
from collections.abc import Mapping
from dataclasses import replace

from specdec.checkpoints.packed_names import is_packed
from specdec.cli.draft_pools import joining_pool
from specdec.cli.listening import (
    NO_METRICS,
    SERVICE_KEY_VARIABLE,
    dialled_address,
    later_metrics_address,
)
from specdec.cli.service_settings import GivenSettings
from specdec.cli.up_flags import (
    LOOKUPS,
    ROLES,
    UTILIZATION_ALONE,
    Models,
    counts,
    num_ranks,
    num_replicas,
    role_of_group,
    utilization,
)
from specdec.contract.errors import InvalidRequest, Unsupported
from specdec.contract.types import SIMULATED_PREFIX
from specdec.settings.addresses import join_address, split_address
from specdec.settings.devices import likely_device
from specdec.settings.processors import num_processors
from specdec.settings.reading import flag_of
from specdec.supervision.fleet import COORDINATOR, GATEWAY, role_of
from specdec.supervision.process_template import ProcessTemplate
from specdec.supervision.processes import Child, free_ports
from specdec.supervision.service_process import environment_of
from specdec.supervision.services import Service

#: Services that check the credentials of clients.
_GUARDED = (COORDINATOR, GATEWAY)

_DRAIN_GRACE_S = 3
#: Idle threads spin for microseconds only (docs/history/log.md). NumPy needs none of its own beside those of torch.
QUIET_THREADS = {"GOMP_SPINCOUNT": "20000", "KMP_BLOCKTIME": "0", "OPENBLAS_NUM_THREADS": "1"}


def secured(args: argparse.Namespace, environ: Mapping[str, str]) -> Mapping[str, str]:
    """Return the environment of the services. If clients of the gateway need keys of their own, so do those of the
    coordinator, and the services share a key."""
    given: dict[str, str] = {}
    for name in ("api_keys", "jwt_jwks"):
        values = [args.settings.value(each, name) or environ.get(_variable(each, name)) for each in _GUARDED]
        if value := next(filter(None, values), None):
            given |= {_variable(COORDINATOR, name): str(value), SERVICE_KEY_VARIABLE: secrets.token_hex(32)}
    return {**given, **environ}


def _variable(service: str, name: str) -> str:
    return f"SPECDEC_{service.upper()}__{name.upper()}"


class Launcher:
    """Starts the services of one system, each by its name: "coordinator", "gateway", or ROLE-NUMBER."""

    def __init__(
        self,
        args: argparse.Namespace,
        served: Models,
        *,
        endpoint: str,
        loopback: str = "",
        http: str = "",
        redis_url: str,
        metrics: Mapping[str, str],
        environ: Mapping[str, str],
        ray_address: str = "",
    ) -> None:
        """
        Args:
            args: the flags of `up`.
            served: the models.
            endpoint: address of the coordinator.
            loopback: its plaintext address for programs of this machine; "": `endpoint`.
            http: address of the gateway; "" for no gateway.
            redis_url: store that all services share.
            metrics: metrics addresses that `--metrics` gives to the services that are started first, by name.
            environ: environment of the caller.
            ray_address: address of the cluster on whose nodes replicas are placed; "" for this machine alone.
        """
        self._args, self._served, self._endpoint, self._redis_url = args, served, endpoint, redis_url
        self._loopback, self._http = loopback, http
        self._metrics, self._environ, self._ray_address = dict(metrics), environ, ray_address
        self._settings: GivenSettings = args.settings
        self._template: ProcessTemplate | None = None
        self._ports = {
            split_address(address)[1] for address in (endpoint, loopback, http, *metrics.values()) if address
        }
        """Ports given to services so far. A service that starts may not listen on its port yet."""

    @property
    def roles(self) -> tuple[str, ...]:
        """The roles that have a model. With several draft pools, each is a role."""
        return ("target", *(pool.group for pool in self._served.drafts))

    @property
    def _is_routed(self) -> bool:
        """True if requests are routed among drafts: by the flags, and by default among the demo's."""
        if self._served.is_demo and not self._settings.is_given(COORDINATOR, "route"):
            return True
        return bool(self._settings.value(COORDINATOR, "route") == "auto")

    def metrics_addresses(self) -> dict[str, str]:
        """Return where services of this machine are to be asked for their metrics, by name. Any thread may call."""
        return {name: dialled_address(address) for name, address in dict(self._metrics).items()}

    def join(self, name: str, model: str) -> str:
        """Add a draft model, as a shadow; return the role of its replicas.

        Raises:
            InvalidRequest: the name is taken or malformed.
            Unsupported: requests are not routed, so the draft would never be scored.
        """
        if not self._is_routed:
            raise Unsupported("this specdec up runs without --route auto: a draft that joins is scored first")
        try:
            pool = joining_pool(name, model, [pool.name for pool in self._served.drafts], LOOKUPS)
        except ValueError as error:
            raise InvalidRequest(str(error), field="pool") from None
        self._served = replace(self._served, drafts=(*self._served.drafts, pool))
        return pool.group

    def forget(self, role: str) -> None:
        """Remove a draft model that joined and of which no replica runs, so that its name is free again."""
        drafts = tuple(pool for pool in self._served.drafts if pool.group != role)
        self._served = replace(self._served, drafts=drafts)

    def coordinator(self) -> Service:
        """Start the coordinator."""
        arguments = [*self.coordinator_arguments(), *self._metrics_flag(COORDINATOR)]
        return Child(COORDINATOR, "coordinator", arguments, self._environ, shown_level=self._args.log_level)

    def gateway(self) -> Service:
        """Start the gateway."""
        arguments = ["--listen", self._http, "--coordinator", self._loopback or dialled_address(self._endpoint)]
        arguments += [*self._settings.arguments(GATEWAY), *self._common(GATEWAY), *self._metrics_flag(GATEWAY)]
        return Child(GATEWAY, "gateway", arguments, self._environ, shown_level=self._args.log_level)

    def coordinator_arguments(self) -> list[str]:
        """Return the coordinator's flags, except for its metrics address."""
        arguments = ["--listen", self._endpoint, *self._settings.arguments(COORDINATOR)]
        arguments += ["--loopback", self._loopback] if self._loopback else []
        arguments += self._unless_given(COORDINATOR, "tokenizer", self._served.target)
        arguments += [word for kind in self._args.lookup for word in ("--lookup", kind)]
        arguments += self._unless_given(COORDINATOR, "route", "auto") if self._is_routed else []
        if len(self._served.drafts) > 1:
            arguments += self._unless_given(COORDINATOR, "default_draft_pool", self._served.drafts[0].name)
        return arguments + self._common(COORDINATOR)

    def replica(self, name: str, num_alike: int) -> Service:
        """Start a replica.

        Args:
            name: name of a service that does not run.
            num_alike: number of replicas that its role is to have.
        """
        role = role_of_group(role_of(name))
        if self._ray_address:
            return self._placed_replica(name, role)
        arguments = [*self.replica_arguments(name), "--listen", f"127.0.0.1:{self._free_port()}"]
        return Child(
            name,
            f"{role}_service",
            [*arguments, *self._metrics_flag(name)],
            self._replica_environ(role, num_alike),
            shown_level=self._args.log_level,
            template=self._template,
        )

    def begin_imports(self) -> None:
        """Start the process whose imports the replicas of this machine share, unless they import by themselves.

        A single replica would gain nothing. Simulated models import little, and CUDA does not survive a fork.
        """
        if self._shares_imports():
            environ = self._replica_environ("target", num_replicas(self._args, "target"))
            imports = "specdec.service.preloaded_kernels" if self._are_packed() else "specdec.service.preloaded"
            self._template = ProcessTemplate([imports], environment_of(environ))

    def has_imported(self) -> bool:
        """Return whether replicas start at once: their packages are imported, or each imports them by itself."""
        return self._template is None or self._template.is_ready

    def end_imports(self) -> None:
        """End that process; replicas that run go on."""
        if self._template is not None:
            self._template.close()

    def _shares_imports(self) -> bool:
        if sys.platform != "linux" or self._ray_address or sum(counts(self._args).values()) < 2:
            return False
        models = [self._served.target, *(pool.model for pool in self._served.drafts)]
        devices = {likely_device(self._settings.value(role, "device")) for role in ROLES}
        return devices == {"cpu"} and not any(model.startswith(SIMULATED_PREFIX) for model in models)

    def _are_packed(self) -> bool:
        """Return whether the replicas will probably read packed weights, and need no transformers."""
        models = [("target", self._served.target), *(("draft", pool.model) for pool in self._served.drafts)]
        return not self._served.local_drafts and all(
            self._settings.value(role, "compile_backend") in ("auto", "native")
            and is_packed(model, self._settings.value(role, "dtype"))
            for role, model in models
        )

    def _placed_replica(self, name: str, role: str) -> Service:
        """Start the process that keeps a replica on a node of the cluster, with resources of its own."""
        num_cpus = self._settings.value(role, "num_threads") or self._environ.get("OMP_NUM_THREADS") or 1
        placed = ["--ray-address", self._ray_address, "--name", name, "--role", role, "--cpus", str(num_cpus)]
        placed += ["--ranks", str(num_ranks(self._args, role))]
        placed += ["--gpus", "none" if self._settings.value(role, "device") == "cpu" else "auto"]
        placed += ["--metrics"] if self._args.metrics not in ("", NO_METRICS) else []
        share = f"SPECDEC_{role.upper()}__GPU_MEMORY_UTILIZATION"
        # No other rank is on its GPU.
        of_device = self._settings.value(role, "gpu_memory_utilization") or UTILIZATION_ALONE
        own = {**QUIET_THREADS, "OMP_NUM_THREADS": str(num_cpus), share: str(of_device)}
        return Child(
            name,
            "specdec.service.ray.placed_replica",
            [*placed, "--", *self.replica_arguments(name)],
            {**own, **self._environ},
            shown_level=self._args.log_level,
        )

    def require_room(self, added: Mapping[str, int]) -> None:
        """Accept any number: whether more processes of a role fit is found out by starting them."""

    def replica_arguments(self, name: str) -> list[str]:
        """Return a replica's flags, except for its addresses."""
        group = role_of(name)
        role = role_of_group(group)
        own = ["--model", self._served.target]
        if role == "draft":
            pool = next(pool for pool in self._served.drafts if pool.group == group)
            own = ["--model", pool.model, "--pool", pool.name]
            own += ["--for-tokenizer", pool.for_tokenizer] if pool.for_tokenizer else []
            own += ["--shadow", "on"] if pool.is_shadow else []
        local_drafts = self._served.local_drafts if role == "target" else ()
        given = self._settings
        if given.value(role, "gpu_memory_utilization") is not None:
            given = given.with_flag(role, "gpu_memory_utilization", str(self._share(role)))
        return [
            *own,
            *(*given.arguments(role), *self._common(role), *self._transport()),
            *(word for kind in local_drafts for word in ("--local-draft", kind)),
        ]

    def _transport(self) -> list[str]:
        """Return the replicas' flags of transport security, which are the coordinator's if it connects with TLS."""
        given = {name: self._settings.value(COORDINATOR, name) for name in ("tls_ca", "tls_cert", "tls_key")}
        if given["tls_ca"]:
            return [word for name, path in given.items() for word in (flag_of(name), os.path.abspath(path))]
        # Ray gives the nodes of its local cluster this machine's address on the network, not that of loopback.
        is_plaintext = self._settings.value(COORDINATOR, "insecure") or self._args.ray_address == "local"
        return ["--insecure"] if is_plaintext else []

    def _common(self, service: str) -> list[str]:
        given = ["--redis-url", self._redis_url, "--cluster", self._args.cluster, "--log-format", "json"]
        given += self._unless_given(service, "drain_grace_s", str(_DRAIN_GRACE_S))
        if SERVICE_KEY_VARIABLE in self._environ:
            given += self._unless_given(service, "service_key", f"env:{SERVICE_KEY_VARIABLE}")
        # Otherwise services keep their own level: their info records say what a start is doing, whatever is shown.
        return given + (self._unless_given(service, "log_level", "debug") if self._args.log_level == "debug" else [])

    def _unless_given(self, service: str, name: str, value: str) -> list[str]:
        return [] if self._settings.is_given(service, name) else [flag_of(name), value]

    def _metrics_flag(self, name: str) -> list[str]:
        """Return the flag of a service's metrics: at the port after the others', or by default at a free one."""
        if name not in self._metrics:
            if self._args.metrics == NO_METRICS or self._environ.get(
                _variable(role_of_group(role_of(name)), "metrics")
            ):
                return []
            self._metrics[name] = (
                later_metrics_address(self._args, self._metrics.values())
                if self._args.metrics
                else join_address("127.0.0.1", self._free_port())
            )
        return ["--metrics", self._metrics[name]]

    def _replica_environ(self, role: str, num_alike: int) -> Mapping[str, str]:
        quiet = dict(QUIET_THREADS)
        # Draft and target work by turns, so a replica of each role may use all cores, and measures whether it should.
        # Several replicas of a role share the cores; one core is left to coordinator, store and client.
        if num_alike > 1:
            num_processes = num_alike * num_ranks(self._args, role)
            quiet["OMP_NUM_THREADS"] = str(max(1, (num_processors() - 1) // num_processes))
        # Not a flag, which would win over the same variable of the caller's environment.
        quiet[f"SPECDEC_{role.upper()}__GPU_MEMORY_UTILIZATION"] = str(self._share(role))
        return {**quiet, **self._environ}

    def _share(self, role: str) -> float:
        """Return each replica's share of the device's memory. An added replica gets as much as the first ones."""
        return utilization(self._args, role) / max(1, num_replicas(self._args, role))

    def _free_port(self) -> int:
        """Return a free port that no service was given before."""
        while (port := free_ports(1)[0]) in self._ports:
            pass
        self._ports.add(port)
        return port
