"""`specdec up`: the whole system on this machine, as child processes on loopback, until SIGTERM or Ctrl-C.

Not here: its flags (`up_flags`), what each service gets of them (`launching`), how services are kept, started again and
scaled (`fleet`), and who may ask for that (`control`).
"""

from __future__ import annotations

import argparse
import contextlib
import secrets
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from dataclasses import replace

from specdec.checkpoints.preflight import require_kv_room
from specdec.checkpoints.rank_checks import require_divisible, require_supported
from specdec.cli import up_flags
from specdec.cli.control import ControlSocket
from specdec.cli.health import is_serving
from specdec.cli.launching import Launcher
from specdec.cli.up_flags import Models, Usage, add_parser
from specdec.cli.waiting import Waiting
from specdec.client import Budgets, Client
from specdec.cross_vocabulary.pair_preflight import require_servable_pair
from specdec.engine_api import SIMULATED_PREFIX
from specdec.errors import SpecdecError, Unavailable
from specdec.rpc.channels import dial_blocking
from specdec.settings.addresses import split_address
from specdec.settings.base import current_backend
from specdec.settings.devices import likely_device, require_device, require_gpu_each
from specdec.state.embedded import EmbeddedRedis
from specdec.state.own_redis import OwnRedis, throwaway_redis
from specdec.supervision.fleet import Fleet
from specdec.supervision.processes import Child
from specdec.supervision.services import Service, tell

__all__ = ["ChildFailed", "Usage", "add_parser", "run"]

_POLL_S = 0.1


class ChildFailed(Exception):
    """A child that ended before it served, as the "CODE REASON: message" of an error line."""


