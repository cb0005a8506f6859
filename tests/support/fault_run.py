"""A fault run: generations on a whole system while its parts are killed, stopped and hung, and clocks are stepped.

Two gateways, two coordinators, two targets and up to two drafts as processes, and a Redis that logs every write. The
clocks of Redis and of each coordinator are stepped, apart from each other. The report says what clients could see. A
seed decides the requests and the faults; times of day decide which token a fault meets, so a repetition is like the
run, and not equal to it. `SPECDEC_FAULT_SEED` sets the seed of a test, `SPECDEC_FAULT_HISTORY` a folder that keeps
histories.
"""

from __future__ import annotations

import asyncio
import os
import random
import secrets
import signal
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

import redis
from transformers import AutoTokenizer

from tests.support.append_log import ARGUMENTS, note_time, read_append_log, step_clock
from tests.support.fault_clients import PATIENCE_S, GrpcClient, HttpClient, Work, make_works
from tests.support.history import Event, check_history, write_history
from tests.support.injured_stack import Injured
from tests.support.redis_fixture import RedisServer
from tests.support.scraping import Endpoint
from tests.support.stack import Stack
from tests.support.stepped_clocks import SteppedClock, build_library, compiler

NUM_AT_ONCE = 8
REDIS = "redis"

_CLOCKS = (REDIS, "coordinator", "coordinator2")
#: Furthest that a clock is set ahead or behind: many leases, and less than an idle session is kept.
_FURTHEST_CLOCK_S = 600.0

#: Longest time for which a part is stopped; longer than a lease lives.
_LONGEST_STOP_S = 4.0
#: Parts that may be away at one time. With more of them nothing serves for most of the run.
_MOST_AWAY = 3
_SETTLE_S = 120.0
_KILL, _STOP, _STEP, _HANG = "kill", "stop", "step the clock", "hang the device"
#: Descriptors that a process may have more at the end than at its start: connections that stay open between calls.
_SPARE_DESCRIPTORS = 40


def fault_seed() -> int:
    """Return the seed of `SPECDEC_FAULT_SEED`, or a random one. Print it, so that a failure can be repeated."""
    seed = int(os.environ.get("SPECDEC_FAULT_SEED") or secrets.randbelow(1 << 32))
    print(f"fault seed: SPECDEC_FAULT_SEED={seed}")
    return seed


@dataclass
class Report:
    """What a fault run has shown."""

    num_ended: int = 0
    num_kills: int = 0
    num_stops: int = 0
    num_hangs: int = 0
    num_clock_steps: int = 0
    problems: list[str] = field(default_factory=list)


