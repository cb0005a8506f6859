"""`specdec up`: the whole system on this machine, as child processes on loopback, until SIGTERM or Ctrl-C.

Not here: how a child is kept (`processes`) and how it ends with its parent (`child`).
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import sys
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any

import grpc

import specdec
from specdec.cli.health import is_serving
from specdec.cli.processes import Child, free_ports
from specdec.cli.waiting import Waiting
from specdec.client import Budgets, Client
from specdec.errors import SpecdecError, Unavailable
from specdec.vocabulary import require_same_vocabulary

_POLL_S = 0.1
_DRAIN_GRACE_S = 3


#: Shares of the device's memory where nothing is said. A small draft keeps the keys and values of as many tokens as its
#: target and needs nearly as much for each, but few weights. The rest is for what each process holds beside its model.
_UTILIZATION = {"target": 0.6, "draft": 0.3}
_UTILIZATION_ALONE = 0.9


class Usage(Exception):
    """Flags that make no sense, alone or together."""


class ChildFailed(Exception):
    """A child that ended before it served, as the "CODE REASON: message" of an error line."""


def add_parser(commands: Any) -> None:
    parser = commands.add_parser("up", help="run the whole system on this machine", allow_abbrev=False)
    model = {"metavar": "PATH_OR_HUB_ID", "default": ""}
    parser.add_argument("--target", **model, help="target model; default: the pair in models/demo")
    parser.add_argument("--draft", **model, help="draft model; default: the pair in models/demo")
    parser.add_argument("--listen", default="127.0.0.1:50051", metavar="HOST:PORT", help="default 127.0.0.1:50051")
    parser.add_argument("--http", default="", metavar="HOST:PORT", help="not available yet")
    parser.add_argument("--redis-url", default="memory://", metavar="URL", help="default: an embedded store")
    parser.add_argument("--device", default="auto", help="cpu, cuda, ...; default auto")
    parser.add_argument("--dtype", default="auto", choices=["auto", "float32", "bfloat16", "float16", "int8"])
    parser.add_argument(
        "--compile-backend", default="auto", metavar="NAME", help="native, captured, eager, inductor, ...; default auto"
    )
    parser.add_argument(
        "--self-check", default="on", choices=["on", "off"], help="refuse models that are computed wrongly; default on"
    )
    parser.add_argument("--replicas-draft", type=int, default=1, metavar="N", help="0: target-only")
    parser.add_argument("--replicas-target", type=int, default=1, metavar="N")
    for role, share in _UTILIZATION.items():
        parser.add_argument(
            f"--gpu-memory-utilization-{role}", type=float, metavar="SHARE",
            help=f"share of a GPU's memory for all {role} replicas together; default {share}"
            + (f", without a draft {_UTILIZATION_ALONE}" if role == "target" else ""),
        )  # fmt: skip
        parser.add_argument(
            f"--kv-cache-bytes-{role}", type=int, metavar="N",
            help=f"size of each {role} replica's KV cache, instead of what that share leaves",
        )  # fmt: skip


def run(args: argparse.Namespace, environ: Mapping[str, str], stop: threading.Event) -> int:
    """Starts everything, prints the ready line, waits for `stop`, stops everything in order.

    Raises:
        Usage: flags that make no sense together.
        Unavailable: the address is taken.
        VocabularyMismatch: target and draft do not fit.
        ChildFailed: a child did not start, or is refused by the coordinator; its own error line where it gave one.
        SpecdecError: the coordinator ended later.
    """
    _check(args)
    target, draft = _models(args)
    endpoint = _listen(args)
    with contextlib.ExitStack() as stack:
        waiting = stack.enter_context(Waiting())
        if args.draft and args.replicas_draft:  # the demo pair needs no look
            _compare_vocabularies(target, draft, waiting, stop)
        if stop.is_set():
            return 0
        children: list[Child] = []
        redis_url = _redis(args, stack)
        stack.callback(_stop, children)
        children += _replicas("target", args.replicas_target, target, args, redis_url, environ)
        children += _replicas("draft", args.replicas_draft, draft, args, redis_url, environ)
        arguments = ["--tokenizer", target, "--listen", endpoint, *_common(redis_url), "--poll-interval-s", "0.2"]
        coordinator = Child("coordinator", "coordinator", arguments, environ)
        children.append(coordinator)
        _await_ready(children, endpoint, args.replicas_target + args.replicas_draft, waiting, stop)
        waiting.close()
        if not stop.is_set():
            print(f"ready grpc={endpoint}", flush=True)
        for child in children:
            child.relay()
        return _watch(children, stop)


def _check(args: argparse.Namespace) -> None:
    if args.http:
        raise Usage("--http is not available: this version has no HTTP gateway yet")
    if args.replicas_target < 1 or args.replicas_draft < 0:
        raise Usage("--replicas-target must be at least 1 and --replicas-draft at least 0")
    if args.target and not args.draft and args.replicas_draft:
        raise Usage("--target needs a --draft with the same vocabulary, or --replicas-draft 0")
    for role in _UTILIZATION:
        if not 0 < _utilization(args, role) <= 1:
            raise Usage(f"--gpu-memory-utilization-{role} must be above 0 and at most 1")
        if (num_bytes := getattr(args, f"kv_cache_bytes_{role}")) is not None and num_bytes < 1:
            raise Usage(f"--kv-cache-bytes-{role} must be at least 1")
    target, draft = (_utilization(args, role) for role in ("target", "draft"))
    if args.replicas_draft and target + draft > 1:
        raise Usage(
            f"--gpu-memory-utilization-target {target:g} and --gpu-memory-utilization-draft {draft:g} are more than 1 "
            "together"
        )


def _utilization(args: argparse.Namespace, role: str) -> float:
    """Share of the device's memory for all replicas of a role."""
    given: float | None = getattr(args, f"gpu_memory_utilization_{role}")
    if given is not None:
        return given
    return _UTILIZATION[role] if args.replicas_draft else _UTILIZATION_ALONE


