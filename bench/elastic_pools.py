"""What a second target and draft give to a steady load, and what the leaving of the first ones costs it.

`specdec up` around simulated engines, scaled by `specdec scale` while eight streams ask for one output after the other,
each in a new session. The target verifies one session a step, as a large model does that is bound by its arithmetic, so
eight streams are more than it can serve. What counts are tokens of outputs that came without an error and are the same
as before the first change. Part of the suite `elastic`, which calls this.
"""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Self

import numpy as np

from bench.pairs import median_ratio
from bench.report import progress
from bench.rows import Row
from specdec.client import Client

PAIR = "simulated:70b-1b,predraft=off"
GAMMA = 4
NUM_STREAMS = 8
#: An output then takes about two seconds before the change: sessions spread anew as quickly.
NUM_TOKENS = 48
#: Of the agreed figures: goodput by then, new sessions by then.
GAIN_BY_S, TAKEN_BY_S = 10.0, 2.0
NUM_WINDOWS, NUM_QUICK_WINDOWS = 12, 4
_WINDOW_S = 1.0
_WARM_S = 4.0


def measure_pools(tokenizer_dir: Path, row: Callable[..., Row], *, quick: bool) -> list[Row]:
    """All rows.

    Args:
        tokenizer_dir: see `write_tokenizer`.
        row: makes a row of the suite.
        quick: fewer windows.
    """
    num_windows = NUM_QUICK_WINDOWS if quick else NUM_WINDOWS
    with _System(tokenizer_dir) as system, _Load(system.endpoint) as load, progress("pools", 4) as advance:
        time.sleep(_WARM_S)
        before = _rates(load, num_windows)
        advance()
        first = system.replicas("target")
        asked_s = time.monotonic()
        system.scale("target=2", "draft=2")
        taken_s = _first_session_s(system, first)
        advance()
        time.sleep(max(0.0, asked_s + GAIN_BY_S - time.monotonic()))
        after = _rates(load, num_windows)
        advance()
        system.scale("target=1", "draft=1")
        time.sleep(_WARM_S)
        left = system.replicas("target") & first
        advance()
    ratio = median_ratio(after, before)
    serving_s = max(system.said_s(f"[{name}] serving") for name in ("target-1", "draft-1"))
    case = f"70B/1B, one verification a step, {NUM_STREAMS} streams, 1 to 2 pairs"
    row = partial(row, row=None, case=case, system="specdec up")
    return [
        row(
            metric="goodput_tokens_per_s_ratio", value=ratio.median, unit="x", ratio_to="one pair", low=ratio.low,
            high=ratio.high, num_pairs=ratio.num_pairs, required=1.9, note=f"from {GAIN_BY_S:g} s after the command on",
        ),
        row(metric="goodput_tokens_per_s", value=float(np.median(before)), unit="tokens/s", system="one pair"),
        row(metric="goodput_tokens_per_s", value=float(np.median(after)), unit="tokens/s", system="two pairs"),
        row(metric="serving_after_command", value=serving_s - asked_s, unit="s"),
        row(metric="new_session_after_serving", value=max(0.0, taken_s - serving_s), unit="s", at_most=TAKEN_BY_S),
        row(metric="errors", value=float(len(load.errors)), unit="outputs", at_most=0.0),
        row(metric="outputs_not_as_before", value=float(load.num_different), unit="outputs", at_most=0.0),
        row(metric="first_pair_left_behind", value=float(len(left)), unit="replicas", at_most=0.0),
        row(metric="outputs", value=float(load.num_ended), unit="outputs"),
    ]  # fmt: skip


def _rates(load: "_Load", num_windows: int) -> list[float]:
    """Tokens a second in windows from now on."""
    began_s = time.monotonic()
    time.sleep(num_windows * _WINDOW_S)
    edges = [began_s + index * _WINDOW_S for index in range(num_windows + 1)]
    chunks = list(load.chunks)
    counts, _ = np.histogram([when for when, _ in chunks], edges, weights=[count for _, count in chunks])
    return [float(count) / _WINDOW_S for count in counts]


def _first_session_s(system: "_System", first: set[str]) -> float:
    """When a target that is not of the first ones is seen to hold a session."""
    while not any(number for name, number in system.sessions("target").items() if name not in first):
        time.sleep(0.02)
    return time.monotonic()


class _System:
    """`specdec up` on simulated engines, and when it said what. Use it by `with`; it is ready once entered."""

    def __init__(self, tokenizer_dir: Path) -> None:
        models = ["--target", PAIR, "--draft", PAIR, "--tokenizer", str(tokenizer_dir)]
        self._specdec = [sys.executable, "-m", "specdec.cli"]
        self._command = [*self._specdec, "up", "--listen", "127.0.0.1:0", *models]
        # A verification's five tokens fill a step.
        self._environ = os.environ | {"SPECDEC_TARGET__MAX_STEP_TOKENS": str(GAMMA + 1)}
        self._said: list[tuple[float, str]] = []

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(
            self._command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=self._environ
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line.startswith("ready grpc="):
            self._process.wait()
            self._reader.join()
            raise RuntimeError(f"specdec up did not start: {''.join(line for _, line in self._said)[-2000:]}")
        self.endpoint = line.split()[1].removeprefix("grpc=")
        self._client = Client(self.endpoint)
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()
        self._process.send_signal(signal.SIGTERM)
        self._process.wait()
        self._reader.join()

    def scale(self, *counts: str) -> None:
        """Returns once it is done."""
        command = [*self._specdec, "scale", *counts, "--endpoint", self.endpoint]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def replicas(self, role: str) -> set[str]:
        return set(self.sessions(role))

    def sessions(self, role: str) -> dict[str, int]:
        """How many sessions each replica of a role holds."""
        pools = [pool for pool in self._client.info().pools if pool.role == role]
        return {replica.replica_id: replica.num_sessions for pool in pools for replica in pool.replicas}

    def said_s(self, words: str) -> float:
        """When it first said a line."""
        return next(when for when, line in self._said if line == words + "\n")

    def _read(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            self._said.append((time.monotonic(), line))


@dataclass
class _Load:
    """Streams in threads of this process, while the context is open."""

    endpoint: str
    chunks: list[tuple[float, int]] = field(default_factory=list)
    """When each chunk came, and its tokens."""
    errors: list[str] = field(default_factory=list)
    num_ended: int = 0
    num_different: int = 0
    """Outputs that are not what the same request gave at first."""

    def __enter__(self) -> Self:
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._threads = [threading.Thread(target=self._run, args=(index,)) for index in range(NUM_STREAMS)]
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def _run(self, index: int) -> None:
        options: dict[str, Any] = {"max_new_tokens": NUM_TOKENS, "ignore_eos": True, "temperature": 0.0, "gamma": GAMMA}
        expected: list[int] | None = None
        with Client(self.endpoint) as client:
            while not self._stop.is_set():
                try:
                    output = self._stream(client, index, options)
                except Exception as error:  # whatever a user would have seen
                    self.errors.append(repr(error))
                    continue
                expected = expected or output
                with self._lock:
                    self.num_ended += 1
                    self.num_different += output != expected

    def _stream(self, client: Client, index: int, options: dict[str, Any]) -> list[int]:
        token_ids: list[int] = []
        with client.generate(prompt_token_ids=[index + 1, 2, 3], seed=index, stream=True, **options) as stream:
            for chunk in stream:
                self.chunks.append((time.monotonic(), len(chunk.token_ids)))
                token_ids += chunk.token_ids
            session_id = stream.result().session_id
        client.delete_session(session_id)
        return token_ids
