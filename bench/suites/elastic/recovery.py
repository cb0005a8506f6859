"""Measure how long streams are silent after a part of their target is lost for good.

`specdec up` on the demo pair under a steady load. A target of two ranks loses one, killed or stopped; and a Ray
cluster of three nodes on this machine loses the one that the target is on, with all that runs there. No
replica is held in reserve: the lost part is started again and loads its model. Each loss is the first in a fresh
system, because restarts of a part that ends repeatedly are delayed more each time. Part of the suite `elastic`, which
calls this.
"""

import os
import signal
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from bench.harness.process_tree import descendants
from bench.harness.report import waiting
from bench.harness.rows import Row
from bench.harness.steady_load import SteadyLoad
from bench.systems.models import DEMO
from bench.systems.ray_nodes import RayNodes
from bench.systems.simulated import redis_server
from bench.systems.up import UpSystem

NUM_STREAMS = 4
NUM_TOKENS = 200
NUM_LOSSES, NUM_QUICK_LOSSES = 3, 1
#: The agreed figure.
MOST_S = 30.0

_DEMO = ["--target", str(DEMO / "target"), "--draft", str(DEMO / "draft"), "--device", "cpu"]
_WARM_S = 3.0
_PATIENCE_S = 240.0


def measure_recovery(_tokenizer_dir: Path, row: Callable[..., Row], quick: bool) -> list[Row]:
    """All rows.

    Args:
        row: makes a row of the suite.
        quick: one loss of each kind.
    """
    num_losses = NUM_QUICK_LOSSES if quick else NUM_LOSSES
    row = partial(row, system="specdec up")
    rows = []
    for name, number in (("killed", signal.SIGKILL), ("stopped", signal.SIGSTOP)):
        with waiting(f"2 ranks, one {name}"):
            losses = [_lose_a_rank(number) for _ in range(num_losses)]
        rows += _rows(f"2 ranks, one {name}", losses, row)
    with waiting("3 Ray nodes, the target's lost"):
        losses = [_lose_a_node() for _ in range(num_losses)]
    return rows + _rows("3 Ray nodes, the target's lost", losses, row)


@dataclass(frozen=True)
class _Loss:
    longest_silence_s: float
    num_faults: int


def _rows(case: str, losses: list[_Loss], row: Callable[..., Row]) -> list[Row]:
    row = partial(row, case=f"demo pair, {NUM_STREAMS} streams: {case}")
    longest_s, num_faults = max(loss.longest_silence_s for loss in losses), sum(loss.num_faults for loss in losses)
    note = f"the longest of {len(losses)}"
    return [
        row(metric="longest_silence", value=longest_s, unit="s", at_most=MOST_S, note=note),
        row(metric="faults", value=float(num_faults), unit="streams", at_most=0.0),
    ]


def _lose_a_rank(number: int) -> _Loss:
    with UpSystem([*_DEMO, "--tensor-parallel", "2"]) as system:
        return _lose(system, partial(_end_a_rank, system, number))


def _lose_a_node() -> _Loss:
    with ExitStack() as stack:
        nodes = stack.enter_context(RayNodes())
        redis_url = stack.enter_context(redis_server())
        placed = ["--ray-address", nodes.address, "--redis-url", redis_url, "--insecure"]
        system = stack.enter_context(UpSystem([*_DEMO, *placed], nodes.environ))
        return _lose(system, partial(_end_a_node, nodes))


def _lose(system: UpSystem, end_a_part: Callable[[], None]) -> _Loss:
    with SteadyLoad(system.endpoint, NUM_STREAMS, NUM_TOKENS, patience_s=_PATIENCE_S) as load:
        time.sleep(_WARM_S)
        first = len(load.chunks)
        end_a_part()
        lost_s = time.monotonic()
        load.wait_for_all_streams()
        time.sleep(_WARM_S)  # a chunk that was already on its way does not count as recovery
        load.wait_for_all_streams()
        return _Loss(_longest_silence_s(load, first, lost_s), len(load.faults))


def _longest_silence_s(load: SteadyLoad, first: int, lost_s: float) -> float:
    """Return the longest silence of any stream between the loss and now, in seconds."""
    last = dict.fromkeys(range(NUM_STREAMS), lost_s)
    longest_s = 0.0
    for when, stream, _ in load.chunks[first:]:
        longest_s = max(longest_s, when - max(last[stream], lost_s))
        last[stream] = when
    return longest_s


def _end_a_rank(system: UpSystem, number: int) -> None:
    (rank,) = [pid for pid in descendants(system.pid) if _is_run_by(pid, "--rank", "1")]
    os.kill(rank, number)


def _end_a_node(nodes: RayNodes) -> None:
    running = {pid for raylet in nodes.raylets for pid in descendants(raylet)}
    (target,) = [pid for pid in running if _is_run_by(pid, "target_service")]
    nodes.kill(nodes.node_of(target))


def _is_run_by(pid: int, *words: str) -> bool:
    try:
        command = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    except OSError:
        return False
    return any(tuple(command[index : index + len(words)]) == words for index in range(len(command)))