def _models(args: argparse.Namespace) -> tuple[str, str]:
    demo = Path(specdec.__file__).resolve().parents[1] / "models" / "demo"
    target, draft = args.target or str(demo / "target"), args.draft or str(demo / "draft")
    if not (args.target and (args.draft or not args.replicas_draft)) and not (demo / "target").is_dir():
        raise Usage(f"no demo pair in {demo}: give --target and --draft")
    return target, draft


def _redis(args: argparse.Namespace, stack: contextlib.ExitStack) -> str:
    if args.redis_url != "memory://":
        return str(args.redis_url)
    from specdec.state.embedded import EmbeddedRedis

    return stack.enter_context(EmbeddedRedis()).url


def _replicas(
    role: str, count: int, model: str, args: argparse.Namespace, redis_url: str, environ: Mapping[str, str]
) -> list[Child]:
    # Draft and target work by turns, so each role may use every core but one: coordinator, store and client run beside
    # them, and a step waits for its slowest thread. Idle threads spin for microseconds only (docs/LOG.md).
    num_threads = max(1, ((os.cpu_count() or 1) - 1) // max(1, count))
    quiet = {"GOMP_SPINCOUNT": "20000", "KMP_BLOCKTIME": "0", "OMP_NUM_THREADS": str(num_threads), **environ}
    # Not a flag, which would win over the same variable of the caller's.
    share = str(_utilization(args, role) / max(1, count))
    quiet = {f"SPECDEC_{role.upper()}__GPU_MEMORY_UTILIZATION": share, **quiet}
    memory = []
    if getattr(args, f"gpu_memory_utilization_{role}") is not None:
        memory += ["--gpu-memory-utilization", share]
    if (num_bytes := getattr(args, f"kv_cache_bytes_{role}")) is not None:
        memory += ["--kv-cache-bytes", str(num_bytes)]
    return [
        Child(
            f"{role}-{index}",
            f"{role}_service",
            [
                *("--model", model, "--device", args.device, "--dtype", args.dtype),
                *("--compile-backend", args.compile_backend, "--self-check", args.self_check, *memory),
                *("--listen", f"127.0.0.1:{port}", *_common(redis_url)),
            ],
            quiet,
        )
        for index, port in enumerate(free_ports(count))
    ]


def _common(redis_url: str) -> list[str]:
    return ["--redis-url", redis_url, "--log-format", "json", "--drain-grace-s", str(_DRAIN_GRACE_S)]


def _listen(args: argparse.Namespace) -> str:
    from specdec.config import join_address, split_address
    from specdec.rpc.server import require_free

    try:
        host, port = split_address(args.listen)
    except ValueError as error:
        raise Usage(f"--listen: {error}") from None
    address = join_address(host, port or free_ports(1)[0])
    require_free(address)  # else whoever listens there already would be taken for our coordinator
    return address


def _compare_vocabularies(target: str, draft: str, waiting: Waiting, stop: threading.Event) -> None:
    """Raises what `require_same_vocabulary` does, before anything is loaded. Returns at once on `stop`."""
    outcome: Future[None] = Future()

    def compare() -> None:
        try:
            require_same_vocabulary(target, draft)
            outcome.set_result(None)
        except Exception as error:
            outcome.set_exception(error)

    # A daemon: Ctrl-C does not wait for the hub, from which the tokenizers may come.
    threading.Thread(target=compare, name="compare-vocabularies", daemon=True).start()
    while not (stop.is_set() or outcome.done()):
        waiting.show(f"comparing the vocabularies of {target} and {draft}")
        wait([outcome], _POLL_S)
    if outcome.done():
        outcome.result()


def _await_ready(
    children: list[Child], endpoint: str, num_replicas: int, waiting: Waiting, stop: threading.Event
) -> None:
    """Waits until the coordinator serves and knows every replica.

    Raises:
        ChildFailed: a child ends first, or the coordinator refuses one.
    """
    dialled = endpoint.replace("0.0.0.0:", "127.0.0.1:").replace("[::]:", "[::1]:")
    with grpc.insecure_channel(dialled) as channel, Client(dialled, budgets=Budgets(connect_s=0)) as client:
        _poll(children, waiting, stop, lambda: is_serving(channel))
        _poll(children, waiting, stop, lambda: _num_replicas(client) >= num_replicas)


def _poll(children: list[Child], waiting: Waiting, stop: threading.Event, done: Callable[[], bool]) -> None:
    coordinator = children[-1]
    while not (stop.is_set() or done()):
        for child in children:
            if not child.is_alive:
                raise ChildFailed(_reason(child))
            # Other systems may share the registry: what it refuses of theirs keeps nobody from being ready.
            for address in coordinator.refusals.keys() & set(child.arguments):
                raise ChildFailed(coordinator.refusals[address])
        waiting.show(", ".join(f"{child.name}: {child.stage}" for child in children))
        stop.wait(_POLL_S)


def _reason(child: Child) -> str:
    words = child.last_words()
    if re.match(r"[A-Z_]+ [A-Z_]+: ", words):
        return words
    return f"{Unavailable.code} {Unavailable.default_reason}: {child.name} did not start: {words}"


def _num_replicas(client: Client) -> int:
    try:
        return sum(len(pool.replicas) for pool in client.info().pools)
    except SpecdecError:
        return 0


def _watch(children: list[Child], stop: threading.Event) -> int:
    """Waits for `stop`. A replica that ends is reported and done without; an end of the coordinator ends all."""
    alive = list(children)
    while not stop.wait(_POLL_S):
        for child in [child for child in alive if not child.is_alive]:
            alive.remove(child)
            print(f"[{child.name}] ended unexpectedly", file=sys.stderr, flush=True)
            if child is children[-1]:
                raise Unavailable("the coordinator ended unexpectedly")
    return 0


def _stop(children: list[Child]) -> None:
    """Ends the coordinator, then draft and target replicas together; the store goes after all of them."""
    for child in children[-1:]:
        child.stop()
    for child in reversed(children):
        child.ask_to_stop()
    for child in reversed(children):
        child.stop()