class FaultSystem:
    """The processes of a run. Use as a context manager; it is ready once entered."""

    def __init__(
        self, models: tuple[Path, Path], directory: Path, *, num_drafts: int = 2, slower_by_s: float = 0.0
    ) -> None:
        """`directory`: an empty one, for the store. `slower_by_s`: time by which a step of a target takes longer."""
        self._models = models
        self.num_drafts = num_drafts
        self._directory = directory
        self._clock_lock = threading.Lock()
        if compiler() is None:
            print("no clock is stepped: this machine has no C compiler (cc)")
            self.clocks = {}
        else:
            library = build_library(directory)
            self.clocks = {name: SteppedClock(directory / f"{name}.clock", library) for name in _CLOCKS}
        machine = self.clocks[REDIS].command if self.clocks else ()
        self.redis = RedisServer(directory, keeps_log=True, arguments=ARGUMENTS, machine=machine)
        self.stack = Stack(
            *models, redis_url=self.redis.url, num_targets=2, num_drafts=num_drafts, num_coordinators=2, num_gateways=2,
            has_metrics=True, clocks=self.clocks,
            coordinator_arguments=["--lease-ttl-s", "2", "--target-wait-s", f"{PATIENCE_S:g}"],
            gateway_arguments=["--retry-s", f"{PATIENCE_S:g}", "--resume-s", f"{PATIENCE_S:g}"],
        )  # fmt: skip
        self.parts = [*self.stack.parts, REDIS]
        self.targets = [name for name in self.stack.parts if name.startswith("target")]
        (directory / "injuries").mkdir()
        self._injured = Injured(self.stack, directory / "injuries", self.targets)
        for name in self.targets if slower_by_s else ():
            self._injured.injure(name, "slow", f"{slower_by_s:g}")

    def __enter__(self) -> Self:
        self.redis.start()
        try:
            self.stack.__enter__()
        except BaseException:
            self.redis.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stack.stop()
        self.redis.stop()

    @property
    def endpoint(self) -> str:
        """Both coordinators, for the SDK."""
        return f"ipv4:{','.join(self.stack.parts[name].address for name in ('coordinator', 'coordinator2'))}"

    @property
    def gateways(self) -> list[str]:
        return [self.stack.parts[name].address for name in ("gateway", "gateway2")]

    def kill_and_restart(self, part: str) -> None:
        """End a part as a crash does, start it again, and return once it serves."""
        if part == REDIS:
            self.redis.restart_without_its_last(0)
            return
        self.stack.kill(part)
        self.stack.restart(part)

    def stop_for(self, part: str, seconds: float) -> None:
        """Let a part stand still."""
        send = self.redis.signal if part == REDIS else self.stack.parts[part].process.send_signal  # type: ignore[union-attr]
        send(signal.SIGSTOP)
        time.sleep(seconds)
        send(signal.SIGCONT)

    def hang_for(self, target: str, seconds: float) -> None:
        """Let a target's device hang with the next step; the process lives."""
        self._injured.injure(target, "hang")
        time.sleep(seconds)
        self._injured.heal(target, "hang")

    def step_clock(self, part: str, ahead_s: float) -> None:
        """Set the clock of a part ahead of the machine's, or behind it where `ahead_s` is negative."""
        if part == REDIS:
            with self._clock_lock:
                step_clock(self.redis.url, self.clocks[part], ahead_s)
        else:
            self.clocks[part].step(ahead_s)

    def note_time(self) -> None:
        """Write the true time into the log of Redis, where its clock is stepped and Redis answers."""
        if self.clocks:
            with self._clock_lock, suppress(redis.RedisError):
                note_time(self.redis.url, self.clocks[REDIS])

    def history(self) -> list[Event]:
        return read_append_log(self._directory)

    def text_of(self, token_ids: Sequence[int]) -> str:
        """Return the text of output tokens as clients get it."""
        return str(self._tokenizer().decode(list(token_ids), skip_special_tokens=True))

    def _tokenizer(self) -> AutoTokenizer:
        return AutoTokenizer.from_pretrained(self._models[0])

    def num_descriptors(self) -> dict[int, int]:
        """Return the open descriptors of each process, by its id."""
        pids = [part.process.pid for part in self.stack.parts.values() if part.process is not None]
        return {pid: len(os.listdir(f"/proc/{pid}/fd")) for pid in pids}

    def leases(self) -> list[str]:
        with redis.Redis.from_url(self.redis.url) as client:
            return [key.decode() for key in client.scan_iter("*:lease")]


async def run_with_faults(
    system: FaultSystem,
    seed: int,
    *,
    num_generations: int,
    num_kinds: int,
    most_tokens: int,
    pause_s: tuple[float, float],
) -> Report:
    """Run generations under faults, and check all that clients, store and processes show.

    Args:
        system: a fresh one.
        seed: decides requests and faults.
        num_generations: how many.
        num_kinds: number of different ones.
        most_tokens: output tokens of the longest.
        pause_s: shortest and longest time between two faults.
    """
    works = make_works(
        num_generations, seed, num_kinds=num_kinds, most_tokens=most_tokens, vocabulary=100,
        has_drafts=system.num_drafts > 0,
    )  # fmt: skip
    report = Report()
    events: list[Event] = []
    expected = await _undisturbed(system, works)
    before = system.num_descriptors()
    faults = asyncio.create_task(_disturb(system, random.Random(seed + 1), pause_s, report))
    noting = asyncio.create_task(_note_times(system))
    clients = [GrpcClient(system.endpoint), HttpClient(system.gateways, seed)]
    gate = asyncio.Semaphore(NUM_AT_ONCE)

    async def run(work: Work) -> None:
        async with gate:
            client = clients[work.number % 2]
            try:
                outputs = await client.run(work, f"s{work.number}", events.append)
            except Exception as error:
                report.problems.append(f"generation {work.number} ({work.mode}): {error!r}")
                return
            report.num_ended += 1
            if work.has_one_text and not _is_same(outputs, expected[_kind(work)], system.text_of):
                report.problems.append(f"generation {work.number} ({work.mode}): other tokens than undisturbed")

    try:
        await asyncio.gather(*(run(work) for work in works))
    finally:
        faults.cancel()
        noting.cancel()
        await asyncio.wait([faults, noting])
        if not faults.cancelled() and faults.exception():
            report.problems.append(f"the faults ended: {faults.exception()!r}")
    history = system.history() + events
    if folder := os.environ.get("SPECDEC_FAULT_HISTORY"):
        write_history(history, Path(folder) / f"{seed}.jsonl")
    report.problems += check_history(history, system.text_of)
    report.problems += await _leaks(system, works, before)
    for client in clients:
        await client.close()
    return report


