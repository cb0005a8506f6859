"""Measure what keys, limits and encryption cost: tokens a second of secured systems beside those of an open one.

Three `specdec up` on the deep pair answer the same batches by turns: an open one; one with API keys, a service key and
all limits of a tenant; and one that also encrypts every connection, with certificates on both sides. Each is idle while
another is timed. Part of the suite `faults`, which calls this.
"""

import hashlib
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from bench.harness.pairs import interleave, rate_rows, ratio_row
from bench.harness.process_tree import cpu_s
from bench.harness.report import progress
from bench.harness.rows import Row
from bench.harness.streams import StreamProcess, StreamRequest, tokens_per_s
from bench.harness.workload import GAMMA, OwnPrompts, prompt_token_ids
from bench.suites.observability.streams import NUM_TOKENS, PROMPT_TOKENS, case_of
from bench.systems.models import DEMO, deep
from bench.systems.up import UpSystem

OPEN, LOCKED, ENCRYPTED = "open", "keys and limits", "keys, limits and mutual TLS"
#: Least tokens a second to those of the open system.
LEAST_RATIOS = {LOCKED: 0.97, ENCRYPTED: 0.92}
#: Interleaved batches by the number of streams.
NUM_RUNS, NUM_QUICK_RUNS = {1: 15, 16: 11}, 2
_KEY = "benchmark-key"
_LIMITS = "concurrent=1000,rpm=1000000,tpm=1000000000,sessions=100000,prompt_tokens=100000,reserved_tokens=1000000"


@dataclass(frozen=True)
class _Batch:
    tokens_per_s: float
    cpu_us_per_token: float
    """Processor time of all services of the system."""


@dataclass(frozen=True)
class _System:
    up: UpSystem
    clients: StreamProcess


def measure_security(row: Callable[..., Row], quick: bool) -> list[Row]:
    """Return the ratios of each secured system to the open one, with one stream and with 16."""
    num_runs = dict.fromkeys(NUM_RUNS, NUM_QUICK_RUNS) if quick else NUM_RUNS
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="specdec-bench-") as folder:
        target = deep(DEMO / "target", Path(folder) / "target", num_layers=18, eps=0.02)
        prompts = OwnPrompts(prompt_token_ids(target, PROMPT_TOKENS))
        total = 3 * (sum(num_runs.values()) + len(num_runs))
        with _running(target, Path(folder)) as systems, progress("keys and encryption", total) as advance:
            for num_streams, number in num_runs.items():
                runs = {name: partial(_batch, system) for name, system in systems.items()}
                interleave([prompts.batch(num_streams)], runs, advance)  # warms caches
                batches = [prompts.batch(num_streams) for _ in range(number)]
                make_row = partial(row, case=case_of("deep(18, 0.02)", num_streams))
                rows += _rows(make_row, interleave(batches, runs, advance))
    return rows


@contextmanager
def _running(target: Path, folder: Path) -> Iterator[dict[str, _System]]:
    keys, cert, key = folder / "keys.txt", folder / "cert.pem", folder / "key.pem"
    keys.touch(mode=0o600)
    keys.write_text(f"{hashlib.sha256(_KEY.encode()).hexdigest()} acme generate,operate {_LIMITS}\n")
    _write_certificate(cert, key)
    locked = ["--api-keys", str(keys)]
    encrypted = [*locked, "--tls-cert", str(cert), "--tls-key", str(key), "--tls-ca", str(cert)]
    with ExitStack() as stack:

        def start(flags: list[str], **credentials: str) -> _System:
            models = ["--target", str(target), "--draft", str(DEMO / "draft")]
            up = stack.enter_context(UpSystem([*models, *flags]))
            return _System(up, stack.enter_context(StreamProcess(up.endpoint, **credentials)))

        yield {
            OPEN: start([]),
            LOCKED: start(locked, api_key=_KEY),
            ENCRYPTED: start(encrypted, api_key=_KEY, tls_ca=str(cert)),
        }


def _write_certificate(cert: Path, key: Path) -> None:
    """Write a certificate that is its own authority, for both sides of every connection."""
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes",
               "-days", "2", "-subj", "/CN=specdec", "-addext", "subjectAltName=IP:127.0.0.1,DNS:localhost",
               "-keyout", str(key), "-out", str(cert)]  # fmt: skip
    subprocess.run(command, check=True, capture_output=True)
    key.chmod(0o600)


def _batch(system: _System, prompts: list[list[int]]) -> _Batch:
    options = {"max_new_tokens": NUM_TOKENS[len(prompts)], "temperature": 0.0, "ignore_eos": True, "gamma": GAMMA}
    asked = [StreamRequest(prompt, options) for prompt in prompts]
    before_s = cpu_s(system.up.pid)
    runs = system.clients.run(asked)
    used_s = cpu_s(system.up.pid) - before_s
    return _Batch(tokens_per_s(runs), used_s * 1e6 / sum(run.num_tokens for run in runs))


def _rows(row: Callable[..., Row], batches: Mapping[str, list[_Batch]]) -> list[Row]:
    rates = {name: [batch.tokens_per_s for batch in done] for name, done in batches.items()}
    costs = {name: [batch.cpu_us_per_token for batch in done] for name, done in batches.items()}
    rows = rate_rows(row, rates)
    for name, least in LEAST_RATIOS.items():
        rows.append(ratio_row(row, rates, name, OPEN, required=least))
        rows.append(ratio_row(row, costs, name, OPEN, metric="cpu_per_token_ratio"))
    return rows