def run(args: argparse.Namespace, environ: Mapping[str, str], stop: threading.Event) -> int:
    """Starts everything, prints the ready line, keeps it running until `stop`, stops everything in order.

    Raises:
        Usage: flags that make no sense together.
        InvalidRequest, Unsupported: a model cannot be served, or not on this machine's devices.
        Unavailable: an address is taken.
        VocabularyMismatch: target and draft do not fit.
        ChildFailed: a child did not start, or is refused by the coordinator; its own error line where it gave one.
    """
    up_flags.check(args)
    served = up_flags.models(args)
    endpoint = up_flags.listen_address(args)
    metrics = up_flags.metrics_addresses(args, up_flags.names_of(args), endpoint)
    if not (served.drafts or args.lookup or args.local_draft) and args.replicas_draft is None:
        tell("note: no --draft was given: target-only, every token takes a step of the target")
    with contextlib.ExitStack() as stack:
        waiting = stack.enter_context(Waiting())
        _require_devices(args, served)
        is_told = any(up_flags.num_ranks(args, role) > 1 or _kv_bytes(args, role) for role in up_flags.ROLES)
        if args.target or args.draft or is_told:  # else the demo pair, as it is: it needs no look
            served = _check_models(args, served, waiting, stop)
        if stop.is_set():
            return 0
        store = _own_store(args, stack)
        if args.ray_address == "local":  # a Ray that runs what it is told by us alone
            environ = {**environ, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
        own_ray = _own_ray(args, environ, waiting, stop, stack)
        if stop.is_set():
            return 0
        launcher = Launcher(
            args,
            served,
            endpoint=endpoint,
            redis_url=args.redis_url if store is None else store.url,
            metrics=metrics,
            environ=environ,
            ray_address=own_ray.address if own_ray else args.ray_address,
        )
        fleet = Fleet(launcher)
        stack.callback(fleet.stop)
        fleet.begin(up_flags.counts(args))
        _await_ready(fleet, endpoint, waiting, stop)
        waiting.close()
        fleet.settle()
        _listen_for_scaling(endpoint, fleet, stack)
        if not stop.is_set():
            for name, address in metrics.items():
                tell(f"[{name}] metrics at http://{address}/metrics")
            try:
                print(f"ready grpc={endpoint}", flush=True)
            except OSError as error:
                tell(f"ready grpc={endpoint} (stdout: {error.strerror})")
        _keep(fleet, own_ray, store, stop)
        return 0


def _keep(fleet: Fleet, own_ray: Service | None, store: OwnRedis | EmbeddedRedis | None, stop: threading.Event) -> None:
    """Until `stop`. Raises ChildFailed: the Ray that all replicas are on has ended, or the store for good."""
    while not stop.wait(_POLL_S):
        fleet.look()
        if store is not None and not store.is_alive:
            tell("the store has ended, and every session with it; starting another")
            try:
                store.start()
            except OSError as error:
                raise ChildFailed(f"{Unavailable.code} {Unavailable.default_reason}: {error}") from error
        if own_ray is not None and not own_ray.is_alive:
            raise ChildFailed(f"{Unavailable.code} {Unavailable.default_reason}: Ray has ended ({own_ray.ending()})")


def _listen_for_scaling(endpoint: str, fleet: Fleet, stack: contextlib.ExitStack) -> None:
    try:
        stack.enter_context(ControlSocket(split_address(endpoint)[1], fleet))
    except Unavailable as error:
        tell(f"warning: specdec scale will not work: {error.message}")


def _own_store(args: argparse.Namespace, stack: contextlib.ExitStack) -> OwnRedis | EmbeddedRedis | None:
    """The store that lives as long as this does; None where another one is given."""
    return stack.enter_context(throwaway_redis()) if args.redis_url == "memory://" else None


def _own_ray(
    args: argparse.Namespace,
    environ: Mapping[str, str],
    waiting: Waiting,
    stop: threading.Event,
    stack: contextlib.ExitStack,
) -> Service | None:
    """The Ray of `--ray-address local`, once it runs. Raises ChildFailed: it does not."""
    if args.ray_address != "local":
        return None
    ray = Child("ray", "specdec.cluster.own_ray", [], environ)
    stack.callback(ray.stop)
    _poll([ray], waiting, stop, lambda: ray.has_started)
    ray.relay()
    return ray


def _require_devices(args: argparse.Namespace, served: Models) -> None:
    """What can be told of devices and ranks without loading anything.

    Raises:
        InvalidRequest, Unsupported: as `require_device`, `require_gpu_each` and `require_supported`.
    """
    models = [served.target, *(pool.model for pool in served.drafts)]
    divided = {
        flag: up_flags.num_ranks(args, role)
        for role, flag in (("target", "--tensor-parallel"), ("draft", "--tensor-parallel-draft"))
        if up_flags.num_ranks(args, role) > 1
    }
    if divided:
        device = args.device if args.ray_address else likely_device(args.device)  # nodes have devices of their own
        require_supported(device=device, dtype=args.dtype, compile_backend=current_backend(args.compile_backend),
                          deterministic=args.deterministic)  # fmt: skip
    # So they do here, and what is simulated needs none.
    if args.ray_address or all(model.startswith(SIMULATED_PREFIX) for model in models):
        return
    require_device(args.device)
    for flag, num_ranks in divided.items():
        require_gpu_each(args.device, num_ranks, flag=flag)


def _kv_bytes(args: argparse.Namespace, role: str) -> int | None:
    given: int | None = up_flags.value(args, f"--kv-cache-bytes-{role}")
    return given


def _check_models(args: argparse.Namespace, served: Models, waiting: Waiting, stop: threading.Event) -> Models:
    """What is served, with whose tokens drafts of another tokenizer are to make. Returns at once on `stop`.

    Raises:
        SpecdecError: what `require_servable_pair` raises, before anything is loaded.
    """
    several = len(served.drafts) > 1
    drafts = {f"--draft {pool.name}" if several else "--draft": pool.model for pool in served.drafts}
    named = {"--target": served.target} | drafts
    models = {flag: model for flag, model in named.items() if not model.startswith(SIMULATED_PREFIX)}
    outcome: Future[dict[str, str]] = Future()

    def check() -> None:
        try:
            in_common = _tokens_in_common(models)
            for flag, model in models.items():
                role = flag.split()[0].removeprefix("--")
                if (ranks := up_flags.num_ranks(args, role)) > 1:
                    require_divisible(model, ranks)
                if given := _kv_bytes(args, role):
                    require_kv_room(model, given, num_ranks=ranks, flag=f"--kv-cache-bytes-{role}")
            outcome.set_result(in_common)
        except BaseException as error:
            outcome.set_exception(error)

    # A daemon: Ctrl-C does not wait for the hub, from which the files may come.
    threading.Thread(target=check, name="check-models", daemon=True).start()
    while not (stop.is_set() or outcome.done()):
        waiting.show(f"checking {' and '.join(models.values())}")
        wait([outcome], _POLL_S)
    if not outcome.done():
        return served
    in_common = outcome.result()
    for flag, told in in_common.items():
        tell(f"note: {flag} has another tokenizer than --target: {told} are the target's too; it drafts for that")
    target = args.tokenizer or served.target
    pools = [
        replace(pool, for_tokenizer=target if flag in in_common else "")
        for flag, pool in zip(drafts, served.drafts, strict=True)
    ]
    return replace(served, drafts=tuple(pools))


def _tokens_in_common(models: Mapping[str, str]) -> dict[str, str]:
    """What each draft with another tokenizer than the target's has in common with it, by flag. Raises as
    `require_servable_pair`."""
    target = {flag: model for flag, model in models.items() if flag == "--target"}
    drafts = [{flag: model} for flag, model in models.items() if flag != "--target"]
    told = {next(iter(draft)): require_servable_pair(target | draft) for draft in drafts}
    if not drafts:
        require_servable_pair(target)
    return {flag: words for flag, words in told.items() if words}


def _await_ready(fleet: Fleet, endpoint: str, waiting: Waiting, stop: threading.Event) -> None:
    """Waits until the coordinator serves and knows every replica.

    Raises:
        ChildFailed: a service ends first, or the coordinator refuses one.
    """
    dialled = endpoint.replace("0.0.0.0:", "127.0.0.1:").replace("[::]:", "[::1]:")
    num_replicas = len(fleet.services) - 1
    with dial_blocking(dialled) as channel, Client(dialled, budgets=Budgets(connect_s=0)) as client:
        _poll(fleet.services, waiting, stop, lambda: is_serving(channel))
        _poll(fleet.services, waiting, stop, lambda: _num_replicas(client) >= num_replicas)


def _poll(services: list[Service], waiting: Waiting, stop: threading.Event, done: Callable[[], bool]) -> None:
    coordinator = services[-1]
    while not (stop.is_set() or done()):
        for service in services:
            if not service.is_alive:
                raise ChildFailed(service.failure())
            # Other systems may share the registry: what it refuses of theirs keeps nobody from being ready.
            if service.address in coordinator.refusals:
                raise ChildFailed(coordinator.refusals[service.address])
        waiting.show(", ".join(f"{service.name}: {service.stage}" for service in services))
        stop.wait(_POLL_S)


def _num_replicas(client: Client) -> int:
    try:
        return sum(len(pool.replicas) for pool in client.info().pools)
    except SpecdecError:
        return 0
