"""`specdec up`: the whole system on this machine, as child processes on loopback, until it is asked to stop.

`up_flags` has its flags, `launching` says what each service gets of them, `specdec.supervision.fleet` starts, restarts
and scales the services, `control` takes requests of other commands, and `detached` is `--detach`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import secrets
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import replace

from specdec.checkpoints.cross_vocabulary.pair_preflight import require_servable_pair
from specdec.checkpoints.preflight import require_kv_room
from specdec.checkpoints.rank_checks import require_divisible, require_supported
from specdec.cli import up_flags
from specdec.cli.control import ControlSocket, RunningSystem
from specdec.cli.control_folder import unmark_starting
from specdec.cli.detached import start_detached
from specdec.cli.extras import GATEWAY_MODULES, require_modules
from specdec.cli.health import is_serving
from specdec.cli.launching import Launcher, secured
from specdec.cli.listening import (
    SERVICE_KEY_VARIABLE,
    dialled_address,
    http_address,
    listen_address,
    loopback_address,
    metrics_addresses,
)
from specdec.cli.progress import LastMessage, Waiting
from specdec.cli.up_flags import Models
from specdec.cli.up_parser import add_parser, add_serve_parser
from specdec.client import Budgets, Client
from specdec.contract.errors import SpecdecError, Unavailable
from specdec.contract.types import SIMULATED_PREFIX
from specdec.rpc.channels import dial_blocking
from specdec.settings.addresses import split_address
from specdec.settings.devices import likely_device, require_device, require_gpu_each
from specdec.settings.shared import current_backend
from specdec.state.embedded import EmbeddedRedis
from specdec.state.own_redis import OwnRedis, throwaway_redis
from specdec.supervision.fleet import GATEWAY, Fleet, role_of
from specdec.supervision.processes import Child
from specdec.supervision.services import Service, tell

__all__ = ["add_parser", "add_serve_parser", "run"]

_POLL_S = 0.1
#: Interval at which running services are looked at.
_LOOK_S = 0.5


class _Start:
    """The start of one system: shows what it waits for, in the terminal and to other commands."""

    def __init__(self, waiting: Waiting, system: RunningSystem) -> None:
        self._waiting, self._system = waiting, system

    @property
    def is_stopped(self) -> bool:
        return self._system.stop.is_set()

    def show(self, stage: str, *, line: str | None = None) -> None:
        """Show a stage; `line`: see `Waiting.show`."""
        self._system.stage = stage
        self._waiting.show(stage, line=line)

    def poll(self, services: Callable[[], list[Service]], done: Callable[[], bool], *, also: str = "") -> None:
        """Wait until `done` or a stop.

        Args:
            services: returns the services that are watched, the coordinator last.
            done: ends the wait.
            also: stage of what else is waited for.

        Raises:
            SpecdecError: a service ends first, or the coordinator, which is the last service, refuses another.
        """
        while not (self.is_stopped or done()):
            running = services()
            for service in running:
                if not service.is_alive:
                    raise service.failure()
                # Other systems may share the registry. Only a refusal of this system's replicas is fatal.
                if service.address in running[-1].refusals:
                    raise running[-1].refusals[service.address]
            stages = [f"{service.name}: {service.stage}" for service in running]
            late = ", ".join(service.name for service in running if not service.has_started)
            # Without a terminal the services' own lines say what they do.
            line = also or (f"waiting for {late}" if late else "")
            self.show(", ".join([*stages, also] if also else stages), line=line)
            self._system.stop.wait(_POLL_S)


def run(args: argparse.Namespace, argv: Sequence[str], environ: Mapping[str, str], stop: threading.Event) -> int:
    """Start everything, print the ready line, keep it running until `stop`, then stop everything in order and say so.

    Args:
        args: the parsed flags.
        argv: the command line that they were parsed from.
        environ: environment of the services.
        stop: set to end the system.

    Raises:
        Usage: flags that make no sense together.
        InvalidRequest, Unsupported: a model cannot be served, or not on this machine's devices.
        Unavailable: an address is in use.
        VocabularyMismatch: target and draft do not fit.
        SpecdecError: a service did not start, or the coordinator refuses it; the error is the service's own.
    """
    up_flags.check(args)
    up_flags.check_certificate_files(args)
    served = up_flags.models(args)
    if args.detach:
        return start_detached(args, argv, environ, stop)
    endpoint = listen_address(args, environ)
    loopback = loopback_address(args, environ)
    http = http_address(args, environ)
    if http:
        require_modules(GATEWAY_MODULES)
    names = [*up_flags.names_of(args), *([GATEWAY] if http else [])]
    metrics = metrics_addresses(args, names, endpoint, http)
    if not (served.drafts or args.lookup or args.local_draft) and args.replicas_draft is None:
        tell("note: no --draft was given: target-only, every token takes a step of the target")
    for warning in up_flags.needs_of_drafts(args):
        tell(warning)
    system = RunningSystem(stop)
    with contextlib.ExitStack() as stack:
        stack.callback(_tell_on_stop, stop, "stopped")
        _open_control_socket(endpoint, system, stack)
        waiting = stack.enter_context(Waiting())
        start = _Start(waiting, system)
        _require_devices(args, served)
        has_limits = any(up_flags.num_ranks(args, role) > 1 or _kv_bytes(args, role) for role in up_flags.ROLES)
        if args.target or args.draft or has_limits:  # the demo pair with its defaults needs no check
            served = _check_models(args, served, start)
        if stop.is_set():
            return 0
        store = _own_store(args, stack)
        if args.ray_address == "local":  # a Ray cluster that takes commands from this process alone
            environ = {**environ, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
        own_ray = _own_ray(args, environ, start, stack)
        if stop.is_set():
            return 0
        environ = secured(args, environ)
        launcher = Launcher(
            args,
            served,
            endpoint=endpoint,
            loopback=loopback,
            http=http,
            redis_url=args.redis_url if store is None else store.url,
            metrics=metrics,
            environ=environ,
            ray_address=own_ray.address if own_ray else args.ray_address,
        )
        stack.callback(launcher.end_imports)
        fleet = Fleet(launcher)
        stack.callback(fleet.stop)
        stack.callback(_tell_on_stop, stop, "stopping")
        launcher.begin_imports()
        fleet.begin(
            up_flags.counts(args), with_gateway=bool(http), prepare=lambda: _await_imports(launcher, fleet, start)
        )
        _await_ready(fleet, loopback or dialled_address(endpoint), start, environ.get(SERVICE_KEY_VARIABLE))
        waiting.close()
        fleet.settle()
        if not stop.is_set():
            system.set_ready(fleet, launcher.metrics_addresses)
            for name, address in metrics.items():
                tell(f"[{name}] metrics at http://{address}/metrics")
            ready = _ready_line(args, endpoint, http, metrics)
            try:
                print(ready, flush=True)
            except OSError as error:
                tell(f"{ready} (stdout: {error.strerror})")
        _keep(fleet, own_ray, store, stop)
        return 0


def _ready_line(args: argparse.Namespace, endpoint: str, http: str, metrics: Mapping[str, str]) -> str:
    if args.json:
        return json.dumps({"grpc": endpoint, "http": http or None, "metrics": dict(metrics)})
    return f"ready grpc={endpoint}" + (f" http={http}" if http else "")


def _keep(fleet: Fleet, own_ray: Service | None, store: OwnRedis | EmbeddedRedis | None, stop: threading.Event) -> None:
    """Supervise the services until `stop`.

    Raises:
        Unavailable: the store cannot be started again, or the Ray cluster that holds all replicas has ended.
    """
    while not stop.wait(_LOOK_S):
        fleet.look()
        if store is not None and not store.is_alive:
            tell("the store has ended, and every session with it; starting another")
            try:
                store.start()
            except OSError as error:
                raise Unavailable(str(error)) from error
        if own_ray is not None and not own_ray.is_alive:
            raise Unavailable(f"Ray has ended ({own_ray.ending()})")


def _tell_on_stop(stop: threading.Event, word: str) -> None:
    """Write how far the end is that a user asked for. A failure has its own error line."""
    if stop.is_set():
        tell(word)


def _open_control_socket(endpoint: str, system: RunningSystem, stack: contextlib.ExitStack) -> None:
    """Take requests of other commands. Raises Unavailable if another system has the port (ADDRESS_IN_USE)."""
    try:
        stack.enter_context(ControlSocket(split_address(endpoint)[1], system))
    except Unavailable as error:
        if error.reason == "ADDRESS_IN_USE":
            raise
        tell(f"warning: specdec scale, join and down will not find this system: {error.message}")
    unmark_starting()


def _own_store(args: argparse.Namespace, stack: contextlib.ExitStack) -> OwnRedis | EmbeddedRedis | None:
    """Return a store that lives as long as this system; None if `--redis-url` names one."""
    return stack.enter_context(throwaway_redis()) if args.redis_url == "memory://" else None


def _own_ray(
    args: argparse.Namespace, environ: Mapping[str, str], start: _Start, stack: contextlib.ExitStack
) -> Service | None:
    """Return the running Ray cluster of `--ray-address local`, else None. Raises SpecdecError if it does not start."""
    if args.ray_address != "local":
        return None
    ray = Child("ray", "specdec.service.ray.own_ray", [], environ)
    stack.callback(ray.stop)
    start.poll(lambda: [ray], lambda: ray.has_started)
    ray.relay()
    return ray


def _require_devices(args: argparse.Namespace, served: Models) -> None:
    """Check devices and ranks as far as possible without loading anything.

    Raises:
        InvalidRequest, Unsupported: as `require_device`, `require_gpu_each` and `require_supported`.
    """
    models = {"target": [served.target], "draft": [pool.model for pool in served.drafts]}
    flags = {"target": "--tensor-parallel", "draft": "--tensor-parallel-draft"}
    for role in up_flags.ROLES:
        device = args.settings.value(role, "device")
        if up_flags.num_ranks(args, role) > 1:
            require_supported(
                device=device if args.ray_address else likely_device(device),  # nodes have devices of their own
                dtype=args.settings.value(role, "dtype"),
                compile_backend=current_backend(args.settings.value(role, "compile_backend")),
                deterministic=args.settings.value(role, "deterministic"),
            )
        # Nodes of a cluster check their devices themselves, and simulated models need none.
        if not args.ray_address and any(not model.startswith(SIMULATED_PREFIX) for model in models[role]):
            require_device(device)
            if up_flags.num_ranks(args, role) > 1:
                require_gpu_each(device, up_flags.num_ranks(args, role), flag=flags[role])


def _kv_bytes(args: argparse.Namespace, role: str) -> int | None:
    given: int | None = args.settings.value(role, "kv_cache_bytes")
    return given


def _check_models(args: argparse.Namespace, served: Models, start: _Start) -> Models:
    """Check the models' files; return what is served, with the tokenizer of drafts that have another one.

    Returns at once on a stop.

    Raises:
        SpecdecError: as `require_servable_pair`, before anything is loaded.
    """
    several = len(served.drafts) > 1
    drafts = {f"--draft {pool.name}" if several else "--draft": pool.model for pool in served.drafts}
    named = {"--target": served.target} | drafts
    models = {flag: model for flag, model in named.items() if not model.startswith(SIMULATED_PREFIX)}
    elsewhere = () if args.settings.value("target", "backend") == "own" else ("--target",)
    outcome: Future[dict[str, str]] = Future()

    def check() -> None:
        try:
            in_common = _tokens_in_common(models, elsewhere)
            for flag, model in models.items():
                role = flag.split()[0].removeprefix("--")
                if (ranks := up_flags.num_ranks(args, role)) > 1:
                    require_divisible(model, ranks)
                if given := _kv_bytes(args, role):
                    require_kv_room(model, given, num_ranks=ranks, flag=f"--kv-cache-bytes-{role}")
            outcome.set_result(in_common)
        except BaseException as error:
            outcome.set_exception(error)

    # A daemon thread: Ctrl-C does not wait for the hub, from which the files may come.
    threading.Thread(target=check, name="check-models", daemon=True).start()
    with LastMessage("specdec.checkpoints") as doing:
        while not (start.is_stopped or outcome.done()):
            start.show(": ".join(filter(None, (f"checking {' and '.join(models.values())}", doing.text))))
            wait([outcome], _POLL_S)
    if not outcome.done():
        return served
    in_common = outcome.result()
    for flag, shared in in_common.items():
        tell(f"note: {flag} has another tokenizer than --target: {shared} are the target's too; it drafts for that")
    target = up_flags.tokenizer(args) or served.target
    pools = [
        replace(pool, for_tokenizer=target if flag in in_common else "")
        for flag, pool in zip(drafts, served.drafts, strict=True)
    ]
    return replace(served, drafts=tuple(pools))


def _tokens_in_common(models: Mapping[str, str], elsewhere: Collection[str]) -> dict[str, str]:
    """Return, by flag, what each draft with another tokenizer has in common with the target's.

    Arguments and errors are those of `require_servable_pair`.
    """
    target = {flag: model for flag, model in models.items() if flag == "--target"}
    drafts = [{flag: model} for flag, model in models.items() if flag != "--target"]
    shared = {next(iter(draft)): require_servable_pair(target | draft, elsewhere=elsewhere) for draft in drafts}
    if not drafts:
        require_servable_pair(target, elsewhere=elsewhere)
    return {flag: words for flag, words in shared.items() if words}


def _await_imports(launcher: Launcher, fleet: Fleet, start: _Start) -> bool:
    """Wait until the packages of the replicas are imported; return False on a stop. Raises as `_Start.poll`."""
    start.poll(lambda: fleet.services, launcher.has_imported, also="replicas: importing their packages")
    return not start.is_stopped


def _await_ready(fleet: Fleet, dialled: str, start: _Start, api_key: str | None) -> None:
    """Wait until the coordinator serves and knows every replica, and the gateway listens. Raises as `_Start.poll`."""
    num_replicas = sum(1 for service in fleet.services if role_of(service.name))
    client = Client(dialled, budgets=Budgets(connect_s=0), api_key=api_key, tls=False)
    with dial_blocking(dialled) as channel, client:
        start.poll(lambda: fleet.services, lambda: is_serving(channel))
        start.poll(lambda: fleet.services, lambda: _num_replicas(client) >= num_replicas)
        start.poll(lambda: fleet.services, lambda: all(s.has_started for s in fleet.services if s.name == GATEWAY))


def _num_replicas(client: Client) -> int:
    try:
        return sum(len(pool.replicas) for pool in client.info().pools)
    except SpecdecError:
        return 0