def _kind(work: Work) -> tuple[object, ...]:
    return work.mode, work.seed, work.turns


async def _undisturbed(system: FaultSystem, works: Sequence[Work]) -> dict[tuple[object, ...], list[tuple[int, ...]]]:
    """Return the tokens of each kind of generation that has one text, from the system before any fault."""
    client = GrpcClient(system.endpoint)
    kinds = {_kind(work): work for work in works if work.has_one_text}
    gate = asyncio.Semaphore(NUM_AT_ONCE)

    async def run(number: int, work: Work) -> list[str | tuple[int, ...]]:
        async with gate:
            outputs = await client.run(work, f"undisturbed{number}", lambda _: None)
            await client.delete(f"undisturbed{number}")
            return outputs

    outputs = await asyncio.gather(*(run(number, work) for number, work in enumerate(kinds.values())))
    await client.close()
    return dict(zip(kinds, outputs, strict=True))  # type: ignore[arg-type]


def _is_same(
    outputs: Sequence[str | tuple[int, ...]],
    expected: Sequence[tuple[int, ...]],
    text_of: Callable[[Sequence[int]], str],
) -> bool:
    """Compare what a client got: token ids, or over HTTP a text."""
    return all(
        got == (text_of(tokens) if isinstance(got, str) else tokens)
        for got, tokens in zip(outputs, expected, strict=True)
    )


async def _note_times(system: FaultSystem) -> None:
    """Write the true time into the log of Redis once a second, until cancelled."""
    while True:
        await asyncio.to_thread(system.note_time)
        await asyncio.sleep(1.0)


async def _disturb(system: FaultSystem, rng: random.Random, pause_s: tuple[float, float], report: Report) -> None:
    """Kill, stop or hang a random part, or step its clock, again and again; leave all running when cancelled."""
    away: dict[str, asyncio.Task[None]] = {}
    try:
        while True:
            await asyncio.sleep(rng.uniform(*pause_s))
            part = rng.choice(system.parts)
            own = {_STEP: part in system.clocks, _HANG: part in system.targets}
            possible = [_KILL, _STOP, *(name for name, is_possible in own.items() if is_possible)]
            fault = rng.choice(possible)
            stop_s, ahead_s = rng.uniform(0.5, _LONGEST_STOP_S), rng.uniform(-_FURTHEST_CLOCK_S, _FURTHEST_CLOCK_S)
            for name in [name for name, task in away.items() if task.done()]:
                away.pop(name).result()
            if part in away or len(away) >= _MOST_AWAY:
                continue
            if fault == _KILL:
                report.num_kills += 1
                away[part] = asyncio.create_task(asyncio.to_thread(system.kill_and_restart, part))
            elif fault == _STEP:
                report.num_clock_steps += 1
                away[part] = asyncio.create_task(asyncio.to_thread(system.step_clock, part, ahead_s))
            elif fault == _HANG:
                report.num_hangs += 1
                away[part] = asyncio.create_task(asyncio.to_thread(system.hang_for, part, stop_s))
            else:
                report.num_stops += 1
                away[part] = asyncio.create_task(asyncio.to_thread(system.stop_for, part, stop_s))
    finally:
        await asyncio.gather(*away.values())


async def _leaks(system: FaultSystem, works: Sequence[Work], before: dict[int, int]) -> list[str]:
    """Return what is left of the run once its sessions are deleted: requests, leases, KV blocks, descriptors."""
    client = GrpcClient(system.endpoint)
    for work in works:
        await client.delete(f"s{work.number}")
    await client.close()
    parts = system.stack.parts
    left = ""
    deadline_s = time.monotonic() + _SETTLE_S
    while time.monotonic() < deadline_s:
        left = "; ".join(
            [
                *(f"{name} has running requests" for name in parts if name.startswith("coordinator") and _value(
                    parts[name].metrics, "num_requests_running")),
                *(f"{name} has active KV blocks" for name in parts if name.startswith(("target", "draft")) and _value(
                    parts[name].metrics, "kv_blocks", state="active")),
                *(f"{key} is held" for key in system.leases()),
            ]
        )  # fmt: skip
        if not left:
            break
        await asyncio.sleep(0.5)
    after = system.num_descriptors()
    return [
        *([f"{_SETTLE_S:g} s after the run: {left}"] if left else []),
        *(
            f"process {pid} has {number} descriptors, {before[pid]} before the run"
            for pid, number in after.items()
            if pid in before and number > before[pid] + _SPARE_DESCRIPTORS
        ),
    ]


def _value(metrics: str, name: str, **labels: str) -> float:
    try:
        return Endpoint(metrics).scrape_now().value(name, **labels)
    except LookupError:  # nothing was counted since its start
        return 0.0
