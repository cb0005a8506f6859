"""Our own system under measurement: three processes started by the `specdec` command, and one stream through them.

Called by the suites.
"""

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from specdec.client import Client
from specdec.client.results import GenerationStats

_STOP_S = 30


@dataclass(frozen=True)
class SystemRun:
    """One greedy stream as the client saw it."""

    token_ids: list[int]
    ttft_s: float
    """Request sent to first tokens received."""
    e2el_s: float
    """Request sent to stream finished."""
    stats: GenerationStats
    num_cached_prompt_tokens: int
    num_first_tokens: int
    """Tokens of the first chunk."""

    @property
    def decode_tokens_per_s(self) -> float:
        """Tokens a second after the first chunk: prefill and admission left out."""
        return (len(self.token_ids) - self.num_first_tokens) / (self.e2el_s - self.ttft_s)

    @property
    def num_tested_tokens(self) -> int:
        """Draft tokens whose acceptance was decided: those accepted, and one for each round that refused one.

        A last round that is cut short by the token limit and fully accepted counts as a refusal: at most one a stream.
        """
        stats = self.stats
        full_rounds = stats.accepted_per_position[-1] if stats.accepted_per_position else 0
        return stats.num_accepted_tokens + stats.num_rounds - stats.num_target_only_steps - full_rounds


class RunningSystem:
    """`specdec up` in a child process. Use it by `with`; it is ready once entered."""

    def __init__(
        self,
        target_dir: Path,
        draft_dir: Path | None,
        dtype: str = "auto",
        device: str = "cpu",
        kv_cache_bytes: tuple[int, int] | None = None,
        lookup: Sequence[str] = (),
        drafts: Sequence[str] = (),
        flags: Sequence[str] = (),
    ) -> None:
        """Start the system with the threads that `specdec up` chooses, no more than the peers get.

        Args:
            target_dir: a checkpoint.
            draft_dir: a checkpoint of the same vocabulary; None: target-only.
            dtype: as a service takes it.
            device: of both models.
            kv_cache_bytes: of target and draft. None is what `specdec up` gives each.
            lookup: kinds of drafts that need no draft replica, as `specdec up --draft` names them.
            drafts: further drafts, each as `--draft` takes it.
            flags: further ones of `specdec up`.
        """
        models = ["--target", str(target_dir)]
        models += ["--draft", str(draft_dir)] if draft_dir else [] if drafts else ["--replicas-draft", "0"]
        self._command = [sys.executable, "-m", "specdec.cli", "up", *models, "--listen", "127.0.0.1:0"]
        self._command += [word for kind in lookup for word in ("--draft", kind)]
        self._command += [*(word for draft in drafts for word in ("--draft", draft)), *flags]
        self._command += ["--device", device, "--dtype", dtype]
        self._environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
        for role, num_bytes in zip(("TARGET", "DRAFT"), kv_cache_bytes or (), strict=False):
            self._environment[f"SPECDEC_{role}__KV_CACHE_BYTES"] = str(num_bytes)

    def __enter__(self) -> Self:
        self._log = tempfile.TemporaryFile("w+")
        self._process = subprocess.Popen(
            self._command, stdout=subprocess.PIPE, stderr=self._log, text=True, env=self._environment
        )
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line.startswith("ready grpc="):
            self._process.wait()
            self._log.seek(0)
            raise RuntimeError(f"specdec up did not start: {self._log.read()[-2000:]}")
        self.endpoint = line.split()[1].removeprefix("grpc=")
        self.client = Client(self.endpoint)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.client.close()
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()

    def run(self, prompt_token_ids: list[int], max_new_tokens: int, **options: object) -> SystemRun:
        """Stream one output in a new session, timed at the client, and delete the session afterwards (untimed).

        Args:
            prompt_token_ids: BOS included.
            max_new_tokens: exactly this many are made: EOS is ignored.
            options: more keyword arguments of `Client.generate` (gamma, mode, temperature, seed).
        """
        fixed = {"max_new_tokens": max_new_tokens, "ignore_eos": True, "stream": True}
        started = time.perf_counter()
        first, num_first_tokens = 0.0, 0
        with self.client.generate(prompt_token_ids=prompt_token_ids, **(fixed | options)) as stream:
            for chunk in stream:
                if not first:
                    first, num_first_tokens = time.perf_counter(), len(chunk.token_ids)
            finished = time.perf_counter()
            result = stream.result()
        self.client.delete_session(result.session_id)
        cached = result.usage.num_cached_prompt_tokens
        return SystemRun(
            list(result.token_ids), first - started, finished - started, result.stats, cached, num_first_tokens
        )


def acceptance(runs: list[SystemRun]) -> float:
    """alpha: accepted over tested draft tokens of all runs."""
    return sum(run.stats.num_accepted_tokens for run in runs) / max(1, sum(run.num_tested_tokens for run in runs))


def emitted_per_round(runs: list[SystemRun]) -> float:
    """tau: mean tokens emitted by one verify pass."""
    return sum(len(run.token_ids) for run in runs) / sum(run.stats.num_rounds for run in runs)
